"""A gRPC server with known latencies, to test the load generator against: no model, no workers.

    python -m disagg.loadtests.generator.fake_server --port 0 --ttft-ms 50 --tpot-ms 10
    prints {"address": ...}; serves until SIGTERM or SIGINT; prints {"messages": ..., "lag_p50_ms": ..., ...}

Each token is a message of its own, as the gateway sends them to a client that reads fast enough. A token's time is
counted from the request's arrival, not from the token before it, so that errors do not add up. `lag` is how much later
than planned a message was handed to gRPC: the part of a generator's error that is really this server's.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import selectors
import signal
import struct
import sys
import time
import zlib
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from typing import Annotated

import grpc
import grpc.aio
import msgspec

from disagg.v1 import inference_pb2 as pb
from disagg.v1 import inference_pb2_grpc as pb_grpc

FAKE_MODEL = "fake-server"
FAKE_VOCAB_SIZE = 49_152
"""Size of the vocabulary: that of SmolLM2, so that requests have their usual size."""
MAX_MODEL_LEN = 1 << 20
STOP_GRACE_S = 0.5

Seconds = Annotated[float, msgspec.Meta(ge=0, le=3600)]
Count = Annotated[int, msgspec.Meta(ge=1)]
_Context = grpc.aio.ServicerContext[pb.GenerateRequest, pb.GenerateResponse]


class FakeTiming(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Latencies and faults of the fake server."""

    ttft_s: Seconds = 0.05
    """Time from a request's arrival to its first token."""
    tpot_s: Seconds = 0.01
    """Time between two tokens of an answer."""
    spread: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.0
    """Spread of the latencies: each request's two latencies are scaled by a factor of its own in [1 - spread, 1 +
    spread]."""
    stall_at_s: Seconds = 0.0
    """Beginning of the stall, counted from the first request."""
    stall_s: Seconds = 0.0
    """Duration of the stall, in which no message is sent. Messages that are due in the stall are sent at its end."""
    refuse_every: Count | None = None
    """Interval of refusals: every n-th request is refused with RESOURCE_EXHAUSTED; None for no refusals."""
    fail_every: Count | None = None
    """Interval of failures: every n-th request ends halfway with UNAVAILABLE, unless it is refused; None for no
    failures."""

    def of(self, prompt: Sequence[int]) -> tuple[float, float]:
        """TTFT and TPOT of one request, in seconds."""
        factor = 1 + self.spread * (2 * _checksum(prompt) / 2**32 - 1)
        return self.ttft_s * factor, self.tpot_s * factor

    def release_s(self, planned_s: float) -> float:
        """Time at which a message is sent that is planned for `planned_s`; both in seconds since the first request."""
        stall_end_s = self.stall_at_s + self.stall_s
        return stall_end_s if self.stall_at_s <= planned_s < stall_end_s else planned_s

    def is_refused(self, number: int) -> bool:
        """Whether the `number`-th request, from 1, is refused."""
        return self.refuse_every is not None and number % self.refuse_every == 0

    def is_failed(self, number: int) -> bool:
        """Whether the `number`-th request, from 1, ends halfway."""
        return self.fail_every is not None and number % self.fail_every == 0


def fake_answer(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """Output tokens: different for every prompt, the same for equal ones."""
    first = _checksum(prompt)
    return [(first + index) % FAKE_VOCAB_SIZE for index in range(num_tokens)]


def _checksum(prompt: Sequence[int]) -> int:
    """CRC-32 of the ids, in [0, 2^32)."""
    return zlib.crc32(struct.pack(f"<{len(prompt)}I", *prompt))


class FakeService(pb_grpc.InferenceServiceServicer):
    """Answers `Generate` on schedule, and `ListModels`. Owner of the count of requests; runs on one event loop."""

    def __init__(self, timing: FakeTiming) -> None:
        self._timing = timing
        self._num_requests = 0
        self._first_request_s = 0.0
        self.lags_s: list[float] = []
        """Lateness of each message in seconds."""

    async def ListModels(  # noqa: N802 - gRPC's name
        self, request: pb.ListModelsRequest, context: object
    ) -> pb.ListModelsResponse:
        """List the only model, which accepts any request."""
        model = pb.Model(name=FAKE_MODEL, max_model_len=MAX_MODEL_LEN, vocab_size=FAKE_VOCAB_SIZE)
        return pb.ListModelsResponse(models=[model])

    async def Generate(  # noqa: N802 - gRPC's name
        self, request: pb.GenerateRequest, context: _Context
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        """Send the answer, token by token, each at its time."""
        arrived_s = time.perf_counter()
        self._num_requests += 1
        number = self._num_requests
        if number == 1:
            self._first_request_s = arrived_s
        if self._timing.is_refused(number):
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "refused, as configured")
        prompt = request.token_ids.ids
        ttft_s, tpot_s = self._timing.of(prompt)
        answer = fake_answer(prompt, request.stopping.max_tokens)
        num_sent = len(answer) // 2 if self._timing.is_failed(number) else len(answer)
        for index, token_id in enumerate(answer[:num_sent]):
            await self._wait_until(arrived_s + ttft_s + index * tpot_s)
            yield pb.GenerateResponse(delta=pb.TokenDelta(first_index=index, token_ids=[token_id], text="word "))
        if num_sent < len(answer):
            await context.abort(grpc.StatusCode.UNAVAILABLE, "ended halfway, as configured")
        usage = pb.Usage(prompt_tokens=len(prompt), completion_tokens=len(answer))
        finished = pb.Finished(reason=pb.FINISH_REASON_LENGTH, usage=usage, request_id=f"fake-{number}")
        yield pb.GenerateResponse(finished=finished)

    async def _wait_until(self, planned_s: float) -> None:
        start_s = self._first_request_s
        release_s = start_s + self._timing.release_s(planned_s - start_s)
        await asyncio.sleep(max(0.0, release_s - time.perf_counter()))
        self.lags_s.append(time.perf_counter() - release_s)

    def lag_line(self) -> bytes:
        """The lags as one line of JSON."""
        lags_ms = sorted(lag * 1e3 for lag in self.lags_s) or [0.0]
        at = {f"lag_p{percent}_ms": round(lags_ms[(len(lags_ms) - 1) * percent // 100], 3) for percent in (50, 99, 100)}
        return msgspec.json.encode({"messages": len(self.lags_s), **at}) + b"\n"


async def serve(timing: FakeTiming, port: int) -> None:
    """Serve on loopback until SIGTERM or SIGINT."""
    service = FakeService(timing)
    server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
    pb_grpc.add_InferenceServiceServicer_to_server(service, server)  # type: ignore[no-untyped-call]
    bound = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    stop_requested = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, stop_requested.set)
    _print_line(msgspec.json.encode({"address": f"127.0.0.1:{bound}"}) + b"\n")
    gc.freeze()
    await stop_requested.wait()
    await server.stop(STOP_GRACE_S)
    _print_line(service.lag_line())


def _precise_loop() -> asyncio.AbstractEventLoop:
    """Make an event loop that waits with select(2), in microseconds; epoll rounds up to milliseconds."""
    return asyncio.SelectorEventLoop(selectors.SelectSelector())


def _print_line(line: bytes) -> None:
    sys.stdout.buffer.write(line)
    sys.stdout.buffer.flush()


def parse_arguments(argv: Sequence[str] | None = None) -> tuple[FakeTiming, int, int | None, int | None]:
    """Parse the command line into settings, port, core and niceness."""
    parser = argparse.ArgumentParser(description="A gRPC server with known latencies.")
    parser.add_argument("--port", type=int, default=0, help="0 takes any free one")
    parser.add_argument("--core", type=int, help="run on this core only")
    parser.add_argument("--nice", type=int, help="niceness; below 0 only where that is allowed")
    parser.add_argument("--ttft-ms", type=float, default=50.0)
    parser.add_argument("--tpot-ms", type=float, default=10.0)
    parser.add_argument("--spread", type=float, default=0.0, help="each request's own factor is 1 +- this")
    parser.add_argument("--stall-at-s", type=float, default=0.0, help="since the first request")
    parser.add_argument("--stall-s", type=float, default=0.0, help="how long no stream gets anything")
    parser.add_argument("--refuse-every", type=int)
    parser.add_argument("--fail-every", type=int)
    options = vars(parser.parse_args(argv))
    port, core, nice = (options.pop(name) for name in ("port", "core", "nice"))
    options["ttft_s"] = options.pop("ttft_ms") / 1e3
    options["tpot_s"] = options.pop("tpot_ms") / 1e3
    try:
        return msgspec.convert(options, FakeTiming), port, core, nice
    except msgspec.ValidationError as error:
        parser.error(str(error))


def main() -> None:
    """Entry point of `python -m disagg.loadtests.generator.fake_server`."""
    timing, port, core, nice = parse_arguments()
    if core is not None:
        os.sched_setaffinity(0, {core})
    if nice is not None:
        with suppress(PermissionError):  # below 0 it is a favour, not a need
            os.setpriority(os.PRIO_PROCESS, 0, nice)
    with asyncio.Runner(loop_factory=_precise_loop) as runner:
        runner.run(serve(timing, port))


if __name__ == "__main__":
    main()
