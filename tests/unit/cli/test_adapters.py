"""What `disagg adapter` prints."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from rich.console import Console

from disagg.cli.operations import adapters as module
from disagg.cli.operations.adapters import run_add, run_list, run_remove
from disagg.client.types import Adapter

SQL = Adapter(name="sql", path="sql-lora", base="m", phase="ready", fingerprint="ab" * 32, bytes=2 << 20)
BAD = Adapter(name="bad", path="bad", base="m", phase="failed", detail="prefill-0: [rank] 128", in_file=True)


class FakeClient:
    def __init__(self, found: list[Adapter]) -> None:
        self.found = found
        self.asked: list[tuple[str, ...]] = []

    def add_adapter(self, name: str, path: str, base: str) -> tuple[Adapter, list[str]]:
        self.asked.append((name, path, base))
        return SQL, ["gateway-2 did not follow within 5 s; it will"]

    def remove_adapter(self, name: str) -> list[str]:
        self.asked.append((name,))
        return []

    def adapters(self) -> list[Adapter]:
        return self.found


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> FakeClient:
    client = FakeClient([BAD, SQL])

    @contextmanager
    def opened(address: str) -> Iterator[FakeClient]:
        assert address == "127.0.0.1:8470"
        yield client

    monkeypatch.setattr(module, "open_client", opened)
    return client


def lines(console: Console) -> list[str]:
    return [line.rstrip() for line in console.export_text().splitlines()]


def test_what_was_added_and_removed(client: FakeClient) -> None:
    console = Console(width=120, record=True)
    run_add("127.0.0.1:8470", "sql", "sql-lora", "m", console)
    run_remove("127.0.0.1:8470", "sql", console)
    assert client.asked == [("sql", "sql-lora", "m"), ("sql",)]
    assert lines(console) == [
        "sql is served: 2.0 MiB on m, content abababababab",
        "note gateway-2 did not follow within 5 s; it will",
        "sql is not served any more; answers that run end with it",
    ]


def test_all_adapters_with_what_is_wrong(client: FakeClient) -> None:
    console = Console(width=120, record=True)
    run_list("127.0.0.1:8470", console)
    head, bad, sql, why = lines(console)
    assert head.split() == ["adapter", "base", "phase", "path", "content", "size", "from"]
    assert bad.split() == ["bad", "m", "failed", "bad", "file"]
    assert sql.split() == ["sql", "m", "ready", "sql-lora", "abababababab", "2.0", "MiB", "operator"]
    assert why == "bad: prefill-0: [rank] 128"
    client.found = []
    console = Console(width=120, record=True)
    run_list("127.0.0.1:8470", console)
    assert lines(console) == ["there is no adapter"]
