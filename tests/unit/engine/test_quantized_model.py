"""A model with 8-bit weights is the model of the rounded weights, and is refused where it cannot be that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from disagg.kernels.quantize import quantize_int8
from disagg.proto.errors import ConfigError
from tests.support.stepping import generate, make_runner, make_sequence, prefill
from tests.support.tiny_models import VOCAB_SIZE, make_checkpoint

PROMPT = [(7 * i * i + 3 * i + 5) % VOCAB_SIZE for i in range(60)]
PROMPTS = [[(a * i * i + 3 * i + a) % VOCAB_SIZE for i in range(60)] for a in range(7, 31)]
BLOCKS = [3, 1, 4, 5, 9, 2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("llama"), dtype=torch.bfloat16)


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe", "deepseek_v3"])
def test_it_computes_with_the_rounded_weights(kind: str, tmp_path: Path) -> None:
    """Closer to the model of the rounded weights than to the original, and as close as bf16 is to its own."""
    folder = make_checkpoint(kind, tmp_path / "exact", dtype=torch.bfloat16)
    rounded = make_checkpoint(kind, tmp_path / "rounded", dtype=torch.bfloat16)
    tensors = load_file(rounded / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("kv_b_proj.weight"):
            continue  # the products by head keep their dtype
        if name.endswith(("_proj.weight", "_with_mqa.weight", "lm_head.weight")):
            tensors[name] = quantize_int8(tensor).dequantized(torch.float32)
    save_file(tensors, rounded / "model.safetensors")

    def logits(folder: Path, **changes: Any) -> torch.Tensor:
        """Those of the last token of each prompt: where experts are close, a rounding may choose another."""
        runner = make_runner(folder, **changes)
        return torch.stack([prefill(runner, make_sequence(prompt, BLOCKS)).float() for prompt in PROMPTS])

    def between(these: torch.Tensor, those: torch.Tensor) -> torch.Tensor:
        """Geometric mean over the prompts of the mean square difference of their logits."""
        return (these - those).square().mean(-1).log().mean().exp()

    exact, of_rounded = logits(folder), logits(rounded)
    found = logits(folder, dtype="bfloat16", quantization="int8")
    error = between(found, of_rounded)
    assert error * 1.3 < between(found, exact)
    assert error < 3 * between(logits(folder, dtype="bfloat16"), exact)


def test_a_decode_step_is_the_same_alone_and_after_a_prefill_of_it(folder: Path) -> None:
    """Rows do not depend on their neighbours: the last token's logits are equal to a rounding of attention."""
    runner = make_runner(folder, dtype="bfloat16", quantization="int8")
    sequence = make_sequence(PROMPT, BLOCKS)
    stepwise = generate(runner, sequence, 6)[-1]
    again = prefill(runner, make_sequence(sequence.token_ids[:-1], BLOCKS))
    assert int(stepwise.argmax()) == int(again.argmax()) == sequence.token_ids[-1]


def test_it_has_another_fingerprint(folder: Path) -> None:
    plain, quantized = (make_runner(folder, dtype="bfloat16", quantization=name) for name in ("none", "int8"))
    assert plain.fingerprint != quantized.fingerprint
    assert plain.layout == quantized.layout


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "float32"}, "quantization: int8 needs dtype bfloat16, not float32"),
        ({"dtype": "bfloat16", "device": "cuda:0"}, "quantization: int8 is for device cpu, not cuda:0"),
        ({"dtype": "bfloat16", "tp": 2}, "quantization: int8 is for workers of one rank, not of 2"),
    ],
)
def test_what_cannot_be_is_refused(folder: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}$"):
        make_runner(folder, quantization="int8", **changes)


def test_a_weight_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    broken = make_checkpoint("llama", tmp_path, dtype=torch.bfloat16)
    tensors = load_file(broken / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][5, 7] = float("nan")
    save_file(tensors, broken / "model.safetensors")
    with pytest.raises(ConfigError, match=r"^quantization: row 5 of a weight is not finite$"):
        make_runner(broken, dtype="bfloat16", quantization="int8")
