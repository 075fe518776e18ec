"""How long things take, from a file."""

from __future__ import annotations

from typing import Any

import pytest

from disagg.proto.messages import KvLayout
from disagg.simulator.durations.overheads import Overheads
from disagg.simulator.durations.tier_times import TierTimes
from disagg.simulator.world.settings import DEFAULT_LINK
from disagg.simulator.world.timing import read_timing
from disagg.step_times.interface import LinkTimes, StepWork

STEP = {"base_ms": 1.0, "prefill_token_ms": 0.5, "attended_ms": 0.01, "decode_ms": 0.25, "context_ms": 0.001}
RECORDED: dict[str, Any] = {
    "format": "disagg-step-times",
    "model": "m",
    "dtype": "bfloat16",
    "machine": "a machine",
    "date": "2026-01-01",
    "kv_bytes_per_token": 64,
}
RAW: dict[str, Any] = {"kv_bytes_per_token": 100, "step": STEP}


def test_a_step_is_the_sum_of_its_parts() -> None:
    assert read_timing(RAW).step.step_s(StepWork(10, 55, 4, 1000)) == pytest.approx(0.00855)


def test_what_is_left_out_has_a_default_and_what_is_there_counts() -> None:
    plain = read_timing(RAW)
    assert (plain.link, plain.overheads, plain.cold_start_s) == (DEFAULT_LINK, Overheads(), 0.0)
    assert plain.tiers == TierTimes(host_bytes_per_s=1e10, disk_bytes_per_s=1e9, disk_latency_s=1e-4)
    assert plain.of_pool("decode") is plain.step
    whole = read_timing(
        {
            **RAW,
            "pools": {"decode": {**STEP, "base_ms": 2.0}},
            "link": {"bandwidth_bytes_per_s": 1e9, "latency_s": 0.5},
            "overheads": {"message_s": 0.001},
            "tiers": {"host_bytes_per_s": 2e10},
            "cold_start_s": 3,
        }
    )
    assert whole.tiers == TierTimes(host_bytes_per_s=2e10)
    assert whole.of_pool("decode").step_s(StepWork(0, 0, 1, 0)) == pytest.approx(0.00225)
    assert whole.link == LinkTimes(bandwidth_bytes_per_s=1e9, latency_s=0.5)
    assert (whole.overheads.message_s, whole.cold_start_s) == (0.001, 3)


def test_pools_with_drafts_have_the_time_of_a_token() -> None:
    drafts = {"tokens_per_step": 2, "rows_per_step": 4}
    for raw in (
        {**RAW, "drafts": drafts},
        {**RECORDED, "samples": [[2, 1, 1, 0, 0], [2, 0, 0, 1, 1]] * 8, "drafts": drafts},
    ):
        timing = read_timing(raw)
        work, rows = StepWork(0, 0, 3, 300), StepWork(0, 0, 12, 1200)
        assert timing.of_pool("decode") is timing.step
        assert timing.of_pool("decode", has_drafts=True).step_s(work) == timing.step.step_s(rows) / 2
    plain = read_timing(RAW)
    assert plain.of_pool("decode", has_drafts=True) is plain.step


def test_a_recording_of_steps_is_fitted() -> None:
    samples = [[5.0 + 0.4 * n, n, n * (n + 1) // 2, 0, 0] for n in (16, 64, 128, 256, 512)]
    samples += [[5.0 + 0.5 * n, 0, 0, n, 300 * n] for n in (1, 8, 32, 64)]
    timing = read_timing({**RECORDED, "samples": samples})
    assert timing.kv_layout == KvLayout.sized(64)
    assert timing.step.step_s(StepWork(300, 45_150, 0, 0)) == pytest.approx(0.125, rel=0.03)
    assert timing.step.step_s(StepWork(0, 0, 16, 4800)) == pytest.approx(0.013, rel=0.03)


def test_windows_and_experts() -> None:
    """4 ms to read all experts, of which a row chooses a quarter."""
    windows = [{"window": 64, "bytes_per_token": 60}]
    timing = read_timing({**RAW, "kv_windows": windows, "step": {**STEP, "experts_ms": 4, "expert_share": 0.25}})
    assert [(group.window, group.bytes_per_token) for group in timing.kv_layout.groups] == [(0, 40), (64, 60)]
    plain = read_timing(RAW).step
    for work, read in ((StepWork(0, 0, 1, 9), 0.25), (StepWork(1, 1, 1, 9), 0.4375), (StepWork(0, 0, 100, 9), 1.0)):
        assert timing.step.step_s(work) - plain.step_s(work) == pytest.approx(4e-3 * read)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (3, "expected the keys step and kv_bytes_per_token"),
        ({"step": STEP}, "kv_bytes_per_token"),
        ({**RAW, "speed": 1}, "speed"),
        ({**RAW, "step": {**STEP, "base_ms": 0}}, r"base_ms|step"),
        ({**RAW, "link": {"bandwidth_bytes_per_s": 0}}, "bandwidth_bytes_per_s"),
        ({**RAW, "tiers": {"disk_bytes_per_s": 0}}, "disk_bytes_per_s"),
        ({**RAW, "drafts": {"tokens_per_step": 0.5, "rows_per_step": 1}}, "tokens_per_step"),
        ({**RAW, "drafts": {"tokens_per_step": 1, "rows_per_step": 17}}, "rows_per_step"),
        (
            {**RAW, "drafts": {"tokens_per_step": 3, "rows_per_step": 2}},
            "rows_per_step: a row gives a token at most; expected at least tokens_per_step, 3, not 2",
        ),
        ({**RAW, "overheads": {"message_s": -1}}, "message_s: expected a time of at least 0"),
        (
            {**RAW, "kv_windows": [{"window": 64, "bytes_per_token": 100}]},
            "kv_windows: 100 bytes a token are no more than those of the windows",
        ),
        ({**RAW, "kv_windows": [{"window": 0, "bytes_per_token": 1}]}, "window"),
        ({**RAW, "step": {**STEP, "expert_share": 1.5}}, "expert_share"),
        ({**RECORDED, "samples": []}, "samples: expected 1 to 100000 steps, not 0"),
        ({**RECORDED, "samples": [[1, 1, 1, 0, 0]] * 7}, "samples: 7 steps are too few"),
        ({**RECORDED, "samples": [[1, 1, 1, 0, 0]] * 8, "kv_bytes_per_token": 0}, "kv_bytes_per_token: expected at l"),
    ],
)
def test_mistakes_are_named(raw: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_timing(raw)
