"""The store of batches: each line once, one owner at a time, tenants apart."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from disagg.proto.errors import InvalidRequestError, LimitError
from disagg.router.gateway.batches.store import Answer, BatchStore, File, StoreLimits

LEASE_S = StoreLimits().lease_s


def _store(folder: Path, **limits: int) -> BatchStore:
    return BatchStore(folder, StoreLimits(**limits))


def _upload(store: BatchStore, folder: Path, file_id: str = "file-1", tenant: str = "a") -> None:
    uploaded = folder / "upload"
    uploaded.write_bytes(b"{}\n")
    store.add_file(File(file_id, tenant, "in.jsonl", "batch", 3, 1.0), uploaded)


def _running(folder: Path) -> BatchStore:
    store = _store(folder)
    _upload(store, folder)
    store.create("b", "a", "/v1/completions", "file-1", now=0.0, window_s=100.0)
    return store


def test_another_process_goes_on_and_no_line_is_lost_or_answered_twice(tmp_path: Path) -> None:
    killed, other = _running(tmp_path), _store(tmp_path)
    assert killed.claim("killed", 0.0)
    killed.begin("b", "killed", 3)
    assert killed.answer("b", "killed", [Answer(2, True, b"two"), Answer(0, True, b"zero")]) == "kept"
    assert other.claim("other", LEASE_S - 1) is None
    claimed = other.claim("other", LEASE_S)
    assert claimed is not None
    assert (claimed.status, claimed.total, claimed.num_completed) == ("in_progress", 3, 2)
    assert other.answered("b") == {0, 2}
    assert killed.answer("b", "killed", [Answer(1, True, b"late")]) == "lost"
    assert killed.renew("b", "killed", LEASE_S) is None
    killed.finish("b", "killed", "completed", 16.0)
    assert other.answer("b", "other", [Answer(1, False, b"one"), Answer(2, True, b"again")]) == "kept"
    other.finish("b", "other", "completed", 17.0)
    done = other.batch("a", "b")
    assert done is not None
    assert (done.status, done.ended, done.num_completed, done.num_failed) == ("completed", 17.0, 2, 1)
    assert done.output_file
    assert done.error_file
    assert other.path(done.output_file).read_bytes() == b"zero\ntwo\n"
    assert other.path(done.error_file).read_bytes() == b"one\n"
    assert other.claim("third", 1e6) is None


def test_a_cancelled_batch_keeps_its_answers(tmp_path: Path) -> None:
    store = _running(tmp_path)
    store.claim("me", 0.0)
    store.begin("b", "me", 2)
    store.answer("b", "me", [Answer(0, True, b"zero")])
    cancelled = store.cancel("a", "b")
    assert cancelled is not None
    assert cancelled.status == "cancelling"
    store.begin("b", "me", 2)
    store.finish("b", "me", "cancelled", 5.0)
    ended = store.cancel("a", "b")
    assert ended is not None
    assert (ended.status, ended.error_file) == ("cancelled", None)
    assert store.answer("b", "me", [Answer(1, True, b"late")]) == "lost"


def test_tenants_see_their_own_only(tmp_path: Path) -> None:
    store = _running(tmp_path)
    assert (store.file("b", "file-1"), store.files("b"), store.batch("b", "b"), store.batches("b", 9)) == (
        None,
        [],
        None,
        [],
    )
    assert store.cancel("b", "b") is None
    assert not store.delete_file("b", "file-1")
    with pytest.raises(InvalidRequestError, match="no such file"):
        store.create("c", "b", "/v1/completions", "file-1", 0.0, 1.0)


def test_what_is_stored_is_bounded(tmp_path: Path) -> None:
    store = _store(tmp_path, max_files=1, max_batches=1)
    _upload(store, tmp_path)
    with pytest.raises(LimitError, match="files: there are 1"):
        _upload(store, tmp_path, "file-2")
    with pytest.raises(LimitError, match="together"):
        _upload(_store(tmp_path, max_total_bytes=5), tmp_path, "file-3", "b")
    assert [file.id for file in store.files("a")] == ["file-1"]
    store.create("b", "a", "/v1/completions", "file-1", 0.0, 1.0)
    with pytest.raises(LimitError, match="batches: 1 have"):
        store.create("c", "a", "/v1/completions", "file-1", 0.0, 1.0)
    with pytest.raises(InvalidRequestError, match="cancel it"):
        store.delete_file("a", "file-1")
    store.claim("me", 0.0)
    store.fail("b", "me", "line 1 is no JSON", 1.0)
    assert store.delete_file("a", "file-1")
    assert not store.path("file-1").exists()


def test_answers_count_before_they_are_a_file(tmp_path: Path) -> None:
    store = _running(tmp_path)
    bounded = _store(tmp_path, max_total_bytes=12)
    bounded.claim("me", 0.0)
    bounded.begin("b", "me", 3)
    assert bounded.answer("b", "me", [Answer(0, True, b"zero")]) == "kept"
    with pytest.raises(LimitError, match="together"):
        _upload(_store(tmp_path, max_total_bytes=10), tmp_path, "file-2", "b")
    assert bounded.answer("b", "me", [Answer(0, True, b"zero"), Answer(1, True, b"four")]) == "full"
    assert bounded.answer("b", "me", [Answer(0, True, b"again"), Answer(2, True, b"two")]) == "kept"
    assert bounded.answer("b", "me", [Answer(1, True, b"")]) == "full"
    bounded.finish("b", "me", "failed", 1.0, "no room")
    ended = store.batch("a", "b")
    assert ended is not None
    assert (ended.status, ended.error, ended.num_completed) == ("failed", "no room", 2)
    assert ended.output_file is not None
    assert store.path(ended.output_file).read_bytes() == b"zero\ntwo\n"
    assert sum(file.num_bytes for file in store.files("a")) == 12
    store.delete_file("a", ended.output_file)
    _upload(_store(tmp_path, max_total_bytes=6), tmp_path, "file-2", "b")


def test_each_claim_is_of_another_tenant(tmp_path: Path) -> None:
    store = _running(tmp_path)
    store.create("b2", "a", "/v1/completions", "file-1", now=1.0, window_s=100.0)
    _upload(store, tmp_path, "file-2", "c")
    store.create("b3", "c", "/v1/completions", "file-2", now=2.0, window_s=100.0)
    claims = [store.claim("me", 3.0, tenants) for tenants in ((), ("a",), ("a", "c"), ("c",))]
    assert [None if batch is None else batch.id for batch in claims] == ["b", "b3", None, "b"]
    assert store.owners() == ["me"]
    store.release("me")
    assert store.owners() == []
    assert store.claim("other", 3.0) is not None


def test_contents_that_no_row_names_are_removed(tmp_path: Path) -> None:
    store = _running(tmp_path)
    lost = ["file-lost", "file-gone-output", "file-gone-output.77"]
    spared = ["file-b-output", "file-b-output.77"]
    for name in (*lost, *spared):
        store.path(name).write_bytes(b"x")
    assert sorted(store.remove_orphans()) == sorted(lost)
    assert sorted(path.name for path in store.path("x").parent.iterdir()) == sorted([*spared, "file-1"])
    assert store.remove_orphans() == []


@pytest.mark.parametrize("earlier", [("answer_bytes", "credential"), ("credential",)])
def test_a_database_of_an_earlier_version_is_completed(tmp_path: Path, earlier: tuple[str, ...]) -> None:
    """Its batches go on; which key ordered them is not known."""
    _running(tmp_path).close()
    with closing(sqlite3.connect(tmp_path / "batches.sqlite")) as database:
        for column in earlier:
            database.execute(f"ALTER TABLE batches DROP COLUMN {column}")
        database.execute("PRAGMA user_version = 0")
    again, other = _store(tmp_path), _store(tmp_path)
    again.claim("me", 0.0)
    again.begin("b", "me", 1)
    assert again.answer("b", "me", [Answer(0, True, b"zero")]) == "kept"
    again.create("b2", "a", "/v1/completions", "file-1", 1.0, 100.0, credential="sha256:00")
    assert [(batch.id, batch.credential) for batch in other.batches("a", 9)] == [("b2", "sha256:00"), ("b", None)]


def test_a_database_of_a_later_version_is_left_alone(tmp_path: Path) -> None:
    _running(tmp_path).close()
    with closing(sqlite3.connect(tmp_path / "batches.sqlite")) as database:
        database.execute("PRAGMA user_version = 2")
    with pytest.raises(sqlite3.DatabaseError, match=r"^the database has version 2, this program knows 1 at most$"):
        _store(tmp_path)
