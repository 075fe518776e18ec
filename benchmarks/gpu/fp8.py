"""Decode steps of the model of `model` with weights in 8 bits, and with weights and KV: the section `fp8`. Weights are
quantized on the device when the model is loaded, in a process that holds no other model.
"""

from __future__ import annotations

import functools
import gc
from typing import Any

import torch

from benchmarks.gpu import model
from benchmarks.gpu.report import RowFile
from benchmarks.gpu.timing import Ceilings, attempt, parse, read_ceilings, row_file
from disagg.engine.runner import model_runner

WAYS: dict[str, dict[str, Any]] = {
    "decode step, fp8 weights": {"quantization": "fp8"},
    "decode step, fp8 weights and KV": {"quantization": "fp8", "kv_cache_dtype": "fp8"},
}


def measure(
    rows: RowFile,
    shape: model.TensorSizes,
    device: torch.device,
    ceilings: Ceilings,
    label: str,
    changes: dict[str, Any],
) -> None:
    """Steps of each batch, against the limit of their own bytes."""
    runner = model.make_runner(shape, device, **changes)
    model_runner.warm_up(runner)
    for batch in shape.decode_batches:
        model.measure_decode(rows, shape, runner, batch, ceilings, label=label, weight_share=0.5, target=None)


def main() -> None:
    """The section `fp8`."""
    arguments = parse(main.__doc__)
    device, rows = torch.device(arguments.device), row_file(arguments, "fp8")
    ceilings = read_ceilings(arguments.ceilings)
    if device.type == "cpu":
        rows.add("decode step, fp8 weights", None, "", detail="fp8 weights need a GPU")
        return
    for label, changes in WAYS.items():
        attempt(rows, label, functools.partial(measure, rows, model.TensorSizes(), device, ceilings, label, changes))
        gc.collect()


if __name__ == "__main__":
    main()
