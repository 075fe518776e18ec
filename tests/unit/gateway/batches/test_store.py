"""The store of batches: each line once, one owner at a time, tenants apart."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from disagg.gateway.batches.store import Answer, BatchStore, File
from disagg.gateway.batches.stored import RUNNABLE, stored_by
from disagg.gateway.config import StoreLimits
from disagg.proto.errors import InvalidRequestError, LimitError

LEASE_S = StoreLimits().lease_s


DAY_S = 86_400.0


def _store(folder: Path, **limits: int) -> BatchStore:
    return BatchStore(folder, StoreLimits(**limits))


def _upload(
    store: BatchStore, folder: Path, file_id: str = "file-1", tenant: str = "a", num_bytes: int = 3, at: float = 1.0
) -> None:
    folder.mkdir(exist_ok=True)
    uploaded = folder / "upload"
    uploaded.write_bytes(b"{}\n")
    store.add_file(File(file_id, tenant, "in.jsonl", "batch", num_bytes, at), uploaded)


def _room(store: BatchStore, batch_id: str = "b", owner: str = "me") -> int:
    held = store.renew(batch_id, owner, 1.0)
    assert held is not None
    return held.room


def _running(folder: Path) -> BatchStore:
    store = _store(folder)
    _upload(store, folder)
    store.create("b", "a", "/v1/completions", "file-1", now=0.0, window_s=100.0)
    return store


def _remove_sums(database: sqlite3.Connection) -> None:
    """An earlier version had none."""
    kinds = "type = 'trigger' OR type = 'index' AND sql IS NOT NULL OR name LIKE 'stored%'"
    for kind, name in database.execute(f"SELECT type, name FROM sqlite_master WHERE {kinds} ORDER BY type").fetchall():
        database.execute(f"DROP {kind} IF EXISTS {name}")


def _check_sums(folder: Path) -> None:
    """What a tenant may have more follows from what is there."""
    with closing(sqlite3.connect(folder / "batches.sqlite")) as database:
        rows = database.execute(
            "SELECT tenant, bytes, 1, 0 FROM files UNION ALL SELECT tenant, bytes, 0, 1 FROM uploads UNION ALL "
            "SELECT tenant, max(answer_bytes, reserved), 0, 0 FROM batches "
            f"WHERE status IN {RUNNABLE}"
        ).fetchall()
        tenants = {tenant for (tenant,) in database.execute("SELECT tenant FROM stored")} | {"nobody"}
        for tenant in tenants | {row[0] for row in rows}:
            sums = [sum(row[column] for row in rows if row[0] == tenant) for column in (1, 2, 3)]
            assert stored_by(database, tenant) == (sum(row[1] for row in rows), *sums)


def test_the_sums_are_those_of_what_is_stored(tmp_path: Path) -> None:
    store = _store(tmp_path)
    steps: list[Callable[[], object]] = [
        lambda: _upload(store, tmp_path, num_bytes=500),
        lambda: store.begin_upload("upload", "c", 90, 0.0, 9.0),
        lambda: store.begin_upload("other", "c", 70, 0.0, 5.0),
        lambda: store.create("b", "a", "/v1/completions", "file-1", now=0.0, window_s=100.0),
        lambda: store.claim("me", 0.0),
        lambda: store.begin("b", "me", 2, expected_bytes=700),
        lambda: store.answer("b", "me", [Answer(0, True, b"z" * 800)]),
        lambda: store.answer("b", "me", [Answer(1, False, b"y" * 10)]),
        lambda: _upload(store, tmp_path, "file-2", "c", 80, at=9e9),
        lambda: store.begin_upload("third", "d", 20, 6.0, 9.0),
        lambda: store.end_upload("third"),
        lambda: store.finish("b", "me", "completed", 8e9),
        lambda: store.delete_file("c", "file-2"),
        lambda: store.expire(1e9),
        lambda: store.create("gone", "a", "/v1/completions", "file-b-output", now=0.0, window_s=1.0),
        lambda: store.claim("me", 0.0),
        lambda: store.fail("gone", "me", "no line", 9e9),
    ]
    for step in steps:
        step()
        _check_sums(tmp_path)
    assert [file.num_bytes for file in store.files("a")] == [11, 801]


def test_a_refused_upload_counts_nothing(tmp_path: Path) -> None:
    store = _store(tmp_path, max_files=1)
    _upload(store, tmp_path)
    with pytest.raises(LimitError):
        _upload(store, tmp_path, "file-2")
    with pytest.raises(LimitError):
        store.begin_upload("file-2", "a", 1, 0.0, 9.0)
    _check_sums(tmp_path)


def test_a_turn_costs_the_same_however_many_files_and_batches_there_are(tmp_path: Path) -> None:
    """Counted in steps of SQLite's machine; a turn renews leases, keeps answers and looks for batches."""
    costs = []
    for number in (10, 2000):
        folder = tmp_path / str(number)
        _running(folder).close()
        with closing(sqlite3.connect(folder / "batches.sqlite")) as database:
            for each in range(number):
                values = (f"f{each}", f"t{each % 50}")
                database.execute("INSERT INTO files VALUES (?, ?, 'in', 'batch', 1, 0)", values)
                database.execute(
                    "INSERT INTO batches(id, tenant, endpoint, input_file, status, created, expires) "
                    "VALUES (?, ?, '', '', 'completed', 0, 0)",
                    values,
                )
            database.commit()
        store = _store(folder)
        steps = 0

        def count() -> int:
            nonlocal steps
            steps += 1
            return 0

        store._db.set_progress_handler(count, 10)
        assert store.claim("me", 0.0)
        store.begin("b", "me", 2)
        assert _room(store)
        assert store.answer("b", "me", [Answer(0, True, b"zero")])
        assert store.claim("me", 0.0, ("a",)) is None
        assert store.owners() == ["me"]
        store.begin_upload("u", "t1", 1, 0.0, 9.0)
        assert store.create("b2", "a", "/v1/completions", "file-1", 0.0, 1.0)
        costs.append(steps)
        store.close()
    assert costs[1] < 1.5 * costs[0], costs


def test_another_process_goes_on_and_no_line_is_lost_or_answered_twice(tmp_path: Path) -> None:
    killed, other = _running(tmp_path), _store(tmp_path)
    assert killed.claim("killed", 0.0)
    killed.begin("b", "killed", 3)
    assert killed.answer("b", "killed", [Answer(2, True, b"two"), Answer(0, True, b"zero")])
    assert other.claim("other", LEASE_S - 1) is None
    claimed = other.claim("other", LEASE_S)
    assert claimed is not None
    assert (claimed.status, claimed.total, claimed.num_completed) == ("in_progress", 3, 2)
    assert other.answered("b") == {0, 2}
    assert killed.answer("b", "killed", [Answer(1, True, b"late")]) is None
    assert killed.renew("b", "killed", LEASE_S) is None
    killed.finish("b", "killed", "completed", 16.0)
    assert other.answer("b", "other", [Answer(1, False, b"one"), Answer(2, True, b"again")])
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
    assert store.answer("b", "me", [Answer(1, True, b"late")]) is None


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
    with pytest.raises(LimitError, match="files: there are 1; at most 1: delete some"):
        _upload(store, tmp_path, "file-2")
    with pytest.raises(LimitError, match="files: there are 1; at most 1: delete some"):
        store.begin_upload("file-2", "a", 1, 0.0, 9.0)
    with pytest.raises(LimitError, match="files: there are 1; at most 1: delete some"):
        store.create("b", "a", "/v1/completions", "file-1", 0.0, 1.0)  # its answers would be further files
    assert [file.id for file in store.files("a")] == ["file-1"]
    store = _store(tmp_path, max_files=2, max_batches=1)
    store.create("b", "a", "/v1/completions", "file-1", 0.0, 1.0)
    with pytest.raises(LimitError, match="batches: 1 have"):
        store.create("c", "a", "/v1/completions", "file-1", 0.0, 1.0)
    with pytest.raises(InvalidRequestError, match="cancel it"):
        store.delete_file("a", "file-1")
    store.claim("me", 0.0)
    store.fail("b", "me", "line 1 is no JSON", 1.0)
    assert store.delete_file("a", "file-1")
    assert not store.path("file-1").exists()


def test_a_tenant_may_have_as_much_as_is_left_free_after_it(tmp_path: Path) -> None:
    """So that others are not refused, and their batches go on, whatever one uploads."""
    store = _store(tmp_path, max_total_bytes=1200)
    for number in range(6):
        _upload(store, tmp_path, f"file-{number}", "a", 100)
    with pytest.raises(LimitError, match=r"stored bytes: there is room for 0 bytes more of tenant a, and this file "):
        _upload(store, tmp_path, "file-6", "a", 100)
    with pytest.raises(LimitError, match="room for 300 bytes more of tenant b"):
        store.begin_upload("upload-b", "b", 301, 0.0, 9.0)
    _upload(store, tmp_path, "file-b", "b", 150)
    store.create("b", "b", "/v1/completions", "file-b", 0.0, 100.0)
    with pytest.raises(
        LimitError, match="room for 0 bytes more of tenant b, and answers to as many bytes as the input"
    ):
        store.create("b2", "b", "/v1/completions", "file-b", 0.0, 100.0)
    _upload(store, tmp_path, "file-c", "c", 150)
    store.claim("me", 0.0)
    assert _room(store) == 150


def test_an_upload_counts_from_its_beginning(tmp_path: Path) -> None:
    store, other = _store(tmp_path, max_total_bytes=400, max_files=2), _store(tmp_path, max_total_bytes=400)
    store.begin_upload("one", "a", 150, 0.0, 60.0)
    for gateway in (store, other):
        with pytest.raises(LimitError, match="room for 50 bytes more of tenant a"):
            gateway.begin_upload("two", "a", 51, 1.0, 60.0)
    store.begin_upload("two", "a", 50, 1.0, 61.0)
    with pytest.raises(LimitError, match="files: there are 0 and 2 arrive; at most 2"):
        store.begin_upload("three", "a", 0, 1.0, 60.0)
    assert other.uploads(60.0) == {"two"}
    store.end_upload("two")
    store.end_upload("two")
    (tmp_path / "one").write_bytes(b"x" * 100)
    store.add_file(File("file-1", "a", "in.jsonl", "batch", 100, 1.0), tmp_path / "one")
    assert store.uploads(1.0) == set()
    store.begin_upload("lost", "a", 100, 1.0, 60.0)  # by a gateway that is killed
    store.begin_upload("next", "a", 100, 60.0, 120.0)


def test_room_for_answers_is_reserved_and_what_was_computed_is_kept(tmp_path: Path) -> None:
    store = _store(tmp_path, max_total_bytes=1000)
    _upload(store, tmp_path, "file-1", "a", 100)
    store.create("b", "a", "/v1/completions", "file-1", 0.0, 100.0)
    _upload(store, tmp_path, "file-x", "x", 400)
    store.claim("me", 0.0)
    store.begin("b", "me", 4)
    assert _room(store) == 100 + 100
    assert store.answer("b", "me", [Answer(0, True, b"x" * 99)]) == 100
    assert store.answer("b", "me", [Answer(0, True, b"again"), Answer(1, True, b"x" * 39)]) == 60
    assert store.answer("b", "me", [Answer(2, True, b"x" * 79)]) == 0
    assert (_room(store), store.answered("b")) == (0, {0, 1, 2})
    with pytest.raises(LimitError, match="room for 0 bytes more of tenant a"):
        _upload(store, tmp_path, "file-2", "a", 1)
    store.note("b", "me", "no room")
    store.delete_file("x", "file-x")
    waiting = store.renew("b", "me", 2.0)
    assert waiting is not None
    assert (waiting.room, waiting.batch.error, waiting.batch.status) == (180, "no room", "in_progress")
    store.note("b", "me", None)
    store.finish("b", "me", "completed", 3.0)
    ended = store.batch("a", "b")
    assert ended is not None
    assert (ended.status, ended.error, ended.num_completed) == ("completed", None, 3)
    assert sum(file.num_bytes for file in store.files("a")) == 100 + 220


def test_more_is_reserved_once_the_lines_were_read(tmp_path: Path) -> None:
    """Half of what is left then; whoever stores more later does not have it."""
    store = _store(tmp_path, max_total_bytes=1000)
    for number, expected in ((0, 120), (1, 10_000)):
        _upload(store, tmp_path, f"file-{number}", f"t{number}", 50)
        store.create(f"b{number}", f"t{number}", "/v1/completions", f"file-{number}", 0.0, 100.0)
        store.claim("me", 0.0, () if not number else ("t0",))
        store.begin(f"b{number}", "me", 4, expected)
    reserved = [120, 50 + (1000 - 170 - 100 - 100) // 2 // 2]
    with sqlite3.connect(tmp_path / "batches.sqlite") as database:
        assert [each for (each,) in database.execute("SELECT reserved FROM batches ORDER BY id")] == reserved
    store.begin("b0", "me", 4, 60)  # by the next owner
    left = (1000 - 170 - 50 - reserved[1]) // 2
    _upload(store, tmp_path, "file-x", "x", left)
    assert _room(store, "b0") >= 120
    assert _room(store, "b1") >= reserved[1]


def test_files_are_deleted_after_their_days_unless_an_open_batch_reads_them(tmp_path: Path) -> None:
    store = _store(tmp_path, file_days=2)
    for file_id, at in (("read", 0.0), ("old", 0.0), ("young", DAY_S)):
        _upload(store, tmp_path, file_id, at=at)
    store.create("b", "a", "/v1/completions", "read", 0.0, DAY_S)
    assert store.expire(2 * DAY_S) == 0
    assert store.expire(2 * DAY_S + 1) == 1
    assert [file.id for file in store.files("a")] == ["young", "read"]
    assert not store.path("old").exists()
    store.claim("me", 0.0)
    store.finish("b", "me", "cancelled", 1.0)
    assert store.expire(2 * DAY_S + 1) == 1


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
    assert all(store.claim("other", 3.0, tenants) for tenants in ((), ("a",)))
    store.give_back("b", "me")
    assert store.claim("third", 3.0, ("a",)) is None
    store.give_back("b3", "other")
    assert store.claim("third", 3.0, ("a",)) is not None


def test_contents_that_no_row_names_are_removed(tmp_path: Path) -> None:
    store = _running(tmp_path)
    lost = ["file-lost", "file-gone-output", "file-gone-output.77"]
    spared = ["file-b-output", "file-b-output.77"]
    for name in (*lost, *spared):
        store.path(name).write_bytes(b"x")
    assert sorted(store.remove_orphans()) == sorted(lost)
    assert sorted(path.name for path in store.path("x").parent.iterdir()) == sorted([*spared, "file-1"])
    assert store.remove_orphans() == []


@pytest.mark.parametrize(
    ("version", "earlier"),
    [
        (0, ("answer_bytes", "credential", "reserved", "num_ends")),
        (0, ("credential", "reserved", "num_ends")),
        (1, ("reserved", "num_ends")),
        (2, ("num_ends",)),
        (3, ()),
    ],
)
def test_a_database_of_an_earlier_version_is_completed(tmp_path: Path, version: int, earlier: tuple[str, ...]) -> None:
    """Its batches go on; which key ordered them is not known. What is stored counts."""
    _running(tmp_path).close()
    with closing(sqlite3.connect(tmp_path / "batches.sqlite")) as database:
        _remove_sums(database)
        for column in earlier:
            database.execute(f"ALTER TABLE batches DROP COLUMN {column}")
        database.execute(f"PRAGMA user_version = {version}")
    again, other = _store(tmp_path), _store(tmp_path)
    again.claim("me", 0.0)
    again.begin("b", "me", 1)
    assert again.answer("b", "me", [Answer(0, True, b"zero")])
    again.create("b2", "a", "/v1/completions", "file-1", 1.0, 100.0, credential="sha256:00")
    kept = "" if "credential" not in earlier else None
    assert [(batch.id, batch.credential) for batch in other.batches("a", 9)] == [("b2", "sha256:00"), ("b", kept)]
    _check_sums(tmp_path)


def test_a_database_of_a_later_version_is_left_alone(tmp_path: Path) -> None:
    _running(tmp_path).close()
    with closing(sqlite3.connect(tmp_path / "batches.sqlite")) as database:
        database.execute("PRAGMA user_version = 5")
    with pytest.raises(sqlite3.DatabaseError, match=r"^the database has version 5, this program knows 4 at most$"):
        _store(tmp_path)
