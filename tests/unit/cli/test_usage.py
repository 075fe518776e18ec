"""What `disagg usage` prints of an answer of the gateway."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from rich.console import Console

from disagg.cli.operations import usage as module
from disagg.cli.operations.usage import NO_KEY, run_usage, usage_json
from disagg.client import UsageByDay
from disagg.v1 import inference_pb2 as pb

ENTRIES = [
    pb.KeyUsage(
        date="2026-11-26",
        key="a",
        model="m",
        requests=1200,
        failed=3,
        prompt_tokens=50_000,
        cached_tokens=16,
        completion_tokens=7,
    ),
    pb.KeyUsage(date="2026-11-26", key="b", model="m", requests=1, prompt_tokens=2, completion_tokens=9_000_000),
    pb.KeyUsage(date="2026-11-25", key="a", model="n", requests=1, prompt_tokens=1, completion_tokens=1),
]


class FakeClient:
    def __init__(self, found: UsageByDay) -> None:
        self.found = found
        self.asked: list[tuple[int, str]] = []

    def usage(self, days: int, key: str) -> UsageByDay:
        self.asked.append((days, key))
        return self.found


def printed(monkeypatch: pytest.MonkeyPatch, found: UsageByDay, *, as_json: bool = False) -> str:
    client = FakeClient(found)

    @contextmanager
    def opened(address: str) -> Iterator[FakeClient]:
        assert address == "127.0.0.1:8470"
        yield client

    monkeypatch.setattr(module, "open_client", opened)
    console = Console(width=120, record=True)
    run_usage("127.0.0.1:8470", 30, "a", console, as_json=as_json)
    assert client.asked == [(30, "a")]
    return "\n".join(line.rstrip() for line in console.export_text().splitlines())


def test_days_and_their_sums_by_key(monkeypatch: pytest.MonkeyPatch) -> None:
    found = UsageByDay(entries=ENTRIES, first_date="2026-10-28", last_date="2026-11-26", has_more=True)
    assert printed(monkeypatch, found) == (
        "day (UTC)   key  model  requests  failed  prompt  cached     output\n"
        "2026-11-26  a    m         1,200       3  50,000      16          7\n"
        "2026-11-26  b    m             1       0       2       0  9,000,000\n"
        "2026-11-25  a    n             1       0       1       0          1\n"
        "\n"
        "all days  requests  failed  prompt  cached     output\n"
        "b                1       0       2       0  9,000,000\n"
        "a            1,201       3  50,001      16          8\n"
        "there are more entries; ask for fewer days or for one key"
    )


def test_nothing_was_used(monkeypatch: pytest.MonkeyPatch) -> None:
    today = UsageByDay(first_date="2026-11-26", last_date="2026-11-26")
    assert printed(monkeypatch, today) == "nothing was used, 2026-11-26 (UTC)"


def test_callers_without_a_key_have_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    found = UsageByDay(entries=[pb.KeyUsage(date="2026-11-26", model="m", requests=1)])
    assert NO_KEY in printed(monkeypatch, found)


def test_programs_get_all_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    found = UsageByDay(entries=ENTRIES[1:2], first_date="2026-11-26", last_date="2026-11-26")
    assert usage_json(found)["entries"] == [
        {
            "date": "2026-11-26",
            "key": "b",
            "model": "m",
            "requests": 1,
            "failed": 0,
            "prompt_tokens": 2,
            "cached_tokens": 0,
            "completion_tokens": 9_000_000,
        }
    ]
    assert '"has_more": false' in printed(monkeypatch, found, as_json=True)
