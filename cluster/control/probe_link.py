"""Runs the probes of new workers: to them the controller is a gateway with one tiny request.

    sessions with P and D ──Dispatch──> P computes ──KV──> D decodes ──end──> result; sessions close, nothing is left

The request is shorter than one block, so nothing of it is cached or reported to routers, and workers leave it out of
their counters of tokens and transfers (`ids.is_probe`). It goes before all others.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import grpc.aio

from disagg.cluster.core.probes import Probe
from disagg.connections.cluster_secret import ClusterSecret
from disagg.connections.shell.channels import first_to_end, open_channel
from disagg.proto.block_hash import HASH_BYTES
from disagg.proto.ids import BlockHash, GatewayId, RequestId, probe_gateway_id
from disagg.proto.messages import (
    Dispatch,
    End,
    PeerRef,
    Sampling,
    SequenceSpec,
    SessionHello,
    StepUpdate,
    WorkerInfo,
    WorkerToGateway,
    decoder,
    encode,
)
from disagg.proto.services import GATEWAY_ID_METADATA, SESSION
from disagg.proto.token_ids import pack_token_ids

logger = logging.getLogger(__name__)

PROBE_TIMEOUT_S = 10.0
PROMPT_TOKENS = 8
OUTPUT_TOKENS = 2
"""Output tokens of a probe: one of P and one of D."""
PRIORITY = 1 << 30

OnEnd = Callable[[Probe, str, bool], None]
"""Called with the probe, the error (empty for success), and whether it failed only because a worker had no room."""
_Call = grpc.aio.StreamStreamCall[bytes, bytes]


class ProbeError(Exception):
    """The probe of a new worker failed."""

    def __init__(self, text: str, is_refusal: bool = False) -> None:
        super().__init__(text)
        self.is_refusal = is_refusal


class Prober:
    """Owner of the tasks of running probes; on the controller's loop.

    Args:
        secret: the cluster's secret.
        on_end: called for each probe that ends, unless `stop` came first.
    """

    def __init__(self, secret: ClusterSecret, on_end: OnEnd) -> None:
        self._secret = secret
        self._on_end = on_end
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, probe: Probe) -> None:
        """Begin a probe; returns at once."""
        task = asyncio.create_task(self._run(probe), name=f"probe-{probe.number}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def stop(self) -> None:
        """Cancel the running probes. Idempotent."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, probe: Probe) -> None:
        name, began, run = " -> ".join(info.worker_id for info in probe.workers), time.monotonic(), _Run(probe)
        error, is_refusal = "", False
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                await run.run(self._secret)
        except ProbeError as failure:
            error, is_refusal = str(failure), failure.is_refusal
        except TimeoutError:
            error = f"no answer in {PROBE_TIMEOUT_S:g} s: {run.where}"
        except grpc.aio.AioRpcError as failure:
            error = f"{run.where}: {failure.details()}"
        except Exception as failure:
            # A bug, or what a worker should not send. It counts as a failed probe, so it is seen.
            logger.exception("the probe of %s ended by a bug", name)
            error = f"{run.where}: {failure!r}"
        if error:
            logger.warning("the probe of %s failed after %.1f s: %s", name, time.monotonic() - began, error)
        else:
            logger.info("the probe of %s went through in %.3f s", name, time.monotonic() - began)
        self._on_end(probe, error, is_refusal)


class _Run:
    """One running probe. `where` is its present stage."""

    def __init__(self, probe: Probe) -> None:
        self._probe = probe
        self._first = probe.workers[0]
        self.where = f"no session with {self._first.worker_id}"
        self._tokens: dict[int, int] = {}
        self._is_handed_over = False

    async def run(self, secret: ClusterSecret) -> None:
        """Run until the answer is complete. Raises `ProbeError` or an error of gRPC."""
        gateway_id = probe_gateway_id(secrets.token_hex(8))
        async with AsyncExitStack() as stack:
            calls: dict[str, _Call] = {}
            for info in self._probe.workers:
                self.where = f"no session with {info.worker_id}"
                calls[info.worker_id] = await stack.enter_async_context(_session(info, gateway_id, secret))
            await calls[self._first.worker_id].write(encode(self._dispatch(gateway_id)))
            self.where = f"{self._first.worker_id} computes the prompt"
            await first_to_end(*(self._read(info, calls[info.worker_id]) for info in self._probe.workers))

    def _dispatch(self, gateway_id: GatewayId) -> Dispatch:
        prefill, decode = self._probe.prefill, self._probe.decode
        longest = min(min(info.max_model_len, info.num_blocks * info.block_size) for info in self._probe.workers)
        spec = SequenceSpec(
            request_id=RequestId(gateway_id),
            attempt=1,
            gateway_id=gateway_id,
            prompt_token_ids=pack_token_ids(range(1, 1 + max(1, min(PROMPT_TOKENS, longest - OUTPUT_TOKENS)))),
            root_hash=BlockHash(secrets.token_bytes(HASH_BYTES)),
            sampling=Sampling(temperature=0.0, max_tokens=OUTPUT_TOKENS),
            priority=PRIORITY,
            timeout_s=PROBE_TIMEOUT_S,
        )
        if prefill is None:
            return Dispatch(spec=spec)
        peer = PeerRef(worker_id=decode.worker_id, incarnation=decode.incarnation, address=decode.address)
        return Dispatch(spec=spec, decode_peer=peer, pair_timeout_s=PROBE_TIMEOUT_S)

    async def _read(self, info: WorkerInfo, call: _Call) -> None:
        """Read until the answer has ended; raises `ProbeError` if it ended in another way."""
        decode = decoder(WorkerToGateway).decode
        while True:
            update = decode(await _frame(call, info))
            if not isinstance(update, StepUpdate):
                raise ProbeError(f"{info.worker_id} sent a second hello")
            for tokens in update.tokens:
                self._tokens.update(enumerate(tokens.token_ids, tokens.first_index))
            if update.prefilled and self._probe.prefill is not None:
                self.where = f"its KV moves to {self._probe.decode.worker_id}"
            if update.handed_over:
                self._is_handed_over = True
                self.where = f"{info.worker_id} decodes"
            for end in update.ends:
                if self._is_over(info, end):
                    return

    def _is_over(self, info: WorkerInfo, end: End) -> bool:
        if end.reason in ("stop", "length"):
            if self._probe.prefill is not None and not self._is_handed_over:
                raise ProbeError(f"{info.worker_id} ended the answer before {self._probe.decode.worker_id} had it")
            return True
        if end.reason == "cancelled" and info is not self._first:
            return False  # P gave it up, and says why
        detail = f" ({end.detail})" if end.detail else ""
        raise ProbeError(f"{info.worker_id}: {end.reason}{detail}", end.reason in ("refused", "preempted"))


@asynccontextmanager
async def _session(info: WorkerInfo, gateway_id: GatewayId, secret: ClusterSecret) -> AsyncIterator[_Call]:
    """Open a session with a worker. Raises `ProbeError` if another process listens there."""
    async with open_channel(info.address, secret) as channel:
        call: _Call = channel.stream_stream(SESSION, None, None)(
            None, metadata=((GATEWAY_ID_METADATA, gateway_id), *secret.metadata)
        )
        try:
            hello = decoder(WorkerToGateway).decode(await _frame(call, info))
            if not isinstance(hello, SessionHello) or hello.info.incarnation != info.incarnation:
                raise ProbeError(f"another process listens at the address of {info.worker_id}")
            yield call
        finally:
            call.cancel()


async def _frame(call: _Call, info: WorkerInfo) -> bytes:
    frame = await call.read()
    if not isinstance(frame, bytes):  # EOF
        raise ProbeError(f"{info.worker_id} closed the session")
    return frame
