"""Triton's ranking and draw in the interpreter, against a sort, and against the engine's sampler token by token."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from disagg.engine.plan import NO_TOKEN
from disagg.engine.randomness import uniform
from disagg.engine.request import Sequence, SequenceState
from disagg.engine.runner.model import device_draws
from disagg.engine.runner.model.device_draws import DeviceDraws
from disagg.engine.runner.sampler import Sampler
from disagg.kernels import weights
from disagg.kernels.ops import Filters
from disagg.kernels.triton import sampling
from disagg.kernels.triton.ranking import rank_top
from disagg.proto.ids import GatewayId, RequestId
from disagg.proto.messages import Sampling, SequenceSpec
from disagg.proto.token_ids import pack_token_ids

torch.set_num_threads(1)

VOCAB_SIZE = 150
NUM_RANKED = 32


def sequence(index: int, **rules: Any) -> Sequence:
    """A sequence that has drawn `index` tokens."""
    spec = SequenceSpec(
        request_id=RequestId("r"),
        attempt=1,
        gateway_id=GatewayId("g"),
        prompt_token_ids=pack_token_ids([0]),
        sampling=Sampling(**rules),
    )
    return Sequence(spec, SequenceState.RUNNING, token_ids=[0] * (1 + index))


def signed(seed: int) -> int:
    """The int64 with the bits of an unsigned seed."""
    return seed - 2**64 if seed >= 2**63 else seed


def filters_of(sequences: list[Sequence]) -> Filters:
    rules = [sequence.spec.sampling for sequence in sequences]
    return Filters(
        temperatures_R=torch.tensor([rule.temperature for rule in rules], dtype=torch.float32),
        top_k_R=torch.tensor([rule.top_k for rule in rules], dtype=torch.int32),
        top_p_R=torch.tensor([rule.top_p for rule in rules], dtype=torch.float64),
        min_p_R=torch.tensor([rule.min_p for rule in rules], dtype=torch.float64),
        seeds_R=torch.tensor([signed(rule.seed) for rule in rules]),
        indices_R=torch.tensor([sequence.num_output_tokens for sequence in sequences]),
    )


def logits(rows: int, columns: int, step: float) -> Tensor:
    """Random fp16 logits that are multiples of `step`, so that some are equal."""
    generator = torch.Generator().manual_seed(rows)
    return (torch.randn((rows, columns), generator=generator) * 2 / step).round().mul(step).half()


def test_uniform_numbers_are_those_of_the_engine() -> None:
    draws = [(0, 0), (1, 5), (2**63, 2**20), (2**64 - 1, 1), (12345678901234567890, 3)]
    seeds, indices = (torch.tensor([signed(number) for number in numbers]) for numbers in zip(*draws, strict=True))
    assert sampling.uniform(seeds, indices).tolist() == [uniform(seed, index) for seed, index in draws]


@pytest.mark.parametrize(
    ("vocab_size", "num", "step"),
    [(4200, 16, 0.25), (100, 256, 0.5), (300, 2, 100.0)],
    ids=["bounded by groups", "all tokens", "all logits equal"],
)
def test_ranks_the_first_tokens_by_value_then_id(vocab_size: int, num: int, step: float) -> None:
    logits_RV = logits(2, vocab_size + 3, step)
    logits_RV[:, vocab_size:] = 1000.0
    temperatures = torch.tensor([0.7, 0.0])
    found = rank_top(logits_RV, num, temperatures, vocab_size)
    values_RV = logits_RV[:, :vocab_size].float() / torch.tensor([[0.7], [1.0]])
    expected = values_RV.sort(dim=1, descending=True, stable=True)
    assert torch.equal(found.ids_RC, expected.indices[:, :num])
    assert torch.equal(found.values_RC, expected.values[:, :num])
    masses = (values_RV - expected.values[:, :1]).exp().sum(dim=1, dtype=torch.float64)
    torch.testing.assert_close(found.masses_RE.sum(dim=1), masses, rtol=1e-6, atol=0)


RULES: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {},
    {"temperature": 3.0},
    {"top_k": 5, "top_p": 0.8},
    {"top_k": 100},
    {"top_p": 0.3},
    {"top_p": 0.95, "temperature": 2.0},
    {"min_p": 0.1},
    {"min_p": 0.001, "top_k": 120, "top_p": 0.97, "temperature": 1.5},
]


def test_draws_the_tokens_of_the_engine() -> None:
    """With every filter, decided by the ranked tokens or not."""
    sequences = [sequence(index, seed=2**64 - 7 * index - 1, **rules) for index, rules in enumerate(RULES)]
    logits_RV = logits(len(RULES), VOCAB_SIZE + 5, 0.5)
    filters = filters_of(sequences)
    expected = Sampler(VOCAB_SIZE).sample(logits_RV, sequences)
    assert sampling.sample(logits_RV, VOCAB_SIZE, filters, NUM_RANKED).tolist() == expected


def test_rows_without_filters_have_the_tokens_of_the_host() -> None:
    """In several chunks of columns, at the ends of the distribution, and of logits that are no multiples of anything;
    rows of other kinds beside them."""
    vocab_size, generator = 4300, torch.Generator().manual_seed(3)
    spread_R1 = torch.tensor([0.1, 2.0, 9.0]).repeat(2)[:, None]
    logits_RV = torch.randn((6, vocab_size + 8), generator=generator) * spread_R1
    logits_RV[4, 100:] = -math.inf
    rules: list[dict[str, Any]] = [*({"temperature": 0.3 + 0.9 * row} for row in range(5)), {"top_k": 9}]
    sequences = [sequence(row, seed=5 * row + 1, **rule) for row, rule in enumerate(rules)]
    filters, expected = filters_of(sequences), Sampler(vocab_size).sample(logits_RV, sequences)
    assert sampling.sample(logits_RV, vocab_size, filters, NUM_RANKED).tolist() == expected
    temperatures_R = filters.temperatures_R
    ranking = rank_top(logits_RV, NUM_RANKED, temperatures_R, vocab_size)
    values_RV = logits_RV[:, :vocab_size] / temperatures_R[:, None]
    exact_RV = weights.weights(values_RV, values_RV.amax(1, keepdim=True))
    assert torch.equal(ranking.weights_RE, torch.stack([exact_RV[:, :4096].sum(1), exact_RV[:, 4096:].sum(1)], 1))
    for u in (0.0, 0.5, 1.0 - 2.0**-53):
        uniform_R = torch.full((6,), u, dtype=torch.float64)
        drawn = sampling.draw(logits_RV, ranking, filters, uniform_R)
        on_host = weights.draw_unfiltered(logits_RV, vocab_size, temperatures_R, uniform_R)
        assert torch.equal(drawn[:5], on_host[:5])


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_the_sampler_draws_where_the_logits_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """More rows than go in one call, some of edited logits, greedy ones among them."""
    monkeypatch.setattr(device_draws, "draw_rows", sampling.sample)
    penalties: list[dict[str, Any]] = [{"repetition_penalty": 1.5}, {"temperature": 0.0, "logit_bias": ((3, 9.0),)}]
    sequences = [sequence(index, seed=11 * index - 3, **rules) for index, rules in enumerate(RULES + penalties)]
    logits_RV = logits(len(sequences), VOCAB_SIZE + 5, 0.5)
    sampler = Sampler(VOCAB_SIZE, DeviceDraws(4, VOCAB_SIZE, torch.device("cpu")))
    assert sampler.sample(logits_RV, sequences) == Sampler(VOCAB_SIZE).sample(logits_RV, sequences)
    logits_RV[7, 5] = math.nan
    expected = Sampler(VOCAB_SIZE).sample(logits_RV, sequences)
    assert expected.index(NO_TOKEN) == 7
    assert expected.count(NO_TOKEN) == 1
    assert sampler.sample(logits_RV, sequences) == expected


def test_the_last_draw_goes_to_the_last_token_that_is_left() -> None:
    """At the largest uniform number, with and without a search behind the ranked tokens."""
    logits_RV = logits(4, VOCAB_SIZE, 0.5)
    rules: list[dict[str, Any]] = [{}, {"top_k": 100}, {"top_k": 20}, {"top_k": 1, "temperature": 5.0}]
    filters = filters_of([sequence(0, **rule) for rule in rules])
    ranking = rank_top(logits_RV, NUM_RANKED, filters.temperatures_R, VOCAB_SIZE)
    found = sampling.draw(logits_RV, ranking, filters, torch.full((4,), 1.0 - 2.0**-53, dtype=torch.float64))
    order = logits_RV.float().sort(dim=1, descending=True, stable=True).indices
    # Without filters tokens stand in the order of their ids.
    assert found.tolist() == [VOCAB_SIZE - 1, *(int(order[row, last]) for row, last in ((1, 99), (2, 19), (3, 0)))]


def test_a_search_finds_every_token_that_a_filter_keeps() -> None:
    """At the middle of its part of the distribution, however many keys are left for the last passes."""
    kept, places_R = 40, torch.tensor([0, 1, 3, 7, 15, 31, 39])
    rows = len(places_R)
    logits_RV = logits(1, VOCAB_SIZE, 0.001).expand(rows, VOCAB_SIZE).contiguous()
    values_V, ids_V = logits_RV[0].double().sort(descending=True, stable=True)
    weights_K = (values_V[:kept] - values_V[0]).exp()
    middles_K = (weights_K.cumsum(0) - weights_K / 2) / weights_K.sum()
    filters = filters_of([sequence(0, top_k=kept)] * rows)
    ranking = rank_top(logits_RV, NUM_RANKED, filters.temperatures_R, VOCAB_SIZE)
    assert sampling.draw(logits_RV, ranking, filters, middles_K[places_R]).tolist() == ids_V[places_R].tolist()


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_rows_that_nothing_can_be_drawn_from() -> None:
    logits_RV = logits(4, VOCAB_SIZE, 0.5)
    logits_RV[0, 3] = math.nan
    logits_RV[1, 149] = math.inf
    logits_RV[2] = -math.inf
    logits_RV[3, :149] = -math.inf
    filters = filters_of([sequence(0, top_k=3) for _ in range(4)])
    assert sampling.sample(logits_RV, VOCAB_SIZE, filters, NUM_RANKED).tolist() == [-1, -1, -1, 149]
