"""Each op once on this device, before anything depends on it: right, whole, and twice the same bits.

Every kernel runs at the shapes of Llama-3-8B, in bf16, fp32 and with KV in fp8, against the reference in fp32. Its
outputs hold NaN before: torch fills what is made without contents, the case what it gives. `probe.json` beside the
rows says of each op whether it is right; it is written before and after each case, so that an op which ends the
process, or hangs, is known as wrong.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.gpu import isolation
from benchmarks.gpu.probe_cases import TINY, Case, Outputs, Sizes, cases
from benchmarks.gpu.report import Row, RowFile, failure
from benchmarks.gpu.timing import parse, row_file

SECTION = "probe"
FILE = "probe.json"
NOT_SWITCHED = ("quantize_rows",)
"""Kernels that `DISAGG_KERNELS` does not name."""
LIMIT_S = 20.0
"""Of a case on a GPU, with what is compiled for it."""
OUTLIER = 16.0
"""A single value is wrong where it is off by more than so many tolerances of itself and of the usual size."""


@dataclass(frozen=True)
class Verdict:
    """Of one output against what was expected."""

    error: float
    """Norm of the difference over the norm of what was expected, or the share of values that differ."""
    wrong: str = ""
    """Empty where it is right; else the first wrong index with both values."""


def compare(found: Tensor, expected: Tensor, tolerance: float, may_differ: float) -> Verdict:
    """By their values singly where `tolerance` is 0, else by norm, and no single value far off; NaN where NaN is
    expected, and nowhere else."""
    if found.shape != expected.shape:
        return Verdict(float("inf"), f"shape {list(found.shape)} instead of {list(expected.shape)}")
    if tolerance == 0.0:
        is_wrong = found != expected
        share = float(is_wrong.double().mean())
        return Verdict(share, _first(is_wrong, found, expected) if share > may_differ else "")
    got, wanted = found.double(), expected.double()
    is_nan = wanted.isnan()
    mixed = got.isfinite() == is_nan
    if bool(mixed.any()):
        return Verdict(float("inf"), _first(mixed, found, expected))
    got, wanted = got.masked_fill(is_nan, 0.0), wanted.masked_fill(is_nan, 0.0)
    norm, difference = wanted.norm(), (got - wanted).abs()
    error = float(difference.norm() / norm) if float(norm) else float(difference.norm())
    usual = norm / max(1, int((~is_nan).sum())) ** 0.5
    is_wrong = difference > OUTLIER * tolerance * (wanted.abs() + usual)
    if bool(is_wrong.any()):
        return Verdict(error, _first(is_wrong, found, expected))
    if error > tolerance:
        return Verdict(error, _first(difference == difference.max(), found, expected))
    return Verdict(error)


def _first(is_wrong: Tensor, found: Tensor, expected: Tensor) -> str:
    place = tuple(is_wrong.nonzero()[0].tolist())
    count = int(is_wrong.sum())
    return f"{list(place)}: {float(found[place]):.6g} instead of {float(expected[place]):.6g}; {count} such"


def same_bits(one: Outputs, other: Outputs) -> bool:
    """Whether two runs gave the same."""
    return all(torch.equal(_bits(one[name]), _bits(other[name])) for name in one)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


@contextmanager
def filled_with_nan() -> Iterator[None]:
    """What torch makes without contents holds NaN, or the largest integer."""
    was = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was)


def judge(case: Case, device: torch.device) -> Row:
    """Run a case twice; its row. Raises what the op raises."""
    runs = []
    for _ in range(2):
        with filled_with_nan():
            found = case.run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if found is None:
            return failure(SECTION, case.name, f"shape {case.shape}; the kernel does not take these tensors")
        runs.append(found)
    expected = case.expected()
    verdicts = {name: compare(runs[0][name], expected[name], case.tolerance, case.may_differ) for name in expected}
    is_same = same_bits(*runs)
    error = max(verdict.error for verdict in verdicts.values())
    detail = f"shape {case.shape}; error {error:.2g} of {case.tolerance or case.may_differ:g}"
    detail += "" if is_same else "; two runs differ"
    wrong = [f"{name} {verdict.wrong}" for name, verdict in verdicts.items() if verdict.wrong]
    if wrong or not is_same:
        return failure(SECTION, case.name, "; ".join([*(f"first wrong: {each}" for each in wrong[:1]), detail]))
    return Row(section=SECTION, name=case.name, status="ok", detail=detail)


class Findings:
    """Whether each op is right, in a file that is complete at any time."""

    def __init__(self, path: Path, *, goes_on: bool) -> None:
        self._path = path
        self._are_right: dict[str, bool] = {}
        if goes_on and path.exists():
            self._are_right = json.loads(path.read_text(encoding="utf-8"))

    def begin(self, op: str) -> bool:
        """It is wrong until it has ended; whether it was right so far."""
        was = self._are_right.get(op, True)
        self._write(op, False)
        return was

    def end(self, op: str, is_right: bool) -> None:
        """What it is."""
        self._write(op, is_right)

    def _write(self, op: str, is_right: bool) -> None:
        if op in NOT_SWITCHED:
            return
        self._are_right[op] = is_right
        temporary = self._path.with_suffix(".new")
        temporary.write_text(json.dumps(self._are_right), encoding="utf-8")
        temporary.replace(self._path)


def probe(case: Case, rows: RowFile, findings: Findings, device: torch.device) -> None:
    """One case; where it hangs or loses the context, another process goes on without it."""
    was_right = findings.begin(case.op)

    def hangs() -> None:
        rows.write(failure(SECTION, case.name, f"shape {case.shape}; it hangs, or compiles for {LIMIT_S:.0f} s"))

    try:
        with isolation.Watch(case.name, LIMIT_S if device.type == "cuda" else 6 * LIMIT_S, hangs):
            row = judge(case, device)
    except Exception as error:
        row = rows.failed(case.name, error)
        isolation.go_on(case.name, error)
    else:
        rows.write(row)
    isolation.tried(case.name)
    findings.end(case.op, was_right and row.status == "ok")


def main() -> None:
    """The section `probe`."""
    arguments = parse(main.__doc__)
    device, rows = torch.device(arguments.device), row_file(arguments, SECTION)
    findings = Findings(arguments.rows.parent / FILE, goes_on=bool(arguments.left_out))
    with torch.inference_mode():
        for case in cases(Sizes() if device.type == "cuda" else TINY, device):
            if case.name not in arguments.left_out:
                probe(case, rows, findings, device)


if __name__ == "__main__":
    main()
