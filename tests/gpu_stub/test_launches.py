"""What is launched for models of real sizes: `make test-gpu-stub`. One to four minutes of a processor, nearly all of
it compiling, in the fixtures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.gpu_stub.table import table

pytestmark = pytest.mark.timeout(1800)

LAYER = {"_rms_norm_kernel": 1, "_kernel": 1, "_add_rms_norm_kernel": 2, "_silu_mul_kernel": 1, "_embed_kernel": 1}
"""Of every step of one layer, with the embedding before it and the norm behind it; `_kernel` is that of
`rope_write.py`."""
STEPS = {
    "prefill of 200": LAYER | {"_prefill_kernel": 1},
    "4 prefills of 5": LAYER | {"_prefill_kernel": 1},
    "prefill of 16 behind 100": LAYER | {"_prefill_kernel": 1},
    "prefill of 32 behind 1900": LAYER | {"_prefill_kernel": 1, "_join_prefill_kernel": 1},
    "8 decodes": LAYER | {"_decode_kernel": 1, "_join_kernel": 1},
}
WIDE_OPS = {
    "silu_mul": {"_silu_mul_kernel": 1},
    "argmax_rows": {"_chunk_kernel": 1, "_row_kernel": 1},
    "draw_rows": dict.fromkeys(
        (f"_{name}_kernel" for name in ("groups", "bounds", "collect", "rank", "uniform", "draw", "search")), 1
    ),
    "digest_sums": {"_digest_kernel": 1},
    "quantize_rows": {"_quantize_rows_kernel": 1},
}
MODELS = {"Llama-3-8B": 8, "Llama-3-8B, TP 2": 4, "Llama-3-70B, TP 8": 1, "Qwen3-8B": 8, "Qwen3-14B": 8}
"""With their KV heads."""
SPARSE = {"_route_kernel": 1, "_place_kernel": 1, "_product_kernel": 2, "_gate_kernel": 1, "_combine_kernel": 1}
"""Of every layer of experts."""
TWO_LAYERS = {"_embed_kernel": 1, "_add_rms_norm_kernel": 4}
OTHERS = {
    "gpt-oss-20b": TWO_LAYERS
    | {"_rms_norm_kernel": 1, "_kernel": 2}
    | {kernel: 2 * count for kernel, count in SPARSE.items()},
    "Gemma 2 9B": TWO_LAYERS | {"_rms_norm_kernel": 5, "_kernel": 2, "_silu_mul_kernel": 2, "_pointwise_kernel": 2},
    "DeepSeek-V3, TP 8": TWO_LAYERS
    | {"_rms_norm_kernel": 5, "_latent_write_kernel": 2, "_silu_mul_kernel": 2}
    | SPARSE,
}
"""Of every step of two layers. The functions of a number are those of embeddings and logits; the MLPs of DeepSeek are
that of a dense layer, and of what all tokens take beside the experts."""
SPILLED = {"_prefill_kernel": 248, "_decode_kernel": 40}
"""Most bytes of a thread; of all other kernels none. The decode kernel spills with fp8 only."""


def launched(folder: Path, *names: str) -> dict[str, Any]:
    """What `launches` finds of models."""
    pytest.importorskip("triton")
    from tests.gpu_stub import driver

    driver.build(folder)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu_stub.launches", folder, *names],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        env=environment | {"TRITON_CACHE_DIR": str(folder / "cache")},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return launched(tmp_path_factory.mktemp("driver"), *MODELS)


def test_every_op_takes_every_model(found: dict[str, Any]) -> None:
    assert found["declined"] == []


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("name", MODELS)
def test_launches_of_a_step_with_one_layer(found: dict[str, Any], name: str, kv_dtype: str) -> None:
    for label, expected in STEPS.items():
        assert found["steps"][f"{name}, {kv_dtype}, {label}"] == expected, label
    for peer_tp in {1, min(2, MODELS[name])}:  # out of the cache and back, a launch for each slice
        assert found["steps"][f"{name}, {kv_dtype}, KV to tp {peer_tp}"] == {"_copy_kernel": 2 * peer_tp}


@pytest.mark.parametrize("name", MODELS)
def test_launches_of_ops_of_full_width(found: dict[str, Any], name: str) -> None:
    for label, expected in WIDE_OPS.items():
        assert found["steps"][f"{name}, {label}"] == expected, label


def test_prefill_fetches_keys_and_values_by_descriptors(found: dict[str, Any]) -> None:
    """Two for each of the two launches of 200 tokens over a cache in bf16; some shapes use them for fewer tokens."""
    assert found["descriptors"] >= 4 * len(MODELS)


def test_every_product_of_the_rotation_is_rounded(found: dict[str, Any]) -> None:
    """As in the reference. The compiler fuses products in 16 bits with the sums behind them where it may."""
    assert [each for each in found["fused"] if each.endswith(": _kernel")] == []


def test_registers_and_spills(found: dict[str, Any]) -> None:
    for where, kernels in found["kernels"].items():
        for kernel, (registers, spilled, shared) in kernels.items():
            assert registers <= 255, (where, kernel)
            assert spilled <= SPILLED.get(kernel, 0), (where, kernel)
            assert shared <= 232448, (where, kernel)
    assert [found["kernels"][f"{name}, bfloat16"]["_decode_kernel"][1] for name in MODELS] == [0] * len(MODELS)


def test_the_page_has_the_table_of_all_kernels(found: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    printed = table(found)
    with capsys.disabled():
        print(f"\n{printed}")
    assert printed in (Path(__file__).parents[2] / "docs/gpu.md").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_launches_of_a_model_with_other_parts(tmp_path: Path, name: str) -> None:
    """Windows, soft caps, sinks, experts, latents. A window of 128 tokens is not split; each cache group is copied."""
    found = launched(tmp_path, name)
    assert found["declined"] == []
    for label, expected in STEPS.items():
        attention = {kernel: 2 * count for kernel, count in expected.items() if kernel not in LAYER}
        if name == "gpt-oss-20b" and "_join_prefill_kernel" in attention:
            attention["_join_prefill_kernel"] = 1
        assert found["steps"][f"{name}, bfloat16, {label}"] == OTHERS[name] | attention, label
    copies = {"_copy_kernel": 2} if "DeepSeek" in name else {"_copy_kernel": 4}
    assert found["steps"][f"{name}, bfloat16, KV to tp 1"] == copies
    assert [each for each in found["fused"] if each.endswith((": _kernel", ": _latent_write_kernel"))] == []
    for kernel, (registers, spilled, shared) in found["kernels"][f"{name}, bfloat16"].items():
        assert registers <= 255, kernel
        assert spilled <= SPILLED.get(kernel, 0), kernel
        assert shared <= 232448, kernel
