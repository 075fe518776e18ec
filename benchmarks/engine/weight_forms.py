"""Products of all layers and the head of a model, from weights of every form beside bf16, in one process.

python -m benchmarks.engine.weight_forms --threads 1 2 --rows 1 4 8 32 --json FILE
python -m benchmarks.engine.weight_forms --forms stored --turns 40

Forms take turns, in both orders, one pass through the whole model each, so that all weights come from memory as they do
in a step. Reported are the medians of the passes, of bf16's time over the form's in the same turn, and the share of the
form's byte limit: bytes of its weights at the median rate of `benchmarks.engine.ceilings`.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.engine.ceilings import measure
from disagg.cluster.models.catalog import DEFAULT_MODEL, resolve_model
from disagg.cluster.system.cores import available_cores, pin_process
from disagg.engine.checkpoint.checkpoint import read_model_config
from disagg.engine.config import Quantization
from disagg.engine.runner.group_scales import GroupScales
from disagg.engine.runner.model.parameters import DenseParameters, ModelParameters, pack_parameters
from disagg.engine.runner.weights import load_parameters
from disagg.kernels import dispatch
from disagg.kernels.cpu.linear import NativeWeight
from disagg.kernels.quantize import STORED
from tests.support.reports import positive, print_table, report, write_json

FORMS: tuple[Quantization, ...] = ("stored", "stored_sums", "int8", "int4")


def weights_of(parameters: ModelParameters) -> list[NativeWeight]:
    """Weights of the products of a step, in its order. Raises ValueError for a model with experts, or without the C++
    kernels."""
    found: list[Any] = []
    for layer in parameters.layers:
        if not isinstance(layer.ffn, DenseParameters):
            raise ValueError("weight forms are measured of dense models")
        found += [layer.qkv_weight_QH, layer.o_weight_HA, layer.ffn.gate_up_weight_2IH, layer.ffn.down_weight_HI]
    found.append(parameters.lm_head_VH)
    if not all(isinstance(each, NativeWeight) for each in found):
        raise ValueError("there are no C++ kernels for these weights")
    return found


def load(folder: str, form: Quantization) -> list[NativeWeight]:
    """The weights of a checkpoint in one form."""
    model, cpu = read_model_config(folder), torch.device("cpu")
    scales = GroupScales() if form in STORED else None
    parameters = load_parameters(folder, model, torch.bfloat16, cpu, scales=scales)
    pack_parameters(parameters, form, scales)
    return weights_of(parameters)


def pass_s(weights: Sequence[NativeWeight], inputs: Mapping[int, Tensor]) -> float:
    """Seconds of all products."""
    started = time.perf_counter()
    for weight in weights:
        weight.gemm(inputs[weight.in_features], None)
    return time.perf_counter() - started


def measure_rows(
    forms: Mapping[str, Sequence[NativeWeight]], rows: int, turns: int, read_gb_s: float
) -> list[dict[str, Any]]:
    """A row for each form."""
    sizes = {weight.in_features for weight in forms["none"]}
    inputs = {size: torch.randn(rows, size).bfloat16() for size in sizes}
    times: dict[str, list[float]] = {name: [] for name in forms}
    for turn in range(turns + 1):
        for name in forms if turn % 2 == 0 else reversed(list(forms)):
            times[name].append(pass_s(forms[name], inputs))
    found = []
    for name, seconds in times.items():
        nbytes = sum(weight.packed.nbytes for weight in forms[name])
        rates = [plain / own for plain, own in zip(times["none"][1:], seconds[1:], strict=True)]
        found.append(
            {
                "weights": "bf16" if name == "none" else name,
                "rows": rows,
                "ms": round(statistics.median(seconds[1:]) * 1e3, 3),
                "times_as_fast": round(statistics.median(rates), 3),
                "gb_s": round(nbytes / statistics.median(seconds[1:]) / 1e9, 2),
                "share_of_byte_limit": round(nbytes / read_gb_s / 1e9 / statistics.median(seconds[1:]), 3),
            }
        )
    return found


def main() -> None:
    """Measure, print the table, write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="a model of the cache, or a checkpoint folder")
    parser.add_argument("--forms", choices=FORMS, nargs="+", default=FORMS)
    parser.add_argument("--threads", type=positive, nargs="+", default=[1])
    parser.add_argument("--rows", type=positive, nargs="+", default=[1, 4, 8, 32])
    parser.add_argument("--turns", type=positive, default=20)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    folder = str(resolve_model(arguments.model))
    forms = {form: load(folder, form) for form in ("none", *arguments.forms)}
    found: list[dict[str, Any]] = []
    cores = available_cores()
    for threads in arguments.threads:
        pin_process(cores[:threads])
        dispatch.set_num_threads(threads)
        ceilings = measure(threads)
        with torch.inference_mode():
            for rows in arguments.rows:
                each = measure_rows(forms, rows, arguments.turns, ceilings.median_read_gb_s)
                found += [{"threads": threads, "read_gb_s": ceilings.median_read_gb_s, **row} for row in each]
    columns = ("threads", "rows", "weights", "ms", "times_as_fast", "gb_s", "share_of_byte_limit")
    print_table(
        f"products of all layers and the head: {dispatch.describe()}",
        columns,
        [[str(row[name]) for name in columns] for row in found],
    )
    if arguments.json is not None:
        summary = {
            f"{row['weights']}_{name}_b{row['rows']}_t{row['threads']}": row[name]
            for row in found
            if row["weights"] != "bf16"
            for name in ("times_as_fast", "share_of_byte_limit")
        }
        write_json(arguments.json, report(found, summary))


if __name__ == "__main__":
    main()
