"""The probe of single ops: what it finds wrong, and what it says of it. The kernels are played."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.gpu import isolation, probe, probe_cases
from benchmarks.gpu.probe import Findings, Verdict, compare, judge
from benchmarks.gpu.probe_cases import Case, Outputs
from benchmarks.gpu.report import RowFile, read_rows
from disagg.kernels.settings.switches import TRITON_OPS

CPU = torch.device("cpu")
NAN = float("nan")


def case(run: Callable[[], Outputs | None], expected: Tensor, **changes: Any) -> Case:
    fields: dict[str, Any] = {"op": "embed", "label": "fp32", "shape": "[2, 2]", "tolerance": 1e-3}
    return Case(run=run, expected=lambda: {"rows": expected}, **{**fields, **changes})


def test_a_value_that_is_far_off_is_wrong_however_small_its_share_of_the_norm_is() -> None:
    expected = torch.ones(1000, 1000)
    found = expected.clone()
    found[3, 7] = 1.1
    verdict = compare(found, expected, 1e-3, 0.0)
    assert verdict.error == pytest.approx(1e-4)
    assert verdict.wrong == "[3, 7]: 1.1 instead of 1; 1 such"


def test_many_small_errors_are_wrong_by_their_norm() -> None:
    verdict = compare(torch.full((4, 4), 1.002), torch.ones(4, 4), 1e-3, 0.0)
    assert verdict.wrong == "[0, 0]: 1.002 instead of 1; 16 such"
    assert compare(torch.full((4, 4), 1.0005), torch.ones(4, 4), 1e-3, 0.0).wrong == ""


def test_nan_that_was_there_before_and_is_left_is_wrong() -> None:
    """And one that the op must leave is not."""
    verdict = compare(torch.tensor([1.0, NAN, NAN]), torch.tensor([1.0, NAN, 2.0]), 1e-3, 0.0)
    assert verdict == Verdict(float("inf"), "[2]: nan instead of 2; 1 such")
    verdict = compare(torch.tensor([1.0, 0.0, 2.0]), torch.tensor([1.0, NAN, 2.0]), 1e-3, 0.0)
    assert verdict == Verdict(float("inf"), "[1]: 0 instead of nan; 1 such")
    assert compare(torch.tensor([1.0, NAN]), torch.tensor([1.0, NAN]), 1e-3, 0.0) == Verdict(0.0)


def test_values_that_are_compared_singly_may_differ_by_a_share() -> None:
    found, expected = torch.tensor([1, 5, 3, 4]), torch.tensor([1, 2, 3, 4])
    assert compare(found, expected, 0.0, 0.25) == Verdict(0.25)
    assert compare(found, expected, 0.0, 0.0) == Verdict(0.25, "[1]: 5 instead of 2; 1 such")


def test_another_shape_is_wrong() -> None:
    assert compare(torch.ones(2), torch.ones(3), 1e-3, 0.0).wrong == "shape [2] instead of [3]"


def test_what_an_op_makes_holds_nan_until_it_is_written() -> None:
    row = judge(case(lambda: {"rows": torch.empty(2, 2)}, torch.ones(2, 2)), CPU)
    assert row.status == "failed"
    assert row.detail.startswith("first wrong: rows [0, 0]: nan instead of 1; 4 such; shape [2, 2]; error inf")
    assert not torch.are_deterministic_algorithms_enabled()


def test_two_runs_that_differ_are_a_failure_though_both_are_near() -> None:
    values = iter([1.0, 1.0001])
    row = judge(case(lambda: {"rows": torch.full((2, 2), next(values))}, torch.ones(2, 2)), CPU)
    assert (row.status, row.detail) == ("failed", "shape [2, 2]; error 0 of 0.001; two runs differ")


def test_tensors_that_a_kernel_does_not_take_are_a_failure() -> None:
    row = judge(case(lambda: None, torch.ones(2, 2)), CPU)
    assert (row.status, row.name) == ("failed", "embed, fp32")
    assert row.detail == "shape [2, 2]; the kernel does not take these tensors"


def test_an_op_is_right_if_all_its_cases_are(tmp_path: Path) -> None:
    rows, findings = (
        RowFile(tmp_path / "rows", "probe", with_targets=False),
        Findings(tmp_path / "probe.json", goes_on=False),
    )
    right = {"rows": torch.ones(2, 2)}
    probe.probe(case(lambda: right, torch.ones(2, 2)), rows, findings, CPU)
    assert json.loads((tmp_path / "probe.json").read_text()) == {"embed": True}
    probe.probe(case(lambda: right, torch.zeros(2, 2), label="bf16"), rows, findings, CPU)
    probe.probe(case(lambda: right, torch.ones(2, 2), label="fp16"), rows, findings, CPU)
    probe.probe(case(lambda: right, torch.ones(2, 2), op="silu_mul"), rows, findings, CPU)
    probe.probe(case(lambda: right, torch.zeros(2, 2), op="quantize_rows"), rows, findings, CPU)
    assert json.loads((tmp_path / "probe.json").read_text()) == {"embed": False, "silu_mul": True}
    assert [row.status for row in read_rows(tmp_path / "rows")] == ["ok", "failed", "ok", "ok", "failed"]


def test_an_op_that_ends_the_process_is_wrong_already(tmp_path: Path) -> None:
    rows, path = RowFile(tmp_path / "rows", "probe", with_targets=False), tmp_path / "probe.json"
    seen = []

    def run() -> Outputs:
        seen.append(json.loads(path.read_text()))
        raise SystemExit

    with pytest.raises(SystemExit):
        probe.probe(case(run, torch.ones(2, 2)), rows, Findings(path, goes_on=False), CPU)
    assert seen == [{"embed": False}]
    assert Findings(path, goes_on=True).begin("embed") is False
    assert Findings(path, goes_on=False).begin("embed") is True


class AcceleratorError(RuntimeError):
    """As torch's."""


AcceleratorError.__module__ = "torch"


def test_an_op_that_loses_the_context_is_left_out_of_the_process_that_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, path = RowFile(tmp_path / "rows", "probe", with_targets=False), tmp_path / "probe.json"
    replaced: list[list[str]] = []
    monkeypatch.setattr(isolation, "_execute", lambda command: replaced.append(list(command)))
    monkeypatch.setattr(isolation, "_tried", [])
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "benchmarks.gpu.probe", "--device", "cuda"])

    def run() -> Outputs:
        raise AcceleratorError("CUDA error: an illegal memory access was encountered")

    findings = Findings(path, goes_on=False)
    probe.probe(case(lambda: {"rows": torch.ones(1)}, torch.ones(1)), rows, findings, CPU)
    probe.probe(case(run, torch.ones(1), op="silu_mul"), rows, findings, CPU)
    command = ["python", "-m", "benchmarks.gpu.probe", "--device", "cuda", "--not", "embed, fp32", "silu_mul, fp32"]
    assert replaced == [command]
    assert isolation.left_out(command[3:]) == ("embed, fp32", "silu_mul, fp32")
    assert json.loads(path.read_text()) == {"embed": True, "silu_mul": False}


def test_names_to_leave_out_stand_behind_each_option() -> None:
    arguments = ["--rows", "x", "--not", "a b", "c", "--device", "cpu", "--not", "d"]
    assert isolation.left_out(arguments) == ("a b", "c", "d")
    assert isolation.left_out(["--device", "cpu"]) == ()


def test_a_measurement_that_hangs_is_told_and_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolation, "_tried", ["before"])
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "played"])
    told: list[object] = []
    is_replaced = threading.Event()

    def replace(command: Sequence[str]) -> None:
        told.append(list(command))
        is_replaced.set()

    with isolation.Watch("hangs", 0.0, lambda: told.append("told"), replace):
        assert is_replaced.wait(60.0)
    assert told == ["told", ["python", "-m", "played", "--not", "before", "hangs"]]


def test_a_measurement_that_ends_in_time_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    with isolation.Watch("ends", 3600.0, lambda: pytest.fail("it is told"), lambda _: None) as watch:
        timer = watch._timer
    timer.join(60.0)
    assert not timer.is_alive()


def test_every_op_that_can_be_switched_off_has_a_case() -> None:
    """With a name of its own, by which a process that goes on leaves it out."""
    found = list(probe_cases.cases(probe_cases.TINY, CPU))
    assert {case.op for case in found} == set(TRITON_OPS) - {"quantize_rows"}
    assert len({case.name for case in found}) == len(found)
