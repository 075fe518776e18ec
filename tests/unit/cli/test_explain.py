"""What `disagg explain` says of a request."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console, RenderableType

from disagg.cli import explain
from disagg.cli.request_ids import shortened
from disagg.cluster.system.children import LaunchError
from disagg.proto.errors import ConfigError, PermissionDeniedError, RequestNotFoundError, UnavailableError
from disagg.v1 import inference_pb2 as pb


def text_of(drawn: RenderableType, width: int = 120) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(drawn)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def option(prefill: str, decode: str, cost: float, **fields: float) -> pb.PlacementOption:
    return pb.PlacementOption(prefill_worker=prefill, decode_worker=decode, cost=cost, **fields)  # type: ignore[arg-type]


def stages(**at_ms: float) -> list[pb.StageTime]:
    return [pb.StageTime(stage=stage, at_ms=at) for stage, at in at_ms.items()]


def whole() -> pb.ExplainRequestResponse:
    chosen = option("prefill-0", "decode-1", 21.5, wait_ms=1, prefill_ms=20, transfer_ms=0.5, ttft_ms=20, tpot_ms=10)
    return pb.ExplainRequestResponse(
        request_id="r1",
        prefill_worker="prefill-0",
        decode_worker="decode-1",
        transport="gloo",
        kv_bytes=3 << 20,
        prefill_cached_tokens=16,
        attempts=1,
        outcome="length",
        prompt_tokens=117,
        completion_tokens=5,
        policy="joint",
        chosen=chosen,
        options=[chosen, option("", "decode-1", 30, prefill_ms=30, missed_targets=1)],
        stages=stages(tokenize=1, route=2, first_token=26, kv_transfer=28, end=66),
        spans=[
            pb.StageSpan(stage="prefill", worker="prefill-0", start_ms=2, end_ms=26),
            pb.StageSpan(stage="tokenize", start_ms=0, end_ms=1),
            pb.StageSpan(stage="decode", worker="decode-1", start_ms=28, end_ms=66),
        ],
        max_itl_ms=12.25,
        trace_parent="00-1-2-01",
        arrived_at=1000.0,
    )


def test_the_ways_to_the_kv_of_the_prompt_and_what_was_fetched() -> None:
    found = whole()
    found.ways.extend(
        [
            pb.PromptWay(kind="compute", tokens=16, get_ms=0, prefill_ms=50),
            pb.PromptWay(kind="disk", tokens=512, prefill_ms=8),
            pb.PromptWay(kind="peer", source="decode-1", tokens=512, get_ms=9.25, prefill_ms=8, chosen=True),
        ]
    )
    found.fetched.CopyFrom(pb.FetchedKv(source="decode-1", outcome="done", tokens=496, bytes=2 << 20, ms=10.5))
    text = text_of(explain.report(found, ascii_only=True))
    assert "fetched      496 tokens, 2.0 MiB in 10.5 ms, from decode-1\n" in text
    assert (
        "   KV by          tokens      get  compute\n"
        "   compute            16      0.0     50.0\n"
        "   disk              512  not now      8.0\n"
        ">  peer decode-1     512      9.2      8.0\n"
        "a load or a fetch is taken if it saves"
    ) in text
    found.fetched.CopyFrom(pb.FetchedKv(source="decode-1", outcome="refused"))
    assert "fetched      from decode-1: refused\n" in text_of(explain.report(found))
    found.ways[2].delay_ms = 1.5
    assert ">  peer decode-1     512      9.2      8.0    1.5" in text_of(explain.report(found))


def test_the_whole_report() -> None:
    assert text_of(explain.report(whole(), ascii_only=True)) == (
        "request      r1\n"
        "outcome      length\n"
        "ran on       prefill-0 (prefill) -> decode-1 (decode)\n"
        "tokens       117 of the prompt, 5 generated\n"
        "cached       16 tokens on prefill-0\n"
        "KV moved     3.0 MiB by gloo\n"
        "longest gap  12.2 ms between two tokens\n"
        "traceparent  00-1-2-01\n"
        "\n"
        "Why there\n"
        "   prefill    decode    cost  wait  prefill  transfer  TTFT  TPOT  misses\n"
        ">  prefill-0  decode-1  21.5   1.0     20.0       0.5  20.0  10.0       0\n"
        "   -          decode-1  30.0   0.0     30.0       0.0                   1\n"
        "policy joint; milliseconds, as predicted at the placement; > was chosen\n"
        "\n"
        "Predicted and measured\n"
        "      predicted  measured\n"
        "TTFT    20.0 ms   24.0 ms  1.20 of it\n"
        "TPOT    10.0 ms   10.0 ms  1.00 of it\n"
        "\n"
        "Where the time went\n"
        "stage     worker     from ms  for ms\n"
        "tokenize  gateway        0.0     1.0  #\n"
        "prefill   prefill-0      2.0    24.0   ###############\n"
        "decode    decode-1      28.0    38.0                  ########################"
    )


def test_drafts_are_shown_where_there_were_some() -> None:
    request = whole()
    request.drafted_tokens, request.accepted_tokens = 52, 38
    assert "drafts       38 of 52 accepted" in text_of(explain.report(request)).splitlines()


def test_a_request_that_waits() -> None:
    request = pb.ExplainRequestResponse(request_id="r1", outcome="running", prompt_tokens=3, stages=stages(tokenize=1))
    assert text_of(explain.report(request)).splitlines() == [
        "request   r1",
        "outcome   running",
        "ran on    nowhere yet",
        "tokens    3 of the prompt, 0 generated",
        "cached    nothing",
        "KV moved  none",
        "attempts  0",
    ]


@pytest.mark.parametrize(
    ("prefill", "decode", "text"),
    [
        ("", "decode-0", "decode-0, prompt and answer"),
        ("prefill-0", "", "prefill-0, where it ended with its prompt"),
    ],
)
def test_where_it_ran(prefill: str, decode: str, text: str) -> None:
    request = pb.ExplainRequestResponse(request_id="r1", prefill_worker=prefill, decode_worker=decode, attempts=1)
    assert f"ran on    {text}\n" in text_of(explain.report(request))


def test_a_policy_that_knows_no_times_and_a_second_attempt() -> None:
    request = whole()
    request.attempts, request.policy = 2, "round_robin"
    request.chosen.CopyFrom(option("prefill-0", "decode-1", 0))
    del request.options[:]
    text = text_of(explain.report(request))
    assert "\nattempts     2\n" in text
    assert "\n   prefill    decode    cost  TTFT  TPOT\n>  prefill-0  decode-1   0.0\npolicy round_robin;" in text
    assert "as predicted at the placement of the latest attempt;" in text
    assert "Predicted and measured" not in text


def test_one_token_has_no_tpot() -> None:
    request = whole()
    request.completion_tokens = 1
    text = text_of(explain.report(request))
    assert "\nTTFT " in text
    assert "\nTPOT " not in text


def test_a_waterfall_of_what_lasts() -> None:
    spans = [
        pb.StageSpan(stage="route", start_ms=0, end_ms=5),
        pb.StageSpan(stage="decode", worker="decode-0", start_ms=5),
        pb.StageSpan(stage="detokenize", start_ms=9.99, end_ms=10),
    ]
    lines = text_of(explain.waterfall(spans, cells=10, ascii_only=True)).splitlines()
    assert lines[1:] == [
        "route       gateway       0.0     5.0  #####",
        "decode      decode-0      5.0   lasts       #####",
        "detokenize  gateway      10.0     0.0           #",
    ]


def test_a_waterfall_of_nothing_but_the_beginning() -> None:
    lines = text_of(explain.waterfall([pb.StageSpan(stage="tokenize")], cells=10, ascii_only=True)).splitlines()
    assert lines[1:] == ["tokenize  gateway      0.0   lasts  #"]


def test_what_guardrails_did() -> None:
    request = whole()
    request.guardrails.add(guardrail="g", rule="r", subject="answer", action="replace", reason="a key", count=2)
    request.guardrails.add(guardrail="s", subject="prompt", action="failed", reason="no verdict in 1 s", count=1)
    text = text_of(explain.report(request))
    assert "g/r: replaced in the answer (a key), 2 times" in text
    assert "s: gave no verdict on the prompt (no verdict in 1 s)" in text


def test_the_list() -> None:
    refused = pb.ExplainRequestResponse(request_id="r2", outcome="slow_down", prompt_tokens=9, arrived_at=100.0)
    lines = text_of(explain.listing([whole(), refused], 1030.0)).splitlines()
    assert [line.split() for line in lines] == [
        ["TTFT", "total"],
        ["request", "ago", "outcome", "prefill", "decode", "prompt", "output", "ms", "ms"],
        ["r1", "30", "s", "length", "prefill-0", "decode-1", "117", "5", "26", "66"],
        ["r2", "16", "min", "slow_down", "-", "-", "9", "0"],
    ]


def test_the_list_has_a_line_for_each_request_in_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = []
    for index in range(2):
        request = whole()
        request.request_id = f"{index:x}" * 32
        requests.append(request)
    monkeypatch.setattr(explain, "open_client", lambda address: Requests(*requests))
    for width, digits in ((80, 8), (120, 32)):
        out = io.StringIO()
        explain.run_list("x:1", 20, Console(file=out, width=width), as_json=False)
        first, second = out.getvalue().splitlines()[2:]
        assert (first.split()[0], second.split()[0]) == ("0" * digits, "1" * digits)
        assert first.split()[-4:] == ["117", "5", "26", "66"]


def named(*ids: str) -> Requests:
    return Requests(*(pb.ExplainRequestResponse(request_id=each) for each in ids))


def test_the_beginning_of_an_id_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "request   abcd " in run(monkeypatch, named("abcd", "b"), "ab")
    assert "request   ab " in run(monkeypatch, named("abcd", "ab"), "ab")
    with pytest.raises(ConfigError, match=r"^request: 2 ids begin with ab: abcd, abce; type more of it$"):
        run(monkeypatch, named("abcd", "abce"), "ab")
    with pytest.raises(RequestNotFoundError):
        run(monkeypatch, named("abcd"), "x")


@pytest.mark.parametrize(
    ("ids", "short"),
    [
        (["0123456789", "abcdefghij"], ["01234567", "abcdefgh"]),
        (["01234567890", "01234567899"], ["01234567890", "01234567899"]),
        (["012345678aaa", "012345678bbb", "x"], ["012345678a", "012345678b", "x"]),
        (["0123456789", "0123456789"], ["01234567", "01234567"]),
        ([], []),
    ],
)
def test_shortened_ids_differ_where_ids_differ(ids: list[str], short: list[str]) -> None:
    assert shortened(ids) == short


class Requests:
    """A client that knows these requests, newest first."""

    def __init__(self, *known: pb.ExplainRequestResponse, error: Exception | None = None) -> None:
        self._known = known
        self._error = error

    def __enter__(self) -> Requests:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def requests(self, limit: int) -> list[pb.ExplainRequestResponse]:
        if self._error is not None:
            raise self._error
        return list(self._known[:limit])

    def explain(self, request_id: str) -> pb.ExplainRequestResponse:
        for request in self._known:
            if request.request_id == request_id:
                return request
        raise RequestNotFoundError("no such request")


def run(
    monkeypatch: pytest.MonkeyPatch, client: Requests, request_id: str | None = None, *, as_json: bool = False
) -> str:
    monkeypatch.setattr(explain, "open_client", lambda address: client)
    out = io.StringIO()
    explain.run_explain("x:1", request_id, Console(file=out, width=120), as_json=as_json)
    return out.getvalue()


def test_without_an_id_it_is_the_latest(monkeypatch: pytest.MonkeyPatch) -> None:
    older = pb.ExplainRequestResponse(request_id="r0")
    assert "request      r1 " in run(monkeypatch, Requests(whole(), older))
    assert "request   r0 " in run(monkeypatch, Requests(whole(), older), "r0")


def test_a_probe_is_not_the_latest_request_unless_there_is_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    probe = pb.ExplainRequestResponse(request_id="p", outcome="length", is_probe=True)
    assert "request      r1 " in run(monkeypatch, Requests(probe, whole()))
    assert "outcome   length, a probe of disagg doctor\n" in run(monkeypatch, Requests(probe))
    assert "length (probe)" in text_of(explain.listing([probe], 1.0))


def test_json_is_the_whole_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    found = json.loads(run(monkeypatch, Requests(whole()), as_json=True))
    assert found["request_id"] == "r1"
    assert found["kv_bytes"] == 3 << 20
    assert found["chosen"]["ttft_ms"] == 20
    assert "ttft_ms" not in found["options"][1]
    assert [span["stage"] for span in found["spans"]] == ["prefill", "tokenize", "decode"]


def test_the_list_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explain, "open_client", lambda address: Requests(whole(), whole()))
    out = io.StringIO()
    explain.run_list("x:1", 1, Console(file=out, width=120), as_json=True)
    assert [request["request_id"] for request in json.loads(out.getvalue())] == ["r1"]


def test_before_the_first_request(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LaunchError, match=r"^there was no request yet; next: disagg generate TEXT$"):
        run(monkeypatch, Requests())
    out = io.StringIO()
    explain.run_list("x:1", 1, Console(file=out, width=120), as_json=False)
    assert out.getvalue() == "there was no request yet; next: disagg generate TEXT\n"


def test_without_a_gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    client = Requests(error=UnavailableError("refused", "unreachable"))
    with pytest.raises(LaunchError, match=r"^no gateway answers at x:1; start one with: disagg up$"):
        run(monkeypatch, client)


def test_what_the_gateway_refuses_is_not_taken_for_its_absence(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnavailableError, match="the controller"):
        run(monkeypatch, Requests(error=UnavailableError("the controller is away", "controller_away")))


@pytest.mark.parametrize("prefix", ["chatcmpl-", "cmpl-", "resp_", "msg_"])
def test_the_id_of_an_answer_names_its_request(monkeypatch: pytest.MonkeyPatch, prefix: str) -> None:
    older = pb.ExplainRequestResponse(request_id="r0")
    assert "request   r0 " in run(monkeypatch, Requests(whole(), older), f"{prefix}r0")


def test_a_tenant_is_told_that_the_request_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    denied = PermissionDeniedError("this needs a key with the scope admin")
    with pytest.raises(RequestNotFoundError, match="no such request"):
        run(monkeypatch, Requests(error=denied), "r9")
