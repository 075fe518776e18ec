"""The findings of a contact with a GPU: statuses, files that were cut off, pages, and how its sections end."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import attention, isolation, preflight, timing
from benchmarks.gpu.contact.runner import End, ending, exit_status, memcheck_rows, wrong_ops
from benchmarks.gpu.report import CheckReport, Row, RowFile, as_json, as_markdown, failure, read_rows
from benchmarks.gpu.timing import Ceilings
from disagg.kernels import describe


def row(status: str, name: str = "what") -> Row:
    return Row(section="model", name=name, status=status)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("with_targets", "share", "target", "status"),
    [
        (True, 0.95, 0.95, "ok"),
        (True, 0.94, 0.95, "miss"),
        (True, None, 0.95, "info"),
        (True, 0.5, None, "info"),
        (False, 0.1, 0.95, "info"),
    ],
)
def test_a_status_follows_from_share_and_target(
    tmp_path: Path, with_targets: bool, share: float | None, target: float | None, status: str
) -> None:
    rows = RowFile(tmp_path / "rows", "model", with_targets=with_targets)
    rows.add("step", 4.5, "ms", share=share, target=target)
    assert [(found.status, found.share) for found in read_rows(tmp_path / "rows")] == [(status, share)]


def test_a_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    rows = RowFile(path, "model", with_targets=True)
    first = rows.add("step", 4.5, "ms")
    second = rows.failed("prefill", RuntimeError("out of\n memory"))
    assert (second.status, second.detail) == ("failed", "RuntimeError: out of memory")
    path.write_text(path.read_text() + '{"section": "mod')
    assert read_rows(path) == [first, second]
    assert read_rows(tmp_path / "none") == []


def test_a_report_has_a_page_and_json() -> None:
    found = Row(section="model", name="step", status="miss", value=4.5, unit="ms", share=0.7, target=0.8, detail="a|b")
    without = Row(section="model", name="other", status="ok", detail="c", without="draw_rows")
    report = CheckReport(machine={"device": "H200"}, commit="abc", command="python x", rows=[found, without])
    page = as_markdown(report)
    assert "| model | step | 4.5 ms | 0.700 | 0.80 | miss | a/b |" in page
    assert "| model | other |  |  |  | ok | c; without: draw_rows |" in page
    assert "1 ok, 1 miss, 0 failed, 0 open." in page
    content = json.loads(as_json(report))
    assert content["summary"] == {"model/step": 0.7}
    assert [each["status"] for each in content["rows"]] == ["miss", "ok"]


def test_ends_of_tests_are_told_from_other_findings() -> None:
    assert row("ok", "test_ops.py::test_norms[bf16]").is_test
    assert not row("ok", "decode step, batch 1").is_test


def end(status: int | None, rows: list[Row], log: Path, **changes: object) -> End:
    log.write_text("the command\nfirst\nlast\n\n")
    fields = {
        "name": "model",
        "mode": "plain",
        "status": status,
        "took_s": 9.2,
        "rows": rows,
        "open_tests": (),
        "log": log,
    }
    return End(**{**fields, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("status", "rows", "told"),
    [
        (None, [], [("open", "time", "ended after 9 s; last line: last")]),
        (None, [row("ok"), row("miss")], [("open", "time", "ended after 9 s; last line: last")]),
        (None, [row("failed"), row("ok")], [("failed", "time", "ended after 9 s; last line: last")]),
        (-11, [row("ok")], [("failed", "run", "exit status -11; last line: last")]),
        (1, [row("failed")], []),
        (0, [], [("failed", "run", "it found nothing; last line: last")]),
        (0, [row("ok")], []),
        (3, [row("open")], []),
    ],
)
def test_how_a_section_ended_is_told(
    tmp_path: Path, status: int | None, rows: list[Row], told: list[tuple[str, str, str]]
) -> None:
    found = ending(end(status, rows, tmp_path / "log"))
    assert [(each.status, each.name, each.detail) for each in found] == told


def test_a_section_that_is_ended_names_the_tests_that_were_running(tmp_path: Path) -> None:
    found = ending(end(None, [], tmp_path / "log", open_tests=("test_a.py::x", "test_b.py::y")))
    assert [each.detail for each in found] == [
        "ended after 9 s; not ended: test_a.py::x, test_b.py::y; last line: last"
    ]


def test_what_the_sanitizer_saw_first_is_told(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(
        "the command\n========= COMPUTE-SANITIZER\n========= Invalid __global__ read of size 4 bytes\n"
        "=========     at _norm_kernel+0x1f0\n1 passed\n========= ERROR SUMMARY: 1 error\n"
    )
    detail = "Invalid __global__ read of size 4 bytes; at _norm_kernel+0x1f0; ERROR SUMMARY: 1 error"
    assert [each.detail for each in memcheck_rows("model", log)] == [detail]
    log.write_text("the command\n========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n")
    assert memcheck_rows("model", log) == []


def test_which_ops_are_wrong_is_read_from_the_probe(tmp_path: Path) -> None:
    assert wrong_ops(tmp_path) == ()
    (tmp_path / "probe.json").write_text('{"embed": true, "silu_mul": false, "draw_rows": false}')
    assert wrong_ops(tmp_path) == ("silu_mul", "draw_rows")


@pytest.mark.parametrize(
    ("rows", "status"),
    [
        ([], 0),
        ([row("ok"), row("info"), row("open", "run")], 0),
        ([row("ok"), row("miss")], 1),
        ([failure("model", "run", "it crashed")], 1),
        ([row("ok"), row("open", "time")], 1),
        ([row("open", "device")], 3),
    ],
)
def test_the_exit_status_says_what_was_found(rows: list[Row], status: int) -> None:
    assert exit_status(rows) == status


CEILINGS = Ceilings(read_gb_s=3000.0, gemm_tflop_s=700.0)


def test_what_flash_attention_3_takes_is_within_every_target_of_prefill() -> None:
    shape = attention.TensorSizes()
    assert round(attention.prefill_rate(shape, 2048, 0, 87.4)) == 393
    for num_tokens, us in attention.FA3_PREFILL_US.items():
        share, target = attention.prefill_share(shape, num_tokens, 0, us, CEILINGS)
        assert share == 1.0
        assert target is not None
        assert target < 1.0
    share, target = attention.prefill_share(shape, 2048, 8192, 700.0, CEILINGS)  # without a figure of it
    assert share == pytest.approx(0.631, abs=0.001)
    assert target == attention.PREFILL_RATE_TARGET


def test_what_flash_attention_3_takes_is_within_every_target_of_decode() -> None:
    """A target above 1 is one that the peer itself misses."""
    assert 0.9 < attention.DECODE_TARGET <= attention.SMALL_DECODE_TARGET <= 1.0


def test_a_decode_is_compared_with_what_flash_attention_3_can_read_on_this_device() -> None:
    nbytes, h200 = 2 * 8 * 65536 * 8 * 128 * 2, Ceilings(read_gb_s=4800.0, gemm_tflop_s=700.0)
    assert attention.decode_share(8, 65536, nbytes, 800.0, h200) == 497.6 / 800
    share = attention.decode_share(8, 65536, nbytes, 800.0, CEILINGS)
    assert share == pytest.approx(nbytes / (0.9 * 3e12) * 1e6 / 800.0)
    assert attention.decode_share(3, 65536, nbytes, 800.0, CEILINGS) is None


def test_few_tokens_behind_a_long_context_are_compared_with_the_time_to_read_it() -> None:
    assert (32, 32768) in attention.TensorSizes().prefill_chunks
    share, target = attention.prefill_share(attention.TensorSizes(), 32, 32768, 90.0, CEILINGS)
    assert share == pytest.approx(134.3e6 / 3e9 * 1e3 / 90e-3 / 1e3, rel=0.01)
    assert target is None


def test_calls_take_turns_on_more_than_a_cache_keeps() -> None:
    l2 = 50 << 20
    shape = attention.TensorSizes()
    assert attention.num_turns(shape.kv_bytes(1024), l2) == 50  # 4 MiB each
    assert attention.num_turns(shape.kv_bytes(64 * 4096), l2) == 1
    seen: list[int] = []
    run = timing.in_turns([lambda: seen.append(1), lambda: seen.append(2), lambda: seen.append(3)])
    for _ in range(4):
        run()
    assert seen == [1, 2, 3, 1]


def test_tables_that_take_turns_share_no_block() -> None:
    shape = attention.TINY
    cache = attention.Cache(shape, torch.device("cpu"))
    turns = cache.turns(2, 40)
    blocks = torch.cat([tables_SM.reshape(-1) for tables_SM in turns]).tolist()
    assert len(turns) * shape.kv_bytes(2 * 40) >= attention.COLD * cache.l2_bytes
    assert len(set(blocks)) == len(blocks)


def test_a_measurement_that_fails_costs_itself_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And one that the device fails for ever starts the program again."""
    executed: list[list[str]] = []
    monkeypatch.setattr(isolation, "_tried", [])
    monkeypatch.setattr(isolation, "_execute", executed.append)
    monkeypatch.setattr(sys, "argv", ["model.py", "--not", "c"])
    rows = RowFile(tmp_path / "rows", "model", with_targets=True)
    made: list[str] = []

    def measure(name: str, error: Exception | None = None) -> bool:
        def make() -> None:
            made.append(name)
            if error is not None:
                raise error

        return timing.attempt(rows, name, make)

    assert [measure("a", ValueError("no")), measure("b"), measure("c")] == [False, True, True]
    assert (made, executed) == (["a", "b"], [])
    measure("d", RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"))
    assert [command[-4:] for command in executed] == [["--not", "a", "b", "d"]]
    assert [(found.name, found.status) for found in read_rows(tmp_path / "rows")] == [("a", "failed"), ("d", "failed")]


def missing(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    if what == "triton":
        monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    elif what == "a C compiler (gcc)":
        monkeypatch.setattr(shutil, "which", lambda _: None)
    elif what == describe.LDCONFIG:
        monkeypatch.setattr(Path, "exists", lambda path: str(path) != what)
    else:
        monkeypatch.setattr(sysconfig, "get_path", lambda _: "/no/include")


@pytest.mark.parametrize(
    "what", ["triton", "a C compiler (gcc)", "Python's headers (/no/include/Python.h)", describe.LDCONFIG]
)
def test_what_triton_lacks_to_launch_a_kernel_is_a_failure(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.delenv("TRITON_LIBCUDA_PATH", raising=False)
    before = {found.name for found in preflight.tool_rows()}
    assert what not in before
    missing(monkeypatch, what)
    rows = list(preflight.tool_rows())
    assert {found.name for found in rows} - before == {what}
    assert {found.status for found in rows} == {"failed"}


def test_a_gpu_that_torch_does_not_see_is_a_failure() -> None:
    unknown = preflight.no_device_row("unknown (no such file)", "torch 2.13.0, CUDA 13.0")
    assert (unknown.status, unknown.name) == ("open", "device")
    listed = preflight.no_device_row("NVIDIA H100, 550.54.15", "torch 2.13.0, CUDA 13.0")
    assert (listed.status, listed.name) == ("failed", "device")
    assert exit_status([unknown]) == 3
    assert exit_status([listed]) == 1
