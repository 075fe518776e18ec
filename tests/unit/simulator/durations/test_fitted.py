"""Fits of step times, their file, and the grid that is measured."""

from __future__ import annotations

import msgspec
import pytest

from disagg.proto.errors import ConfigError
from disagg.proto.messages import StepSample
from disagg.simulator.durations.calibration_file import (
    MAX_BYTES,
    StepRecording,
    check_samples,
    decode_recording,
    encode_recording,
)
from disagg.simulator.durations.fitted import (
    FITS,
    LinearStepTimes,
    PiecewiseStepTimes,
    error_of,
    fit,
    held_out_error,
    work_of,
)
from disagg.simulator.durations.grid import GridStep, grid
from disagg.step_times.interface import StepTimes, StepWork

PREFILLS = [(tokens, start) for tokens in (1, 8, 16, 32, 64, 128, 256, 512) for start in (0, 256, 1024)]
DECODES = [(batch, context) for batch in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32) for context in (64, 512, 1024)]


def linear_ms(tokens: int, attended: int, decodes: int, context: int) -> float:
    return 8.0 + 0.3 * tokens + 1e-4 * attended + 0.9 * decodes + 8e-4 * context


def bent_ms(tokens: int, attended: int, decodes: int, context: int) -> float:
    """Rows beyond the fourth cost a third of the first ones."""
    rows = tokens + decodes
    return 5.0 + 1.5 * min(rows, 4) + 0.5 * max(0, rows - 4) + 1e-4 * attended + 8e-4 * context


def samples(ms: object) -> list[StepSample]:
    assert callable(ms)
    work = [(tokens, tokens * start + tokens * (tokens + 1) // 2, 0, 0) for tokens, start in PREFILLS]
    work += [(0, 0, batch, batch * context) for batch, context in DECODES]
    return [StepSample(ms(*each), *each) for each in work]


@pytest.mark.parametrize("name", FITS)
def test_a_linear_worker_is_found_by_both_fits(name: str) -> None:
    recorded = samples(linear_ms)
    assert error_of(FITS[name](recorded), recorded).worst < 1e-3
    assert held_out_error(FITS[name], recorded).worst < 0.02


def test_what_is_linear_is_extrapolated() -> None:
    times = LinearStepTimes(samples(linear_ms))
    assert times.step_s(StepWork(1000, 2_000_000, 50, 100_000)) * 1e3 == pytest.approx(
        linear_ms(1000, 2_000_000, 50, 100_000), rel=1e-3
    )


def test_a_bend_in_the_batch_needs_the_piecewise_fit() -> None:
    recorded = samples(bent_ms)
    assert error_of(PiecewiseStepTimes(recorded), recorded).worst < 1e-4
    assert held_out_error(PiecewiseStepTimes, recorded).mean < 0.005
    assert held_out_error(LinearStepTimes, recorded).mean > 0.02
    assert isinstance(fit(recorded), PiecewiseStepTimes)
    assert isinstance(fit(recorded, "linear"), LinearStepTimes)


def expert_ms(tokens: int, attended: int, decodes: int, context: int) -> float:
    """Most of a step is reading the experts, of 128 of which a row chooses 8."""
    rows = tokens + decodes
    return 5.0 + 0.05 * rows + 40.0 * (1 - (15 / 16) ** rows) + 1e-6 * attended + 1e-5 * context


@pytest.mark.parametrize("name", FITS)
def test_both_fits_know_the_experts_that_a_step_reads(name: str) -> None:
    recorded = samples(expert_ms)
    known, unknown = FITS[name](recorded, 1 / 16), FITS[name](recorded)
    between = [StepSample(expert_ms(0, 0, n, n * 100), 0, 0, n, n * 100) for n in (5, 7, 10, 14, 20, 28)]
    assert error_of(known, between).worst < 0.005
    assert error_of(unknown, between).worst > 5 * error_of(known, between).worst


def test_the_router_s_fit_misses_experts_that_it_does_not_know_of() -> None:
    recorded = samples(expert_ms)
    assert held_out_error(LinearStepTimes, recorded).worst > 0.1
    assert held_out_error(LinearStepTimes, recorded, 1 / 16).worst < 0.02


def test_more_work_never_takes_less_time() -> None:
    noisy = [msgspec.structs.replace(s, ms=s.ms * (1.1 if i % 3 else 0.9)) for i, s in enumerate(samples(bent_ms))]
    for make in FITS.values():
        times: StepTimes = make(noisy)
        steps = [times.step_s(StepWork(0, 0, batch, batch * 100)) for batch in range(1, 200)]
        assert steps == sorted(steps)
        assert steps[0] > 0.0


def test_a_recorded_step_with_a_prompt_counts_one() -> None:
    assert work_of(StepSample(1.0, 4, 10, 2, 20)) == StepWork(4, 10, 2, 20, 1)
    assert work_of(StepSample(1.0, 0, 0, 2, 20)) == StepWork(0, 0, 2, 20, 0)


def test_too_few_steps_and_unknown_fits_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^step times: 7 recorded steps are too few; at least 8 are needed$"):
        fit(samples(linear_ms)[:7])
    with pytest.raises(ConfigError, match=r"^step times: there is no fit 'cubic'; there is auto, linear, piecewise$"):
        fit(samples(linear_ms), "cubic")


# ---------------------------------------------------------------- file


RECORDING = StepRecording(
    model="smollm2-135m",
    dtype="bfloat16",
    num_threads=2,
    machine="a machine",
    date="2026-01-01T00:00:00+00:00",
    kv_bytes_per_token=23040,
    samples=(StepSample(10.5, 0, 0, 1, 64), StepSample(40.0, 128, 8256)),
)


def test_a_recording_survives_its_file() -> None:
    content = encode_recording(RECORDING)
    assert decode_recording(content, "steps.json") == RECORDING
    assert content.decode().count("\n") == 23  # one line a field, one a step


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "other"}, "not recorded step times: Invalid enum value 'other' - at `$.format`"),
        ({"version": 2}, "not recorded step times: Invalid enum value 2 - at `$.version`"),
        ({"threads": 1}, "not recorded step times: Object contains unknown field `threads`"),
        ({"num_threads": 0}, "not recorded step times: Expected `int` >= 1 - at `$.num_threads`"),
        ({"samples": []}, "samples: expected 1 to 100000 steps, not 0"),
        ({"samples": [["x"]]}, "not recorded step times: Expected `float`, got `str` - at `$.samples[0][0]`"),
        ({"samples": [[1.0, 0, 0, 1, 1], [0.0, 0, 0, 1, 1]]}, "samples[1]: expected a time above 0"),
        ({"samples": [[1.0, 0, 0, 0, 0]]}, "samples[0]: a step computes at least one token"),
        ({"samples": [[1.0, 8, 7, 0, 0]]}, "samples[0]: 8 prompt tokens attend to themselves at least, not to 7"),
        ({"samples": [[1.0, 0, 0, 8, 7]]}, "samples[0]: 8 decodes attend to themselves at least, not to 7"),
        ({"samples": [[1.0, 0, 5, 1, 1]]}, "samples[0]: tokens are attended to by nothing"),
        ({"samples": [[1.0, -1, 0, 1, 1]]}, "samples[0]: counts must be from 0 to"),
    ],
)
def test_a_file_that_cannot_be_is_refused_with_the_place(change: dict[str, object], message: str) -> None:
    raw = msgspec.to_builtins(RECORDING) | change
    with pytest.raises(ConfigError) as refused:
        decode_recording(msgspec.json.encode(raw), "steps.json")
    assert str(refused.value).startswith(f"steps.json: {message}")


def test_what_is_no_json_or_too_long_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^steps.json: not valid JSON: "):
        decode_recording(b"{", "steps.json")
    with pytest.raises(ConfigError, match=rf"^steps.json: has {MAX_BYTES + 1} bytes, more than {MAX_BYTES}$"):
        decode_recording(bytes(MAX_BYTES + 1), "steps.json")


def test_a_time_that_is_no_number_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^x: samples\[0\]: expected a time above 0 and up to 1e\+07 ms, not nan$"):
        check_samples([StepSample(float("nan"), 1, 1)], "x")


# ---------------------------------------------------------------- grid


def test_the_grid_has_what_a_worker_can_compute() -> None:
    steps = grid(token_budget=64, max_len=600, num_blocks=64, block_size=16, max_num_seqs=8)
    assert steps[0] == GridStep(prefill_tokens=1)
    assert {step.prefill_tokens for step in steps if not step.num_decodes} == {1, 4, 8, 16, 32, 64}
    assert {step.start for step in steps} == {0, 256}
    assert {(step.num_decodes, step.context) for step in steps if not step.prefill_tokens} == {
        *((batch, 32) for batch in (1, 2, 3, 4, 6, 8)),
        *((batch, 128) for batch in (1, 2, 3, 4, 6, 8)),
        *((batch, 512) for batch in (1, 2)),
    }
    assert [step for step in steps if step.prefill_tokens and step.num_decodes] == [
        GridStep(16, 0, 1, 128),
        GridStep(16, 0, 4, 128),
    ]


def test_a_large_worker_measures_all_of_it_once() -> None:
    steps = grid(token_budget=8192, max_len=8192, num_blocks=100_000, block_size=16, max_num_seqs=256)
    assert len(steps) == len(set(steps)) == 15 * 4 + 12 * 5 + 5 * 5 * 2
