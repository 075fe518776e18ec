"""Workers of several stages by the roofline: layers, times and links that can be worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from disagg.engine.checkpoint.model_config import ExpertsConfig
from disagg.kernels.routing import Routing
from disagg.proto.errors import ConfigError
from disagg.simulator.durations.devices import H100, Kernels
from disagg.simulator.durations.model_shapes import MODEL_SHAPES, ExpertsShape
from disagg.simulator.durations.roofline import NETWORK_LATENCY_S, NETWORK_SHARE, RooflineStepTimes
from disagg.simulator.durations.stages import LINK_SHARE, StagedStepTimes, stage_layers, stage_shapes
from disagg.step_times.interface import StepWork, prefill_s

LLAMA = MODEL_SHAPES["llama-3-8b"]
PROMPT = StepWork(2048, 2048 * 2049 // 2, 0, 0, 1)
TOKEN = StepWork(0, 0, 8, 8 * 1000)


def staged(pp: int, tp: int = 1) -> StagedStepTimes:
    return StagedStepTimes(RooflineStepTimes(LLAMA, H100, tp=tp), pp)


def test_embedding_and_head_count_in_the_cut() -> None:
    """Each of both has the weights of 2.4 of the 32 layers."""
    assert stage_layers(LLAMA, 2) == (range(16), range(16, 32))
    assert [len(layers) for layers in stage_layers(LLAMA, 4)] == [7, 9, 9, 7]
    assert sum(part.matrix_parameters for part in stage_shapes(LLAMA, 4)) == LLAMA.matrix_parameters


def test_windows_and_experts_go_to_the_stages_of_their_layers() -> None:
    config = ExpertsConfig(routing=Routing(num_experts=16, top_k=2), intermediate_size=1024)
    model = replace(LLAMA, windows=(512, 0) * 16, experts=ExpertsShape(config=config, num_layers=30))
    parts = stage_shapes(model, 4)
    assert sum((part.windows for part in parts), ()) == model.windows
    assert [part.num_dense_layers for part in parts] == [2, 0, 0, 0]
    assert sum(part.matrix_parameters for part in parts) == model.matrix_parameters


@pytest.mark.parametrize("pp", [0, 33])
def test_more_stages_than_layers_are_refused(pp: int) -> None:
    with pytest.raises(ConfigError, match=rf"^--pp: {pp} stages are not between 1 and the 32 layers of llama-3-8b$"):
        stage_layers(LLAMA, pp)


def test_stages_together_take_what_one_device_takes_and_the_messages() -> None:
    whole, four = RooflineStepTimes(LLAMA, H100), staged(4)
    for work, rows, sampled in ((PROMPT, 2048, 1), (TOKEN, 8, 8)):
        link = H100.link_bandwidth * LINK_SHARE
        hidden_s = H100.kernels.all_reduce_start_s + rows * 4096 * 2 / link
        logits_s = H100.kernels.all_reduce_start_s + sampled * 128256 * 2 / link
        assert four.step_s(work) == pytest.approx(whole.step_s(work) + 3 * hidden_s + logits_s, rel=1e-12)


def test_each_rank_sends_the_hidden_rows_to_its_like() -> None:
    assert staged(2, tp=4).sent_s(0, PROMPT) == staged(2).sent_s(0, PROMPT)


def test_the_next_stage_on_another_node_is_reached_over_the_network() -> None:
    """Stages of four ranks fill a node of eight two by two."""
    four = staged(4, tp=4)
    inside = H100.kernels.all_reduce_start_s + 2048 * 4096 * 2 / (H100.link_bandwidth * LINK_SHARE)
    outside = NETWORK_LATENCY_S + 2048 * 4096 * 2 / (H100.network_bandwidth * NETWORK_SHARE)
    assert [four.sent_s(stage, PROMPT) for stage in range(3)] == [inside, outside, inside]
    logits_s = NETWORK_LATENCY_S + 128256 * 2 / (H100.network_bandwidth * NETWORK_SHARE)
    assert four.sent_s(3, PROMPT) == logits_s  # back to the first rank
    assert four.sent_s(3, StepWork(0, 0, 0, 0)) == 0.0


def test_no_all_reduce_goes_between_stages() -> None:
    whole = RooflineStepTimes(LLAMA, H100, tp=4)
    assert sum(stage.parts(PROMPT).all_reduces for stage in staged(4, tp=4).stages) == pytest.approx(
        whole.parts(PROMPT).all_reduces, rel=1e-12
    )
    assert all(stage.parts(PROMPT).all_reduces == 0.0 for stage in staged(4).stages)


def test_the_first_stage_has_the_fixed_time_and_the_last_one_the_head() -> None:
    parts = [stage.parts(PROMPT) for stage in staged(4).stages]
    assert [part.fixed for part in parts] == [H100.kernels.step_s, 0.0, 0.0, 0.0]
    assert [part.head > 0.0 for part in parts] == [False, False, False, True]


def test_equal_stages_of_an_ideal_device_share_a_long_prompt() -> None:
    """16 chunks on 4 stages: 19 stage times instead of 64."""
    device = replace(H100, kernels=replace(Kernels(), step_s=0.0, all_reduce_start_s=0.0), link_bandwidth=1e30)
    model = replace(LLAMA, vocab_size=1)
    whole = RooflineStepTimes(model, device)
    times = StagedStepTimes(whole, 4)
    flat = replace(model, windows=(1,) * 32)  # chunks that attend to nothing take equally long
    whole_flat = RooflineStepTimes(flat, device)
    flat_times = StagedStepTimes(whole_flat, 4)
    alone = prefill_s(whole_flat, 16 * 1024, 1024)
    assert prefill_s(flat_times, 16 * 1024, 1024) == pytest.approx(alone * 19 / 64, rel=1e-3)
    assert prefill_s(times, 16 * 1024, 1024) < prefill_s(whole, 16 * 1024, 1024) / 3.0


# ---------------------------------------------------------------- whole experts


def experts_model(num_experts: int = 16, columns: int = 1024) -> RooflineStepTimes:
    config = ExpertsConfig(routing=Routing(num_experts=num_experts, top_k=2), intermediate_size=columns)
    model = replace(LLAMA, experts=ExpertsShape(config=config, num_layers=32))
    return RooflineStepTimes(model, H100, tp=4, ep=True)


def test_whole_experts_wait_for_the_busiest_rank() -> None:
    whole = experts_model()
    divided = RooflineStepTimes(whole.model, H100, tp=4)
    few = StepWork(0, 0, 16, 16 * 100)
    assert whole.parts(few).gemms > divided.parts(few).gemms
    # Many rows fall on all ranks alike: a tenth more at most.
    assert whole.parts(PROMPT).gemms < 1.1 * divided.parts(PROMPT).gemms


def test_whole_experts_need_columns_that_divide_no_more() -> None:
    assert experts_model(columns=1001).tp == 4
    with pytest.raises(ConfigError, match=r"^--tp: 1001 columns of an expert of llama-3-8b cannot be divided among 4"):
        RooflineStepTimes(experts_model(columns=1001).model, H100, tp=4)
    with pytest.raises(ConfigError, match=r"^--tp: 18 experts of llama-3-8b cannot be divided among 4 ranks$"):
        experts_model(num_experts=18)
