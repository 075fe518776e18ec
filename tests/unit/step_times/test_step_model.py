"""Workers whose true times are known, seen through noise, hiccups and changes of pace."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.proto.messages import StepCoefficients, StepSample
from disagg.step_times.step_model import DEFAULT_COEFFICIENTS, StepModel

SMALL = StepCoefficients(6.0, 0.35, 1.5e-4, 0.7, 6e-4)
"""About what a small model does on one core."""
QUICK = StepCoefficients(9.0, 0.012, 2e-7, 0.02, 1e-5)
"""A large model on a GPU: another shape altogether."""


def pairs(start: int, num_tokens: int) -> int:
    return num_tokens * start + num_tokens * (num_tokens + 1) // 2


def prefill(true: StepCoefficients, num_tokens: int, start: int = 0, factor: float = 1.0) -> StepSample:
    return step(true, num_tokens, pairs(start, num_tokens), 0, 0, factor)


def decode(true: StepCoefficients, num_decodes: int, context: int, factor: float = 1.0) -> StepSample:
    return step(true, 0, 0, num_decodes, context, factor)


def step(
    true: StepCoefficients, tokens: int, attended: int, decodes: int, context: int, factor: float = 1.0
) -> StepSample:
    return StepSample(true.ms_of(tokens, attended, decodes, context) * factor, tokens, attended, decodes, context)


def calibration_of(true: StepCoefficients) -> list[StepSample]:
    chunks = [prefill(true, *shape) for shape in ((16, 0), (128, 0), (128, 384), (512, 0))]
    return chunks + [decode(true, n, n * context) for n, context in ((1, 64), (1, 512), (8, 64), (8, 512), (32, 64))]


def traffic(
    true: StepCoefficients, count: int, *, kinds: str = "pdm", noise: float = 0.05, seed: int = 1
) -> Iterable[StepSample]:
    """Steps of kinds p(refill), d(ecode) and m(ixed), with relative noise."""
    draw = random.Random(seed)
    for _ in range(count):
        kind, tokens, attended, decodes, context = draw.choice(kinds), 0, 0, 0, 0
        if kind in "pm":
            tokens = draw.choice((16, 64, 128, 512))
            attended = pairs(draw.choice((0, 512, 1024)), tokens)
        if kind in "dm":
            decodes = draw.randint(1, 32)
            context = decodes * draw.randint(50, 1500)
        yield step(true, tokens, attended, decodes, context, max(0.3, draw.gauss(1.0, noise)))


def test_the_first_long_prompts_correct_what_short_ones_could_not_show() -> None:
    """Short prompts say little of what a pair costs. Steps of a long one do, however many short ones were before."""
    true = StepCoefficients(30.0, 0.0, 0.0, 0.0, 0.0)
    model = StepModel([StepSample(0.035, 16, 136, 0, 0), StepSample(0.052, 128, 57408, 0, 0)])
    draw = random.Random(3)
    for number in range(400):
        model.observe(prefill(true, 25 + number % 170, factor=draw.uniform(0.99, 1.04)))
        assert model.coefficients.base_ms >= 0
    for number in range(3):
        model.observe(prefill(true, 512, 512 * (4 + number)))
    assert model.coefficients.ms_of(512, pairs(3584, 512), 0, 0) == pytest.approx(30.0, rel=0.2)


def test_one_step_that_took_long_is_no_reason_to_fit_again() -> None:
    model = StepModel(calibration_of(SMALL))
    for sample in traffic(SMALL, 200, noise=0.0):
        model.observe(sample)
    before = model.coefficients
    model.observe(prefill(SMALL, 128, factor=20.0))
    assert model.coefficients is before


def feed(model: StepModel, samples: Iterable[StepSample]) -> None:
    """Observe as a router does that reads the coefficients now and then."""
    for sample in samples:
        model.observe(sample)
        assert min(model.coefficients) >= 0.0


def predict(model: StepModel, sample: StepSample) -> float:
    return model.coefficients.step_ms(sample)


PROBES = ((16, 0, 0, 0), (512, pairs(0, 512), 0, 0), (128, pairs(1024, 128), 0, 0), (0, 0, 1, 100), (0, 0, 32, 16_000))


def largest_error(model: StepModel, true: StepCoefficients, probes: Iterable[tuple[int, ...]] = PROBES) -> float:
    """Relative, over steps of all kinds."""
    samples = [step(true, *probe) for probe in probes]
    return max(abs(predict(model, sample) - sample.ms) / sample.ms for sample in samples)


class TestStepModel:
    def test_without_a_sample_it_is_the_default(self) -> None:
        assert StepModel(()).coefficients == pytest.approx(DEFAULT_COEFFICIENTS)

    @pytest.mark.parametrize("true", [SMALL, QUICK], ids=["small", "quick"])
    def test_the_calibration_alone_gives_the_coefficients(self, true: StepCoefficients) -> None:
        model = StepModel(calibration_of(true))
        assert list(model.coefficients) == pytest.approx(list(true), rel=0.03)
        assert largest_error(model, true) < 0.0005

    @pytest.mark.parametrize("true", [SMALL, QUICK], ids=["small", "quick"])
    @pytest.mark.parametrize("calibrated", [True, False])
    def test_noisy_steps_give_the_coefficients(self, true: StepCoefficients, calibrated: bool) -> None:
        model = StepModel(calibration_of(true) if calibrated else ())
        feed(model, traffic(true, 600))
        assert largest_error(model, true) < 0.03

    def test_without_calibration_the_first_steps_are_one(self) -> None:
        model = StepModel(())
        feed(model, traffic(QUICK, 16, kinds="d", noise=0.0))
        assert largest_error(model, QUICK, PROBES[3:]) < 0.01
        slow = StepCoefficients(*(20.0 * value for value in DEFAULT_COEFFICIENTS))
        model = StepModel(())
        feed(model, traffic(slow, 16, kinds="d", noise=0.0))
        assert largest_error(model, slow) < 0.01, "a prompt is 20 times slower too, as far as anyone knows"

    def test_only_decodes_leave_what_a_prompt_costs(self) -> None:
        model = StepModel(calibration_of(SMALL))
        feed(model, traffic(SMALL, 5000, kinds="d"))
        assert largest_error(model, SMALL) < 0.05

    def test_one_size_of_batch_leaves_what_other_sizes_cost(self) -> None:
        model = StepModel(calibration_of(SMALL))
        feed(model, (decode(SMALL, 8, 8 * (200 + i % 50)) for i in range(3000)))
        assert largest_error(model, SMALL) < 0.03

    def test_a_worker_that_becomes_slower_as_a_whole_is_followed_also_in_what_it_does_not_do(self) -> None:
        model = StepModel(calibration_of(SMALL))
        slow = StepCoefficients(*(1.5 * value for value in SMALL))
        feed(model, traffic(slow, 600, kinds="d"))
        assert largest_error(model, slow, PROBES[3:]) < 0.05
        assert largest_error(model, slow) < 0.12

    @pytest.mark.parametrize("pace", [0.5, 2.0, 4.0])
    def test_a_change_of_pace_is_followed_and_forgotten(self, pace: float) -> None:
        model, changed = StepModel(calibration_of(SMALL)), StepCoefficients(*(pace * value for value in SMALL))
        feed(model, traffic(SMALL, 600))
        feed(model, traffic(changed, 1200))
        assert largest_error(model, changed) < 0.05
        feed(model, traffic(SMALL, 1200))
        assert largest_error(model, SMALL) < 0.05

    def test_one_coefficient_that_changes_is_followed(self) -> None:
        model, changed = StepModel(calibration_of(SMALL)), SMALL._replace(context_ms=3 * SMALL.context_ms)
        feed(model, traffic(changed, 1200))
        assert largest_error(model, changed) < 0.05

    @pytest.mark.parametrize("factor", [20.0, 1000.0, 0.01])
    def test_a_step_in_twenty_that_was_disturbed_moves_nothing(self, factor: float) -> None:
        model, draw = StepModel(calibration_of(SMALL)), random.Random(2)
        for sample in traffic(SMALL, 1500):
            model.observe(StepSample(sample.ms * factor, *_counts(sample)) if draw.random() < 0.05 else sample)
        assert largest_error(model, SMALL) < 0.05

    def test_one_disturbed_step_among_good_ones(self) -> None:
        model = StepModel(calibration_of(SMALL))
        feed(model, traffic(SMALL, 300))
        before = predict(model, decode(SMALL, 8, 4000))
        feed(model, [decode(SMALL, 8, 4000, factor=20.0), *traffic(SMALL, 32, seed=3)])
        assert predict(model, decode(SMALL, 8, 4000)) == pytest.approx(before, rel=0.03)

    def test_samples_that_cannot_be_are_left_out(self) -> None:
        model = StepModel([StepSample(0.0, 16, 136), StepSample(math.nan, 16, 136)])
        for sample in (
            StepSample(math.inf, 16, 136),
            StepSample(-1.0, 16, 136),
            StepSample(5.0),
            StepSample(5.0, 16, -136),
            StepSample(5.0, 0, 0, 3, -1),
        ):
            model.observe(sample)
        assert model.coefficients == pytest.approx(DEFAULT_COEFFICIENTS)

    def test_numbers_without_measure_do_no_harm(self) -> None:
        model = StepModel([StepSample(1e-3, 2**62, 2**62), StepSample(9e8, 0, 0, 1, 1), *calibration_of(SMALL)])
        feed(model, [StepSample(1e-3, 2**62, 2**62, 2**62, 2**62), StepSample(9e8, 1, 1, 1, 1)] * 50)
        assert all(map(math.isfinite, model.coefficients))

    def test_a_fit_is_not_made_for_every_step(self) -> None:
        model = StepModel(calibration_of(SMALL))
        feed(model, traffic(SMALL, 600))
        fits = set()
        for sample in traffic(SMALL, 320, seed=4):
            model.observe(sample)
            fits.add(model.coefficients)
        assert 10 <= len(fits) <= 11


def _counts(sample: StepSample) -> tuple[int, int, int, int]:
    return sample.prefill_tokens, sample.prefill_attended, sample.num_decodes, sample.decode_context


sizes = st.integers(0, 4096)
any_sample = st.builds(
    StepSample,
    st.floats(0.01, 1e5),
    prefill_tokens=sizes,
    prefill_attended=st.integers(0, 10**8),
    num_decodes=st.integers(0, 512),
    decode_context=st.integers(0, 10**6),
)


@given(st.lists(any_sample, max_size=12), st.lists(any_sample, max_size=60), st.tuples(sizes, sizes, sizes, sizes))
def test_predictions_are_positive_and_grow_with_the_work(
    calibration: list[StepSample], steps: list[StepSample], counts: tuple[int, int, int, int]
) -> None:
    model = StepModel(calibration)
    for sample in steps:
        model.observe(sample)
    predicted = predict(model, StepSample(1.0, *counts))
    assert 0.0 < predicted < math.inf
    for i in range(4):
        more = predict(model, StepSample(1.0, *(count + 1000 * (i == j) for j, count in enumerate(counts))))
        assert more >= predicted


FACTORS = (2.0, 5.0, 20.0, 100.0, 0.5, 0.2, 0.05, 0.01)


def at_pace(factor: float, true: StepCoefficients = SMALL) -> StepCoefficients:
    return StepCoefficients(*(factor * value for value in true))


class TestChangesOfPace:
    @pytest.mark.parametrize("factor", FACTORS)
    @pytest.mark.parametrize("kinds", ["p", "d", "m"])
    def test_a_few_steps_show_it_for_all_kinds(self, factor: float, kinds: str) -> None:
        model = StepModel(calibration_of(SMALL))
        feed(model, traffic(SMALL, 300))
        feed(model, traffic(at_pace(factor), 8, kinds=kinds, seed=3))
        assert largest_error(model, at_pace(factor)) < 0.15
        feed(model, traffic(SMALL, 8, kinds=kinds, seed=4))
        assert largest_error(model, SMALL) < 0.15

    @pytest.mark.parametrize("factor", FACTORS)
    def test_a_calibration_at_another_pace_is_overcome_as_soon(self, factor: float) -> None:
        model = StepModel(calibration_of(at_pace(factor)))
        feed(model, traffic(SMALL, 16))
        assert largest_error(model, SMALL) < 0.15

    @pytest.mark.parametrize("factor", [3.0, 0.3])
    def test_what_takes_as_long_as_ever_meanwhile_is_left(self, factor: float) -> None:
        """Only prompts take longer, or less; decodes between them show that it is not the whole worker."""
        model = StepModel(calibration_of(SMALL))
        feed(model, traffic(SMALL, 300, kinds="pd"))
        pairs_of = zip(traffic(at_pace(factor), 60, kinds="p"), traffic(SMALL, 60, kinds="d", seed=3), strict=True)
        feed(model, [sample for pair in pairs_of for sample in pair])
        assert largest_error(model, SMALL, PROBES[4:]) < 0.15
        assert largest_error(model, at_pace(factor), PROBES[1:2]) < 0.15

    @pytest.mark.parametrize(("factor", "number"), [(20.0, 5), (0.05, 2)])
    def test_fewer_move_nothing(self, factor: float, number: int) -> None:
        model = StepModel(calibration_of(SMALL))
        feed(model, traffic(SMALL, 300))
        for seed in range(3):
            feed(model, traffic(at_pace(factor), number, kinds="d", seed=seed))
            feed(model, traffic(SMALL, 40, kinds="d", seed=seed))
            assert largest_error(model, SMALL) < 0.1

    @pytest.mark.parametrize("during", [0.5, 0.15, 0.06])
    def test_a_step_during_which_the_pace_changed_tells_of_neither(self, during: float) -> None:
        model = StepModel(calibration_of(SMALL))
        for pace, number in ((1.0, 8), (20.0, 8), (20.0 * during, 1), (1.0, 8)):
            shapes = ((32, 480) if odd % 2 else (480, 0) for odd in range(number))
            feed(model, [prefill(at_pace(pace), *shape) for shape in shapes])
        assert largest_error(model, SMALL) < 0.1

    def test_reports_that_are_read_late_do_not_count_twice(self) -> None:
        model = StepModel(calibration_of(SMALL))
        feed(model, traffic(SMALL, 300))
        for sample in traffic(at_pace(20.0), 40, seed=3):
            model.observe(sample)
        assert largest_error(model, at_pace(20.0)) < 0.15


# ---------------------------------------------------------------- experts

EXPERTS = StepCoefficients(5.0, 0.05, 1e-6, 0.1, 1e-5, experts_ms=40.0, expert_share=8 / 128)
"""A model with 128 experts, of which a token chooses 8: from 1 to 16 rows most of the time is for reading them."""


def of_rows(num_rows: int) -> StepSample:
    return decode(EXPERTS, num_rows, num_rows * 300)


def furthest_off(model: StepModel) -> float:
    """Over batches from one sequence to all experts."""
    samples = [of_rows(num_rows) for num_rows in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)]
    return max(abs(predict(model, sample) / sample.ms - 1.0) for sample in samples)


@pytest.mark.parametrize("noise", [0.0, 0.01])
def test_steps_of_experts_bend_with_their_rows(noise: float) -> None:
    steps = list(traffic(EXPERTS, 600, noise=noise))
    linear, model = StepModel(calibration_of(EXPERTS)), StepModel(calibration_of(EXPERTS), 8 / 128)
    assert furthest_off(model) < 0.02  # by the calibration alone
    for fitted in (linear, model):
        feed(fitted, steps)
    assert furthest_off(linear) > 0.1
    assert furthest_off(model) < 0.02
    assert model.coefficients.expert_share == 8 / 128


def test_one_row_reads_its_share_of_the_experts_and_many_all_of_them() -> None:
    assert EXPERTS.ms_of(0, 0, 1, 0) == pytest.approx(5.1 + 40.0 / 16)
    assert EXPERTS.ms_of(1, 1, 1, 0) == pytest.approx(5.15 + 1e-6 + 40.0 * (1 - (15 / 16) ** 2))
    assert EXPERTS.ms_of(1000, 0, 0, 0) == pytest.approx(55.0 + 40.0)
    assert EXPERTS.step_ms(StepSample(0.0, 2, 3, 4, 100)) == EXPERTS.ms_of(2, 3, 4, 100)


def test_a_pace_of_a_model_with_experts_is_that_of_all_terms() -> None:
    model = StepModel(calibration_of(EXPERTS), 8 / 128)
    slow = EXPERTS._replace(**{name: 2.0 * value for name, value in EXPERTS._asdict().items() if name.endswith("_ms")})
    feed(model, traffic(slow, 200, noise=0.0))
    assert abs(predict(model, of_rows(4)) / (2.0 * of_rows(4).ms) - 1.0) < 0.02
