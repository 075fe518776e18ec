"""`quantization: stored`: weights that a checkpoint has in 4 or 8 bits stay so, and no bit of a result is another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from disagg.engine.checkpoint import convert
from disagg.engine.checkpoint.gguf_models import GGUF_MODELS
from disagg.engine.checkpoint.weight_headers import GROUPS_FILE, read_group_headers
from disagg.engine.runner.model.parameters import DenseParameters
from disagg.engine.runner.model_runner import TorchModelRunner
from disagg.kernels import dispatch
from disagg.kernels.cpu.linear import NativeWeight
from disagg.kernels.groups import Groups, find_codes, quantize_int4
from disagg.proto.errors import ConfigError
from tests.support import quantized
from tests.support.stepping import generate, make_runner, make_sequence
from tests.support.tiny_models import VOCAB_SIZE, make_checkpoint

PROMPT = [(7 * i * i + 3 * i + 5) % VOCAB_SIZE for i in range(40)]
DOWN = "model.layers.1.mlp.down_proj.weight"


def rounded_checkpoint(folder: Path) -> Path:
    """A checkpoint as an import from 4 bits leaves it: numbers in bf16, and the scales beside them."""
    make_checkpoint("llama", folder, dtype=torch.bfloat16)
    tensors = load_file(folder / "model.safetensors")
    scales = dict[str, Tensor]()
    for name, tensor in tensors.items():
        if tensor.dim() == 2:
            coded = quantize_int4(tensor)
            tensors[name] = coded.dequantized()
            assert coded.groups.offset_OG is not None
            scales |= {f"{name}.scale": coded.groups.scale_OG, f"{name}.minimum": coded.groups.offset_OG}
    save_file(tensors, folder / "model.safetensors")
    save_file(scales, folder / GROUPS_FILE)
    return folder


def packed(runner: TorchModelRunner) -> list[NativeWeight]:
    """The linear weights of a model."""
    found = []
    for layer in runner._parameters.layers:
        assert isinstance(layer.ffn, DenseParameters)
        found += [layer.qkv_weight_QH, layer.o_weight_HA, layer.ffn.gate_up_weight_2IH, layer.ffn.down_weight_HI]
    found.append(runner._parameters.lm_head_VH)
    assert all(isinstance(weight, NativeWeight) for weight in found)
    return found  # type: ignore[return-value]


def assert_same_results(folder: Path) -> tuple[list[NativeWeight], list[NativeWeight]]:
    """The weights with and without; logits of a prompt and of decode steps are equal, and so is the fingerprint."""
    with_bits, without = (make_runner(folder, dtype="bfloat16", quantization=name) for name in ("stored", "none"))
    first, second = (generate(runner, make_sequence(PROMPT, [3, 1, 4]), 5) for runner in (with_bits, without))
    assert all(map(torch.equal, first, second))
    assert len(first) == 5
    assert with_bits.fingerprint == without.fingerprint
    return packed(with_bits), packed(without)


def test_results_are_those_of_the_numbers_in_full_size(tmp_path: Path) -> None:
    stored, plain = assert_same_results(rounded_checkpoint(tmp_path))
    assert all(weight.are_codes for weight in stored)
    assert not any(weight.are_codes for weight in plain)
    assert sum(weight.packed.nbytes for weight in stored) * 3 < sum(weight.packed.nbytes for weight in plain)


@pytest.mark.parametrize("name", ["gptq_32", "gptq_one_group", "awq_32", "int8_channel", "int8_group_32"])
def test_published_formats_keep_their_bits(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized, "GROUP", 32)
    made = {
        "gptq_32": quantized.Format(quantized._gptq(4, 32), quantized._gptq_config(4, 32)),
        "awq_32": quantized.Format(
            quantized._awq, {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
        ),
        "int8_group_32": quantized.Format(
            quantized._packed(8, 32),
            quantized._compressed("pack-quantized", num_bits=8, strategy="group", group_size=32),
        ),
    }
    for key, each in made.items():
        monkeypatch.setitem(quantized.FORMATS, key, each)
    folder = make_checkpoint("llama", tmp_path, dtype=torch.bfloat16)
    quantized.quantize_checkpoint(name, folder)
    stored, _ = assert_same_results(folder)
    assert all(weight.are_codes for weight in stored[:-1])


def test_one_scale_that_is_missing_leaves_a_weight_in_full_size(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = rounded_checkpoint(tmp_path)
    scales = load_file(folder / GROUPS_FILE)
    save_file({name: each for name, each in scales.items() if "layers.1.mlp.up_proj" not in name}, folder / GROUPS_FILE)
    dispatch._warn_not_stored.cache_clear()
    stored, _ = assert_same_results(folder)
    assert [index for index, weight in enumerate(stored) if not weight.are_codes] == [6]
    shape = [stored[6].out_features, stored[6].in_features]
    assert f"stored weights: one of shape {shape} is computed from its numbers in full size" in caplog.text


def test_scales_of_other_numbers_are_no_use(tmp_path: Path) -> None:
    folder = rounded_checkpoint(tmp_path)
    scales = load_file(folder / GROUPS_FILE)
    scales[f"{DOWN}.scale"][3, 1] *= 1.5
    save_file(scales, folder / GROUPS_FILE)
    stored, _ = assert_same_results(folder)
    assert [index for index, weight in enumerate(stored) if not weight.are_codes] == [7]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({f"{DOWN}.minimum": torch.zeros(1, 3).half()}, rf"tensor {DOWN}.minimum has shape \[1, 3\]; .* requires"),
        ({f"{DOWN}.scale": torch.zeros(64, 3)}, f"tensor {DOWN}.scale is F32; supported are F16"),
    ],
)
def test_broken_scales_are_refused(tmp_path: Path, change: dict[str, Tensor], message: str) -> None:
    folder = rounded_checkpoint(tmp_path)
    save_file(load_file(folder / GROUPS_FILE) | change, folder / GROUPS_FILE)
    with pytest.raises(ConfigError, match=f"groups.safetensors: {message}"):
        make_runner(folder, dtype="bfloat16", quantization="stored")


def test_a_checkpoint_without_such_weights_is_refused(tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path, dtype=torch.bfloat16)
    with pytest.raises(ConfigError, match=r"^quantization: stored, but the checkpoint has no linear weights in groups"):
        make_runner(folder, dtype="bfloat16", quantization="stored")


@pytest.mark.parametrize("name", ["stored", "stored_sums", "int4"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "float32"}, "needs dtype bfloat16, not float32"),
        ({"dtype": "bfloat16", "device": "cuda:0"}, "is for device cpu, not cuda:0"),
        ({"dtype": "bfloat16", "tp": 2}, "is for workers of one rank, not of 2"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^quantization: {name} {message}$"):
        make_runner(tmp_path, quantization=name, **changes)


def test_sums_of_codes_are_other_bits_of_the_same_model(tmp_path: Path) -> None:
    folder = rounded_checkpoint(tmp_path)
    sums, plain = (make_runner(folder, dtype="bfloat16", quantization=name) for name in ("stored_sums", "none"))
    assert {weight.kind for weight in packed(sums)} == {6}
    assert sums.fingerprint != plain.fingerprint
    assert sums.arithmetic == f"{plain.arithmetic}, sums of codes"
    found, expected = (generate(runner, make_sequence(PROMPT, [3, 1, 4]), 5) for runner in (sums, plain))
    assert not all(map(torch.equal, found, expected))
    assert (found[0] - expected[0]).norm() < 0.03 * expected[0].norm()


def test_sums_of_codes_of_a_checkpoint_without_such_weights_are_refused(tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path, dtype=torch.bfloat16)
    with pytest.raises(ConfigError, match=r"^quantization: stored_sums, but the checkpoint has no linear weights"):
        make_runner(folder, dtype="bfloat16", quantization="stored_sums")


def test_int4_is_the_model_of_the_rounded_weights(tmp_path: Path) -> None:
    exact = make_checkpoint("llama", tmp_path / "exact", dtype=torch.bfloat16)
    rounded = rounded_checkpoint(tmp_path / "rounded")
    runner = make_runner(exact, dtype="bfloat16", quantization="int4")
    assert all(weight.are_codes for weight in packed(runner))
    found, expected = (weight for weight in (packed(runner), packed(make_runner(rounded, dtype="bfloat16"))))
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    assert torch.equal(found[0].gemm(x, None), expected[0].gemm(x, None))
    assert runner.fingerprint != make_runner(exact, dtype="bfloat16").fingerprint


# ---------------------------------------------------------------- files in GGUF


def blocks_of(name: str, rows: int, columns: int) -> np.ndarray[Any, Any]:
    """Random blocks with finite scales."""
    random = np.random.default_rng(3)
    size = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}[name]
    blocks = random.integers(0, 256, (rows, columns // 32, size), dtype=np.uint8)
    if name == "Q8_0":
        blocks[..., 2:] = np.maximum(blocks[..., 2:].view(np.int8), -127).view(np.uint8)
    for at in range(2 if name == "Q4_1" else 1):
        numbers = random.normal(size=(*blocks.shape[:2], 1)).astype(np.float16)
        blocks[..., 2 * at : 2 * at + 2] = numbers.view(np.uint8)
    return blocks


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q8_0"])
@pytest.mark.parametrize("tensor", ["ffn_up", "attn_q"])
def test_an_import_keeps_the_scales(tmp_path: Path, name: str, tensor: str) -> None:
    """Rows of Q are in another order there."""
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    blocks = blocks_of(name, 64, 96)
    kind = gguf.GGMLQuantizationType[name]
    writer.add_tensor(f"blk.0.{tensor}.weight", blocks.reshape(64, -1), raw_dtype=kind)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    tensors = {each.name: each for each in convert.open_gguf(tmp_path / "x.gguf").tensors}
    outputs = convert.checkpoint_outputs(GGUF_MODELS["llama"], tensors, 4, 2)
    (own_name, output), *_ = outputs.items()
    convert._write_scales(tmp_path / GROUPS_FILE, outputs)
    scales = load_file(tmp_path / GROUPS_FILE)
    second = {"Q4_0": "zero", "Q4_1": "minimum", "Q8_0": None}[name]
    kinds = ["scale"] if second is None else ["scale", second]
    assert sorted(read_group_headers(tmp_path)) == sorted(f"{own_name}.{each}" for each in kinds)
    weight = torch.from_numpy(np.concatenate(list(output.pieces()))).bfloat16()
    offset_OG = None if second is None else scales[f"{own_name}.{second}"]
    found = find_codes(weight, Groups(scales[f"{own_name}.scale"], offset_OG, second or "none"))  # type: ignore[arg-type]
    assert found is not None
    assert torch.equal(found.dequantized(), weight)
