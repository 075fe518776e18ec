"""The gateway's benchmark measures what it says: its worker speaks as told, its clients count right, its sums are
right; and its bad input is bad."""

from __future__ import annotations

import asyncio
import itertools
import random
import struct
from typing import cast

import pytest

from benchmarks.gateway.command import parse_arguments
from benchmarks.gateway.cost import Cost, medians, orders, summary
from benchmarks.gateway.slow import Slow, slow_summary, timings
from disagg.gateway.rpc.shell.decoding import decode
from disagg.proto.errors import InvalidRequestError
from disagg.proto.ids import AttemptKey, GatewayId, RequestId
from disagg.proto.messages import Cancel, Dispatch, End, PrefillDone, Sampling, SequenceSpec, StepUpdate, TokenOut
from disagg.proto.token_ids import pack_token_ids
from disagg.v1 import inference_pb2 as pb
from tests.acceptance.bad_input import generated_grpc, generated_http
from tests.acceptance.bad_input.generated import MODEL, Outcomes
from tests.support.gateway import make_turns
from tests.support.gateway_rig.rig import split
from tests.support.gateway_rig.worker import Steps
from tests.support.raw_clients import GENERATE, GrpcStreams, HttpStream, frame, grpc_message, http_request
from tests.support.router import ROOT


def dispatch(name: str, max_tokens: int) -> Dispatch:
    return Dispatch(
        spec=SequenceSpec(
            request_id=RequestId(name),
            attempt=0,
            gateway_id=GatewayId("g"),
            prompt_token_ids=pack_token_ids([1]),
            emitted_token_ids=(),
            block_hashes=(),
            root_hash=ROOT,
            sampling=Sampling(max_tokens=max_tokens),
        )
    )


# ---------------------------------------------------------------- the worker


def test_a_step_is_one_message_of_all_sequences() -> None:
    steps = Steps([10, 11, 12])
    assert steps.step() is None
    steps.take(dispatch("a", 2))
    steps.take(dispatch("b", 9))
    a, b = (AttemptKey(RequestId(name), 0) for name in "ab")
    first = steps.step()
    assert first == StepUpdate(
        tokens=(TokenOut(a.request_id, 0, 0, (10,)), TokenOut(b.request_id, 0, 0, (11,))),
        prefilled=tuple(PrefillDone(request_id=k.request_id, attempt=0, cached_tokens=0) for k in (a, b)),
    )
    second = steps.step()
    assert second is not None
    assert second.tokens == (TokenOut(a.request_id, 0, 1, (11,)), TokenOut(b.request_id, 0, 1, (12,)))
    assert second.ends == (End(request_id=a.request_id, attempt=0, reason="length"),)
    assert second.prefilled == ()
    steps.take(Cancel(request_id=b.request_id, attempt=0))
    steps.take(Cancel(request_id=a.request_id, attempt=0))
    assert steps.step() == StepUpdate(ends=(End(request_id=b.request_id, attempt=0, reason="cancelled"),))
    assert (steps.step(), steps.num_tokens, steps.num_sequences) == (None, 4, 0)


def test_a_worker_needs_something_to_say() -> None:
    with pytest.raises(ValueError, match="token_ids"):
        Steps([])


# ---------------------------------------------------------------- the clients


class Wire:
    """Stands for a transport: keeps what is written."""

    def __init__(self) -> None:
        self.written = b""

    def write(self, data: bytes) -> None:
        self.written += data


EVENTS = b'HTTP/1.1 200 OK\r\n\r\ndata: {"a": 1}\n\ndata: {"b": "data: [x"}\n\ndata: {"c": 3}\n\ndata: [DONE]\n\n'


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 11, 1000])
def test_events_are_counted_however_they_are_cut(size: int) -> None:
    client = HttpStream(b"")
    for start in range(0, len(EVENTS), size):
        client.data_received(EVENTS[start : start + size])
    assert (client.stream.num_messages, client.stream.completed) == (3, True)
    assert client.stream.num_bytes == len(EVENTS)


@pytest.mark.parametrize("size", [1, 4, 9, 13, 1000])
def test_messages_are_counted_however_they_are_cut(size: int) -> None:
    deltas = [pb.GenerateResponse(delta=pb.TokenDelta(token_ids=[i])).SerializeToString() for i in range(3)]
    finished = pb.GenerateResponse(finished=pb.Finished(request_id="r")).SerializeToString()
    first, second = grpc_message(deltas[0]) + grpc_message(deltas[1])[:4], grpc_message(deltas[1])[4:]
    data = frame(4, 0, 0, b"") + frame(1, 4, 1, b"headers") + frame(0, 0, 1, first) + frame(6, 0, 0, b"12345678")
    data += frame(0, 0, 3, grpc_message(deltas[2])) + frame(0, 0, 1, second) + frame(0, 0, 1, grpc_message(finished))
    data += frame(1, 5, 1, b"trailers") + frame(3, 0, 3, struct.pack(">I", 8))
    times = itertools.count()
    client = GrpcStreams(GENERATE, [b"x", b"y"], 65535, lambda: float(next(times)))
    wire = Wire()
    client.transport = cast(asyncio.Transport, wire)
    for start in range(0, len(data), size):
        client.data_received(data[start : start + size])
    one, other = client.streams
    assert (one.num_messages, one.completed, one.ended, len(one.times)) == (3, True, True, 3)
    assert (other.num_messages, other.completed, other.ended) == (1, False, True)
    assert one.num_bytes == sum(len(grpc_message(m)) for m in (*deltas[:2], finished))
    assert wire.written == frame(4, 1, 0, b"") + frame(6, 1, 0, b"12345678")


def test_a_request_is_well_formed() -> None:
    raw = http_request("/x", {"a": "ü"}, [("b", "c")])
    head, _, body = raw.partition(b"\r\n\r\n")
    assert head.split(b"\r\n") == [
        b"POST /x HTTP/1.1",
        b"host: localhost",
        b"content-type: application/json",
        b"content-length: %d" % len(body),
        b"b: c",
    ]
    assert body == b'{"a": "\\u00fc"}'


# ---------------------------------------------------------------- the sums


def cost(protocol: str, num_streams: int, cpu_s: float, num_tokens: int = 1000, seconds: float = 2.0) -> Cost:
    return Cost(
        protocol=protocol,  # type: ignore[arg-type]
        num_streams=num_streams,
        step_ms=1.0,
        repeat=0,
        seconds=seconds,
        num_tokens=num_tokens,
        num_messages=num_tokens // 2,
        cpu_s=cpu_s,
        rss_bytes=0,
    )


def test_summary_takes_medians_and_the_dearer_share() -> None:
    costs = [cost("grpc", 1, s) for s in (0.3, 0.1, 0.2)] + [cost("http", 1, s) for s in (0.4, 0.2, 0.3)]
    costs += [cost("grpc", 8, 0.05), cost("http", 8, 0.06)]
    live = [cost("grpc", 9, 1.0), cost("http", 9, 1.5)]
    assert summary(costs, live) == {
        "grpc_us_per_token_1": 200.0,
        "http_us_per_token_1": 300.0,
        "grpc_us_per_token_8": 50.0,
        "http_us_per_token_8": 60.0,
        "http_over_grpc_1": 1.5,
        "http_over_grpc_8": 1.2,
        "grpc_us_per_token": 50.0,
        "http_us_per_token": 60.0,
        "http_over_grpc": 1.2,
        "grpc_core_share_9_streams": 0.5,
        "grpc_tokens_per_message_9_streams": 2.0,
        "http_core_share_9_streams": 0.75,
        "http_tokens_per_message_9_streams": 2.0,
        "core_share_9_streams": 0.75,
    }
    assert summary([], []) == {}


def test_the_median_of_an_even_number_is_a_window_that_was_measured() -> None:
    windows = [cost("grpc", 1, s) for s in (0.1, 0.4, 0.2, 0.3)]
    assert medians(windows) == {("grpc", 1): windows[3]}


def test_each_protocol_goes_first_by_turns() -> None:
    assert [(repeat, protocols[0]) for repeat, protocols in orders(3)] == [(0, "grpc"), (1, "http"), (2, "grpc")]


def test_shares() -> None:
    assert split(10, 4) == [3, 3, 2, 2]
    assert split(3, 3) == [1, 1, 1]


def test_timings_are_over_streams_and_over_gaps() -> None:
    tpot_ms, gap_ms = timings([[0.0, 0.1, 0.2], [0.0, 0.3], [1.0]])
    assert tpot_ms == pytest.approx(200.0)
    assert gap_ms == pytest.approx(296.0)


def test_summary_of_misbehaving_clients() -> None:
    row = Slow(
        protocol="grpc",
        kind="never_reads",
        num_clients=2,
        tpot_p50_ms_before=4.0,
        tpot_p50_ms=5.0,
        gap_p99_ms_before=6.0,
        gap_p99_ms=7.0,
        bytes_per_client=2048.0,
        freed_after_s=3.0,
    )
    assert slow_summary([row]) == {
        "grpc_never_reads_tpot_ratio": 1.25,
        "grpc_never_reads_gap_p99_ms": 7.0,
        "grpc_never_reads_kib_per_client": 2.0,
        "grpc_never_reads_freed_after_s": 3.0,
    }


def test_arguments() -> None:
    options = parse_arguments(["--streams", "1", "8", "--live", "0"])
    assert (options.streams, options.live, options.slow, options.repeats) == ([1, 8], 0, False, 5)


# ---------------------------------------------------------------- bad input


def test_generated_input_is_the_same_for_the_same_dice() -> None:
    for make in (generated_http.bad_requests, generated_grpc.bad_messages, generated_grpc.bad_frames):
        first, again, other = (list(itertools.islice(make(random.Random(s), MODEL), 50)) for s in (1, 1, 2))
        assert first == again != other


def test_every_wrong_value_differs_from_the_right_one() -> None:
    dice = random.Random(1)
    bodies = generated_http.Bodies(MODEL)
    for route, fields in bodies.wrong.items():
        for name, wrong in fields.items():
            for _ in range(30):
                value = wrong(dice)
                assert value != bodies.valid[route].get(name) or isinstance(value, bool), f"{route} {name}: {value!r}"


@pytest.mark.parametrize(
    ("received", "may_close", "is_fine"),
    [
        (b"", True, True),
        (b"", False, False),
        (b"HTTP/1.1 400 x\r\n\r\n", True, True),
        (b"HTTP/1.1 400 x\r\n\r\n{}", False, False),
        (b'HTTP/1.1 400 x\r\n\r\n{"error": {"message": "m", "type": "t", "param": null, "code": "c"}}', False, True),
        (b'HTTP/1.1 400 x\r\n\r\n{"error": {"message": "", "type": "t", "param": null, "code": "c"}}', False, False),
        (b"HTTP/1.1 200 x\r\n\r\n", True, False),
        (b"HTTP/1.1 500 x\r\n\r\n", True, False),
    ],
)
def test_what_counts_as_a_refusal(received: bytes, may_close: bool, is_fine: bool) -> None:
    bad = generated_http.BadHttp("x", b"", may_close)
    assert (generated_http.problem(bad, generated_http.parse(received)) is None) is is_fine


def test_what_is_no_reply_is_a_problem_too() -> None:
    with pytest.raises(ValueError, match="not a reply"):
        generated_http.parse(b"\x15\x03\x01")


def test_an_answer_among_frames_is_found() -> None:
    assert not generated_grpc.has_message(frame(4, 0, 0, b"") + frame(0, 1, 1, b""))
    assert generated_grpc.has_message(frame(4, 0, 0, b"") + frame(0, 0, 1, b"x"))
    assert not generated_grpc.has_message(b"HTTP/1.1 400")


def test_outcomes_add_up() -> None:
    outcomes = Outcomes()
    outcomes.note("http", "a", "400", None)
    outcomes.note("grpc", "a", "200", "taken")
    outcomes.find("afterwards", "it died")
    assert outcomes.summary() == {"inputs": 2, "kinds": 2, "problems": 2, "inputs_http": 1, "inputs_grpc": 1}
    assert outcomes.problems == ["a: taken", "afterwards: it died"]


async def test_broken_messages_do_not_decode() -> None:
    """All but the well-formed ones with wrong values, which `validate` refuses."""
    kinds: dict[str, list[bytes]] = {}
    for bad in itertools.islice(generated_grpc.bad_messages(random.Random(3), MODEL), 2000):
        if bad.kind.startswith("protobuf: "):
            kinds.setdefault(bad.kind, []).append(bad.raw)
    assert len(kinds) == 8
    for raw in itertools.chain.from_iterable(kinds.values()):
        with pytest.raises(InvalidRequestError):
            await decode(raw, pb.GenerateRequest, make_turns(), 10_000)
