"""Recordings of the generator on disk: what is there while it runs, and when it has ended."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from disagg.loadtests.generator.recorder import GeneratorInfo, Recorder, info_path, read_info
from disagg.loadtests.records import RequestRecord, read_file

INFO = GeneratorInfo(
    target="127.0.0.1:1",
    model="m",
    label="",
    window_s=2.0,
    num_planned=2,
    is_complete=True,
    started_at="2026-01-01T00:00:00+00:00",
    elapsed_s=2.5,
    ttft_slo_s=None,
    tpot_slo_s=0.01,
    max_in_flight=4,
    request_timeout_s=None,
    cores=[0],
    niceness=0,
    versions={"python": "3"},
)


def record(index: int) -> RequestRecord:
    return RequestRecord(index=index, due_s=0.5, sent_s=0.5, status="ok", num_prompt_tokens=3, max_tokens=1)


def test_records_are_written_in_the_order_of_their_ends_and_the_info_last(tmp_path: Path) -> None:
    path = tmp_path / "new" / "run.jsonl"
    recorder = Recorder(path)
    recorder.add(record(1))
    recorder.add(record(0))
    with pytest.raises(ValueError, match=r"run\.run: not there; the run of run\.jsonl was cut off"):
        read_info(path)
    recorder.finish(INFO)
    assert [found.index for found in read_file(path)] == [1, 0] == [found.index for found in recorder.records]
    assert read_info(path) == INFO
    assert sorted(file.name for file in path.parent.iterdir()) == ["run.jsonl", "run.run"]


def test_a_new_run_takes_the_old_ones_place_at_once(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    Recorder(path).finish(INFO)
    recorder = Recorder(path)
    assert not info_path(path).exists()
    recorder.add(record(0))
    recorder.finish(INFO)
    assert [found.index for found in read_file(path)] == [0]


def test_without_a_path_records_are_kept_in_memory() -> None:
    recorder = Recorder()
    recorder.add(record(7))
    recorder.finish(INFO)
    assert recorder.records == [record(7)]


def test_an_info_that_is_none_is_an_error_with_its_name(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    info_path(path).write_bytes(msgspec.json.encode({"target": 3}))
    with pytest.raises(ValueError, match=r"run\.run: .*target"):
        read_info(path)
