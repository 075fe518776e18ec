"""The sampler's filters, penalties and draws, on vocabularies small enough to compute by hand."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from disagg.engine.plan import NO_TOKEN
from disagg.engine.randomness import uniform
from disagg.engine.request import Sequence, SequenceState
from disagg.engine.runner.sampler import Sampler, row_faults
from disagg.proto.ids import GatewayId, RequestId
from disagg.proto.messages import Sampling, SequenceSpec
from disagg.proto.token_ids import pack_token_ids

torch.set_num_threads(1)


def sequence(prompt: tuple[int, ...] = (0,), output: tuple[int, ...] = (), **sampling: Any) -> Sequence:
    spec = SequenceSpec(
        request_id=RequestId("r"),
        attempt=1,
        gateway_id=GatewayId("g"),
        prompt_token_ids=pack_token_ids(prompt),
        sampling=Sampling(**sampling),
    )
    return Sequence(spec, SequenceState.RUNNING, token_ids=[*prompt, *output])


def logits(*rows: list[float]) -> Tensor:
    return torch.tensor(rows)


def of_probabilities(*probabilities: float) -> list[float]:
    return [math.log(p) if p > 0 else -math.inf for p in probabilities]


def support(row: list[float], draws: int = 400, **sampling: Any) -> set[int]:
    """Every token that some of `draws` seeds gives."""
    sampler = Sampler(len(row))
    sequences = [sequence(seed=seed, **sampling) for seed in range(draws)]
    return set(sampler.sample(torch.tensor([row] * draws), sequences))


def expected_token(probabilities: list[float], u: float, *, filtered: bool = False) -> int:
    """Inverse CDF over the ids, with filters over (probability descending, id ascending), in plain Python."""
    ranked = sorted(range(len(probabilities)), key=lambda token: (-probabilities[token] if filtered else 0.0, token))
    below = 0.0
    for token in ranked:
        below += probabilities[token]
        if u < below:
            return token
    raise AssertionError("probabilities do not add up to 1")


# ---------------------------------------------------------------- greedy


def test_greedy_takes_the_largest_logit() -> None:
    sequences = [sequence(temperature=0.0), sequence(temperature=1e-6)]
    assert Sampler(3).sample(logits([1, 3, 2], [0, -1, 5]), sequences) == [1, 2]


def test_the_largest_logits_may_be_known_before() -> None:
    values, known = logits([1, 3, 2], [0, 9, 0], [5, 4, 0]), torch.tensor([1, -1, 0])
    mixed = [sequence(temperature=0.0), sequence(top_k=1), sequence(temperature=0.0, logit_bias=((2, 9.0),))]
    assert Sampler(3).sample(values, mixed, known) == [1, 1, 2]
    assert Sampler(3).sample(values, [sequence(temperature=0.0)] * 3, known) == [1, NO_TOKEN, 0]


def test_greedy_takes_the_smallest_id_among_equals() -> None:
    row = [0.0] * 3000
    row[700] = row[2000] = row[2999] = 1.0
    assert Sampler(3000).sample(logits(row), [sequence(temperature=0.0)]) == [700]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_logits_are_left_alone(dtype: torch.dtype) -> None:
    values = torch.randn(3, 50, generator=torch.Generator().manual_seed(1)).to(dtype)
    before = values.clone()
    sequences = [
        sequence(temperature=0.0, repetition_penalty=2.0),
        sequence(min_tokens=3, stop_token_ids=(4,), logit_bias=((5, 3.0),)),
        sequence(output=(3, 3), temperature=0.5, frequency_penalty=1.0, top_p=0.5),
    ]
    Sampler(50).sample(values, sequences)
    assert torch.equal(values, before)


def test_no_rows_give_no_tokens() -> None:
    assert Sampler(5).sample(torch.empty(0, 5), []) == []


def test_padding_columns_are_never_taken() -> None:
    row = [1.0, 2.0, 100.0, 100.0]
    assert Sampler(2).sample(logits(row, row), [sequence(temperature=0.0), sequence(top_k=1)]) == [1, 1]


# ---------------------------------------------------------------- filters


def test_temperature_scales_the_odds() -> None:
    row = of_probabilities(0.6, 0.3, 0.1)
    for temperature in (0.5, 1.0, 2.0):
        powers = [p ** (1 / temperature) for p in (0.6, 0.3, 0.1)]
        probabilities = [power / sum(powers) for power in powers]
        sequences = [sequence(seed=seed, temperature=temperature) for seed in range(300)]
        found = Sampler(3).sample(torch.tensor([row] * 300), sequences)
        assert found == [expected_token(probabilities, uniform(seed, 0)) for seed in range(300)]


def test_top_k() -> None:
    row = of_probabilities(0.1, 0.4, 0.2, 0.3)
    assert support(row, top_k=1) == {1}
    assert support(row, top_k=2) == {1, 3}
    assert support(row, top_k=3) == {1, 2, 3}
    assert support(row, top_k=4) == support(row, top_k=0) == support(row, top_k=9) == {0, 1, 2, 3}


def test_top_k_keeps_the_smallest_ids_among_equals() -> None:
    assert support([0.0, 1.0, 0.0, 0.0], top_k=3) == {0, 1, 2}


def test_top_p_keeps_the_token_that_crosses() -> None:
    row = of_probabilities(0.1, 0.4, 0.2, 0.3)
    assert support(row, top_p=0.01) == support(row, top_p=0.39) == {1}
    assert support(row, top_p=0.41) == support(row, top_p=0.69) == {1, 3}
    assert support(row, top_p=0.71) == support(row, top_p=0.89) == {1, 2, 3}
    assert support(row, top_p=0.91) == support(row, top_p=1.0) == {0, 1, 2, 3}


def test_min_p_is_relative_to_the_most_probable() -> None:
    row = of_probabilities(0.1, 0.4, 0.2, 0.3)
    assert support(row, min_p=0.76) == support(row, min_p=1.0) == {1}
    assert support(row, min_p=0.74) == support(row, min_p=0.51) == {1, 3}
    assert support(row, min_p=0.49) == support(row, min_p=0.26) == {1, 2, 3}
    assert support(row, min_p=0.24) == {0, 1, 2, 3}


def test_top_p_counts_what_top_k_left() -> None:
    # After top-k 2: 4/7 and 3/7. 0.55 < 4/7 is reached by the first token alone; of the whole, 0.4, it would not be.
    row = of_probabilities(0.1, 0.4, 0.2, 0.3)
    assert support(row, top_k=2, top_p=0.55) == {1}
    assert support(row, top_k=2, top_p=0.6) == {1, 3}


def test_filtered_probabilities_are_renormalized() -> None:
    row = of_probabilities(0.1, 0.4, 0.2, 0.3)
    sequences = [sequence(seed=seed, top_k=3, top_p=0.75, min_p=0.3) for seed in range(300)]
    found = Sampler(4).sample(torch.tensor([row] * 300), sequences)
    # top-k 3: 4/9 3/9 2/9; top-p 0.75: the first two reach 7/9; min-p: 3/4 stays
    assert found == [expected_token([0.0, 4 / 7, 0.0, 3 / 7], uniform(seed, 0), filtered=True) for seed in range(300)]


def test_filters_follow_temperature() -> None:
    row = of_probabilities(0.6, 0.4)
    assert support(row, min_p=0.5) == {0, 1}  # 0.4 / 0.6 = 0.67
    assert support(row, min_p=0.5, temperature=0.5) == {0}  # (0.4 / 0.6)^2 = 0.44


# ---------------------------------------------------------------- penalties and masks


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits() -> None:
    row = [3.0, 2.0, -1.0, -1.5]
    sampler = Sampler(4)
    repeated: dict[str, Any] = {"temperature": 0.0, "repetition_penalty": 2.0}
    assert sampler.sample(logits(row), [sequence(prompt=(1,), **repeated)]) == [0]
    assert sampler.sample(logits(row), [sequence(prompt=(0,), **repeated)]) == [1]  # 3/2 < 2
    assert sampler.sample(logits(row), [sequence(prompt=(0,), output=(1, 1), **repeated)]) == [0]  # 1.5 > 2/2
    only = [-math.inf, -math.inf, -1.0, -1.5]
    assert sampler.sample(logits(only), [sequence(prompt=(2, 2), **repeated)]) == [3]  # -2 < -1.5


def test_presence_penalty_counts_output_once_and_no_prompt() -> None:
    row = [2.0, 1.5, 0.0]
    sampler = Sampler(3)
    assert sampler.sample(logits(row), [sequence(prompt=(0,), temperature=0.0, presence_penalty=1.0)]) == [0]
    once = [sequence(output=(0,), temperature=0.0, presence_penalty=penalty) for penalty in (0.4, 0.6)]
    assert sampler.sample(logits(row, row), once) == [0, 1]
    thrice = [sequence(output=(0, 0, 0), temperature=0.0, presence_penalty=penalty) for penalty in (0.4, 0.6)]
    assert sampler.sample(logits(row, row), thrice) == [0, 1]


def test_frequency_penalty_counts_every_output() -> None:
    row = [2.0, 1.5, 0.0]
    outputs: list[tuple[int, ...]] = [(), (0,), (0, 0), (0, 2, 0), (0, 0, 1)]
    sequences = [sequence(output=output, temperature=0.0, frequency_penalty=0.3) for output in outputs]
    # token 0: 2.0, 1.7, 1.4, 1.4, 1.4; token 1: 1.5, 1.5, 1.5, 1.5, 1.2
    assert Sampler(3).sample(logits(*[row] * 5), sequences) == [0, 0, 1, 1, 0]


def test_a_negative_penalty_rewards() -> None:
    sequences = [sequence(output=(1,), temperature=0.0, presence_penalty=-1.0)]
    assert Sampler(2).sample(logits([2.0, 1.5]), sequences) == [1]


def test_penalties_come_before_the_draw() -> None:
    # log-odds 0 and 1; both penalties take 0.5 + 2 * 0.25 from token 1: even odds
    found = [
        Sampler(2).sample(
            logits([0.0, 1.0]),
            [sequence(output=(1, 1), seed=seed, presence_penalty=0.5, frequency_penalty=0.25)],
        )[0]
        for seed in range(200)
    ]
    assert found == [expected_token([0.5, 0.5], uniform(seed, 2)) for seed in range(200)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_stop_id_before_min_tokens(temperature: float) -> None:
    row = [-20.0, 30.0, 20.0, 10.0]
    outputs: list[tuple[int, ...]] = [(), (3,), (3, 3), (3, 3, 3)]
    sequences = [
        sequence(output=output, temperature=temperature, min_tokens=2, stop_token_ids=(1, 2, 99)) for output in outputs
    ]
    assert Sampler(4).sample(logits(*[row] * 4), sequences) == [3, 3, 1, 1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_bias_bans_and_forces(temperature: float) -> None:
    row = [1.0, 30.0, 2.0]
    biases: list[tuple[tuple[int, float], ...]] = [(), ((1, -100.0),), ((0, 100.0),), ((1, -60.0), (0, 50.0))]
    sequences = [sequence(temperature=temperature, logit_bias=bias) for bias in biases]
    assert Sampler(3).sample(logits(*[row] * 4), sequences) == [1, 2, 0, 0]


def test_a_bias_shifts_the_odds_and_a_token_that_is_named_twice_gets_both() -> None:
    row = of_probabilities(0.6, 0.3, 0.1)
    bias = ((2, math.log(2)), (0, math.log(0.25)), (2, math.log(1.5)))
    sequences = [sequence(seed=seed, logit_bias=bias) for seed in range(300)]
    found = Sampler(3).sample(torch.tensor([row] * 300), sequences)
    assert found == [expected_token([0.2, 0.4, 0.4], uniform(seed, 0)) for seed in range(300)]


def test_a_bias_comes_before_penalties() -> None:
    # (-1 + 6) / 4 < 1.5, while -1 * 4 + 6 is more; (-1 + 7.5) / 4 is more than 1.5.
    row = [-1.0, 1.5, 0.0]
    repeated: dict[str, Any] = {"temperature": 0.0, "repetition_penalty": 4.0}
    assert Sampler(3).sample(logits(row), [sequence(prompt=(0,), logit_bias=((0, 6.0),), **repeated)]) == [1]
    assert Sampler(3).sample(logits(row), [sequence(prompt=(0,), logit_bias=((0, 7.5),), **repeated)]) == [0]


def test_no_bias_brings_a_masked_stop_id_back() -> None:
    sequences = [
        sequence(output=output, temperature=0.0, min_tokens=1, stop_token_ids=(0,), logit_bias=((0, 100.0),))
        for output in ((), (2,))
    ]
    assert Sampler(3).sample(logits(*[[1.0, 2.0, 3.0]] * 2), sequences) == [2, 0]


def test_emitted_tokens_of_earlier_attempts_are_output() -> None:
    spec = SequenceSpec(
        request_id=RequestId("r"),
        attempt=2,
        gateway_id=GatewayId("g"),
        prompt_token_ids=pack_token_ids([0]),
        emitted_token_ids=(1, 1),
        sampling=Sampling(seed=11),
    )
    resumed = Sequence(spec, SequenceState.RUNNING, token_ids=[0, 1, 1])
    row = torch.randn(1, 100, generator=torch.Generator().manual_seed(2))
    first = sequence(output=(1, 1), seed=11)
    found = Sampler(100).sample(row, [resumed])
    assert found == Sampler(100).sample(row, [first])
    assert found == [expected_token(torch.softmax(row[0].double(), 0).tolist(), uniform(11, 2))]


# ---------------------------------------------------------------- the draw


@pytest.mark.parametrize(
    "sampling", [{}, {"top_p": 0.9}, {"top_k": 700}, {"min_p": 0.02}, {"temperature": 3.0, "top_p": 0.99}]
)
def test_a_draw_is_the_inverse_cdf_of_one_uniform_also_far_down_the_ranking(sampling: dict[str, Any]) -> None:
    vocab_size, temperature = 2000, sampling.get("temperature", 1.0)
    values = torch.randn(60, vocab_size, generator=torch.Generator().manual_seed(5)) * 1.5
    values[:30] = values[:30].bfloat16().float()  # many equal logits
    found = Sampler(vocab_size).sample(values, [sequence(seed=seed, **sampling) for seed in range(60)])
    expected, ranks = [], []
    for seed, row in enumerate(values):
        p = torch.softmax(row.double() / temperature, 0)
        by_id = not sampling
        order = list(range(vocab_size))
        order.sort(key=lambda token, p=p: (by_id or -float(p[token]), token))  # type: ignore[misc]
        kept = order[: int(sampling.get("top_k", vocab_size))]
        sums = torch.cumsum(p[kept], 0)
        if "top_p" in sampling:
            kept = kept[: int((sums < sampling["top_p"]).sum()) + 1]
        if "min_p" in sampling:
            kept = [token for token in kept if p[token] >= sampling["min_p"] * p.max()]
        sums = torch.cumsum(p[kept], 0)
        rank = int((sums <= uniform(seed, 0) * sums[-1]).sum())
        expected.append(kept[rank])
        ranks.append(rank)
    assert found == expected
    assert min(ranks) < 256 < max(ranks)


def test_without_filters_a_draw_is_of_the_tokens_by_id() -> None:
    """In one row and another, whatever the batch; the uniform numbers at the borders too."""
    values = logits([1.0, 3.0, 2.0])
    p = torch.softmax(values[0].double(), 0).tolist()
    found = Sampler(3).sample(values.repeat(300, 1), [sequence(seed=seed) for seed in range(300)])
    drawn = [uniform(seed, 0) for seed in range(300)]
    assert found == [0 if u < p[0] else 1 if u < p[0] + p[1] else 2 for u in drawn]
    assert set(found) == {0, 1, 2}


def test_equal_logits_are_ranked_by_id() -> None:
    sequences = [sequence(seed=seed) for seed in range(200)]
    found = Sampler(1000).sample(torch.zeros(200, 1000), sequences)
    assert found == [int(uniform(seed, 0) * 1000) for seed in range(200)]


def test_zeros_of_both_signs_are_equal() -> None:
    found = Sampler(2).sample(logits(*[[0.0, -0.0], [-0.0, 0.0]] * 50), [sequence(seed=i // 2) for i in range(100)])
    assert found[::2] == found[1::2]


def test_a_masked_token_is_never_drawn() -> None:
    assert support([-math.inf, 0.0, -math.inf, 0.0]) == {1, 3}


def test_draws_do_not_depend_on_the_batch() -> None:
    generator = torch.Generator().manual_seed(7)
    values = torch.randn(12, 3000, generator=generator) * 2
    parameters: list[dict[str, Any]] = [{}, {"top_k": 50}, {"top_p": 0.8}, {"temperature": 0.0}, {"min_p": 0.1}, {}]
    sequences = [
        sequence(output=(1,) * row, seed=row * 31, frequency_penalty=0.1 * (row % 3), **parameters[row % 6])
        for row in range(12)
    ]
    sampler = Sampler(3000)
    together = sampler.sample(values, sequences)
    alone = [sampler.sample(values[row : row + 1], [sequences[row]])[0] for row in range(12)]
    backwards = sampler.sample(values.flip(0), sequences[::-1])[::-1]
    assert together == alone == backwards
    assert sampler.sample(values, sequences) == together
    assert len(set(together)) > 6


def test_every_output_index_draws_anew_and_every_seed_differs() -> None:
    values = torch.zeros(1, 1 << 14)
    sampler = Sampler(1 << 14)
    by_index = [sampler.sample(values, [sequence(output=(0,) * i, seed=3)])[0] for i in range(50)]
    by_seed = [sampler.sample(values, [sequence(seed=seed)])[0] for seed in range(50)]
    assert len(set(by_index)) == 50
    assert len(set(by_seed)) == 50


def test_draws_follow_the_probabilities() -> None:
    probabilities = [0.05, 0.5, 0.15, 0.3]
    sequences = [sequence(seed=seed) for seed in range(4000)]
    counts = Counter(Sampler(4).sample(torch.tensor([of_probabilities(*probabilities)] * 4000), sequences))
    for token, probability in enumerate(probabilities):
        deviation = math.sqrt(4000 * probability * (1 - probability))
        assert abs(counts[token] - 4000 * probability) < 3 * deviation


# ---------------------------------------------------------------- what cannot be sampled


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("row", [[1.0, math.nan, 2.0], [1.0, math.inf, 0.0], [-math.inf] * 3])
def test_a_row_of_the_model_that_is_not_finite_gives_no_token(row: list[float], temperature: float) -> None:
    sequences = [sequence(temperature=temperature, top_k=1), sequence(temperature=temperature)]
    values = logits([1.0, 2.0, 3.0], row)
    token_ids = Sampler(3).sample(values, sequences)
    assert token_ids == [2, NO_TOKEN]
    assert row_faults(values, 3, token_ids) == {1: "model"}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "sampling",
    [
        {"repetition_penalty": 1e-38},
        {"logit_bias": ((0, 3e38), (0, 3e38))},
        {"logit_bias": ((1, math.nan),)},
        {"frequency_penalty": -3e38, "presence_penalty": -3e38},
        {"min_tokens": 9, "stop_token_ids": (0, 1, 2)},
    ],
)
def test_a_row_that_its_request_leaves_nothing_finite_of_gives_no_token(
    sampling: dict[str, Any], temperature: float
) -> None:
    sequences = [
        sequence(temperature=temperature, top_k=1, frequency_penalty=0.1),
        sequence(output=(0,), temperature=temperature, **sampling),
        sequence(temperature=0.0),
    ]
    values = logits(*[[5.0, 20.0, 3.0]] * 3)
    token_ids = Sampler(3).sample(values, sequences)
    assert token_ids == [1, NO_TOKEN, 1]
    assert row_faults(values, 3, token_ids) == {1: "request"}


def test_rows_with_tokens_have_no_fault() -> None:
    assert row_faults(logits([1.0, math.nan]), 2, [0]) == {}


@pytest.mark.parametrize("shape", [(1, 4), (2, 3), (2, 4, 1)])
def test_shapes_that_do_not_fit_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"for 2 sequences and 4 tokens"):
        Sampler(4).sample(torch.zeros(shape), [sequence(), sequence()])
