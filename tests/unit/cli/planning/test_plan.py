"""`disagg plan`: what is printed and written, and that bad input is answered with the flag and what is wrong."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from disagg.autoscaler.queueing import Lengths
from disagg.cli.main import app
from disagg.cli.planning.plan import PlanOptions, load_of, run_plan, shape_named, site_of
from disagg.proto.errors import ConfigError
from disagg.proto.messages import StepSample
from disagg.simulator.durations.calibration_file import StepRecording, encode_recording
from disagg.simulator.durations.model_shapes import MODEL_SHAPES
from disagg.simulator.durations.parallelism import Parallelism
from tests.support.tiny_models import make_checkpoint

USUAL = PlanOptions(
    model="llama-3-8b", device="h100", tp="1", prompt_tokens=1024, output_tokens=64, max_simulated=3, requests=None
)
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 1,
}


def options(**changes: Any) -> PlanOptions:
    return dataclasses.replace(USUAL, **changes)


def output(given: PlanOptions) -> tuple[int, str]:
    screen = io.StringIO()
    return run_plan(given, Console(file=screen)), screen.getvalue()


def refusal(**changes: Any) -> str:
    with pytest.raises(ConfigError) as refused:
        output(options(**changes))
    return str(refused.value)


# ---------------------------------------------------------------- what comes out


def test_without_a_rate_there_are_the_calculations() -> None:
    status, text = output(options(tp=None))
    assert status == 0
    assert "llama-3-8b on h100: 8.03 billion parameters, 16.1 GB of weights, 131072 bytes of KV a token" in text
    assert (
        "step times: roofline of the data sheet's numbers\nprice of a device: 3 an hour (an example; set --price)"
        in text
    )
    assert "ridge: 295 FLOP/byte; prompts are bound by arithmetic from 317 tokens on" in text
    assert "KV in tiers: 1 GiB of host memory or disk holds 8192 tokens; " in text
    widths = text.split("a worker by its stages")[1].split("GB are of")[0].splitlines()[2:]
    assert [line.split()[2:8] for line in widths if line.split()[:3] in (["1", "x", "1"], ["1", "x", "8"])] == [
        ["1", "8192", "16.1", "53.9", "411525", "378"],
        ["8", "8192", "2.0", "68.0", "4149928", "3814"],
    ]
    assert "next: --rate, --ttft-ms and --tpot-ms" in text


def test_with_a_rate_there_are_pools() -> None:
    status, text = output(options(rate=2.0, ttft_ms=500.0, tpot_ms=30.0, price=7.5, simulate=False))
    assert status == 0
    assert "price of a device: 7.5 an hour\n" in text
    assert "2 requests/s, limits TTFT 500 ms, TPOT 30 ms, for 90 % of them (estimated)" in text
    best = next(line.split() for line in text.splitlines() if line.startswith("*"))
    assert best == [
        "*",
        "1x1",
        "colocated,",
        "2048-token",
        "steps",
        "1",
        "7.50",
        "16.276",
        "100.0%",
        "100.0%",
        *best[-2:],
    ]
    assert "do not disaggregate: 1x1 colocated, 2048-token steps (1 device) meet the limits" in text


def test_the_simulator_judges_unless_it_is_left_out() -> None:
    status, text = output(options(rate=2.0, ttft_ms=500.0, tpot_ms=30.0, mode="colocated", max_simulated=1))
    assert status == 0
    assert "simulating up to 1 candidates, 305 requests each" in text
    assert "(simulated, fast engine)" in text


def test_limits_that_no_pools_meet_are_status_1() -> None:
    status, text = output(options(rate=500.0, ttft_ms=500.0, tpot_ms=30.0, max_gpus=2, simulate=False))
    assert status == 1
    assert "no pools within --max-gpus meet the limits for 90 % of the requests" in text


def test_everything_is_written_as_json(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    output(options(rate=2.0, ttft_ms=500.0, tpot_ms=30.0, simulate=False, json=file))
    report = json.loads(file.read_text())
    assert report["best"]["colocated"] == {
        "num_workers": 1,
        "tp": 1,
        "token_budget": 2048,
        "pp": 1,
        "ep": False,
    }
    assert report["best"]["price_per_million_output_tokens"] == pytest.approx(3.0 / 3600 / 128 * 1e6)
    assert report["best"]["joules_per_million_output_tokens"] == pytest.approx(700 / 128 * 1e6)
    assert report["facts"]["weight_bytes"] == 16_060_522_496


def test_the_pools_of_windows_and_what_experts_take_are_said(tmp_path: Path) -> None:
    """Half of the layers of gpt-oss have a window; all have experts."""
    folder = make_checkpoint("gpt_oss", tmp_path / "oss")
    file = tmp_path / "plan.json"
    given = options(model=str(folder), device="cpu-core", tp=None, prompt_tokens=100, output_tokens=20, json=file)
    status, text = output(given)
    assert status == 0
    (width,) = json.loads(file.read_text())["facts"]["widths"]
    memory, (full, window) = width["memory"], width["memory"]["groups"]
    assert (full["window"], window["window"]) == (0, 16)
    assert " 384 bytes of KV a token, 128 of one that has left all windows\n" in text
    assert "KV in tiers" not in text
    (line,) = [line for line in text.splitlines() if line.startswith("memory of each device, tp 1: ")]
    assert f"KV of all tokens in {full['num_blocks']} blocks ({full['num_blocks'] * 16} tokens, " in line
    assert f"KV of the last 16 tokens in {window['num_blocks']} blocks ({window['num_blocks'] * 16} tokens, " in line
    assert line.endswith(f"GB of experts and {memory['scratch_bytes'] / 1e9:.2f} GB to compute them")
    assert width["sequences"] == min(full["num_blocks"] // 8, (window["num_blocks"] - window["step_blocks"]) // 3)
    assert "memory of each device" not in output(options())[1]
    with pytest.raises(ConfigError, match=r"^--weight-dtype: fp8 is not supported for experts, which oss has$"):
        output(options(model=str(folder), device="h100", weight_dtype="fp8"))


def test_experts_in_mxfp4_are_counted_as_they_are_loaded(tmp_path: Path) -> None:
    folder = make_checkpoint("gpt_oss", tmp_path / "oss")
    experts, found = 3 * 3 * 8 * 64 * 96, dict[str, Any]()
    given: dict[str, Any] = {
        "model": str(folder),
        "device": "cpu-core",
        "tp": None,
        "prompt_tokens": 100,
        "output_tokens": 20,
    }
    for dtype in ("bfloat16", "mxfp4"):
        file = tmp_path / f"{dtype}.json"
        assert output(options(**given, weight_dtype=dtype, json=file))[0] == 0
        found[dtype] = json.loads(file.read_text())["facts"]
    assert found["bfloat16"]["weight_bytes"] - found["mxfp4"]["weight_bytes"] == experts * (2 - 17 / 32)
    (plain,), (own,) = (each["widths"] for each in found.values())
    assert (plain["memory"]["expert_bytes"], own["memory"]["expert_bytes"]) == (experts * 2, experts * 17 / 32)
    assert found["mxfp4"]["ridge"] == found["bfloat16"]["ridge"]
    for changes, message in (
        ({"device": "h100"}, "--weight-dtype: mxfp4 is for experts on a CPU, not for oss on h100"),
        ({"model": "smollm2-135m"}, "--weight-dtype: mxfp4 is for experts on a CPU, not for smollm2-135m on cpu-core"),
        ({"tp": "2"}, "--tp: --weight-dtype mxfp4 is for workers of one rank"),
        ({"pp": "2"}, "--pp: --weight-dtype mxfp4 is for workers of one stage"),
    ):
        with pytest.raises(ConfigError, match=f"^{message}$"):
            output(options(**{**given, "weight_dtype": "mxfp4", **changes}))


def test_everything_is_drawn_as_a_page(tmp_path: Path) -> None:
    file = tmp_path / "plan.html"
    output(options(rate=2.0, ttft_ms=500.0, tpot_ms=30.0, simulate=False, html=file))
    text = file.read_text()
    assert text.startswith("<!doctype html>")
    assert text.count("<svg") == 3
    assert "<h1>llama-3-8b on h100</h1>" in text
    assert "<td>verdict</td><td>do not disaggregate: 1x1 colocated" in text


def test_a_scenario_brings_lengths_rate_and_limits() -> None:
    load, requests = load_of(options(scenario="interactive", prompt_tokens=None, output_tokens=None, rate=3.0), SMOL)
    assert requests is not None
    assert len(requests.requests) == 300
    assert load.rate_per_s == pytest.approx(3.0)
    assert set(load.kinds) == {Lengths(512, 64)}
    assert (load.slo.ttft_s, load.slo.tpot_s) == (4.0, 0.02)
    tighter, _ = load_of(
        options(scenario="shared-prefix", prompt_tokens=None, output_tokens=None, ttft_ms=100.0, requests=50), SMOL
    )
    assert (tighter.slo.ttft_s, tighter.slo.tpot_s) == (0.1, 0.05)
    assert set(tighter.kinds) == {Lengths(1088, 16), Lengths(1088, 16, 1024)}


# ---------------------------------------------------------------- models


SMOL = MODEL_SHAPES["smollm2-135m"]


def test_a_model_is_a_name_a_file_or_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "other.json").write_text(json.dumps(CONFIG))
    expected = dataclasses.replace(MODEL_SHAPES["llama-3-8b"], name="mine")
    assert shape_named(str(folder)) == expected
    assert shape_named(str(folder / "config.json")) == expected
    assert shape_named(str(folder / "other.json")) == expected
    assert shape_named("Llama-3-8B") is MODEL_SHAPES["llama-3-8b"]


def test_a_quantized_model_takes_what_it_takes_when_it_is_loaded(tmp_path: Path) -> None:
    """Weights are dequantized to the compute dtype."""
    quantization = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": quantization}))
    assert shape_named(str(tmp_path)) == dataclasses.replace(MODEL_SHAPES["llama-3-8b"], name=tmp_path.name)


def test_a_config_of_another_architecture_is_refused_with_the_file(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(CONFIG | {"architectures": ["FalconForCausalLM"]}))
    assert refusal(model=str(file)).startswith(f"{file}: architecture FalconForCausalLM is not supported")


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model": "gpt-9"},
            "--model: 'gpt-9' is no file, no folder, and no imported model, and not one of smollm2-135m",
        ),
        ({"device": "h900"}, "--device: 'h900' is not known; there is h100"),
        ({"model": "llama-3-70b", "device": "l40s", "pp": "1"}, "--device: llama-3-70b takes 141.1 GB of weights"),
        ({"tp": "3"}, "--tp: 32 query heads of llama-3-8b cannot be divided among 3 ranks"),
        ({"tp": "one"}, "--tp: expected whole numbers such as 1,2,4; got 'one'"),
        ({"tp": "0"}, "--tp: expected numbers of at least 1; got '0'"),
        ({"pp": "two"}, "--pp: expected whole numbers such as 1,2,4; got 'two'"),
        ({"pp": "64"}, "--pp: 64 stages are not between 1 and the 32 layers of llama-3-8b"),
        ({"ep": 2}, "--ep: expert parallelism (2) beyond the ranks of a worker is not supported"),
        ({"prompt_tokens": None}, "--prompt-tokens, --output-tokens: give both, or --scenario"),
        ({"prompt_tokens": 0}, "--prompt-tokens, --output-tokens: expected at least 1 each"),
        ({"prompt_tokens": 9000}, "--prompt-tokens, --output-tokens: 9064 tokens are more than the 8192 positions"),
        ({"rate": 0.0}, "--rate: expected requests per second above 0, not 0"),
        ({"rate": -1.0}, "--rate: expected requests per second above 0, not -1"),
        ({"rate": float("nan")}, "--rate: expected requests per second above 0, not nan"),
        ({"rate": float("inf")}, "--rate: expected requests per second above 0, not inf"),
        ({"rate": 1.0, "ttft_ms": 0.0}, "--ttft-ms: expected a time above 0, not 0"),
        ({"rate": 1.0, "tpot_ms": -1.0}, "--tpot-ms: expected a time above 0, not -1"),
        ({"rate": 1.0, "ttft_ms": 5.0}, "--ttft-ms: 5 ms cannot be met"),
        ({"rate": 1.0, "tpot_ms": 1.0}, "--tpot-ms: 1 ms cannot be met"),
        ({"price": -1.0}, "--price: expected at least 0, not -1"),
        ({"link_gb_s": 0.0}, "--link-gb-s: expected a bandwidth above 0, not 0"),
        ({"dtype": "bf16"}, "--dtype: 'bf16' is not known; there is"),
        ({"device": "a100", "weight_dtype": "fp8"}, "--weight-dtype: a100 does not multiply fp8"),
        ({"mode": "both"}, "--mode: expected any, disaggregated, colocated; got 'both'"),
        ({"token_budgets": "1"}, "--token-budgets: a step has at least 2 tokens"),
        ({"scenario": "interactive"}, "--scenario: it has its own lengths"),
        ({"scenario": "nope", "prompt_tokens": None, "output_tokens": None}, "--scenario: scenario: there is no "),
        (
            {"scenario": "mooncake", "prompt_tokens": None, "output_tokens": None},
            "--scenario: workload.path: there is no conversation_trace.jsonl",
        ),
        ({"perf_tables": Path("/nonexistent")}, "--perf-tables: there is no folder /nonexistent"),
        ({"step_times": Path("/nonexistent")}, "--step-times: /nonexistent cannot be read: No such file or directory"),
        ({"html": Path("/nonexistent/x.html")}, "--html: /nonexistent/x.html cannot be written"),
        ({"json": Path("/nonexistent/x.json")}, "--json: /nonexistent/x.json cannot be written"),
    ],
)
def test_bad_input_is_answered_with_the_flag(changes: dict[str, Any], message: str) -> None:
    assert refusal(**changes).startswith(message)


def test_a_trace_without_its_columns_is_refused_with_file_and_field(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("a,b\n1,2\n")
    scenario = tmp_path / "scenario.yaml"
    scenario.write_text(f"workload: {{kind: trace, path: {trace}, format: azure}}\narrivals: {{kind: trace}}\n")
    message = refusal(scenario=str(scenario), prompt_tokens=None, output_tokens=None)
    assert message.startswith("--scenario: ")
    assert str(trace) in message


def recording(**changes: Any) -> StepRecording:
    samples = tuple(StepSample(8.0 + batch, 0, 0, batch, 100 * batch) for batch in range(1, 9))
    samples += tuple(StepSample(8.0 + 0.3 * n, n, n * (n + 1) // 2) for n in (8, 16, 64, 128))
    values: dict[str, Any] = {
        "model": "smollm2-135m",
        "dtype": "bfloat16",
        "machine": "a machine",
        "date": "2026-01-01",
        "kv_bytes_per_token": 23040,
        "samples": samples,
    }
    return StepRecording(**(values | changes))


def test_measured_step_times_are_planned_with(tmp_path: Path) -> None:
    file = tmp_path / "steps.json"
    file.write_bytes(encode_recording(recording()))
    given = options(model="smollm2-135m", device="cpu-core", step_times=file)
    site, source = site_of(given)
    assert source.startswith("12 steps measured on a machine (")
    assert site.times_of(Parallelism(1)) is site.times_of(Parallelism(1))
    assert site.token_budgets == (128, 256, 512)


def test_measured_step_times_are_those_of_one_stage(tmp_path: Path) -> None:
    file = tmp_path / "steps.json"
    file.write_bytes(encode_recording(recording()))
    assert site_of(options(model="smollm2-135m", device="cpu-core", step_times=file))[0].pps == (1,)
    with pytest.raises(ConfigError, match=r"^--pp: --step-times was measured with one stage; leave one of them out$"):
        site_of(options(model="smollm2-135m", device="cpu-core", step_times=file, pp="1,2"))


def test_stages_are_tried_and_the_reasons_said(tmp_path: Path) -> None:
    assert site_of(options(tp=None))[0].pps == (1, 2, 4, 8)
    assert site_of(options(pp="1,3"))[0].pps == (1, 3)
    file = tmp_path / "plan.json"
    _, text = output(options(pp="1,2", rate=2.0, ttft_ms=500.0, tpot_ms=30.0, simulate=False, json=file))
    last = text.splitlines()[-1]
    assert last.startswith("colocated with tp 1: a token of ")
    assert json.loads(file.read_text())["reasons"] == [last]


@pytest.mark.parametrize(
    ("changes", "given", "message"),
    [
        (
            {"kv_bytes_per_token": 1},
            {},
            "was measured with smollm2-135m (1 bytes of KV a token), not smollm2-135m (23040)",
        ),
        ({"dtype": "float32", "kv_bytes_per_token": 46080}, {}, "was measured with dtype float32; --dtype is bfloat16"),
        ({"tp": 2}, {}, "was measured with 2 ranks; give --tp 2"),
        ({}, {"tp": "3"}, "was measured with 1 rank; give --tp 1"),
    ],
)
def test_step_times_of_something_else_are_refused(
    tmp_path: Path, changes: dict[str, Any], given: dict[str, Any], message: str
) -> None:
    file = tmp_path / "steps.json"
    file.write_bytes(encode_recording(recording(**changes)))
    found = refusal(model="smollm2-135m", device="cpu-core", step_times=file, **given)
    assert found == f"--step-times: {file} {message}"


def test_the_command_line_reaches_it() -> None:
    words = "plan --model llama-3-8b --device h100 --tp 1 --prompt-tokens 512 --output-tokens 16"
    result = CliRunner().invoke(app, words.split())
    assert result.exit_code == 0
    assert "llama-3-8b on h100" in result.output
