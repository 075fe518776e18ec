"""The file of usage: sums of several processes, days that are kept, streams that break and go on."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from disagg.gateway.sqlite import transaction
from disagg.gateway.usage import store as module
from disagg.gateway.usage.counts import OTHERS, Batch, Counts, Key, Part, Row
from disagg.gateway.usage.store import FILE, PART_S, UsageStore

DAY_S = 86_400.0
KEY = Key("a", 10, "m")
NOW = 10 * DAY_S + 5


def _store(folder: Path, retention_days: int = 30, busy_timeout_s: float = 0.0) -> UsageStore:
    return UsageStore(folder, retention_days, busy_timeout_s)


def _rows(store: UsageStore, tenant: str | None = None, days: int = 30, limit: int = 100) -> list[Row]:
    return store.read(days, tenant, limit, NOW).rows


def test_two_processes_add_to_the_same_sums(tmp_path: Path) -> None:
    first, second = _store(tmp_path), _store(tmp_path)
    for store in (first, second, first):
        store.write(Batch({KEY: Counts(2, 1, 30, 16, 7), Key("b", 10, "m"): Counts(1)}), NOW)
    assert _rows(second) == [Row(KEY, Counts(6, 3, 90, 48, 21)), Row(Key("b", 10, "m"), Counts(3))]
    first.close()
    second.close()
    assert _rows(_store(tmp_path), "a") == [Row(KEY, Counts(6, 3, 90, 48, 21))]


def test_rows_come_by_day_and_only_those_that_are_asked_for(tmp_path: Path) -> None:
    store = _store(tmp_path)
    keys = [Key(tenant, day, model) for tenant in "ab" for day in (8, 9, 10) for model in "mn"]
    store.write(Batch(dict.fromkeys(keys, Counts(1))), NOW)
    page = store.read(2, None, 5, NOW)
    assert [row.key for row in page.rows] == [
        Key("a", 10, "m"),
        Key("a", 10, "n"),
        Key("b", 10, "m"),
        Key("b", 10, "n"),
        Key("a", 9, "m"),
    ]
    assert (page.first_day, page.last_day, page.has_more) == (9, 10, True)
    page = store.read(1, "b", 2, NOW)
    assert ([row.key for row in page.rows], page.has_more) == ([Key("b", 10, "m"), Key("b", 10, "n")], False)


def test_days_are_kept_as_long_as_configured(tmp_path: Path) -> None:
    store = _store(tmp_path, retention_days=2)
    store.write(Batch({Key("a", day, "m"): Counts(1) for day in (8, 9, 10)}), NOW)
    assert [row.key.day for row in _rows(store)] == [10, 9]
    store.write(Batch({Key("a", 11, "m"): Counts(1)}), NOW + DAY_S)
    assert [row.key.day for row in store.read(30, None, 9, NOW + DAY_S).rows] == [11, 10]


def test_names_beyond_the_bound_are_counted_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_ROWS_A_DAY", 2)
    store = _store(tmp_path)
    store.write(Batch({Key(tenant, 10, "m"): Counts(1) for tenant in "abcd"}), NOW)
    store.write(Batch({KEY: Counts(1), Key("d", 10, "m"): Counts(1)}), NOW)
    assert {row.key.tenant: row.counts.requests for row in _rows(store)} == {OTHERS: 3, "a": 2, "b": 1}


def _part(
    prompt: int, completion: int, *, goes_on: bool, is_open: bool, failed: int = 0, tenant: str = "a", had: int = 0
) -> Batch:
    counts, token_ids = Counts(1, failed, prompt, 16, completion), b"abcd" * completion
    return Batch({}, [Part(Key(tenant, 10, "m"), b"stream", goes_on, is_open, counts, token_ids, had)])


def test_a_stream_that_goes_on_counts_once(tmp_path: Path) -> None:
    store = _store(tmp_path)
    store.write(_part(40, 5, goes_on=False, is_open=True, failed=1), NOW)
    assert _rows(store) == [Row(KEY, Counts(1, 1, 40, 16, 5))]
    store.write(_part(40, 9, goes_on=True, is_open=True, failed=1, had=5), NOW)
    store.write(_part(40, 7, goes_on=True, is_open=True, had=7), NOW)  # broke off before it came so far
    store.write(_part(40, 20, goes_on=True, is_open=False, had=7), NOW)
    assert _rows(store) == [Row(KEY, Counts(1, 1, 40, 16, 20))]
    store.write(_part(40, 20, goes_on=True, is_open=False), NOW)  # of another one, whose gateway was killed
    assert _rows(store) == [Row(KEY, Counts(2, 1, 80, 32, 40))]


def test_a_part_is_of_its_tenant_and_is_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_PARTS", 2)
    store = _store(tmp_path)
    store.write(_part(40, 5, goes_on=False, is_open=True), NOW)
    store.write(_part(40, 9, goes_on=True, is_open=False, tenant="b"), NOW)
    assert {row.key.tenant: row.counts.completion_tokens for row in _rows(store)} == {"a": 5, "b": 9}
    store.write(_part(40, 5, goes_on=True, is_open=False), NOW + PART_S + 1)
    assert _rows(store, "a") == [Row(KEY, Counts(1, 0, 40, 16, 5))]
    for _ in range(5):
        store.write(_part(1, 1, goes_on=False, is_open=True), NOW)
    with closing(sqlite3.connect(tmp_path / FILE)) as database:
        assert database.execute("SELECT count(*) FROM parts").fetchone() == (2,)


def test_marks_of_parts_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_PART_BYTES", 250)
    store = _store(tmp_path)
    for _ in range(5):
        store.write(_part(1, 50, goes_on=False, is_open=True), NOW)
    with closing(sqlite3.connect(tmp_path / FILE)) as database:
        assert database.execute("SELECT count(*), sum(length(marks)) FROM parts").fetchone() == (2, 200)


def test_a_file_of_an_earlier_version_is_completed_and_an_earlier_gateway_uses_it(tmp_path: Path) -> None:
    _store(tmp_path).close()
    with closing(sqlite3.connect(tmp_path / FILE)) as database:
        for column in ("marks", "num_again", "num_continued"):
            database.execute(f"ALTER TABLE parts DROP COLUMN {column}")
    store = _store(tmp_path)
    with closing(sqlite3.connect(tmp_path / FILE, isolation_level=None)) as earlier:
        earlier.execute(
            "INSERT INTO parts(tenant, stream, made, failed, prompt_tokens, completion_tokens) VALUES "
            "('a', CAST('stream' AS BLOB), ?, 0, 40, 5)",
            (NOW,),
        )
    store.write(_part(40, 20, goes_on=True, is_open=False, had=5), NOW)
    assert _rows(store) == [Row(KEY, Counts(0, 0, 0, 0, 15))]


def test_nothing_of_a_write_that_fails_is_counted(tmp_path: Path) -> None:
    store = _store(tmp_path)
    batch = Batch({KEY: Counts(1)})
    with closing(sqlite3.connect(tmp_path / FILE, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            store.write(batch, NOW)
        assert _rows(store) == []
        other.execute("ROLLBACK")
        (pages,) = other.execute("PRAGMA page_count").fetchone()
    store._db.execute(f"PRAGMA max_page_count={pages}")  # as a full disk does
    many = Batch({Key(f"{number:060}", 10, "m"): Counts(1) for number in range(1000)})
    with pytest.raises(sqlite3.OperationalError, match="full"):
        store.write(many, NOW)
    assert _rows(store) == []
    store.write(batch, NOW)
    assert _rows(store) == [Row(KEY, Counts(1))]


def test_a_transaction_whose_commit_fails_is_over(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "x", isolation_level=None)) as database:
        database.executescript(
            "PRAGMA foreign_keys=ON; CREATE TABLE t(id INTEGER PRIMARY KEY);"
            "CREATE TABLE u(t INTEGER REFERENCES t(id) DEFERRABLE INITIALLY DEFERRED)"
        )
        with pytest.raises(sqlite3.IntegrityError), transaction(database):
            database.execute("INSERT INTO u VALUES (7)")
        with transaction(database):
            database.execute("INSERT INTO t VALUES (1)")
        assert database.execute("SELECT count(*) FROM t, (SELECT count(*) AS n FROM u) WHERE n = 0").fetchone() == (1,)
