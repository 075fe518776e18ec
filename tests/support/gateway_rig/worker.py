"""A worker without a model for the gateway's benchmark: every sequence that it has gets one token a step, at a fixed
pace, as one message of all sequences, the way a real worker sends its steps.

    Dispatch ──> `PrefillDone` and token 0 with the next step ──> a token each step ──> End at max_tokens, or a Cancel
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import grpc
import grpc.aio
import msgspec

from disagg.proto.ids import AttemptKey, Incarnation, WorkerId
from disagg.proto.messages import (
    BlocksSnapshot,
    Cancel,
    Dispatch,
    End,
    GatewayToWorker,
    KvLayout,
    Load,
    PrefillDone,
    SessionHello,
    StepUpdate,
    TokenOut,
    WorkerInfo,
    WorkerReport,
    encode,
)
from disagg.proto.services import SERVER_OPTIONS, SESSION, WATCH, WORKER_SERVICE, service_and_method

FINGERPRINT = "paced"
MAX_SEQUENCES = 4096

_Context = grpc.aio.ServicerContext[Any, Any]
_down: msgspec.msgpack.Decoder[GatewayToWorker] = msgspec.msgpack.Decoder(GatewayToWorker)


@dataclass(slots=True)
class _Sequence:
    """One attempt: how far it is, of how much, and where in the text it began."""

    key: AttemptKey
    max_tokens: int
    start: int
    num_tokens: int = 0


class Steps:
    """The sequences and what a step makes of them. No clock, no socket.

    Args:
        token_ids: the text of every sequence, repeated, each from a place of its own.
    """

    def __init__(self, token_ids: Sequence[int]) -> None:
        if not token_ids:
            raise ValueError("token_ids must not be empty")
        self._token_ids = tuple(token_ids)
        self._sequences: dict[AttemptKey, _Sequence] = {}
        self._num_started = 0
        self._cancelled: list[AttemptKey] = []
        self.num_tokens = 0
        """Tokens sent so far, of all sequences."""

    @property
    def num_sequences(self) -> int:
        """Sequences that have not ended."""
        return len(self._sequences)

    def take(self, message: GatewayToWorker) -> None:
        """What the gateway sent."""
        match message:
            case Dispatch(spec=spec):
                self._sequences[spec.key] = _Sequence(spec.key, spec.sampling.max_tokens, self._num_started)
                self._num_started += 1
            case Cancel(request_id=request_id, attempt=attempt):
                key = AttemptKey(request_id, attempt)
                if self._sequences.pop(key, None) is not None:
                    self._cancelled.append(key)

    def step(self) -> StepUpdate | None:
        """One token for each sequence, and the ends; `None` where there is none."""
        cancelled = tuple(End(request_id=k.request_id, attempt=k.attempt, reason="cancelled") for k in self._cancelled)
        self._cancelled.clear()
        if not self._sequences and not cancelled:
            return None
        running = list(self._sequences.values())
        prefilled = tuple(_prefilled(sequence.key) for sequence in running if sequence.num_tokens == 0)
        tokens = tuple(self._say(sequence) for sequence in running)
        ended = [sequence.key for sequence in running if sequence.num_tokens == sequence.max_tokens]
        for key in ended:
            del self._sequences[key]
        ends = tuple(End(request_id=key.request_id, attempt=key.attempt, reason="length") for key in ended)
        return StepUpdate(tokens=tokens, prefilled=prefilled, ends=cancelled + ends)

    def _say(self, sequence: _Sequence) -> TokenOut:
        index = sequence.num_tokens
        sequence.num_tokens += 1
        self.num_tokens += 1
        token_id = self._token_ids[(sequence.start + index) % len(self._token_ids)]
        return TokenOut(sequence.key.request_id, sequence.key.attempt, index, (token_id,))


def _prefilled(key: AttemptKey) -> PrefillDone:
    return PrefillDone(request_id=key.request_id, attempt=key.attempt, cached_tokens=0)


class PacedWorker:
    """The worker as a gRPC server on loopback. `step_s` may change while it runs."""

    def __init__(self, token_ids: Sequence[int], max_model_len: int) -> None:
        self.steps = Steps(token_ids)
        self.step_s = 0.05
        self._max_model_len = max_model_len
        self._server: grpc.aio.Server | None = None
        self._calls: set[asyncio.Task[Any]] = set()
        self.address = ""

    async def __aenter__(self) -> Self:
        self._server = grpc.aio.server(options=SERVER_OPTIONS)
        handlers = {
            service_and_method(SESSION)[1]: grpc.stream_stream_rpc_method_handler(self._session),
            service_and_method(WATCH)[1]: grpc.unary_stream_rpc_method_handler(self._watch),
        }
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(WORKER_SERVICE, handlers),))
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        assert self._server is not None
        await self._server.stop(None)
        if self._calls:
            await asyncio.wait(self._calls)

    @property
    def info(self) -> WorkerInfo:
        """What it registers."""
        return WorkerInfo(
            worker_id=WorkerId("paced-0"),
            incarnation=Incarnation("1"),
            roles=("prefill", "decode"),
            address=self.address,
            pid=1,
            fingerprint=FINGERPRINT,
            kv_layout=KvLayout.dense(num_layers=1, num_kv_heads=1, head_dim=1, dtype="fake", bytes_per_token=8),
            num_blocks=1 << 21,
            block_size=16,
            max_num_seqs=MAX_SEQUENCES,
            token_budget=1 << 16,
            max_model_len=self._max_model_len,
        )

    async def _session(self, requests: AsyncIterator[bytes], context: _Context) -> AsyncIterator[bytes]:
        self._note_call()
        yield encode(SessionHello(info=self.info))
        reader = asyncio.create_task(self._read(requests))
        loop = asyncio.get_running_loop()
        due = loop.time()
        try:
            while True:
                due = max(due + self.step_s, loop.time() - self.step_s)
                await asyncio.sleep(max(0.0, due - loop.time()))
                if (update := self.steps.step()) is not None:
                    yield encode(update)
        finally:
            reader.cancel()

    async def _read(self, requests: AsyncIterator[bytes]) -> None:
        async for frame in requests:
            self.steps.take(_down.decode(frame))

    async def _watch(self, frame: bytes, context: _Context) -> AsyncIterator[bytes]:
        self._note_call()
        info = self.info
        yield encode(
            WorkerReport(
                worker_id=info.worker_id,
                incarnation=info.incarnation,
                sequence=0,
                load=Load(blocks_total=info.num_blocks),
                kv_events=(BlocksSnapshot(hashes=()),),
            )
        )
        await asyncio.Event().wait()

    def _note_call(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
