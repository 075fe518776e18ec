"""Is a prefix fetched from another worker where that is quicker, and computed where it is not?

Real engine cores, hand-overs and placement in simulated time: a prefill worker and a decode worker, whose link is
slowed down by a latency and a rate so that fetching and computing cross at about 1,024 tokens. All prefixes are
computed, handed over, evicted from the prefill worker by another prompt, and asked for again: never fetched, always
fetched, or as placement decides after it has seen some fetches; at once, or after a pause. Nothing here depends on the
machine, and other work on it does not matter.

    chosen / better of computed and fetched, by the length of the prefix
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from benchmarks.tiers.choice import CHOSEN, COMPUTED, CROSSING, LOADED, TAIL_TOKENS
from benchmarks.tiers.figures import AFTER_A_PAUSE, CHOICE_OF_LINK
from disagg.loadtests.workload.workload import OutlinedRequest, PromptPart
from disagg.router.placement import fetches
from disagg.simulator.cluster import SimulatedCluster
from disagg.simulator.world.settings import ClusterSpec
from disagg.simulator.world.users import UserRequest
from tests.support.simulation import BYTES_PER_TOKEN, NO_LOCAL, LinearTimes, cluster_spec

TIMES = LinearTimes(base_s=0.008, token_s=0.0014, decode_s=0.003)
"""Step times of SmolLM2-135M on one core."""
_TAUGHT = (384, 1536) * 3
"""Tokens of the prefixes that come again first, by which the link becomes known."""
LONGEST = 4096
"""Tokens of the longest prefix."""
PAUSE_S = 60.0
"""Seconds without a request before each prefix, where there is a pause."""
_NEVER, _ALWAYS = float("inf"), float("-inf")


def slow_link(lengths: Sequence[int]) -> ClusterSpec:
    """The cluster: half of the time of a fetch of `CROSSING` tokens is latency, of two transfers (the first block goes
    alone)."""
    budget_s = CROSSING * TIMES.token_s
    spec = cluster_spec(
        prefill=1,
        decode=1,
        fetch=True,
        times=TIMES,
        bandwidth_bytes_per_s=CROSSING * BYTES_PER_TOKEN / (budget_s / 2),
        latency_s=budget_s / 4,
        router=NO_LOCAL,
    )
    longest = longest_of(lengths)
    prefill, decode = spec.pools
    most = 2 * sum((*_TAUGHT, *lengths)) + 2 * longest
    pools = [replace(prefill, num_blocks=-(-longest // 16) + 1), replace(decode, num_blocks=-(-most // 16))]
    return replace(spec, pools=pools, max_model_len=longest)


def longest_of(lengths: Sequence[int]) -> int:
    """Tokens of the longest sequence."""
    return max(*lengths, *_TAUGHT, CROSSING) + 2 * TAIL_TOKENS


def rows(lengths: Sequence[int], pause_s: float = 0.0) -> Iterator[dict[str, Any]]:
    """One for each length and way. `pause_s`: seconds without a request before each of the lengths."""
    for way, won_by_ms in ((COMPUTED, _NEVER), (LOADED, _ALWAYS), (CHOSEN, fetches.WON_BY_MS)):
        with _won_by(won_by_ms):
            yield from first_tokens(slow_link(lengths), lengths, pause_s, CHOICE_OF_LINK, way)


def first_tokens(
    spec: ClusterSpec, lengths: Sequence[int], pause_s: float, part: str, way: str
) -> Iterator[dict[str, Any]]:
    """A row for each length, of one run."""
    result = SimulatedCluster(spec, requests(lengths, pause_s)).run()
    assert not result.problems, result.problems
    for length, record in zip(lengths, result.records[-len(lengths) :], strict=True):
        assert record.ttft_s is not None, "an answer without a token"
        yield {
            "part": part + AFTER_A_PAUSE * (pause_s > 0.0),
            "way": way,
            "length": length,
            "repeat": 0,
            "ttft_ms": round(record.ttft_s * 1e3, 3),
            "cached_tokens": record.cached_tokens,
            "token": record.output_digest,
        }


def requests(lengths: Sequence[int], pause_s: float) -> list[UserRequest]:
    """A prompt of each length, one that evicts them all, and each again with another end; one after the other."""
    prefixes = [PromptPart(length, ("prefix", number)) for number, length in enumerate((*_TAUGHT, *lengths))]
    prompts = [(prefix, PromptPart(TAIL_TOKENS, ("first", n))) for n, prefix in enumerate(prefixes)]
    prompts.append((PromptPart(max(*lengths, *_TAUGHT, CROSSING), ("other",)), PromptPart(TAIL_TOKENS, ("other", 1))))
    prompts += [(prefix, PromptPart(TAIL_TOKENS, ("again", n))) for n, prefix in enumerate(prefixes)]
    found, due_s = [], 0.0
    for index, parts in enumerate(prompts):
        due_s += pause_s * (index >= len(prompts) - len(lengths))
        found.append(UserRequest(OutlinedRequest(index=index, due_s=due_s, parts=parts, max_tokens=2)))
        due_s += 1.0 + 1.5 * TIMES.token_s * (parts[0].num_tokens + TAIL_TOKENS)
    return found


@contextmanager
def _won_by(ms: float) -> Iterator[None]:
    """By so many milliseconds a fetch must win."""
    before, fetches.WON_BY_MS = fetches.WON_BY_MS, ms
    try:
        yield
    finally:
        fetches.WON_BY_MS = before
