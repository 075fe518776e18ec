"""Launches what the GPU benchmarks launch, at their sizes, on the driver that computes nothing.

    python -m tests.gpu_stub.benchmarks DRIVER_FOLDER

Kernels differ by dtype, by sizes of the model, by the power of two above a batch, and by whether a number is 1 or a
multiple of 16; not by the length of a context. So a small cache stands for a large one.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from pathlib import Path

os.environ["DISAGG_KERNELS"] = "triton"

import torch

from benchmarks.gpu import attention
from benchmarks.gpu.report import RowFile
from benchmarks.gpu.shapes import candidates, read_table, rounds
from benchmarks.gpu.sweep import FULL, SECTION, Sweep, launched_as
from disagg.kernels.attention import OwnKernels, prompts
from disagg.kernels.dispatch import paged_decode_attention
from tests.gpu_stub import launches
from tests.gpu_stub.driver import Launches, install

MODEL = "Llama-3-8B"
BATCHES = (1, 2, 3, 4, 8, 16, 24, 32, 64, 128, 256)
"""Of decodes: every power of two, and numbers that are none, or no multiple of 16."""
CPU = torch.device("cpu")


def models(counts: Launches) -> None:
    """Steps of the benchmark `model` and of captures, of one layer, and draws of as many rows."""
    found = launches.Found()
    steps = {f"{batch} decodes": launches.decodes(batch) for batch in BATCHES}
    steps |= {f"prefill of {count}": launches.prefills(count, 1) for count in (1, 16, 512, 777)}
    for kv_dtype in launches.KV_DTYPES:
        launches.launch_model(found, counts, MODEL, kv_dtype, steps, num_blocks=2 * max(BATCHES))
    for batch in BATCHES:
        launches.launch_wide_ops(found, counts, MODEL, batch)


def attentions() -> None:
    """Cells of the benchmark `attention`: over blocks of 64 and of 16, KV in bf16 and fp8."""
    for block_size, fp8 in ((64, False), (64, True), (16, False)):
        shape = attention.TensorSizes(
            block_size=block_size, fp8=fp8, decode_cells=((1, 64),), prefill_chunks=((8192, 0),)
        )
        cache = attention.Cache(shape, CPU)
        keys, values = cache.keys_NKBD, cache.values_NKBD
        for batch in sorted({batch for batch, _ in attention.TensorSizes().decode_cells}):
            lens_S = torch.full((batch,), 64, dtype=torch.int32)
            paged_decode_attention(cache.queries(batch), keys, values, cache.tables(batch, 64), lens_S, shape.form)
        for num_tokens, start in attention.TensorSizes().prefill_chunks:
            provider = OwnKernels.of(cache.spec)
            q_TND, table_M = cache.queries(num_tokens), cache.tables(1, start + num_tokens)[0]
            provider.plan(prompts(provider, (table_M, start, num_tokens)))
            provider.attend(q_TND, keys, values, shape.form, torch.empty_like(q_TND))


def sweeps() -> None:
    """Every shape of the sweep in every cell."""
    sweep = Sweep(FULL, CPU, RowFile(Path(os.devnull), SECTION, with_targets=False))
    small = attention.TensorSizes(decode_cells=((1, 64),), prefill_chunks=((2048, 0),))
    sweep.__dict__["_cache"] = attention.Cache(small, CPU)
    for shape in (shape for each in rounds(candidates(), read_table()) for shape in each):
        for cell in FULL.cells(shape.kind):
            with launched_as(shape):
                (sweep._decode if shape.kind == "decode" else sweep._prefill)(*cell)()


def probes() -> None:
    """Every case of the probe, where there is one."""
    if importlib.util.find_spec("benchmarks.gpu.probe_cases"):
        module = importlib.import_module("benchmarks.gpu.probe_cases")
        for case in module.cases(module.Sizes(), CPU):
            case.run()


def main(folder: str) -> None:
    counts = install(Path(folder) / "libcuda.so.1")
    torch.set_num_threads(1)
    models(counts)
    attentions()
    sweeps()
    probes()
    print(f"{sum(counts.counts().values())} launches of {len(counts.counts())} kernels")


if __name__ == "__main__":
    main(*sys.argv[1:])
