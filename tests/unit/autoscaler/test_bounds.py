"""What an estimate costs does not follow a user's numbers: chunks of a token, long prompts, many places."""

from __future__ import annotations

import math

import pytest

from disagg.autoscaler import queueing
from disagg.autoscaler.queueing import Lengths, WorkerModel, sharing
from disagg.step_times.interface import MAX_CHUNKS, StepWork, chunks_s
from tests.unit.autoscaler.test_queueing import load


class Linear:
    """A step's time is linear in all that it does; counts how often it is asked."""

    def __init__(self) -> None:
        self.num_asked = 0

    def step_s(self, work: StepWork) -> float:
        self.num_asked += 1
        return 5e-3 + 4e-4 * work.prefill_tokens + 1e-7 * work.prefill_attended + 5e-4 * work.num_decodes


def one_by_one_s(times: Linear, tokens: int, chunk: int, before: int, num_decodes: int) -> float:
    seconds, done, end = 0.0, before, before + tokens
    while done < end:
        size = min(chunk, end - done)
        seconds += times.step_s(StepWork(size, size * done + size * (size + 1) // 2, num_decodes, 0, 1))
        done += size
    return seconds


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 500, 8000, 8001])
@pytest.mark.parametrize("chunk", [1, 2, 16, 100, 10_000])
@pytest.mark.parametrize("before", [0, 48])
def test_chunks_are_summed_in_few_steps(tokens: int, chunk: int, before: int) -> None:
    times = Linear()
    expected = one_by_one_s(times, tokens, chunk, before, 3)
    times.num_asked = 0
    assert chunks_s(times, tokens, chunk, before, 3) == pytest.approx(expected, rel=2e-5)
    assert times.num_asked <= MAX_CHUNKS + 1


@pytest.mark.parametrize("token_budget", [2, 65, 70, 2048])
def test_an_estimate_takes_few_steps(token_budget: int) -> None:
    """Decodes leave a token or a few of the budget for prompts of 8,000 tokens."""
    times = Linear()
    worker = WorkerModel(times=times, token_budget=token_budget, max_num_seqs=64, kv_tokens=10_000_000)
    kinds = tuple(Lengths(8000 + number, 64) for number in range(queueing.MAX_KINDS))
    queueing.colocated(load(1e-4, None, None, *kinds), worker, 4)
    assert times.num_asked <= 8 * queueing.MAX_KINDS * (MAX_CHUNKS + 1) + 2000


def exact(rate_per_s: float, work: float, num_workers: int, most: int, base_s: float, each_s: float) -> list[float]:
    """Probabilities of all states, one by one."""
    log_weights = [0.0]
    for number in range(1, num_workers * most + 1):
        seconds = base_s + each_s * max(1.0, number / num_workers)
        log_weights.append(log_weights[-1] + math.log(rate_per_s * work * seconds / number))
    highest = max(log_weights)
    weights = [math.exp(each - highest) for each in log_weights]
    total = sum(weights)
    return [each / total for each in weights]


@pytest.mark.parametrize("share", [0.02, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("num_workers", [1, 4, 64, 400])
def test_many_states_are_about_all_states(num_workers: int, share: float) -> None:
    most, base_s, each_s = 64, 5e-3, 5e-4
    work = 100.0
    rate = share * num_workers * most / (base_s + each_s * most) / work
    asked: list[float] = []

    def token_s(batch: float) -> float:
        asked.append(batch)
        return base_s + each_s * batch

    found = sharing(rate, work, num_workers, most, token_s)
    assert found is not None
    shares = exact(rate, work, num_workers, most, base_s, each_s)
    mean = sum(number * share for number, share in enumerate(shares)) / num_workers
    assert found.mean_batch == pytest.approx(mean, rel=2e-3)
    assert found.full == pytest.approx(shares[-1], rel=0.05, abs=1e-9)
    assert len(asked) <= 2 * (32 * math.isqrt(num_workers * most) + 1100)
