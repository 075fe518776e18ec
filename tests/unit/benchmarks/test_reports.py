"""The arithmetic of the benchmarks, exactly; and that their bad input is refused by the gateway's own checks."""

from __future__ import annotations

import asyncio
import json
import platform
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import grpc
import pytest

from benchmarks import load
from benchmarks.load import Run, Timing
from benchmarks.serving.side_by_side import num_requests
from benchmarks.serving.throughput import parse_arguments
from disagg.cluster.config.cluster_config import parse_config
from disagg.gateway.requests.validate import Limits, check_request
from disagg.gateway.rpc.protobuf import read_request
from disagg.gateway.text.tokenizer import ModelInfo
from disagg.proto.errors import DisaggError
from disagg.v1 import inference_pb2 as pb
from disagg.v1.inference_pb2_grpc import InferenceServiceStub
from tests.acceptance.bad_input import refusals
from tests.support import reports as common
from tests.support.launch import cluster_config

MODEL = pb.Model(name="tiny", max_model_len=64, vocab_size=100)


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [
        ([7.0], 50, 7.0),
        ([7.0], 99, 7.0),
        ([3.0, 1.0, 2.0], 50, 2.0),
        ([4.0, 1.0, 3.0, 2.0], 50, 2.5),
        ([10.0, 20.0], 90, 19.0),
        ([float(n) for n in range(101)], 99, 99.0),
        ([0.0, 100.0], 99, 99.0),
        ([1.0, 2.0, 3.0], 0, 1.0),
        ([1.0, 2.0, 3.0], 100, 3.0),
    ],
)
def test_percentile(values: list[float], percent: float, expected: float) -> None:
    assert common.percentile(values, percent) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("values", "percent"), [([], 50), ([1.0], -1), ([1.0], 101), ([1.0], float("nan"))])
def test_a_percentile_that_does_not_exist(values: list[float], percent: float) -> None:
    with pytest.raises(ValueError, match="percent"):
        common.percentile(values, percent)


def test_tpot_is_undefined_for_one_token() -> None:
    assert Timing(ttft_s=0.5, e2e_s=0.5, output_tokens=1).tpot_s is None
    assert Timing(ttft_s=0.5, e2e_s=2.5, output_tokens=5).tpot_s == 0.5


def run(mode: str, concurrency: int, repeat: int, elapsed_s: float, *timings: Timing) -> Run:
    return Run(mode=mode, concurrency=concurrency, repeat=repeat, elapsed_s=elapsed_s, timings=timings)


FAST = Timing(ttft_s=0.1, e2e_s=0.3, output_tokens=3)
SLOW = Timing(ttft_s=0.2, e2e_s=1.0, output_tokens=5)
ONE = Timing(ttft_s=0.4, e2e_s=0.4, output_tokens=1)


def test_summary_pools_requests_and_takes_the_median_run() -> None:
    runs = [
        run("disaggregated", 1, 0, 1.0, FAST),
        run("disaggregated", 1, 1, 0.5, SLOW),
        run("disaggregated", 1, 2, 0.5, ONE),
        run("colocated", 8, 0, 2.0, SLOW, SLOW),
    ]
    assert load.summary(runs) == {
        "tok_s_c1": 3.0,  # of 3, 10 and 2
        "ttft_p50_ms_c1": 200.0,
        "ttft_p90_ms_c1": 360.0,
        "ttft_p99_ms_c1": 396.0,
        "tpot_p50_ms_c1": 150.0,  # of 100 and 200; the answer of one token has none
        "tpot_p90_ms_c1": 190.0,
        "tpot_p99_ms_c1": 199.0,
        "colocated_tok_s_c8": 5.0,
        "colocated_ttft_p50_ms_c8": 200.0,
        "colocated_ttft_p90_ms_c8": 200.0,
        "colocated_ttft_p99_ms_c8": 200.0,
        "colocated_tpot_p50_ms_c8": 200.0,
        "colocated_tpot_p90_ms_c8": 200.0,
        "colocated_tpot_p99_ms_c8": 200.0,
    }


def test_answers_of_one_token_have_no_tpot_figures() -> None:
    assert load.summary([run("running", 1, 0, 1.0, ONE)]) == {
        "tok_s_c1": 1.0,
        "ttft_p50_ms_c1": 400.0,
        "ttft_p90_ms_c1": 400.0,
        "ttft_p99_ms_c1": 400.0,
    }


def test_a_row_has_every_measurement() -> None:
    assert load.row(run("colocated", 8, 1, 2.0, FAST, SLOW, ONE)) == {
        "mode": "colocated",
        "concurrency": 8,
        "repeat": 1,
        "requests": 3,
        "elapsed_s": 2.0,
        "tok_s": 4.5,
        "ttft_ms": [100.0, 200.0, 400.0],
        "tpot_ms": [100.0, 200.0],
    }


def test_the_table_has_one_line_per_mode_and_concurrency() -> None:
    columns, lines = load.table([run("colocated", 8, 0, 2.0, SLOW), run("colocated", 8, 1, 2.0, SLOW)])
    assert lines == [("colocated", "8", "2", "2.5", "200.0", "200.0", "200.0", "200.0", "200.0", "200.0")]
    assert len(columns) == len(lines[0])


def test_prompts_are_seeded_and_in_the_vocabulary() -> None:
    first, second = (list(request.token_ids.ids) for request in load.requests(MODEL, SHAPE, 7, 2))
    assert first == load.random_prompt(7, 8, 100)
    assert second == load.random_prompt(8, 8, 100)
    assert first != second
    assert len(first) == 8
    assert set(first + second) <= set(range(100))


SHAPE = load.RequestSizes(input_tokens=8, output_tokens=3)


class FakeService:
    """Answers with `num_tokens` tokens in messages of two, and counts how many calls are open at once."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self.open = 0
        self.most_open = 0
        self.prompts: list[tuple[int, ...]] = []

    async def Generate(  # noqa: N802 - the name in the API
        self, request: pb.GenerateRequest
    ) -> AsyncIterator[pb.GenerateResponse]:
        self.prompts.append(tuple(request.token_ids.ids))
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        for first in range(0, self.num_tokens, 2):
            await asyncio.sleep(0)
            ids = range(first, min(first + 2, self.num_tokens))
            yield pb.GenerateResponse(delta=pb.TokenDelta(first_index=first, token_ids=ids))
        self.open -= 1
        yield pb.GenerateResponse(finished=pb.Finished())


def stub(service: FakeService) -> InferenceServiceStub:
    return cast(InferenceServiceStub, service)


async def test_closed_loop_keeps_the_concurrency_and_sends_everything_once() -> None:
    service = FakeService(num_tokens=3)
    elapsed_s, timings = await load.closed_loop(stub(service), load.requests(MODEL, SHAPE, 0, 10), 4)
    assert service.most_open == 4
    assert sorted(service.prompts) == sorted(tuple(load.random_prompt(seed, 8, 100)) for seed in range(10))
    assert [timing.output_tokens for timing in timings] == [3] * 10
    assert all(0 <= timing.ttft_s <= timing.e2e_s <= elapsed_s for timing in timings)


async def test_an_answer_of_another_length_is_an_error() -> None:
    with pytest.raises(ExceptionGroup) as raised:
        await load.closed_loop(stub(FakeService(num_tokens=2)), load.requests(MODEL, SHAPE, 0, 1), 1)
    assert [str(error) for error in raised.value.exceptions] == ["2 tokens came, 3 were asked for"]


def test_command_line_defaults_are_the_agreed_load() -> None:
    options = parse_arguments([])
    assert (options.concurrency, options.input_tokens, options.output_tokens) == ([1, 8, 32], 256, 128)
    assert [num_requests(concurrency, options.requests) for concurrency in options.concurrency] == [8, 16, 64]
    assert num_requests(32, 5) == 5


def test_both_modes_get_as_many_workers() -> None:
    base: dict[str, Any] = {"pools": {"prefill": {"size": 2}, "decode": {"size": 3}}, "gateway": {"max_queued": 5}}
    config = parse_config(cluster_config(base, "colocated", 1234))
    assert (config.mode, config.pools.colocated.size, config.gateway.port) == ("colocated", 5, 1234)
    assert config.gateway.max_queued == 5
    assert "port" not in base["gateway"]
    assert cluster_config({}, "colocated", 1)["pools"]["colocated"] == {"size": 2}
    assert cluster_config({"pools": {"colocated": {"size": 1}}}, "colocated", 1)["pools"]["colocated"] == {"size": 1}


def test_the_report_has_the_one_form(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "report.json"
    common.write_json(file, common.report([{"a": 1}], {"b": 2.0}))
    written = json.loads(file.read_text())
    assert set(written) == {"machine", "commit", "command", "rows", "summary"}
    assert (written["rows"], written["summary"]) == ([{"a": 1}], {"b": 2.0})
    assert written["machine"]["python"] == platform.python_version()
    assert written["machine"]["cores"] >= 1
    with pytest.raises(ValueError, match="not JSON compliant"):
        common.write_json(file, common.report([], {"b": float("nan")}))


def test_the_command_has_no_path_of_this_machine() -> None:
    folder = common.REPOSITORY / "benchmarks"
    script = folder / "serving" / "__main__.py"
    assert common.command([str(script), "--json", "a b.json"]) == "python -m benchmarks.serving --json 'a b.json'"
    assert common.command([str(folder / "engine" / "kv_use.py")]) == "python -m benchmarks.engine.kv_use"
    assert common.command(["/elsewhere/x.py"]) == "python x.py"


def test_every_kind_of_bad_input_is_refused_before_tokenizing() -> None:
    info = ModelInfo(name="tiny", max_model_len=64, vocab_size=100, eos_token_ids=(2,))
    limits = Limits(model=info, max_prompt_bytes=1 << 20)
    seen = {}
    for kind in refusals.kinds(MODEL):
        with pytest.raises(DisaggError) as raised:
            check_request(common.in_one_go(read_request(kind.request, limits.model)), limits)
        assert raised.value.grpc_code == kind.expected.name, kind.name
        seen[kind.name] = raised.value.grpc_code
    assert len(seen) == 19
    assert [name for name, code in seen.items() if code == grpc.StatusCode.NOT_FOUND.name] == ["model_unknown"]


def test_bad_input_summary() -> None:
    measured = [
        refusals.Measured("a", grpc.StatusCode.NOT_FOUND, [1.0, 3.0]),
        refusals.Measured("b", grpc.StatusCode.NOT_FOUND, [5.0]),
    ]
    assert refusals.summary(measured) == {
        "a_p50_ms": 2.0,
        "a_p99_ms": 2.98,
        "b_p50_ms": 5.0,
        "b_p99_ms": 5.0,
        "worst_p99_ms": 5.0,
    }
