"""The comparison of the serving benchmark: its arithmetic, its order of turns, its reading of HTTP streams."""

from __future__ import annotations

import argparse
import asyncio
import json

import pytest

from benchmarks import load, load_http
from benchmarks.load import RequestSizes, Run, Timing
from benchmarks.load_http import HttpCall
from benchmarks.serving import side_by_side, throughput
from benchmarks.serving.parties import Party, divided

# ---------------------------------------------------------------- ratios


def run(mode: str, concurrency: int, repeat: int, tok_s: float) -> Run:
    timing = Timing(ttft_s=0.1, e2e_s=0.5, output_tokens=10)
    return Run(mode=mode, concurrency=concurrency, repeat=repeat, elapsed_s=10 / tok_s, timings=(timing,))


RUNS = [
    run("colocated-2x1 gRPC", 8, 0, 90.0),
    run("colocated-2x1 gRPC", 8, 1, 70.0),
    run("colocated-2x1 gRPC", 8, 2, 60.0),
    run("colocated-2x1 HTTP", 8, 0, 50.0),
    run("colocated-2x1 engine", 8, 0, 100.0),
    run("colocated-2x1 engine", 8, 1, 100.0),
    run("colocated-2x1 engine", 8, 2, 50.0),
    run("1p1d HTTP", 8, 0, 75.0),
    run("vllm", 8, 0, 25.0),
]


def test_a_ratio_is_the_median_over_the_repeats() -> None:
    assert side_by_side.ratios(RUNS, "colocated-2x1 gRPC", "colocated-2x1 engine") == {8: 0.9}
    assert side_by_side.ratios(RUNS, "colocated-2x1 gRPC", "nobody") == {}


def test_the_summary_has_the_best_shape_and_each() -> None:
    found = side_by_side.summary(RUNS)
    assert {name: value for name, value in found.items() if "served_over" in name} == {
        "served_over_engine_c8": 0.9,
        "colocated-2x1_served_over_engine_c8": 0.9,
        "served_over_engine_http_c8": 0.5,
        "colocated-2x1_served_over_engine_http_c8": 0.5,
        "served_over_vllm_c8": 3.0,
        "colocated-2x1_served_over_vllm_c8": 2.0,
        "1p1d_served_over_vllm_c8": 3.0,
        "served_over_vllm_grpc_c8": 3.6,
        "colocated-2x1_served_over_vllm_grpc_c8": 3.6,
    }
    assert found["vllm_tok_s_c8"] == 25.0


class FakeParty(Party):
    """Notes its turns."""

    def __init__(self, name: str, turns: list[tuple[str, int, int, int]]) -> None:
        super().__init__(name)
        self._turns = turns

    def run(self, shape: RequestSizes, concurrency: int, repeat: int, first_seed: int, count: int) -> Run:
        self._turns.append((self.name, concurrency, first_seed, count))
        return run(self.name, concurrency, repeat, 1.0)


def test_turns_go_both_ways_and_no_prompt_comes_twice() -> None:
    turns: list[tuple[str, int, int, int]] = []
    options = argparse.Namespace(input_tokens=4, output_tokens=10, repeats=2, concurrency=[1], requests=3, seed=100)
    runs = side_by_side.run_all([FakeParty("a", turns), FakeParty("b", turns)], options)
    assert [name for name, *_ in turns] == ["a", "b", "a", "b", "b", "a"]
    assert [seed for _, _, seed, _ in turns[2:]] == [100, 103, 106, 109]
    assert [(each.mode, each.repeat) for each in runs] == [("a", 0), ("b", 0), ("b", 1), ("a", 1)]


def test_work_is_divided_evenly() -> None:
    assert divided(7, 2) == [4, 3]
    assert divided(2, 2) == [1, 1]
    assert divided(8, 1) == [8]


def test_command_line_of_a_comparison() -> None:
    options = throughput.parse_arguments(["--peer", "vllm"])
    assert (options.side_by_side, options.repeats) == (True, 5)
    assert options.shapes == ["colocated-2x1", "colocated-1x2", "1p1d"]
    assert throughput.parse_arguments([]).repeats == 1
    assert throughput.parse_arguments(["--engine", "--repeats", "2", "--shapes", "1p1d"]).repeats == 2
    assert throughput.parse_arguments(["--shapes", "1p1d"]).side_by_side
    for arguments in (["--engine", "--address", "x:1"], ["--shapes", "1p1d", "--address", "x:1"]):
        with pytest.raises(SystemExit, match="2"):
            throughput.parse_arguments(arguments)


def test_shapes_alone_are_compared_with_the_first() -> None:
    rates = {"elastic-2x1": 30.0, "1p1d": 40.0, "colocated-2x1": 20.0}
    runs = [run(f"{name} {kind}", 8, 0, rate) for name, rate in rates.items() for kind in ("gRPC", "HTTP")]
    found = side_by_side.summary(runs)
    assert {name: value for name, value in found.items() if name.startswith("elastic-2x1_served")} == {
        "elastic-2x1_served_over_1p1d_c8": 0.75,
        "elastic-2x1_served_over_colocated-2x1_c8": 1.5,
    }


# ---------------------------------------------------------------- HTTP

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
TEXT = b'data: {"choices":[{"index":0,"text":"a"}]}\n\n'
END = b'data: {"choices":[],"usage":{"prompt_tokens":4,"completion_tokens": 3}}\n\ndata: [DONE]\n\n'


class FakeTransport(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.aborted = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += bytes(data)

    def abort(self) -> None:
        self.aborted = True


def call_with(pieces: list[bytes], num_tokens: int = 3) -> tuple[HttpCall, FakeTransport]:
    """A call that is sent at 1.0 s and gets a piece at each second from 2.0 s on; then the connection ends."""
    times = iter([1.0, *(2.0 + index for index in range(len(pieces)))])
    # The clock is read when the request is sent and when a piece has an event.
    call = HttpCall(b"request", num_tokens, lambda: next(times))
    transport = FakeTransport()
    call.connection_made(transport)
    for piece in pieces:
        call.data_received(piece)
    call.connection_lost(None)
    return call, transport


async def test_times_are_those_of_the_first_and_the_last_event() -> None:
    call, transport = call_with([HEAD + TEXT, TEXT, TEXT + END])
    assert await call.done == Timing(ttft_s=1.0, e2e_s=3.0, output_tokens=3)
    assert (transport.written, transport.aborted) == (b"request", True)


async def test_an_event_may_be_cut_anywhere() -> None:
    whole = HEAD + TEXT + TEXT + END
    for cut in range(1, len(whole)):
        call, _ = call_with([whole[:cut], whole[cut:]])
        assert (await call.done).output_tokens == 3


@pytest.mark.parametrize(
    ("pieces", "num_tokens", "message"),
    [
        ([HEAD + TEXT + END], 4, "3 tokens came, 4 were asked for"),
        ([HEAD + TEXT], 3, "the connection ended before the answer did"),
        ([HEAD + b"data: [DONE]\n\n"], 3, "no stream with a usage block came"),
        ([b"HTTP/1.1 400 Bad Request\r\n\r\n{}" + END], 3, "no stream with a usage block came: b'HTTP/1.1 400"),
    ],
)
async def test_another_answer_is_an_error(pieces: list[bytes], num_tokens: int, message: str) -> None:
    call, _ = call_with(pieces, num_tokens)
    with pytest.raises(RuntimeError, match=message):
        await call.done


def test_a_request_is_the_one_that_goes_over_grpc() -> None:
    raw = load_http.request_bytes("m", 100, RequestSizes(input_tokens=8, output_tokens=3), seed=7)
    head, _, body = raw.partition(b"\r\n\r\n")
    assert head.startswith(b"POST /v1/completions HTTP/1.1\r\n")
    sent = json.loads(body)
    assert sent["prompt"] == load.random_prompt(7, 8, 100)
    assert (sent["max_tokens"], sent["ignore_eos"], sent["stream"]) == (3, True, True)


def test_the_address_of_a_server() -> None:
    assert load_http.address_of("http://127.0.0.1:8100/") == "127.0.0.1:8100"
    assert load_http.address_of("http://host") == "host:80"
    for url in ("https://host", "host:80", "http://host/v1"):
        with pytest.raises(ValueError, match="http://HOST:PORT"):
            load_http.address_of(url)
