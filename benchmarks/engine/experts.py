"""A layer of experts: how near steps of few rows come to the time in which their weights are read, and what it costs
when all rows choose the same experts.

    python -m benchmarks.engine.experts [--threads 2] [--experts 64 --top-k 8 --hidden 2048 --inner 768] [--json FILE]
    python -m benchmarks.engine.experts --mxfp4 --experts 32 --top-k 4 --hidden 2880 --inner 2880

Weights are bf16, those of a Qwen3-MoE layer with half the experts by default: 0.6 GB, beyond every cache. The bytes of
a step are those of the experts that its rows chose, counted; beside them stands what E * (1 - (1 - k / E)^rows)
expects. Before and behind each call as many cores read a buffer: how long the step's bytes take at that rate is its
limit, in the same moment. The skewed routing has one expert that every row chooses and spreads the rest; `one` has all
rows on the same k experts.

With `--mxfp4` the layer has random weights in MXFP4, and calls with these and with their bf16 numbers take turns: their
results are compared bit for bit, and bf16's time is stated over that of MXFP4.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.engine.ceilings import READ_BYTES, read_s
from disagg.cluster.system.cores import available_cores, pin_process
from disagg.kernels import dispatch
from disagg.kernels.cpu.linear import NativeExpertWeight
from disagg.kernels.experts import Experts, ExpertWeight, Router
from disagg.kernels.groups import GROUP
from disagg.kernels.mxfp4 import Mxfp4Weight
from disagg.kernels.routing import SILU, GatedActivation, Routing
from tests.support.reports import positive, print_table, report, write_json

FEW_ROWS = (1, 8, 32)
MANY_ROWS = 512
BIAS = 100.0
"""Added to the score of an expert that every row shall choose."""


def random_weights(num_experts: int, hidden: int, inner: int) -> tuple[ExpertWeight, ExpertWeight]:
    """Packed bf16 weights of gate and up, and of down."""
    gate_up, down = (
        dispatch.pack_experts(torch.randn(num_experts, *shape, dtype=torch.bfloat16).mul_(shape[1] ** -0.5))
        for shape in ((2 * inner, hidden), (hidden, inner))
    )
    return gate_up, down


class Layer:
    """Packed weights, and a router whose choice a bias moves."""

    def __init__(
        self,
        routing: Routing,
        hidden: int,
        inner: int,
        weights: tuple[ExpertWeight, ExpertWeight],
        activation: GatedActivation = SILU,
    ) -> None:
        self.routing, self.hidden, self.inner = routing, hidden, inner
        gate_up, down = weights
        self.experts = Experts(activation, gate_up, down)
        router_weight = torch.randn(routing.num_experts, hidden).mul_(hidden**-0.5)  # sigmoids of more are all one
        self.router_weight = dispatch.pack_router(router_weight, gate_up)
        self.counts_E = torch.zeros(routing.num_experts, dtype=torch.int64)
        self.bias_E = torch.zeros(routing.num_experts)
        self.router = Router(routing, self.router_weight, None, self.bias_E, self.counts_E)

    def run(self, x_TH: Tensor) -> Tensor:
        """One call."""
        return dispatch.moe_ffn(x_TH, self.router, self.experts, None)

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert's weights."""
        weights = self.experts.gate_up_L2IH, self.experts.down_LHI
        assert all(isinstance(each, NativeExpertWeight) for each in weights), "there are C++ kernels"
        return sum(each.packed[0].nbytes for each in weights if isinstance(each, NativeExpertWeight))

    def rows(self, count: int) -> Tensor:
        """New random rows, which choose other experts."""
        return torch.randn(count, self.hidden, dtype=torch.bfloat16)

    def use(self, routing: str) -> None:
        """`uniform`, `skewed` (one expert for every row) or `one` (the same experts for every row)."""
        self.bias_E.zero_()
        self.bias_E[: {"uniform": 0, "skewed": 1, "one": self.routing.top_k}[routing]] = BIAS


def few_rows(layer: Layer, count: int, calls: int, cores: Sequence[int]) -> dict[str, float]:
    """Median time of a call, bytes of the experts that it read on average, and the median of its time over that in
    which these bytes are read right before and behind it."""
    layer.use("uniform")
    times, read, ratios = list[float](), list[float](), list[float]()
    before_s = read_s(cores)
    for _ in range(calls):
        x_TH = layer.rows(count)
        counts_E = layer.counts_E.clone()
        started = time.perf_counter()
        layer.run(x_TH)
        times.append(time.perf_counter() - started)
        read.append(int((layer.counts_E > counts_E).sum()) * layer.expert_bytes)
        behind_s = read_s(cores)
        ratios.append(times[-1] / ((before_s + behind_s) / 2 * read[-1] / READ_BYTES))
        before_s = behind_s
    return {
        "us": round(statistics.median(times) * 1e6, 1),
        "mb": round(statistics.mean(read) / 1e6, 1),
        "mb_expected": round(layer.routing.distinct_experts(count) * layer.expert_bytes / 1e6, 1),
        "over_limit": round(statistics.median(ratios), 3),
    }


def many_rows(layer: Layer, count: int, calls: int) -> dict[str, float]:
    """Median milliseconds of a call with each routing, in turns."""
    times: dict[str, list[float]] = {"uniform": [], "skewed": [], "one": []}
    x_TH = layer.rows(count)
    for call in range(calls):
        for name in times if call % 2 == 0 else reversed(times):
            layer.use(name)
            started = time.perf_counter()
            layer.run(x_TH)
            times[name].append(time.perf_counter() - started)
    return {name: round(statistics.median(each) * 1e3, 1) for name, each in times.items()}


def measured(options: argparse.Namespace) -> dict[str, Any]:
    """All figures."""
    cores = available_cores()[: options.threads]
    dispatch.set_num_threads(options.threads)
    routing = Routing(num_experts=options.experts, top_k=options.top_k, score="sigmoid", renormalize=True)
    layer = Layer(
        routing, options.hidden, options.inner, random_weights(options.experts, options.hidden, options.inner)
    )
    found: dict[str, Any] = {}
    for count in FEW_ROWS:
        of_count = few_rows(layer, count, options.calls, cores)
        found |= {f"rows_{count}_{name}": value for name, value in of_count.items()}
    for name, ms in many_rows(layer, MANY_ROWS, options.calls // 4 or 1).items():
        found[f"rows_{MANY_ROWS}_{name}_ms"] = ms
    for name in ("skewed", "one"):
        ratio = found[f"rows_{MANY_ROWS}_{name}_ms"] / found[f"rows_{MANY_ROWS}_uniform_ms"]
        found[f"rows_{MANY_ROWS}_{name}_over_uniform"] = round(ratio, 3)
    return found


def in_both_forms(routing: Routing, hidden: int, inner: int) -> dict[str, Layer]:
    """A layer of random weights in MXFP4, and that of their bf16 numbers, with gpt-oss's activation."""
    made: dict[str, list[ExpertWeight]] = {"bf16": [], "mxfp4": []}
    for outputs, inputs in ((2 * inner, hidden), (hidden, inner)):
        code = torch.randint(0, 256, (routing.num_experts, outputs, inputs // 2), dtype=torch.uint8)
        exponent = torch.randint(118, 122, (routing.num_experts, outputs, inputs // GROUP), dtype=torch.uint8)
        weight = Mxfp4Weight(code, exponent)
        made["mxfp4"].append(dispatch.pack_experts(weight))
        made["bf16"].append(dispatch.pack_experts(weight.dequantized()))
    activation = GatedActivation(kind="clamped_swiglu")
    layers = {name: Layer(routing, hidden, inner, (each[0], each[1]), activation) for name, each in made.items()}
    layers["mxfp4"].router = layers["bf16"].router
    return layers


def mxfp4_beside_bf16(options: argparse.Namespace) -> dict[str, Any]:
    """Size of the layer in both forms, medians of calls in turns, and bf16's time over that of MXFP4: the median of the
    turns, and that of the quickest calls of each."""
    dispatch.set_num_threads(options.threads)
    routing = Routing(num_experts=options.experts, top_k=options.top_k, score="softmax_of_top")
    layers = in_both_forms(routing, options.hidden, options.inner)
    found: dict[str, Any] = {
        f"layer_mb_{name}": round(options.experts * each.expert_bytes / 1e6, 1) for name, each in layers.items()
    }
    for count in FEW_ROWS:
        times: dict[str, list[float]] = {name: [] for name in layers}
        for turn in range(options.calls):
            x_TH, results = layers["bf16"].rows(count), []
            for name in layers if turn % 2 == 0 else reversed(list(layers)):
                started = time.perf_counter()
                results.append(layers[name].run(x_TH))
                times[name].append(time.perf_counter() - started)
            assert torch.equal(results[0], results[1]), "MXFP4 has the bits of bf16"
        rates = [plain / own for plain, own in zip(times["bf16"], times["mxfp4"], strict=True)]
        found |= {f"rows_{count}_{name}_ms": round(statistics.median(each) * 1e3, 2) for name, each in times.items()}
        found[f"rows_{count}_least_times_as_fast"] = round(min(times["bf16"]) / min(times["mxfp4"]), 3)
        found[f"rows_{count}_times_as_fast"] = round(statistics.median(rates), 3)
    return found


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=positive, default=len(available_cores()))
    parser.add_argument("--experts", type=positive, default=64)
    parser.add_argument("--top-k", type=positive, default=8)
    parser.add_argument("--hidden", type=positive, default=2048)
    parser.add_argument("--inner", type=positive, default=768)
    parser.add_argument("--calls", type=positive, default=40)
    parser.add_argument("--mxfp4", action="store_true", help="compare experts in MXFP4 with their bf16 numbers")
    parser.add_argument("--json", type=Path, help="write the report to this file")
    return parser.parse_args(argv)


def main() -> None:
    """Measure, print, and write."""
    options = parse_arguments()
    pin_process(available_cores()[: options.threads])
    found = mxfp4_beside_bf16(options) if options.mxfp4 else measured(options)
    lines = [(name, str(value)) for name, value in found.items()]
    print_table(f"a layer of experts: {dispatch.describe()}, threads: {options.threads}", ("figure", "value"), lines)
    if options.json is not None:
        figures = {
            name: value
            for name, value in found.items()
            if name.endswith(("_over_limit", "_over_uniform", "_times_as_fast"))
        }
        write_json(options.json, report([found], figures))


if __name__ == "__main__":
    main()
