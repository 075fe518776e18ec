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
import sys
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress

import grpc
import grpc.aio
import msgspec

from disagg.loadtests.generator.fake_timing import FAKE_VOCAB_SIZE, FakeTiming, fake_answer
from disagg.v1 import inference_pb2 as pb
from disagg.v1 import inference_pb2_grpc as pb_grpc

FAKE_MODEL = "fake-server"
MAX_MODEL_LEN = 1 << 20
STOP_GRACE_S = 0.5

_Context = grpc.aio.ServicerContext[pb.GenerateRequest, pb.GenerateResponse]


class FakeService(pb_grpc.InferenceServiceServicer):
    """Answers `Generate` on schedule, and `ListModels`. Owner of the count of requests; lives on one event loop."""

    def __init__(self, timing: FakeTiming) -> None:
        self._timing = timing
        self._num_requests = 0
        self._first_request_s = 0.0
        self.lags_s: list[float] = []
        """How late each message went out."""

    async def ListModels(  # noqa: N802 - gRPC's name
        self, request: pb.ListModelsRequest, context: object
    ) -> pb.ListModelsResponse:
        """One model, which takes anything."""
        model = pb.Model(name=FAKE_MODEL, max_model_len=MAX_MODEL_LEN, vocab_size=FAKE_VOCAB_SIZE)
        return pb.ListModelsResponse(models=[model])

    async def Generate(  # noqa: N802 - gRPC's name
        self, request: pb.GenerateRequest, context: _Context
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        """The answer, token by token, each at its time."""
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
    """Serve on loopback until told to stop."""
    service = FakeService(timing)
    server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
    pb_grpc.add_InferenceServiceServicer_to_server(service, server)  # type: ignore[no-untyped-call]
    bound = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    told_to_stop = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, told_to_stop.set)
    _print_line(msgspec.json.encode({"address": f"127.0.0.1:{bound}"}) + b"\n")
    gc.freeze()
    await told_to_stop.wait()
    await server.stop(STOP_GRACE_S)
    _print_line(service.lag_line())


def _precise_loop() -> asyncio.AbstractEventLoop:
    """An event loop that waits with select(2), in microseconds; epoll rounds up to milliseconds."""
    return asyncio.SelectorEventLoop(selectors.SelectSelector())


def _print_line(line: bytes) -> None:
    sys.stdout.buffer.write(line)
    sys.stdout.buffer.flush()


def parse_arguments(argv: Sequence[str] | None = None) -> tuple[FakeTiming, int, int | None, int | None]:
    """The command line as settings, port, core and niceness."""
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
