"""Log-probabilities of sampled tokens against `torch.log_softmax` and a full sort."""

from __future__ import annotations

import math

import pytest
import torch

from disagg.engine.request import Sequence
from disagg.engine.runner.logits import sampled_logprobs
from disagg.proto.messages import TokenLogprobs
from tests.support.stepping import make_sequence

torch.set_num_threads(1)


def asking(*counts: int) -> list[Sequence]:
    return [make_sequence([1], [0], logprobs=count) for count in counts]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_they_are_those_of_log_softmax_in_fp32(dtype: torch.dtype) -> None:
    """In half precision many logits are equal; `sorted` keeps them in the order of their ids."""
    logits = (torch.randn(4, 5000, generator=torch.Generator().manual_seed(1)) * 3).to(dtype)
    before = logits.clone()
    token_ids, counts = [17, 4999, 0, 2500], [20, 0, 1, 5000]
    found = sampled_logprobs(logits, 5000, asking(*counts), token_ids)
    assert torch.equal(logits, before)
    assert list(found) == [0, 1, 2, 3]
    for row, (token_id, count) in enumerate(zip(token_ids, counts, strict=True)):
        expected = torch.log_softmax(logits[row].float(), dim=-1).tolist()
        values = logits[row].tolist()
        top_ids = sorted(range(5000), key=lambda each, values=values: -values[each])[:count]  # type: ignore[misc]
        assert found[row] == TokenLogprobs(
            expected[token_id], tuple(top_ids), tuple(expected[each] for each in top_ids)
        )


def test_only_rows_that_ask_are_computed() -> None:
    row = [math.log(p) for p in (0.5, 0.25, 0.125, 0.125)]
    found = sampled_logprobs(torch.tensor([[math.nan] * 4, row, [math.nan] * 4]), 4, asking(-1, 2, -1), [0, 3, 0])
    assert list(found) == [1]
    assert found[1].logprob == pytest.approx(math.log(0.125), abs=1e-6)
    assert found[1].top_ids == (0, 1)
    assert found[1].top_logprobs == pytest.approx((math.log(0.5), math.log(0.25)), abs=1e-6)


def test_nobody_asks() -> None:
    assert sampled_logprobs(torch.zeros(2, 4), 4, asking(-1, -1), [0, 0]) == {}
    assert sampled_logprobs(torch.zeros(0, 4), 4, [], []) == {}


def test_the_smallest_ids_come_first_among_equals() -> None:
    row = [0.0] * 3000
    row[2999] = row[700] = 1.0
    (found,) = sampled_logprobs(torch.tensor([row]), 3000, asking(4), [9]).values()
    assert found.top_ids == (700, 2999, 0, 1)


def test_a_small_vocabulary_has_no_more_tokens_than_that_and_padding_has_none() -> None:
    (found,) = sampled_logprobs(torch.tensor([[1.0, 3.0, 2.0, 9.0]]), 3, asking(20), [0]).values()
    assert found.top_ids == (1, 2, 0)
    assert sum(map(math.exp, found.top_logprobs)) == pytest.approx(1.0, abs=1e-6)


def test_a_row_does_not_depend_on_the_batch() -> None:
    logits = torch.randn(6, 3000, generator=torch.Generator().manual_seed(2))
    together = sampled_logprobs(logits, 3000, asking(*[5] * 6), [3] * 6)
    alone = {row: sampled_logprobs(logits[row : row + 1], 3000, asking(5), [3])[0] for row in range(6)}
    assert together == alone
