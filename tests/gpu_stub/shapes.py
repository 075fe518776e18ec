"""Writes benchmarks/gpu/shapes.json: what each launch shape of `benchmarks.gpu.sweep` uses of a multiprocessor.

    build/gpu-image/bin/python -m tests.gpu_stub.shapes

Compiles the attention kernels for sm_90, heads of 128 in bf16, blocks of 64, with the Triton of the interpreter that
runs it: the one of the machine that the sweep is for. No GPU is needed.
"""

from __future__ import annotations

import json

import triton

from benchmarks.gpu.shapes import TABLE, KernelShape, candidates
from tests.support.attention_cases import decode_case, prefill_case
from tests.support.triton_compile import Case, compile_kernels


def case_of(shape: KernelShape) -> Case:
    """Decode for 256 sequences, which has most to hold."""
    if shape.kind == "decode":
        return decode_case("bf16", "bf16", 128, 4, 64, shape.values)
    return prefill_case("bf16", "bf16", 128, 4, 64, 4096, shape.values)


def main() -> None:
    by_code = {shape.code: shape for shape in candidates()}
    usages = compile_kernels([case_of(shape) for shape in by_code.values()])
    lines = [
        f"    {json.dumps(code)}: [{usage.registers}, {usage.spilled_bytes}, {usage.shared_bytes}]"
        for code, usage in zip(by_code, usages, strict=True)
    ]
    head = f'  "triton": {json.dumps(triton.__version__)},\n  "units": "registers, spilled bytes, shared bytes",'
    TABLE.write_text(f'{{\n{head}\n  "shapes": {{\n' + ",\n".join(lines) + "\n  }\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
