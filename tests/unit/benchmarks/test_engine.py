"""The arithmetic of the engine's and the kernels' benchmarks, exactly; and the rig on the model without weights."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest
import torch

from benchmarks.engine import commits, kernel_cases, kernels, kv_use, llamacpp, steps
from benchmarks.engine.ceilings import Ceilings
from benchmarks.engine.commits import Pair
from benchmarks.engine.llamacpp import PeerRun
from benchmarks.engine.process import Engine
from benchmarks.engine.rig import EngineRig, LoopResult, LoopShape
from benchmarks.engine.step_limit import Work, decode_works, limit_s, overlapped_limit_s, prefill_works
from benchmarks.engine.steps import Decode, Kind, Measured, Repeat
from disagg.engine.checkpoint.model_config import AttentionConfig, DenseConfig, LayerConfig, ModelConfig, RopeConfig
from disagg.engine.config import WorkerConfig
from disagg.kernels.cpu import build
from disagg.loadtests.workload.traces import TraceRequest

MODEL = ModelConfig(
    architecture="LlamaForCausalLM",
    hidden_size=8,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    vocab_size=32,
    max_positions=64,
    rms_norm_eps=1e-5,
    layers=(
        LayerConfig(
            attention=AttentionConfig(scale=0.5, rope=RopeConfig()),
            ffn=DenseConfig(intermediate_size=16),
        ),
    )
    * 2,
    tied_embeddings=True,
    eos_token_ids=(),
)
LAYER_WEIGHTS = 8 * (8 + 2 * 4) + 8 * 8 + 3 * 8 * 16
KV_TOKEN_BYTES = 2 * 2 * 4 * 2
SLOW = Ceilings(read_gb_s=1e-9, gemm_gflop_s=1e-9, median_read_gb_s=1e-9)
"""One byte and one operation a second."""


# ---------------------------------------------------------------- limits


def test_the_work_of_a_decode_step() -> None:
    assert decode_works(MODEL, batch=3, context=10) == [
        Work(name="layers", nbytes=2 * 2 * LAYER_WEIGHTS, flop=2 * 3 * 2 * LAYER_WEIGHTS),
        Work(name="head", nbytes=2 * 32 * 8, flop=2 * 3 * 32 * 8),
        Work(name="attention", nbytes=(30 + 3) * KV_TOKEN_BYTES, flop=4 * 2 * 8 * 30),
    ]
    int8 = decode_works(MODEL, batch=3, context=10, weight_bytes=1.0)
    assert [work.nbytes for work in int8] == [2 * LAYER_WEIGHTS, 32 * 8, 33 * KV_TOKEN_BYTES]


def test_the_work_of_a_prompt_has_logits_of_one_row() -> None:
    layers, head, attention = prefill_works(MODEL, num_tokens=5)
    assert layers.flop == 2 * 5 * 2 * LAYER_WEIGHTS
    assert head.flop == 2 * 32 * 8
    assert attention.flop == 4 * 2 * 8 * 15


def test_two_prompts_share_the_weights_and_do_not_see_each_other() -> None:
    one, two = prefill_works(MODEL, num_tokens=5), prefill_works(MODEL, num_tokens=5, num_prompts=2)
    assert [work.flop for work in two] == [2 * work.flop for work in one]
    assert [two[i].nbytes - one[i].nbytes for i in (0, 1)] == [0, 0]
    assert two[2].nbytes == 2 * one[2].nbytes


def test_a_limit_adds_up_what_each_work_waits_for() -> None:
    works = [Work(name="reads", nbytes=10.0, flop=1.0), Work(name="computes", nbytes=2.0, flop=7.0)]
    assert limit_s(works, SLOW) == pytest.approx(10.0 + 7.0)
    assert overlapped_limit_s(works, SLOW) == pytest.approx(12.0)


# ---------------------------------------------------------------- the engine's report


def measured(level: str = "") -> Measured:
    """Two repeats on two threads: steps at half and at a quarter of the limit, twice and four times the peer. The
    median burst reads half as fast as the best."""
    limit = decode_works(MODEL, 1, 10)
    ceilings = Ceilings(read_gb_s=1e-3, gemm_gflop_s=1.0, median_read_gb_s=5e-4)
    limit_ms = limit_s(limit, ceilings) * 1e3
    repeats = [
        Repeat(
            decodes=(Decode(batch=1, steps_ms=(step_ms,) * 4, ceilings=ceilings),),
            prefills_ms=prefills_ms,
            ceilings=ceilings,
        )
        for step_ms, prefills_ms in ((2 * limit_ms, (8.0, 4.0)), (4 * limit_ms, (16.0, 4.0)))
    ]
    tok_s = [1e3 / (2 * limit_ms), 1e3 / (4 * limit_ms)]
    peer = [
        [PeerRun(batch=1, decode_tok_s=tok_s[0] / 2, prefill_tok_s=500.0)],
        [PeerRun(batch=1, decode_tok_s=tok_s[1] / 4, prefill_tok_s=125.0)],
    ]
    kind = Kind(num_threads=2, quantization="none", level=level)
    return Measured(kinds={kind: repeats}, peers={(level, False): peer})


def test_ratios_are_those_of_each_repeat() -> None:
    rows = steps.decode_rows(measured(), MODEL, context=10) + steps.prefill_rows(measured(), MODEL, num_tokens=8)
    assert [(row["what"], row["engine"]) for row in rows] == [
        ("decode", "bf16, 2 threads"),
        ("prefill", "bf16, 2 threads"),
        ("prefill", "bf16, 2 threads"),
    ]
    assert [(row["prompts"], row["tokens"]) for row in rows[1:]] == [(1, 8), (2, 4)]
    found = steps.summary(rows)
    assert found["decode_limit_share_b1_t2"] == 0.375  # of 1/2 and 1/4
    assert found["decode_share_of_usual_b1_t2"] == 0.75
    assert found["decode_over_llamacpp_b1"] == 3.0
    assert found["prefill_over_llamacpp"] == 3.0  # 1000 and 500 tok/s over 500 and 125
    assert found["prefill_tok_s_t2"] == 750.0
    assert found["prefill_2_prompts_tok_s_t2"] == 2000.0


def test_a_level_is_compared_with_the_peer_of_its_level() -> None:
    it = measured("x86-64-v3")
    v3 = Kind(num_threads=2, quantization="none", level="x86-64-v3")
    it.kinds[Kind(num_threads=2, quantization="none", level="x86-64-v4")] = it.kinds[v3]
    it.kinds[Kind(num_threads=1, quantization="none", level="x86-64-v3")] = it.kinds[v3]
    it.kinds[Kind(num_threads=2, quantization="int8", level="x86-64-v3")] = it.kinds[v3]
    rows = steps.decode_rows(it, MODEL, context=10) + steps.prefill_rows(it, MODEL, num_tokens=8)
    assert steps.summary(rows) == {}
    assert steps.level_summary(rows) == {
        "share_avx2_b1": 0.375,
        "share_avx2_prompt": rows[4]["share"],
        "over_llamacpp_avx2_b1": 3.0,
        "over_llamacpp_avx2_prompt": 3.0,
        "share_avx512_b1": 0.375,
        "share_avx512_prompt": rows[4]["share"],
        "int8_over_bf16_avx2_b1": 1.0,
        "int8_over_bf16_avx2_prompt": 1.0,
    }
    assert [(threads, level) for threads, level in steps.ceilings_of(it)] == [
        (2, "x86-64-v3"),
        (2, "x86-64-v4"),
        (1, "x86-64-v3"),
    ]


def test_the_engines_are_those_of_the_command_line() -> None:
    some = ["--threads", "1", "2", "--quantization", "none"]
    for options in (steps.parse_arguments(some), commits.parse_arguments(["HEAD", *some])):
        assert steps.kinds(options) == [Kind(num_threads=count, quantization="none") for count in (1, 2)]
    here = [level.name for level in build.levels_here() if level.name in steps.SHORT]
    assert [kind.level for kind in steps.kinds(steps.parse_arguments(["--levels", "--threads", "2"]))] == here


def test_of_several_ceilings_the_highest_and_the_median_of_the_medians() -> None:
    found = [Ceilings(read_gb_s=read, gemm_gflop_s=10.0 - read, median_read_gb_s=read / 2) for read in (4.0, 6.0, 5.0)]
    assert steps.best_of(found) == Ceilings(read_gb_s=6.0, gemm_gflop_s=6.0, median_read_gb_s=2.5)


def test_an_engine_with_fewer_threads_is_not_compared_with_the_peer() -> None:
    both = measured()
    both.kinds[Kind(num_threads=1, quantization="int8")] = both.kinds[Kind(num_threads=2, quantization="none")]
    found = steps.summary(steps.decode_rows(both, MODEL, context=10))
    assert [name for name in found if "llamacpp" in name] == ["decode_over_llamacpp_b1"]
    assert found["int8_decode_tok_s_b1"] == found["decode_tok_s_b1_t2"]


def test_a_batch_is_counted_over_all_steps_and_timed_by_the_median_one() -> None:
    decode = Decode(batch=4, steps_ms=(1.0, 1.0, 6.0), ceilings=SLOW)
    assert (decode.step_ms, decode.tok_s) == (1.0, 1500.0)


@pytest.mark.parametrize(
    "arguments",
    [["--llamacpp", "x", "--model", "other"], ["--llamacpp", "x", "--batches", "1"], ["--input-tokens", "3"]],
)
def test_what_cannot_be_compared_is_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        steps.parse_arguments(arguments)


def test_llama_cpp_lines() -> None:
    output = (
        "main: n_kv_max = 18432\n"
        '{"n_kv_max": 18432, "pp": 512, "tg": 64, "pl": 8, "speed_pp": 1288.5, "t_tg": 1.0, "speed_tg": 484.0}\n\n'
    )
    assert llamacpp.parse(output) == [PeerRun(batch=8, decode_tok_s=484.0, prefill_tok_s=1288.5)]


def test_llama_cpp_of_a_level_is_beside_that_of_this_processor() -> None:
    assert llamacpp.folder_of(Path("peers/bin"), "") == Path("peers/bin")
    assert llamacpp.folder_of(Path("peers/bin"), "x86-64-v3") == Path("peers/bin-x86-64-v3")


def test_llama_cpp_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--llamacpp: .* has no llama-batched-bench"):
        llamacpp.open_llama_cpp(tmp_path)


# ---------------------------------------------------------------- the rig


@pytest.fixture
def rig() -> EngineRig:
    return EngineRig(
        WorkerConfig(worker_id="b", roles=("prefill", "decode"), model_path="fake", num_blocks=64, max_model_len=256)
    )


def test_the_rig_times_each_step(rig: EngineRig) -> None:
    times_ms = rig.decode(batch=3, context=20, num_steps=5)
    assert len(times_ms) == 5
    assert min(times_ms) > 0
    assert rig.prefill(100) > 0
    assert rig.prefill(50, num_prompts=2) > 0
    assert rig.decode(batch=2, context=200, num_steps=1)  # what the first ones held is free again


def test_the_rig_refuses_what_the_engine_has_no_room_for(rig: EngineRig) -> None:
    with pytest.raises(RuntimeError, match="the engine does not decode"):
        rig.decode(batch=6, context=200, num_steps=1)


@pytest.mark.parametrize("concurrency", [1, 3, 9])
def test_the_closed_loop_answers_every_request(rig: EngineRig, concurrency: int) -> None:
    shape = LoopShape(concurrency=concurrency, requests=7, input_tokens=20, output_tokens=4, first_seed=0)
    result = rig.closed_loop(shape)
    assert len(result.ttft_s) == len(result.e2e_s) == 7
    assert all(0 < first <= end <= result.elapsed_s for first, end in zip(result.ttft_s, result.e2e_s, strict=True))


# ---------------------------------------------------------------- kernels


def test_every_case_computes_what_its_reference_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_cases, "COLD_BYTES", 1)
    cases = [make() for make in kernel_cases.makers(MODEL)]
    assert len(cases) == 4 * 4 + 3 + 4 * 3 + 4 + 2 + 3 + 1
    for case in cases:
        ours, expected = _tensors(case.ours(0)), _tensors(case.reference(0))
        for found, wanted in zip(ours, expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=0.05, atol=0.1, msg=f"{case.op} {case.shape}")


def _tensors(result: object) -> tuple[torch.Tensor, ...]:
    if isinstance(result, tuple):
        return result
    assert isinstance(result, torch.Tensor)
    return (result,)


def test_a_share_needs_a_limit() -> None:
    case = kernel_cases.Case(op="x", shape="s", ours=int, reference=int, copies=1, nbytes=4e6, flop=2e6)
    ceilings = Ceilings(read_gb_s=1.0, gemm_gflop_s=1.0, median_read_gb_s=1.0)  # 4 ms of reading, 2 ms of computing
    found = kernels.row(case, ceilings, ours_us=8000.0, reference_us=12000.0)
    assert (found["share"], found["gb_s"], found["gflop_s"], found["speedup"]) == (0.5, 0.5, 0.2, 1.5)
    cached = kernel_cases.Case(op="y", shape="s", ours=int, reference=int, copies=1)
    other = kernels.row(cached, ceilings, ours_us=1.0, reference_us=2.0)
    assert set(other) == {"op", "shape", "us", "reference_us", "speedup"}
    assert kernels.summary([found, {**found, "share": 0.25, "speedup": 3.0}, other]) == {
        "x_share_min": 0.25,
        "x_speedup_min": 1.5,
        "y_speedup_min": 2.0,
    }


# ---------------------------------------------------------------- use of KV memory


def trace_request(time_s: float, num_input: int, num_output: int) -> TraceRequest:
    return TraceRequest(time_s=time_s, num_input_tokens=num_input, num_output_tokens=num_output)


def test_live_slots_are_weighted_with_the_time_of_the_step() -> None:
    speed = kv_use.Speed(prefill_tok_s=10.0, decode_ms=500.0)
    use = kv_use.replay([trace_request(3.0, 20, 3)], kv_use.new_scheduler(8, 16, 512), speed)
    # The prompt takes 2 s, then two decodes of 0.5 s; two blocks all the time.
    assert (use.steps, use.busy_s, use.most_allocated, use.preemptions) == (3, 3.0, 32, 0)
    assert use.live == 20 * 2.0 + 21 * 0.5 + 22 * 0.5
    assert use.allocated == 32 * 3.0
    assert use.share == pytest.approx(61.5 / 96)


def test_requests_come_at_their_times_and_all_of_them_end() -> None:
    speed = kv_use.Speed(prefill_tok_s=1000.0, decode_ms=1.0)
    requests = kv_use.scaled([trace_request(0.0, 64, 8), trace_request(0.0, 64, 1), trace_request(9.0, 1, 1)], 0.25)
    assert [(each.num_input_tokens, each.num_output_tokens) for each in requests] == [(16, 2), (16, 1), (1, 1)]
    use = kv_use.replay(requests, kv_use.new_scheduler(8, 16, 512), speed)
    assert use.steps == 3
    assert use.busy_s == pytest.approx(0.032 + 0.001 + 0.001)
    assert use.live == pytest.approx(32 * 0.032 + 17 * 0.001 + 1 * 0.001)


def test_a_request_that_never_fits_is_an_error() -> None:
    speed = kv_use.Speed(prefill_tok_s=1.0, decode_ms=1.0)
    with pytest.raises(ValueError, match=r"request 0 has 120 \+ 9 tokens; the blocks hold 128"):
        kv_use.replay([trace_request(0.0, 120, 9)], kv_use.new_scheduler(8, 16, 512), speed)


# ---------------------------------------------------------------- two commits


class TimedEngine:
    """Takes as many milliseconds as it has tokens to compute, and a prompt one more; a loop, one a request."""

    def __init__(self) -> None:
        self.loops: list[LoopShape] = []

    def decode(self, batch: int, context: int, num_steps: int) -> list[float]:
        return [float(batch)] * num_steps

    def prefill(self, num_tokens: int, num_prompts: int) -> float:
        return (num_tokens + 1) * num_prompts

    def begin_loop(self, shape: LoopShape) -> None:
        self.loops.append(shape)

    def end_loop(self) -> LoopResult:
        return LoopResult(elapsed_s=self.loops[-1].requests / 1000, ttft_s=[], e2e_s=[])


def test_each_turn_times_every_work_on_both_sides() -> None:
    options = commits.parse_arguments(["HEAD", "--batches", "1", "8", "--input-tokens", "32", "--turns", "2"])
    side = cast("Engine", TimedEngine())
    found = commits.measure_kind((side, side), options)
    assert found == {
        name: [Pair(before=ms, after=ms)] * 2
        for name, ms in {"decode 1": 1, "decode 8": 8, "prompt of 32": 33, "2 prompts of 16": 34}.items()
    }


def test_loops_are_timed_too_each_with_prompts_of_its_own() -> None:
    command_line = ["HEAD", "--batches", "1", "--loops", "2", "8", "--turns", "2"]
    side = TimedEngine()
    engines = cast("Engine", side), cast("Engine", side)
    found = commits.measure_kind(engines, commits.parse_arguments(command_line))
    assert [found["loop of 2"], found["loop of 8"]] == [[Pair(before=6, after=6)] * 2, [Pair(before=24, after=24)] * 2]
    prompts = [seed for loop in side.loops for seed in range(loop.first_seed, loop.first_seed + loop.requests)]
    assert [len(prompts), len(set(prompts))] == [120, 120]
    assert {(loop.input_tokens, loop.output_tokens) for loop in side.loops} == {(256, 128)}


def test_a_ratio_is_the_median_over_turns_of_this_tree_over_the_other_commit() -> None:
    pairs = [Pair(before=10.0, after=8.0), Pair(before=20.0, after=10.0), Pair(before=4.0, after=5.0)]
    assert commits.rows_of(Kind(num_threads=1, quantization="int8"), {"decode 8": pairs}) == [
        {
            "engine": "int8, 1 thread",
            "what": "decode 8",
            "before_ms": 10.0,
            "after_ms": 8.0,
            "ratio": 0.8,
            "least_ratio": 0.5,
            "most_ratio": 1.25,
        }
    ]


def test_a_commit_that_git_does_not_know_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="revision: "):
        commits.check_out("no-such-commit", tmp_path)
