"""Compiles Triton kernels for a Hopper GPU on a machine without one, down to machine code, and reports their resources.

Triton decides between its interpreter and its compiler when it is imported, and tests import it for the interpreter, so
this compiles in a process of its own: `compile_kernels` sends the cases to `python -m tests.support.triton_compile`.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Case:
    """One variant of a kernel."""

    module: str
    kernel: str
    types: dict[str, str]
    """Of each argument that is not a constexpr: `*bf16`, `i32`, `fp32`; `i32:16` is known to be a multiple of 16, as
    every pointer is."""
    constants: dict[str, int | float | bool | str | None] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 3


@dataclass(frozen=True, kw_only=True)
class Usage:
    """What a thread and a program of a compiled kernel use."""

    registers: int
    spilled_bytes: int
    """Local memory of a thread."""
    shared_bytes: int
    """As triton reads it at the launch."""


def compile_kernels(cases: list[Case]) -> list[Usage]:
    """One result per case.

    Raises:
        AssertionError: with the compiler's words, if a case does not compile.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.triton_compile"],
        input=json.dumps([asdict(case) for case in cases]),
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [Usage(**found) for found in json.loads(done.stdout)]


def _compile(case: Case) -> Usage:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel: Any = getattr(importlib.import_module(case.module), case.kernel)
    signature = {
        name: case.types[name].split(":")[0] if name in case.types else "constexpr" for name in kernel.arg_names
    }
    aligned = [
        (position,)
        for position, name in enumerate(kernel.arg_names)
        if name in case.types and (case.types[name].startswith("*") or case.types[name].endswith(":16"))
    ]
    source = ASTSource(
        kernel, signature, constexprs=case.constants, attrs={at: [["tt.divisibility", 16]] for at in aligned}
    )
    compiled = triton.compile(
        source,
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": case.num_warps, "num_stages": case.num_stages},
    )
    registers, spilled = resources(compiled.asm["cubin"])
    return Usage(registers=registers, spilled_bytes=spilled, shared_bytes=compiled.metadata.shared)


def resources(cubin: bytes) -> tuple[int, int]:
    """(registers, bytes of local memory) of a thread."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) .*LOCAL:(\d+)", text)
    assert found is not None, text
    return int(found[1]), int(found[2]) + int(found[3])


def main() -> None:
    """Cases as JSON on stdin, usages as JSON on stdout."""
    cases = [Case(**case) for case in json.load(sys.stdin)]
    json.dump([asdict(_compile(case)) for case in cases], sys.stdout)


if __name__ == "__main__":
    main()
