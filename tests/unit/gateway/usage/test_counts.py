"""Sums that are not written yet: by tenant, day and model, bounded, and put back as they were."""

from __future__ import annotations

from array import array
from typing import Any

import pytest

from disagg.gateway.requests.call_use import CallUse
from disagg.gateway.usage import counts
from disagg.gateway.usage.counts import OTHERS, Counts, Key, Part, Pending, date_of, day_of

KEY = Key("a", 3, "m")


def _use(prompt: int = 10, cached: int = 4, completion: int = 6, **more: Any) -> CallUse:
    use = CallUse("m", **more)
    use.add(prompt, cached, completion)
    return use


@pytest.mark.parametrize(
    ("now", "date"),
    [(0.0, "1970-01-01"), (86_399.9, "1970-01-01"), (86_400.0, "1970-01-02"), (1_764_115_200.0, "2025-11-26")],
)
def test_a_day_begins_at_midnight_in_utc(now: float, date: str) -> None:
    assert date_of(day_of(now)) == date


def test_calls_are_summed_by_key_until_they_are_taken() -> None:
    pending = Pending()
    pending.add("a", 3, _use(), failed=False, is_open=False)
    pending.add("a", 3, _use(1, 0, 0), failed=True, is_open=True)
    pending.add("b", 4, _use(7, 9, 2), failed=False, is_open=False)
    assert pending.num_requests == 3
    batch = pending.take()
    assert batch.sums == {KEY: Counts(2, 1, 11, 4, 6), Key("b", 4, "m"): Counts(1, 0, 7, 7, 2)}
    assert (batch.parts, pending.num_requests, bool(pending.take())) == ([], 0, False)
    pending.add("a", 3, _use(), failed=False, is_open=False)
    pending.put_back(batch)
    assert pending.take().sums[KEY] == Counts(3, 1, 21, 8, 12)


def test_several_prompts_of_a_call_are_added() -> None:
    use = _use()
    use.add(5, 5, 1)
    assert (use.prompt_tokens, use.cached_tokens, use.completion_tokens) == (15, 9, 7)


def test_only_what_may_go_on_or_goes_on_is_a_part() -> None:
    pending = Pending()
    pending.add("a", 3, _use(stream=b"s", token_ids=array("I", [1, 2])), failed=False, is_open=True)
    pending.add("a", 3, _use(stream=b"s", continues=True, num_had=3), failed=False, is_open=False)
    pending.add("a", 3, _use(stream=b"s"), failed=False, is_open=False)
    pending.add("a", 3, _use(10, 0, 0, stream=b"s"), failed=False, is_open=True)
    pending.add("a", 3, _use(), failed=True, is_open=True)
    one, ids = Counts(1, 0, 10, 4, 6), array("I", [1, 2])
    batch = pending.take()
    assert batch.parts == [
        Part(KEY, b"s", False, True, one, ids.tobytes()),
        Part(KEY, b"s", True, False, one, num_had=3),
    ]
    assert batch.sums == {KEY: Counts(3, 1, 30, 8, 12)}
    assert batch.num_requests == 5


def test_what_is_pending_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counts, "MAX_PENDING_KEYS", 2)
    monkeypatch.setattr(counts, "MAX_PENDING_PARTS", 1)
    pending = Pending()
    for tenant in ("a", "b", "c", "d", "a"):
        pending.add(tenant, 3, _use(), failed=False, is_open=False)
    for _ in range(2):
        pending.add("a", 3, _use(stream=b"s"), failed=False, is_open=True)
    batch = pending.take()
    assert {key.tenant: one.requests for key, one in batch.sums.items()} == {"a": 3, "b": 1, OTHERS: 2}
    assert len(batch.parts) == 1
    pending.add("a", 3, _use(stream=b"t"), failed=False, is_open=True)
    pending.put_back(batch)
    again = pending.take()
    assert (len(again.parts), again.num_requests) == (1, 8)


def test_tokens_of_parts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counts, "MAX_PENDING_PART_BYTES", 40)
    pending = Pending()
    for num_tokens in (6, 5, 4):
        ids = array("I", range(num_tokens))
        pending.add("a", 3, _use(stream=b"s", token_ids=ids), failed=False, is_open=True)
    batch = pending.take()
    assert [len(part.token_ids) for part in batch.parts] == [24, 16]
    assert batch.sums == {KEY: Counts(1, 0, 10, 4, 6)}
    pending.add("a", 3, _use(stream=b"s", token_ids=array("I", range(5))), failed=False, is_open=True)
    pending.put_back(batch)
    assert [len(part.token_ids) for part in pending.take().parts] == [24, 16]
