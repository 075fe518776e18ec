"""Real worker processes and a stand-in for the gateway that talks to them.

The stand-in chooses the pair itself, so a test decides which cache is warm on which side.
"""

from __future__ import annotations

import asyncio
import itertools
import tempfile
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import grpc

from disagg.cluster.hosts.processes import DEFAULT_LOGGING, WORKER_MODULE, start_child, stop_children
from disagg.cluster.system.process_tools import thread_environment
from disagg.connections.cluster_secret import ClusterSecret
from disagg.engine.config import WorkerConfig
from disagg.proto.block_hash import chain_hashes, root_hash
from disagg.proto.ids import AttemptKey, GatewayId, RequestId
from disagg.proto.messages import (
    Adapter,
    AuditReport,
    AuditRequest,
    Cancel,
    Dispatch,
    End,
    Fetched,
    FetchFrom,
    ForgetTenant,
    GatewayToWorker,
    HandedOver,
    PeerRef,
    PrefillDone,
    Sampling,
    SequenceSpec,
    SessionHello,
    StepUpdate,
    TokenLogprobs,
    WorkerInfo,
    WorkerToGateway,
    decoder,
    encode,
)
from disagg.proto.services import AUDIT, CHANNEL_OPTIONS, GATEWAY_ID_METADATA, SESSION
from disagg.proto.token_ids import pack_token_ids
from tests.support.registry import Registry
from tests.support.secret import SECRET
from tests.support.shared_templates import SharedTemplates
from tests.support.waiting import WAIT_S

GATEWAY = GatewayId("test-gateway")
START_TIMEOUT_S = 60.0
_starts = itertools.count(1)


def prompt_of(length: int) -> list[int]:
    """A prompt that shares no prefix with any other one, since workers are shared by tests."""
    start = next(_starts)
    return [start % 250, start // 250, *((start + 7 * i) % 250 for i in range(2, length))][:length]


@contextmanager
def running_workers(*configs: WorkerConfig) -> Iterator[list[WorkerInfo]]:
    """Worker processes, started together; every one must end by itself at SIGTERM."""
    with (
        tempfile.TemporaryDirectory() as folder,
        Registry() as registry,
        closing(SharedTemplates(logs := Path(folder), DEFAULT_LOGGING)) as templates,
    ):
        one = thread_environment(1)
        children = [
            start_child(c.worker_id, WORKER_MODULE, c, registry.address, SECRET, logs, one, templates) for c in configs
        ]
        try:
            yield registry.wait([config.worker_id for config in configs], START_TIMEOUT_S)
        finally:
            killed = stop_children(children)
            problems = [
                line for child in children for line in child.log.read_text().splitlines() if "Traceback" in line
            ]
    assert not killed
    assert not problems


@dataclass
class Answer:
    """All messages of the workers about one attempt."""

    tokens: dict[int, int] = field(default_factory=dict)
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    """By output index; empty where the request wanted none."""
    prefilled: list[PrefillDone] = field(default_factory=list)
    handed_over: list[HandedOver] = field(default_factory=list)
    fetched: list[Fetched] = field(default_factory=list)
    ends: list[End] = field(default_factory=list)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    first_token: asyncio.Event = field(default_factory=asyncio.Event)
    computed: asyncio.Event = field(default_factory=asyncio.Event)
    """`prefilled` has one."""

    @property
    def token_ids(self) -> list[int]:
        """Output tokens; their indices must be complete."""
        assert sorted(self.tokens) == list(range(len(self.tokens))), sorted(self.tokens)
        return [self.tokens[index] for index in range(len(self.tokens))]

    @property
    def reason(self) -> str:
        return self.ends[0].reason


class GatewayStub:
    """Sessions to workers, by worker id. Use within `open_gateway`."""

    def __init__(self) -> None:
        self.answers: dict[AttemptKey, Answer] = {}
        self.infos: dict[str, WorkerInfo] = {}
        self._queues: dict[str, asyncio.Queue[GatewayToWorker | None]] = {}
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._calls: list[grpc.aio.StreamStreamCall[bytes, bytes]] = []
        self._readers: list[asyncio.Task[None]] = []

    async def connect(self, info: WorkerInfo) -> None:
        queue: asyncio.Queue[GatewayToWorker | None] = asyncio.Queue()
        channel = grpc.aio.insecure_channel(info.address, options=CHANNEL_OPTIONS)

        async def frames() -> AsyncIterator[bytes]:
            while (message := await queue.get()) is not None:
                yield encode(message)

        call = channel.stream_stream(SESSION, None, None)(
            frames(), metadata=((GATEWAY_ID_METADATA, GATEWAY), *SECRET.metadata)
        )
        self._calls.append(call)
        hello = decoder(WorkerToGateway).decode(cast(bytes, await call.read()))
        assert hello == SessionHello(info=info)
        self.infos[info.worker_id] = info
        self._queues[info.worker_id] = queue
        self._channels[info.worker_id] = channel
        self._readers.append(asyncio.create_task(self._read(call)))

    async def close(self) -> None:
        for reader in self._readers:
            reader.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)
        for queue in self._queues.values():
            queue.put_nowait(None)  # gRPC waits for our next frame, also when the worker ended the call
        for call in self._calls:
            call.cancel()
            await call.code()
        for channel in self._channels.values():
            await channel.close(None)

    async def _read(self, call: Any) -> None:
        decode = decoder(WorkerToGateway).decode
        while isinstance(frame := await call.read(), bytes):
            update = decode(frame)
            assert isinstance(update, StepUpdate)
            self._apply(update)

    def _apply(self, update: StepUpdate) -> None:
        for out in update.tokens:
            answer = self.answers[AttemptKey(out.request_id, out.attempt)]
            for offset, token in enumerate(out.token_ids):
                known = answer.tokens.setdefault(out.first_index + offset, token)
                assert known == token, f"token {out.first_index + offset} was {known} and is {token}"
            for offset, logprobs in enumerate(out.logprobs):
                assert answer.logprobs.setdefault(out.first_index + offset, logprobs) == logprobs
            answer.first_token.set()
        for prefilled in update.prefilled:
            answer = self.answers[AttemptKey(prefilled.request_id, prefilled.attempt)]
            answer.prefilled.append(prefilled)
            answer.computed.set()
        for handed_over in update.handed_over:
            self.answers[AttemptKey(handed_over.request_id, handed_over.attempt)].handed_over.append(handed_over)
        for fetched in update.fetched:
            self.answers[AttemptKey(fetched.request_id, fetched.attempt)].fetched.append(fetched)
        for end in update.ends:
            answer = self.answers[AttemptKey(end.request_id, end.attempt)]
            answer.ends.append(end)
            answer.ended.set()

    def submit(
        self,
        prompt: Sequence[int],
        *,
        worker: str,
        to: str | None = None,
        max_tokens: int = 16,
        sampling: Sampling | None = None,
        emitted: Sequence[int] = (),
        timeout_s: float | None = None,
        attempt: int = 1,
        fetch_from: str | None = None,
        end_token: int = 0,
        fetch_timeout_s: float = WAIT_S,
        adapter: Adapter | None = None,
    ) -> tuple[AttemptKey, Answer]:
        """Dispatch to `worker`, handing over to `to` if given, and fetching the first `end_token` tokens from
        `fetch_from` if that is given."""
        info = self.infos[worker]
        root = root_hash(info.fingerprint, adapter="" if adapter is None else adapter.fingerprint)
        spec = SequenceSpec(
            request_id=RequestId(uuid.uuid4().hex),
            attempt=attempt,
            gateway_id=GATEWAY,
            prompt_token_ids=pack_token_ids(prompt),
            emitted_token_ids=tuple(emitted),
            block_hashes=tuple(chain_hashes(root, pack_token_ids([*prompt, *emitted]))),
            root_hash=root,
            sampling=sampling or Sampling(temperature=0.0, max_tokens=max_tokens),
            timeout_s=timeout_s,
            adapter=adapter,
        )
        answer = self.answers[spec.key] = Answer()
        peer = None if to is None else self._peer(to)
        fetch = None
        if fetch_from is not None:
            fetch = FetchFrom(peer=self._peer(fetch_from), end_token=end_token, timeout_ms=fetch_timeout_s * 1e3)
        self._queues[worker].put_nowait(Dispatch(spec=spec, decode_peer=peer, fetch=fetch))
        return spec.key, answer

    def _peer(self, worker: str) -> PeerRef:
        info = self.infos[worker]
        return PeerRef(worker_id=info.worker_id, incarnation=info.incarnation, address=info.address)

    async def run(self, prompt: Sequence[int], **how: object) -> Answer:
        """`submit` and wait for the end and, where D took over, for the end that P sends on its own stream."""
        _, answer = self.submit(prompt, **how)  # type: ignore[arg-type]
        await asyncio.wait_for(answer.ended.wait(), 60)
        if answer.handed_over:
            await asyncio.wait_for(answer.computed.wait(), 60)
        return answer

    def forget(self, tag: bytes) -> None:
        """To all workers."""
        for queue in self._queues.values():
            queue.put_nowait(ForgetTenant(tenant_tag=tag))

    def cancel(self, key: AttemptKey) -> None:
        """To all workers, as the gateway does."""
        for queue in self._queues.values():
            queue.put_nowait(Cancel(request_id=key.request_id, attempt=key.attempt))

    async def wait_until_idle(self) -> None:
        """Every worker holds nothing."""
        await wait_until_workers_idle(list(self.infos.values()))


async def audit(info: WorkerInfo, secret: ClusterSecret = SECRET) -> AuditReport:
    """What a worker holds now."""
    async with grpc.aio.insecure_channel(info.address, options=CHANNEL_OPTIONS) as channel:
        frame = await channel.unary_unary(AUDIT, None, None)(encode(AuditRequest()), metadata=secret.metadata)
    return decoder(AuditReport).decode(frame)


async def wait_until_workers_idle(
    infos: Sequence[WorkerInfo], secret: ClusterSecret = SECRET, timeout_s: float = WAIT_S
) -> None:
    """Every worker holds nothing and finds no problem, within `timeout_s`."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    while True:
        reports = [await audit(info, secret) for info in infos]
        left = {r.worker_id: (_held(r.counts), r.problems) for r in reports}
        if not any(counts or problems for counts, problems in left.values()):
            return
        assert asyncio.get_running_loop().time() < deadline, f"left over: {left}"
        await asyncio.sleep(0.02)


def _held(counts: dict[str, int]) -> dict[str, int]:
    """What is not zero, but for tombstones: those are memories, which fade by time."""
    return {name: count for name, count in counts.items() if count and name != "tombstones"}


@asynccontextmanager
async def open_gateway(infos: Sequence[WorkerInfo]) -> AsyncIterator[GatewayStub]:
    """A stub with sessions to all workers; at the end all of them must be idle, whatever the test did."""
    stub = GatewayStub()
    try:
        for info in infos:
            await stub.connect(info)
        yield stub
        await stub.wait_until_idle()
    finally:
        await stub.close()
