"""Recordings: found again by what was to be measured, and only when they are complete."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from disagg.loadtests.records import to_line
from disagg.loadtests.verdict.recordings import Point, Recording, RunInfo, begin, finish, load, records_path
from disagg.loadtests.workload.arrivals import ArrivalConfig
from disagg.loadtests.workload.workload import RandomWorkload
from tests.support.load_records import record

WORKLOAD = RandomWorkload(isl=4, osl=1)


def point(shape: str = "1p1d", rate_per_s: float = 1.5, repeat: int = 0, **config: Any) -> Point:
    return Point(
        shape=shape,
        shape_config={"mode": "disaggregated", **config},
        workload=WORKLOAD,
        arrivals=ArrivalConfig(rate_per_s=rate_per_s, num_requests=2),
        repeat=repeat,
    )


def measure(folder: Path, measured: Point, num_records: int = 2) -> RunInfo:
    info = RunInfo(point=measured, duration_s=1.25, num_requests=2, versions={"python": "3"})
    begin(folder, measured).write_bytes(b"".join(to_line(record(index)) for index in range(num_records)))
    finish(folder, info)
    return info


def test_a_key_says_what_was_measured_and_is_the_same_on_every_machine() -> None:
    assert point("2x1 chunked:256").key() == "2x1-chunked-256_1.5_0_431ca8965e443eda"
    trace = msgspec.structs.replace(point(), arrivals=ArrivalConfig(kind="trace"))
    assert trace.key().startswith("1p1d_trace_0_")


def test_everything_that_shapes_the_outcome_makes_another_key() -> None:
    base = point()
    others = [
        point("other"),
        point(rate_per_s=2.0),
        point(repeat=1),
        point(token_budget=256),
        msgspec.structs.replace(base, workload=RandomWorkload(isl=4, osl=1, seed=1)),
        msgspec.structs.replace(base, arrivals=ArrivalConfig(rate_per_s=1.5, num_requests=2, seed=1)),
    ]
    assert len({base.key(), *(other.key() for other in others)}) == 7
    assert point(a=1, b=2).key() == point(b=2, a=1).key()


def test_a_point_is_found_only_when_it_is_finished(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    assert load(folder, point()) is None
    begin(folder, point()).write_bytes(to_line(record(0)))
    assert load(folder, point()) is None
    info = measure(folder, point())
    found = load(folder, point())
    assert found == Recording(info=info, records=[record(0), record(1)])
    assert found is not None
    assert found.rate_per_s == 1.5
    assert load(folder, point(repeat=1)) is None


def test_beginning_again_forgets_what_was_there(tmp_path: Path) -> None:
    measure(tmp_path, point())
    begin(tmp_path, point())
    assert load(tmp_path, point()) is None
    assert list(tmp_path.iterdir()) == []


def test_a_point_without_all_its_records_cannot_be_finished(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"jsonl: expected one record for each of 2 requests; got 1 records of 1"):
        measure(tmp_path, point(), num_records=1)
    assert load(tmp_path, point()) is None


def test_damage_is_named_by_file(tmp_path: Path) -> None:
    measure(tmp_path, point())
    records = records_path(tmp_path, point())
    records.write_bytes(records.read_bytes() + b"{")
    with pytest.raises(ValueError, match=rf"{records.name}: line 3: "):
        load(tmp_path, point())
    records.unlink()
    with pytest.raises(ValueError, match=rf"{records.name}: expected one record for each of 2 requests; got 0"):
        load(tmp_path, point())
    records.with_suffix(".json").write_text("{}")
    with pytest.raises(ValueError, match=rf"{records.stem}\.json: Object missing required field"):
        load(tmp_path, point())


def test_a_trace_at_its_own_pace_has_the_rate_that_it_had(tmp_path: Path) -> None:
    info = measure(tmp_path, msgspec.structs.replace(point(), arrivals=ArrivalConfig(kind="trace")))
    assert Recording(info=info, records=[]).rate_per_s == 1.6
