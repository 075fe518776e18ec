"""Compiles, binds and launches every Triton op of several models for a Hopper GPU, and prints what was launched.

    python -m tests.gpu_stub.launches DRIVER_FOLDER NAME ...     NAME: of `MODELS` or `OTHERS`

Triton's compiler, its argument checks and its C launcher are the real ones, the driver is `cuda_stub.c`, which lies
in DRIVER_FOLDER (`driver.build`). Nothing is computed, so tensors lie in host memory. Each model has one layer, or two,
and a small matrix product behind attention: torch computes those. One JSON object on standard output.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import re
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

os.environ["DISAGG_KERNELS"] = "triton"

import torch
import triton

from disagg.engine.batch_arrays import BatchBuilder
from disagg.engine.checkpoint.checkpoint import read_model_config
from disagg.engine.checkpoint.model_config import ModelConfig
from disagg.engine.plan import ScheduledSequence, StepPlan
from disagg.engine.request import dummy_sequence
from disagg.engine.runner.model.batch import to_batch
from disagg.engine.runner.model.decoder import Decoder
from disagg.engine.runner.model.device_draws import DeviceDraws
from disagg.engine.runner.model.kv_cache import KvCache, kv_layout
from disagg.engine.runner.model.parameters import allocate_parameters
from disagg.engine.runner.model.rope import RopeTables
from disagg.kernels import dispatch
from disagg.kernels.triton import fp8_rows
from disagg.proto.messages import ParallelShape
from tests.gpu_stub.driver import Launches, install
from tests.support.triton_compile import resources

SMALL = 512
"""Features and vocabulary of what torch computes here."""
MODELS: dict[str, dict[str, Any]] = {
    "Llama-3-8B": {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8},
    "Llama-3-8B, TP 2": {"hidden_size": 4096, "num_attention_heads": 16, "num_key_value_heads": 4},
    "Llama-3-70B, TP 8": {"hidden_size": 8192, "num_attention_heads": 8, "num_key_value_heads": 1},
    "Qwen3-8B": {"model_type": "qwen3", "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8},
    "Qwen3-14B": {"model_type": "qwen3", "hidden_size": 5120, "num_attention_heads": 40, "num_key_value_heads": 8},
}
"""Fields of `config.json`; head_dim is 128. A share of several ranks is a model with that many heads."""
OTHERS: dict[str, dict[str, Any]] = {
    "gpt-oss-20b": {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "hidden_size": 2880,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_hidden_layers": 2,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096},
    },
    "Gemma 2 9B": {
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "hidden_size": 3584,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 256,
        "num_hidden_layers": 2,
        "sliding_window": 4096,
        "query_pre_attn_scalar": 256,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
    "DeepSeek-V3, TP 8": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "hidden_size": 7168,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 64,
        "num_hidden_layers": 2,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "first_k_dense_replace": 1,
        "n_routed_experts": 32,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "moe_intermediate_size": SMALL,
    },
}
"""Those with other parts, of two layers: windows, sinks and experts; windows and soft caps; latents and experts."""
FEATURES = {
    "Llama-3-8B": 14336,
    "Llama-3-8B, TP 2": 7168,
    "Llama-3-70B, TP 8": 3584,
    "Qwen3-8B": 12288,
    "Qwen3-14B": 17408,
}
"""Of the MLP, of one rank."""
VOCAB = {"Llama": 128256, "Qwen3": 151936}
BLOCK, NUM_BLOCKS, MAX_LEN = 64, 64, 2048
KV_DTYPES = ("bfloat16", "float8_e4m3fn")


@dataclass
class Found:
    """What was launched, by step of a model of one layer."""

    steps: dict[str, dict[str, int]] = field(default_factory=dict)
    declined: list[str] = field(default_factory=list)
    """Ops that fell back to torch."""
    kernels: dict[str, dict[str, tuple[int, int, int]]] = field(default_factory=dict)
    """By "model, dtype of KV" (empty for the wide ops) and kernel, (registers, spilled bytes, bytes of shared memory)
    of a thread or program: the most of all variants that it needs."""
    fused: list[str] = field(default_factory=list)
    """Kernels in which the compiler fused a product in 16 bits with the sum behind it, "model, dtype of KV: kernel"."""
    descriptors: int = 0


def model_config(name: str) -> ModelConfig:
    family = "Qwen3" if "Qwen3" in name else "Llama"
    fields = {
        "architectures": [f"{family}ForCausalLM"],
        "model_type": family.lower(),
        "intermediate_size": SMALL,
        "num_hidden_layers": 1,
        "vocab_size": SMALL,
        "head_dim": 128,
        "max_position_embeddings": MAX_LEN,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e5,
        "tie_word_embeddings": False,
        "eos_token_id": 0,
    }
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(fields | {**MODELS, **OTHERS}[name]), encoding="utf-8")
        return read_model_config(folder)


def prefills(num_tokens: int, count: int, start: int = 0) -> StepPlan:
    sequences = [dummy_sequence(start + num_tokens, 4 * at, BLOCK, (NUM_BLOCKS,)) for at in range(count)]
    return StepPlan(prefills=tuple(ScheduledSequence(each, start, num_tokens, True) for each in sequences))


def decodes(count: int) -> StepPlan:
    sequences = [dummy_sequence(100, 2 * at, BLOCK, (NUM_BLOCKS,)) for at in range(count)]
    return StepPlan(decodes=tuple(ScheduledSequence(each, 99, 1, True) for each in sequences))


STEPS = {
    "prefill of 200": prefills(200, 1),
    "4 prefills of 5": prefills(5, 4),
    "prefill of 16 behind 100": prefills(16, 1, 100),
    "prefill of 32 behind 1900": prefills(32, 1, 1900),
    "8 decodes": decodes(8),
}


def launch_model(
    found: Found,
    launches: Launches,
    name: str,
    kv_dtype: str,
    steps: Mapping[str, StepPlan] = STEPS,
    num_blocks: int = NUM_BLOCKS,
) -> None:
    """A step of each kind, and KV out of the cache and back, whole and for a worker of two ranks."""
    config, cpu = model_config(name), torch.device("cpu")
    layout = kv_layout(config, kv_dtype)
    windows = len(layout.groups) - 1
    cache = KvCache(layout, num_blocks, BLOCK, cpu, window_blocks=[num_blocks] * windows)
    ropes = RopeTables(config, MAX_LEN, torch.bfloat16, cpu)
    decoder = Decoder(config, allocate_parameters(config, torch.bfloat16, cpu), ropes, cache)
    builder = BatchBuilder(BLOCK, MAX_LEN, windows)
    for label, plan in steps.items():
        batch = to_batch(builder.arrays(plan), decoder.attention)
        found.steps[f"{name}, {kv_dtype}, {label}"] = launches.of(lambda batch=batch: decoder.forward(batch))  # type: ignore[misc]
    for peer_tp in {1, min(2, config.num_kv_heads)}:
        staged = torch.zeros(32 * cache.layout.bytes_per_token, dtype=torch.uint8)

        def copy(peer_tp: int = peer_tp, staged: torch.Tensor = staged) -> None:
            for group in range(1 + windows):
                cache.gather_part([3, 1], 5, 37, staged, ParallelShape(tp=peer_tp), group=group)
                cache.scatter_part([3, 1], 5, 37, staged, ParallelShape(tp=peer_tp), group=group)

        found.steps[f"{name}, {kv_dtype}, KV to tp {peer_tp}"] = launches.of(copy)


def launch_wide_ops(found: Found, launches: Launches, name: str, num_rows: int = 8) -> None:
    """What the small model does not have: the MLP's width, the vocabulary, rows that are drawn, fp8 rows. `num_rows`
    are those of the logits."""
    vocab_size = VOCAB["Qwen3" if "Qwen3" in name else "Llama"]
    features, logits_SV = FEATURES[name], torch.zeros(num_rows, vocab_size, dtype=torch.bfloat16)
    draws = DeviceDraws(num_rows, vocab_size, torch.device("cpu"))
    rows = [dummy_sequence(1, 0, BLOCK, temperature=1.0) for _ in range(num_rows)]
    gate_up_T2F = torch.zeros(200, 2 * features, dtype=torch.bfloat16)
    x_TI = torch.zeros(200, MODELS[name]["hidden_size"], dtype=torch.bfloat16)
    calls: dict[str, Callable[[], object]] = {
        "silu_mul": lambda: dispatch.silu_mul(gate_up_T2F),
        "argmax_rows": lambda: dispatch.argmax_rows(logits_SV, vocab_size),
        "draw_rows": lambda: draws.draw(logits_SV, rows, [0] * num_rows),
        "digest_sums": lambda: dispatch.digest_sums(torch.zeros(4 << 20, dtype=torch.uint8), 1 << 63),
        "quantize_rows": lambda: fp8_rows.quantize_rows(x_TI),
    }
    for label, call in calls.items():
        found.steps[f"{name}, {label}"] = launches.of(call)


def note_resources(found: Found, name: str, kv_dtype: str = "") -> None:
    """From now on add to `found` what each kernel uses that is launched. Those of other models are forgotten, so that
    Triton compiles them, or finds them in its cache on disk, and calls its listener again."""
    kernels = found.kernels.setdefault(f"{name}, {kv_dtype}", {})

    def compiled(*, metadata: dict[str, Any], metadata_group: dict[str, str], **_: object) -> None:
        cubin = next(path for path in metadata_group.values() if path.endswith(".cubin"))
        usage = (*resources_of(cubin), int(metadata["shared"]))
        most = map(max, kernels.get(metadata["name"], usage), usage)
        kernels[metadata["name"]] = (next(most), next(most), next(most))
        ptx = next(path for path in metadata_group.values() if path.endswith(".ptx"))
        if re.search(r"fma\.rn\.b?f16", Path(ptx).read_text(encoding="utf-8")):
            found.fused.append(f"{name}, {kv_dtype}: {metadata['name']}")

    triton.knobs.compilation.listener = compiled
    for module in [module for path, module in sys.modules.items() if path.startswith("disagg.kernels.triton.")]:
        for each in vars(module).values():
            if isinstance(each, triton.JITFunction):
                each.device_caches.clear()


@functools.cache
def resources_of(cubin: str) -> tuple[int, int]:
    """As `resources`, of a file."""
    return resources(Path(cubin).read_bytes())


class Declined(logging.Handler):
    """Collects what `dispatch` warns of."""

    def __init__(self, into: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._into = into

    def emit(self, record: logging.LogRecord) -> None:
        self._into.append(record.getMessage())


def main(folder: str, *names: str) -> None:
    launches = install(Path(folder) / "libcuda.so.1")
    torch.set_num_threads(1)
    found = Found()
    logging.getLogger("disagg.kernels.dispatch").addHandler(Declined(found.declined))
    for name in names:
        for kv_dtype in KV_DTYPES if name in MODELS else KV_DTYPES[:1]:
            note_resources(found, name, kv_dtype)
            launch_model(found, launches, name, kv_dtype)
        if name in MODELS:
            note_resources(found, name)
            launch_wide_ops(found, launches, name)
    found.descriptors = launches.descriptors
    json.dump(asdict(found), sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
