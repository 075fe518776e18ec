from __future__ import annotations

import random
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.engine.request import Sequence, SequenceState
from disagg.engine.speculation import lookup
from disagg.engine.speculation.lookup import Lookup, Match, TextIndex, continuation
from disagg.engine.speculation.proposer import NOTHING, Proposal
from tests.support.engine import make_spec


def brute_force(text: list[int], most_tokens: int = 10**9) -> Match | None:
    """The longest match up to 16 tokens, of several the latest. Of those of three tokens and more only the latest
    `MOST_CANDIDATES` count."""
    matches: list[Match] = []
    for end in range(len(text) - 1, max(0, len(text) - most_tokens - 1), -1):
        length = max(n for n in range(min(16, end) + 1) if text[end - n : end] == text[len(text) - n :])
        if length > 0:
            matches.append(Match(end, length))
    long = [match for match in matches if match.length >= 3]
    return max(long[: lookup.MOST_CANDIDATES] or matches, key=lambda match: match.length, default=None)


def copying_text(rng: random.Random, size: int, num_ids: int) -> list[int]:
    """Random ids, with pieces of what stood before."""
    text = [rng.randrange(num_ids) for _ in range(4)]
    while len(text) < size:
        start = rng.randrange(len(text))
        piece = text[start : start + rng.randrange(25)] if rng.random() < 0.5 else [rng.randrange(num_ids)]
        text += piece
    return text[:size]


@given(
    seed=st.integers(0, 10**9),
    num_ids=st.sampled_from([1, 2, 3, 10, 50, 2**21]),
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=8),
    most_tokens=st.sampled_from([8, 50, 10**6]),
    tail=st.sampled_from([1, 3, 16, 1000]),
)
def test_a_text_that_grows_anyhow_has_the_matches_of_a_naive_search(
    seed: int, num_ids: int, sizes: list[int], most_tokens: int, tail: int
) -> None:
    text = copying_text(random.Random(seed), sum(sizes), num_ids)
    index, seen = TextIndex(most_tokens, tail), 0
    for size in sizes:
        seen += size
        index.extend(text[:seen])
        assert index.find(text[:seen]) == brute_force(text[:seen], most_tokens)


@given(
    st.lists(st.sampled_from([1, 2, 3, 2**21 + 1, 2**21 + 2, 2**32 - 1]), min_size=1, max_size=40),
    st.sampled_from([1, 8, 1000]),
)
def test_ids_too_large_for_a_key_are_never_mistaken(text: list[int], tail: int) -> None:
    index = TextIndex(tail=tail)
    for size in range(1, len(text) + 1):
        index.extend(text[:size])
    match = index.find(text)
    if match is not None:
        assert text[match.end - match.length : match.end] == text[len(text) - match.length :]
        assert match.length <= match.end < len(text)


def test_keys_that_collide_are_told_apart() -> None:
    assert lookup._key([1], 1) == lookup._key([2**21 + 1], 1)
    index = TextIndex()
    for text in ([1, 2**21 + 1], [5, 1, 7, 5, 2**21 + 1], [5, 6, 1, 7, 5, 6, 2**21 + 1]):
        index = TextIndex()
        index.extend(text)
        assert index.find(text) is None


@pytest.mark.parametrize("tail", [1, 512])
def test_of_many_occurrences_the_latest_ones_are_compared(monkeypatch: pytest.MonkeyPatch, tail: int) -> None:
    text = [9, 1, 2, 3, 50, *[each for i in range(10) for each in (100 + i, 1, 2, 3)], 9, 1, 2, 3]
    index = TextIndex(tail=tail)
    for size in range(1, len(text) + 1):
        index.extend(text[:size])
    assert index.find(text) == Match(4, 4)
    monkeypatch.setattr(lookup, "MOST_CANDIDATES", 10)
    assert index.find(text) == Match(len(text) - 4, 3)


def test_the_index_stays_within_its_memory() -> None:
    rng = random.Random(1)
    text = [rng.randrange(1000) for _ in range(3000)]
    index = TextIndex(most_tokens=1000, tail=100)
    index.extend(text)
    assert index.num_bytes == 12 * 1001
    for _ in range(5000):
        text.append(rng.randrange(1000))
        index.extend(text)
        assert index.num_bytes <= 12 * (1000 + 2 * 100) + lookup.TABLE_BYTES * 100


def test_a_prompt_of_64k_tokens_takes_12_bytes_for_each() -> None:
    index = TextIndex()
    index.extend(range(100_000))
    assert index.num_bytes == 12 * (lookup.MOST_TOKENS + 1)


def test_the_tables_take_no_more_memory_than_they_are_counted_with() -> None:
    text = list(range(100_000, 100_000 + 2 * lookup.TAIL))
    index = TextIndex()
    index.extend(text[: lookup.TAIL + 2])
    tracemalloc.start()
    for size in range(lookup.TAIL + 2, 2 * lookup.TAIL):
        index.extend(text[:size])
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(index._previous) > 200
    assert 100 * len(index._previous) < used < lookup.TABLE_BYTES * len(index._previous)


def test_a_text_never_becomes_shorter() -> None:
    index = TextIndex()
    index.extend([1, 2, 3, 4, 5])
    with pytest.raises(AssertionError, match="shorter"):
        index.extend([1, 2, 3, 4])


@pytest.mark.parametrize(
    ("text", "start", "most", "expected"),
    [
        ([1, 2, 3, 4], 1, 2, [2, 3]),
        ([1, 2, 3, 4], 1, 3, [2, 3, 4]),
        ([1, 2, 3, 4], 2, 7, [3, 4, 3, 4, 3, 4, 3]),
        ([5, 5, 5], 2, 4, [5, 5, 5, 5]),
        ([1, 2, 3, 4], 1, 0, []),
    ],
)
def test_what_follows_a_match_goes_on_periodically_behind_the_end(
    text: list[int], start: int, most: int, expected: list[int]
) -> None:
    assert continuation(text, start, most) == expected


def sequence(text: list[int], stop: tuple[int, ...] = ()) -> Sequence:
    spec = make_spec("r", text[:2], stop=stop, max_tokens=100, cached=False)
    return Sequence(spec, SequenceState.RUNNING, token_ids=list(text))


@pytest.mark.parametrize(
    ("text", "stop", "most", "expected"),
    [
        ([1, 2, 3, 4, 5, 6, 1, 2, 3], (), 2, Proposal((4, 5), 3)),
        ([1, 2, 3, 4, 5, 6, 1, 2, 3], (), 5, Proposal((4, 5, 6, 1, 2), 3)),
        ([0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3], (), 1, Proposal((4,), 4)),
        ([1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3], (), 1, Proposal((5,), 3)),
        ([1, 2, 3, 1, 2, 3, 1, 2, 3], (), 7, Proposal((1, 2, 3, 1, 2, 3, 1), 6)),
        ([7] * 40, (), 5, Proposal((7,) * 5, 16)),
        ([1, 2, 3, 4, 5, 6, 1, 2, 3], (5,), 5, Proposal((4,), 3)),
        ([1, 2, 3, 4, 5, 6, 1, 2, 3], (6, 4), 5, NOTHING),
        ([1, 2, 3, 4, 5, 6, 1, 2, 3], (), 0, NOTHING),
        ([1, 2, 3, 4, 5, 6, 9, 2, 3], (), 2, Proposal((4, 5), 2)),
        ([1, 2, 3, 4, 2, 5, 6, 9, 2], (), 2, Proposal((5, 6), 1)),
        ([1, 2, 3], (), 5, NOTHING),
        ([1, 1], (), 3, Proposal((1, 1, 1), 1)),
        ([1], (), 5, NOTHING),
    ],
    ids=[
        "at most so many",
        "into the output",
        "length of the match",
        "the latest of equal length",
        "a loop",
        "one id",
        "before a stop id",
        "nothing before a stop id",
        "none wanted",
        "the last two tokens",
        "the last token",
        "the last token is new",
        "two equal tokens",
        "one token",
    ],
)
def test_proposals(text: list[int], stop: tuple[int, ...], most: int, expected: Proposal) -> None:
    assert Lookup().propose(sequence(text, stop), most) == expected


def test_the_index_is_kept_with_its_sequence_until_it_is_forgotten() -> None:
    proposer, its = Lookup(), sequence([1, 2, 3, 4, 1, 2, 3])
    proposer.propose(its, 2)
    index = its.draft_index
    its.token_ids += [4, 1, 2]
    assert proposer.propose(its, 2) == Proposal((3, 4), 6)
    assert isinstance(index, TextIndex)
    assert its.draft_index is index
    proposer.forget(its)
    assert its.draft_index is None
