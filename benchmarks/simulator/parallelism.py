"""Plans beside published figures: which stages and ranks DistServe found for each pool, and what stages brought SGLang.

    python -m benchmarks.simulator.parallelism

DistServe (Y. Zhong et al., OSDI 2024): OPT on four nodes of eight A100 with 80 GB, 25 Gb/s between nodes; stages,
ranks, limits and rates as in its artifact (`evaluation/2-benchmark-serving` of LLMServe/DistServe). Lengths have the
means that the paper gives for ShareGPT, 755 and 200 tokens, and are spread evenly from 1 to twice that. Its stages of P
and D stand on one node, so that KV goes over NVLink; so it does here.

SGLang ("Pipeline Parallelism in SGLang", LMSYS, 2026-01-15): DeepSeek-V3.1 in fp8 on four nodes of eight H20, one
prompt at a time in chunks of 12K tokens; 4 stages of 8 ranks compute 3.31 times as many tokens a second as 8 ranks, 32
ranks 2.54 times as many. Three lengths of prompts are computed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from disagg.autoscaler.queueing import Lengths, representative
from disagg.engine.checkpoint.model_config import ExpertsConfig, LatentConfig
from disagg.kernels.routing import Routing
from disagg.loadtests.verdict.goodput import Slo
from disagg.loadtests.workload.arrivals import ArrivalConfig
from disagg.loadtests.workload.workload import Outline, RandomWorkload, outline
from disagg.simulator.durations.devices import A100, GIGA, H100, TERA, Device
from disagg.simulator.durations.model_shapes import ExpertsShape, ModelShape
from disagg.simulator.durations.parallelism import Parallelism
from disagg.simulator.durations.roofline import RooflineStepTimes
from disagg.simulator.durations.stages import StagedStepTimes
from disagg.simulator.plan.candidates import Judged
from disagg.simulator.plan.judge import SimulatedJudge, lengths_of
from disagg.simulator.plan.load import Load
from disagg.simulator.plan.pools import Planner
from disagg.simulator.plan.reasons import reasons
from disagg.simulator.plan.search import best_pools
from disagg.simulator.plan.workers import Site
from disagg.step_times.interface import LinkTimes, StepTimes, decode_s, prefill_s

DISTSERVE_NODES = replace(A100, network_bandwidth=25 / 8 / 8 * GIGA)
"""25 Gb/s for a node of eight devices."""
H20 = replace(  # NVIDIA H20: 148 TFLOP/s bf16 and 296 fp8, dense, 96 GB at 4.0 TB/s, NVLink of 900 GB/s
    H100,
    name="h20",
    flops={"bfloat16": 148 * TERA, "float16": 148 * TERA, "fp8": 296 * TERA, "int8": 296 * TERA},
    memory_bytes=96 * GIGA,
    memory_bandwidth=4.0 * TERA,
)
SHAREGPT = Lengths(755, 200)
"""The mean request."""


class Published(NamedTuple):
    """What DistServe found for a model."""

    model: ModelShape
    prefill: Parallelism
    decode: Parallelism
    ttft_s: float
    tpot_s: float
    rate_per_s: float
    """Requests per second on all devices of both: those at which its limits are varied."""


def opt(name: str, hidden: int, columns: int, layers: int, heads: int) -> ModelShape:
    """A model of the OPT family. `columns` are those of an MLP of three matrices with as many weights as its two."""
    return ModelShape(
        name=name,
        hidden_size=hidden,
        intermediate_size=columns,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        vocab_size=50272,
        max_positions=2048,
        tied_embeddings=True,
        qkv_bias=True,
        o_bias=True,
    )


DISTSERVE = (
    Published(opt("opt-13b", 5120, 13656, 40, 40), Parallelism(2), Parallelism(1), 0.25, 0.1, 1.5 * 3),
    Published(opt("opt-66b", 9216, 24576, 64, 72), Parallelism(4), Parallelism(2, 2), 0.4, 0.1, 0.25 * 8),
    Published(opt("opt-175b", 12288, 32760, 96, 96), Parallelism(3, 3), Parallelism(4, 3), 4.0, 0.2, 0.125 * 21),
)
DEEPSEEK_V3 = ModelShape(
    name="deepseek-v3",
    hidden_size=7168,
    intermediate_size=18432,
    num_layers=61,
    num_heads=128,
    num_kv_heads=1,
    head_dim=576,
    vocab_size=129280,
    max_positions=163840,
    latent=LatentConfig(query_rank=1536, latent_dim=512, key_dim=128, rope_dim=64, value_dim=128),
    experts=ExpertsShape(
        config=ExpertsConfig(routing=Routing(num_experts=256, top_k=8), intermediate_size=2048, shared_size=2048),
        num_layers=58,
    ),
)
SGLANG = {Parallelism(8, 4): 3.31, Parallelism(32): 2.54}
"""Prompt tokens a second over those of `SGLANG_BASE`."""
SGLANG_BASE = Parallelism(8)
SGLANG_CHUNK, SGLANG_PROMPTS = 12288, (32768, 131072, 524288)
MAX_SIMULATED = 12
SETTLE_S = 120.0
"""Seconds before requests count, and in which they do."""


def times_of(model: ModelShape, device: Device, parallelism: Parallelism, weight_dtype: str | None = None) -> StepTimes:
    """Step times by the roofline."""
    tp, pp, ep = parallelism
    whole = RooflineStepTimes(model, device, tp=tp, ep=ep, weight_dtype=weight_dtype)
    return whole if pp == 1 else StagedStepTimes(whole, pp)


# ---------------------------------------------------------------- DistServe


def planned(published: Published, *, simulates: bool = True) -> tuple[Planner, Judged]:
    """The pools that a plan finds for a model, limits and rate of DistServe's, on the same nodes."""
    model = published.model
    site = Site(
        model=model,
        device=DISTSERVE_NODES,
        times_of=lambda parallelism: times_of(model, DISTSERVE_NODES, parallelism),
        link=LinkTimes(bandwidth_bytes_per_s=A100.link_bandwidth, latency_s=1e-4),
        tps=(1, 2, 3, 4, 8) if model.num_heads % 3 == 0 else (1, 2, 4, 8),
        pps=(1, 2, 3, 4),
        token_budgets=(512, 2048),
        price_per_hour=A100.example_price_per_hour,
        max_devices=32,
        modes=(True,),
    )
    slo = Slo(ttft_s=published.ttft_s, tpot_s=published.tpot_s)
    requests = spread_requests(published.rate_per_s)
    kinds = representative(lengths_of(requests.requests))
    planner = Planner(site, Load(rate_per_s=published.rate_per_s, kinds=kinds, slo=slo))
    judge = SimulatedJudge(planner, requests, counted_from_s=SETTLE_S) if simulates else None
    return planner, best_pools(planner, judge, MAX_SIMULATED).best


def spread_requests(rate_per_s: float) -> Outline:
    """Poisson arrivals of requests whose lengths are spread evenly."""
    workload = RandomWorkload(isl=(1, 2 * SHAREGPT.prompt), osl=(1, 2 * SHAREGPT.output))
    number = round(rate_per_s * 2 * SETTLE_S)
    arrivals = ArrivalConfig(kind="poisson", rate_per_s=rate_per_s, num_requests=number)
    return outline(workload, arrivals, max_model_len=2048)


def print_distserve() -> None:
    """Print what both found for each model, and what a prompt and a token take with either choice."""
    for published in DISTSERVE:
        planner, best = planned(published)
        num_devices = published.prefill.num_devices + published.decode.num_devices
        print(
            f"{published.model.name}, {published.rate_per_s:g} requests/s, TTFT {published.ttft_s:g} s, TPOT "
            f"{published.tpot_s:g} s"
        )
        print(f"  DistServe: {published.prefill} prefill, {published.decode} decode ({num_devices} devices)")
        print(
            f"  plan: {best.candidate} ({best.candidate.num_devices} devices), attained "
            f"{best.judgement.attainment:.3f}, TTFT {best.judgement.mean_ttft_s * 1e3:.0f} ms, TPOT "
            f"{best.judgement.mean_tpot_s * 1e3:.1f} ms"
        )
        for line in reasons(planner, best):
            print(f"  {line}")
        prefill, decode = (planner.site.times_of(each) for each in (published.prefill, published.decode))
        print(
            f"  DistServe's: a prompt takes {prefill_s(prefill, SHAREGPT.prompt, 2048) * 1e3:.1f} ms, a token of 16 "
            f"sequences {decode_s(decode, 16, SHAREGPT.prompt) * 1e3:.1f} ms"
        )


# ---------------------------------------------------------------- SGLang


def speed_up(parallelism: Parallelism, prompt: int, network_share: float = 1.0) -> float:
    """Prompt tokens a second over those of `SGLANG_BASE`, by the roofline, one prompt at a time. `network_share`: the
    part of the network's bandwidth that is there."""
    device = replace(H20, network_bandwidth=H20.network_bandwidth * network_share)
    seconds = [
        prefill_s(times_of(DEEPSEEK_V3, device, each, "fp8"), prompt, SGLANG_CHUNK)
        for each in (SGLANG_BASE, parallelism)
    ]
    return seconds[0] / seconds[1]


def print_sglang() -> None:
    """Print the published and the computed speed of both ways to use four nodes, over that of one."""
    for parallelism, published in SGLANG.items():
        computed = ", ".join(f"{speed_up(parallelism, prompt):.2f} ({prompt} tokens)" for prompt in SGLANG_PROMPTS)
        quarter = speed_up(parallelism, SGLANG_PROMPTS[-1], 0.25)
        print(f"{parallelism} over {SGLANG_BASE}: published {published:.2f}; computed {computed}")
        print(f"  with a quarter of the network {quarter:.2f} ({SGLANG_PROMPTS[-1]} tokens)")


def main() -> None:
    """Entry point."""
    print_distserve()
    print_sglang()


if __name__ == "__main__":
    main()
