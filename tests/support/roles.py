"""What a role needs around it, without engine and sockets: the test plays the engine, the peer and the gateway."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

import numpy as np

from disagg.connections.cluster_secret import ClusterSecret
from disagg.engine.commands import Command
from disagg.engine.config import TransferLimits, WorkerConfig
from disagg.engine.core.outbox import Outbox
from disagg.engine.parallel.interfaces import Followers, NoFollowers
from disagg.engine.plan import Buffer
from disagg.engine.shell.parts import DEFAULT_PARTS
from disagg.prefill_worker.service import PairError
from disagg.proto.handover import PairWelcome, ReceiverToSender, SenderToReceiver
from disagg.proto.ids import AttemptKey, BlockHash, GatewayId, Incarnation, RequestId, WorkerId
from disagg.proto.messages import (
    End,
    HandedOver,
    KvLayout,
    PeerRef,
    PrefillDone,
    RoleName,
    Sampling,
    SequenceSpec,
    StepUpdate,
    WorkerInfo,
)
from disagg.proto.token_ids import pack_token_ids
from tests.support.secret import SECRET

GATEWAY = GatewayId("gateway")
BYTES_PER_TOKEN = 8
LAYOUT = KvLayout.dense(num_layers=1, num_kv_heads=1, head_dim=1, dtype="fake", bytes_per_token=BYTES_PER_TOKEN)
WAIT_S = 60.0
C = TypeVar("C")


def info_of(worker_id: str, role: RoleName, **changes: Any) -> WorkerInfo:
    fields: dict[str, Any] = {
        "worker_id": WorkerId(worker_id),
        "incarnation": Incarnation(f"{worker_id}.1"),
        "roles": (role,),
        "address": f"{worker_id}:1",
        "pid": 1,
        "fingerprint": "fake",
        "kv_layout": LAYOUT,
        "num_blocks": 64,
        "block_size": 16,
        "max_num_seqs": 8,
        "token_budget": 64,
        "max_model_len": 1024,
    }
    return WorkerInfo(**{**fields, **changes})


def peer_of(info: WorkerInfo) -> PeerRef:
    return PeerRef(worker_id=info.worker_id, incarnation=info.incarnation, address=info.address)


def spec_of(request_id: str, num_tokens: int = 20, *, attempt: int = 1, timeout_s: float | None = None) -> SequenceSpec:
    return SequenceSpec(
        request_id=RequestId(request_id),
        attempt=attempt,
        gateway_id=GATEWAY,
        prompt_token_ids=pack_token_ids(range(num_tokens)),
        root_hash=BlockHash(b""),
        sampling=Sampling(temperature=0.0),
        timeout_s=timeout_s,
    )


def key_of(request_id: str, attempt: int = 1) -> AttemptKey:
    return AttemptKey(RequestId(request_id), attempt)


class PlayedContext:
    """A `RoleContext`. `time` is moved by the test."""

    def __init__(self, worker_id: str, role: RoleName) -> None:
        self.config = WorkerConfig(
            worker_id=worker_id,
            roles=(role,),
            model_path="fake",
            transport="local",
            transfer=TransferLimits(chunk_bytes=10 * BYTES_PER_TOKEN, staging_bytes=2 * 10 * BYTES_PER_TOKEN),
        )
        self.cluster_secret = SECRET
        self.outbox = Outbox()
        self.parts = DEFAULT_PARTS
        self.followers: Followers = NoFollowers()
        self.info = info_of(worker_id, role)
        self.digests = False
        self.time = 100.0
        self.faults: list[Exception] = []
        self._commands: list[Command] = []
        self._updates: list[StepUpdate] = []
        self._loop = asyncio.get_running_loop()

    def post(self, command: Command) -> None:
        self._commands.append(command)

    def new_staging(self, nbytes: int) -> Buffer:
        return np.zeros(nbytes, dtype=np.uint8)

    def now(self) -> float:
        return self.time

    def call_soon(self, callback: Callable[..., None], *args: Any) -> None:
        self._loop.call_soon_threadsafe(self._call, callback, args)

    def flush(self) -> None:
        self._updates += self.outbox.flush().values()

    def _call(self, callback: Callable[..., None], args: tuple[Any, ...]) -> None:
        try:
            callback(*args)
        except Exception as error:
            self.faults.append(error)
        self.flush()

    # ------------------------------------------------------------ for the test

    def commands(self) -> list[Command]:
        """Commands to the engine since the last call."""
        taken, self._commands = self._commands, []
        return taken

    def command(self, kind: type[C]) -> C:
        """The only command to the engine."""
        (command,) = self.commands()
        assert isinstance(command, kind), command
        return command

    def _said(self, name: str) -> list[Any]:
        self.flush()
        return [each for update in self._updates for each in getattr(update, name)]

    @property
    def ends(self) -> list[End]:
        """All ends that were sent to the gateway."""
        return self._said("ends")

    @property
    def handed_over(self) -> list[HandedOver]:
        return self._said("handed_over")

    @property
    def prefilled(self) -> list[PrefillDone]:
        return self._said("prefilled")

    def reasons(self) -> list[tuple[str, str]]:
        """(request, reason) of all ends."""
        return [(end.request_id, end.reason) for end in self.ends]


class PlayedStream:
    """In place of a `PairStream`: the test is the decode worker. `all` has every one that was made."""

    all: list[PlayedStream]

    def __init__(self, peer: PeerRef, secret: ClusterSecret) -> None:
        self.peer = peer
        self.welcome: asyncio.Future[PairWelcome] = asyncio.get_running_loop().create_future()
        self.closed = False
        self._over = asyncio.Event()
        self._sent: list[SenderToReceiver] = []
        self._incoming: asyncio.Queue[ReceiverToSender | PairError | None] = asyncio.Queue()
        self.all.append(self)

    async def open(self, info: WorkerInfo, timeout_s: float, *, digests: bool = False) -> PairWelcome:
        self.digests = digests
        return await self.welcome

    def send(self, message: SenderToReceiver) -> None:
        assert not self.closed
        self._sent.append(message)

    def abandon(self) -> None:
        self._over.set()
        self._incoming.put_nowait(PairError("abandoned"))

    async def messages(self) -> AsyncIterator[ReceiverToSender]:
        while (message := await self._incoming.get()) is not None:
            if isinstance(message, PairError):
                raise message
            yield message

    async def ended(self) -> None:
        await self._over.wait()

    async def close(self) -> None:
        self.closed = True
        self._over.set()

    # ------------------------------------------------------------ for the test

    def say(self, message: ReceiverToSender) -> None:
        self._incoming.put_nowait(message)

    def end(self) -> None:
        self._over.set()
        self._incoming.put_nowait(None)

    def sent(self) -> list[SenderToReceiver]:
        """Messages of the prefill worker since the last call."""
        taken, self._sent = self._sent, []
        return taken

    def message(self, kind: type[C]) -> C:
        """Its only message."""
        (message,) = self.sent()
        assert isinstance(message, kind), message
        return message


async def until(condition: Callable[[], object]) -> None:
    """Give other tasks and threads their turns until `condition` holds."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that"
        await asyncio.sleep(0)


async def settle() -> None:
    """Let every task run that can."""
    for _ in range(20):
        await asyncio.sleep(0)
