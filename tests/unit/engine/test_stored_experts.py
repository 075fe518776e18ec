"""`quantization: stored` of experts in MXFP4: they are computed from their codes, and no bit of a result is another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from disagg.engine.checkpoint.formats.mxfp4 import WEIGHT_BYTES
from disagg.engine.checkpoint.formats.reader import TensorReader
from disagg.engine.runner import loaded_weights
from disagg.engine.runner.expert_floats import ExpertFloats
from disagg.engine.runner.model.parameters import ExpertsParameters
from disagg.engine.runner.model_runner import TorchModelRunner
from disagg.kernels import dispatch
from disagg.kernels.cpu.linear import NativeExpertWeight
from disagg.kernels.mxfp4 import Mxfp4Weight
from disagg.proto.errors import ConfigError
from tests.support.quantized import quantize_checkpoint
from tests.support.stepping import generate, make_runner, make_sequence
from tests.support.tiny_models import VOCAB_SIZE, make_checkpoint

PROMPT = [(7 * i * i + 3 * i + 5) % VOCAB_SIZE for i in range(40)]
EXPERTS = "model.layers.1.mlp.experts"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_checkpoint("gpt_oss", tmp_path_factory.mktemp("gpt-oss"), dtype=torch.bfloat16)
    quantize_checkpoint("mxfp4", folder)
    return folder


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    """A copy to change."""
    for path in original.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def changed(folder: Path, changes: dict[str, Tensor], without: tuple[str, ...] = ()) -> Path:
    tensors = load_file(folder / "model.safetensors") | changes
    save_file({name: each for name, each in tensors.items() if name not in without}, folder / "model.safetensors")
    return folder


def experts_of(runner: TorchModelRunner) -> list[NativeExpertWeight]:
    """Gate and up, then down, of each layer."""
    found = []
    for layer in runner._parameters.layers:
        assert isinstance(layer.ffn, ExpertsParameters)
        found += [layer.ffn.gate_up_weight_L2IH, layer.ffn.down_weight_LHI]
    assert all(isinstance(weight, NativeExpertWeight) for weight in found)
    return found  # type: ignore[return-value]


def assert_same_results(folder: Path, **changes: Any) -> tuple[list[NativeExpertWeight], list[NativeExpertWeight]]:
    """The experts with and without; logits of a prompt and of decode steps are equal, as is the fingerprint."""
    stored, plain = (make_runner(folder, dtype="bfloat16", quantization=name, **changes) for name in ("stored", "none"))
    sequences = [make_sequence(PROMPT, [3, 1, 4, 5]) for _ in range(2)]
    found, wanted = (generate(runner, each, 8) for runner, each in zip((stored, plain), sequences, strict=True))
    assert len(found) == 8
    assert all(map(torch.equal, found, wanted))
    assert sequences[0].token_ids == sequences[1].token_ids
    assert stored.fingerprint == plain.fingerprint
    assert stored.arithmetic == plain.arithmetic
    return experts_of(stored), experts_of(plain)


def test_results_are_those_of_the_numbers_in_bf16_from_a_quarter_of_the_bytes(original: Path) -> None:
    stored, plain = assert_same_results(original)
    for weight, other in zip(stored, plain, strict=True):
        num_weights = 8 * other.out_features * other.in_features
        assert (weight.packed.nbytes, other.packed.nbytes) == (num_weights * WEIGHT_BYTES, num_weights * 2)


def test_no_weight_of_experts_is_dequantized_at_load(original: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, pieces = list[str](), TensorReader.pieces

    def noted(self: TensorReader, name: str, part: Any) -> Any:
        read.append(name)
        return pieces(self, name, part)

    monkeypatch.setattr(TensorReader, "pieces", noted)
    make_runner(original, dtype="bfloat16", quantization="stored")
    assert f"{EXPERTS}.gate_up_proj_bias" in read
    assert not [name for name in read if name.endswith(("gate_up_proj", "experts.down_proj"))]


def test_exponents_beyond_those_of_bf16_change_nothing(folder: Path) -> None:
    """Zeros often have the least exponent, and a number below bf16's normal ones is as small as it was."""
    name = f"{EXPERTS}.down_proj_scales"
    scales = load_file(folder / "model.safetensors")[name]
    scales[:, :5] = torch.arange(5, dtype=torch.uint8)[:, None]
    stored, _ = assert_same_results(changed(folder, {name: scales}))
    assert {weight.packed.shape[-1] for weight in stored} == {544}


def test_a_layer_with_one_plain_product_is_computed_in_bf16(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    numbers = torch.randn(8, 96, 64, generator=torch.Generator().manual_seed(1)).bfloat16() / 9
    plain, parts = f"{EXPERTS}.down_proj", (f"{EXPERTS}.down_proj_blocks", f"{EXPERTS}.down_proj_scales")
    dispatch._warn_not_stored.cache_clear()
    stored, _ = assert_same_results(changed(folder, {plain: numbers}, parts))
    assert [weight.packed.shape[-1] for weight in stored] == [544, 544, 64, 64, 544, 544]
    for shape in ([8, 192, 64], [8, 64, 96]):
        assert f"stored weights: one of shape {shape} is computed from its numbers in full size" in caplog.text


def test_a_scale_that_is_no_number_is_refused(folder: Path) -> None:
    name = f"{EXPERTS}.gate_up_proj_scales"
    scales = load_file(folder / "model.safetensors")[name]
    scales[7, 100, 1] = 255
    changed(folder, {name: scales})
    for quantization in ("none", "stored"):
        with pytest.raises(ConfigError, match=f"tensor {name} has a scale that is not finite"):
            make_runner(folder, dtype="bfloat16", quantization=quantization)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quantization": "stored", "tp": 2}, "stored is for workers of one rank, not of 2"),
        ({"quantization": "stored", "tp": 2, "ep": True}, "stored is for workers of one rank, not of 2"),
        ({"quantization": "stored", "dtype": "float32"}, "stored needs dtype bfloat16, not float32"),
        (
            {"quantization": "stored_sums"},
            "stored_sums, but the checkpoint has no linear weights in groups of 4 or 8 bits",
        ),
        ({"quantization": "int4"}, "int4 is not supported for experts"),
    ],
)
def test_what_cannot_be_is_refused(original: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^quantization: {message}$"):
        make_runner(original, **{"dtype": "bfloat16", **changes})


def test_a_checkpoint_without_such_experts_is_refused(tmp_path: Path) -> None:
    folder = make_checkpoint("gpt_oss", tmp_path, dtype=torch.bfloat16)
    with pytest.raises(ConfigError, match=r"^quantization: stored, but the .* 4 or 8 bits and no experts in MXFP4$"):
        make_runner(folder, dtype="bfloat16", quantization="stored")


def test_shared_weights_are_mapped_as_they_are(original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISAGG_HOME", str(tmp_path))
    make_runner(original, dtype="bfloat16", quantization="stored", share_weights=True)
    monkeypatch.setattr(loaded_weights, "load_parameters", None)  # the second one maps the file
    mapped = make_runner(original, dtype="bfloat16", quantization="stored", share_weights=True)
    monkeypatch.undo()
    plain = make_runner(original, dtype="bfloat16")
    found, wanted = (generate(runner, make_sequence(PROMPT, [3, 1, 4]), 3) for runner in (mapped, plain))
    assert all(map(torch.equal, found, wanted))


def test_experts_lie_where_their_parameter_would(original: Path) -> None:
    """Gate and up of a feature are neighbours in the file, and halves of the parameter."""
    parameter = torch.empty(2, 2 * 3, 64, dtype=torch.bfloat16)
    view_LHI2 = parameter.view(2, 2, 3, 64).permute(0, 3, 2, 1)
    random = torch.Generator().manual_seed(1)
    weights = [
        Mxfp4Weight(*(torch.randint(0, 256, (1, 6, size), generator=random).byte() for size in (32, 2)))
        for _ in range(2)
    ]
    kept = ExpertFloats()
    are_none = [kept.are_none]
    for index, weight in enumerate(weights):
        kept.put(view_LHI2[index : index + 1], weight)
    assert [*are_none, kept.are_none] == [True, False]
    found = kept.take(parameter)
    assert found is not None
    order = [0, 2, 4, 1, 3, 5]
    for index, weight in enumerate(weights):
        assert torch.equal(found.code_LOB[index], weight.code_LOB[0, order])
        assert torch.equal(found.exponent_LOG[index], weight.exponent_LOG[0, order])
    assert kept.take(parameter) is None
