"""Published formats: each tensor is read as its format defines it, any part of it, and what is broken is refused."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from disagg.engine.checkpoint.checkpoint import model_fingerprint, read_model_config
from disagg.engine.checkpoint.formats import reader as reader_module
from disagg.engine.checkpoint.formats.mxfp4 import Mxfp4
from disagg.engine.checkpoint.formats.names import ModulePatterns, ModuleTargets
from disagg.engine.checkpoint.formats.reader import TensorReader
from disagg.engine.checkpoint.formats.stored import stored_tensors
from disagg.engine.checkpoint.model_config import ExpertsConfig
from disagg.engine.checkpoint.weight_headers import read_headers
from disagg.engine.runner.model.parameters import plain as plain_of
from disagg.engine.runner.weight_targets import checkpoint_tensors
from disagg.engine.runner.weights import check_weights, load_parameters
from disagg.engine.sharding.model_shards import with_whole_experts
from disagg.engine.sharding.shards import WHOLE, Shard
from disagg.proto.errors import ConfigError
from tests.support.quantized import FORMATS, quantize_checkpoint
from tests.support.stepping import generate, make_runner, make_sequence
from tests.support.tiny_models import VOCAB_SIZE, make_checkpoint

CPU = torch.device("cpu")
PROMPT = [(7 * i * i + 3 * i + 5) % VOCAB_SIZE for i in range(40)]
DOWN = "model.layers.1.mlp.down_proj"
Q = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("plain"))


MADE: dict[str, tuple[Path, dict[str, Tensor]]] = {}


def quantized(name: str, plain: Path, folder: Path) -> tuple[Path, dict[str, Tensor]]:
    """A checkpoint in a format, and its values; it is made once and copied."""
    if name not in MADE:
        made = plain.with_name(name)
        shutil.copytree(plain, made)
        MADE[name] = made, quantize_checkpoint(name, made)
    made, values = MADE[name]
    shutil.copytree(made, folder, dirs_exist_ok=True)
    return folder, values


def opened(folder: Path) -> TensorReader:
    entries = read_headers(folder)
    return TensorReader(stored_tensors(entries, read_model_config(folder).weight_format), entries)


def read(reader: TensorReader, name: str, *part: range) -> Tensor:
    whole = torch.full([len(indices) for indices in part], float("nan"))
    for place, piece in reader.pieces(name, part):
        assert not place or piece.numel() <= max(reader_module.PIECE_ELEMENTS, piece.shape[-1])
        whole[place] = piece.to(torch.float32)
    return whole


# ---------------------------------------------------------------- values


DENSE = [name for name in FORMATS if name != "mxfp4"]


@pytest.mark.parametrize("name", DENSE)
def test_each_tensor_has_the_values_that_its_format_defines(
    plain: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole, in pieces of three rows, and each part of it, also one that begins inside of a word and of a group."""
    folder, values = quantized(name, plain, tmp_path)
    with opened(folder) as reader:
        for key, value in values.items():
            assert torch.equal(read(reader, key, *map(range, value.shape)), value), key
        monkeypatch.setattr(reader_module, "PIECE_ELEMENTS", 3 * 96)
        value = values[f"{DOWN}.weight"]
        for rows, columns in ((range(64), range(96)), (range(5, 43), range(37, 91)), (range(63, 64), range(1, 2))):
            found = read(reader, f"{DOWN}.weight", rows, columns)
            assert torch.equal(found, value[rows.start : rows.stop, columns.start : columns.stop])


def make_dequantized(folder: Path, values: dict[str, Tensor], target: Path) -> Path:
    shutil.copytree(folder, target)
    save_file(values, target / "model.safetensors")
    config = json.loads((target / "config.json").read_text())
    del config["quantization_config"]
    (target / "config.json").write_text(json.dumps(config))
    return target


def assert_same_model(folder: Path, dequantized: Path) -> None:
    """Parameters of one rank, of each of two, also with whole experts, and of each of two stages, in fp32 and in bf16;
    and the tokens."""
    configs = [read_model_config(each) for each in (folder, dequantized)]
    has_experts = any(isinstance(layer.ffn, ExpertsConfig) for layer in configs[0].layers)
    for shard, dtype, change in itertools.product(
        (WHOLE, Shard(0, 2), Shard(1, 2), Shard(0, 1, 0, 2), Shard(0, 1, 1, 2)),
        (torch.float32, torch.bfloat16),
        (None, with_whole_experts) if has_experts else (None,),
    ):
        models = [change(config) if change else config for config in configs]
        found, expected = (
            checkpoint_tensors(model, load_parameters(each, model, dtype, CPU, shard), shard)
            for each, model in zip((folder, dequantized), models, strict=True)
        )
        for key, target in found.items():
            assert all(map(torch.equal, target.tensors, expected[key].tensors)), key
    tokens = []
    for each in (folder, dequantized):
        sequence = make_sequence(PROMPT, [3, 1, 4])
        generate(make_runner(each), sequence, 6)
        tokens.append(sequence.token_ids[len(PROMPT) :])
    assert tokens[0] == tokens[1]
    assert len(tokens[0]) == 6


@pytest.mark.parametrize("name", DENSE)
def test_a_model_is_that_of_the_dequantized_weights(plain: Path, tmp_path: Path, name: str) -> None:
    folder, values = quantized(name, plain, tmp_path / "quantized")
    assert_same_model(folder, make_dequantized(folder, values, tmp_path / "dequantized"))


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("gpt_oss", "mxfp4"),
        ("qwen3_moe", "fp8_block"),
        ("deepseek_v3", "fp8_exponents"),
        ("mixtral", "awq"),
        ("phi3", "packed_int4_zeros"),
    ],
)
def test_models_with_experts_or_fused_tensors_are_those_of_the_dequantized_weights(
    tmp_path: Path, kind: str, name: str
) -> None:
    folder = make_checkpoint(kind, tmp_path / "quantized")
    values = quantize_checkpoint(name, folder)
    assert_same_model(folder, make_dequantized(folder, values, tmp_path / "dequantized"))


def test_mxfp4_has_the_values_of_the_microscaling_formats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All codes, exponents from the least to the greatest; experts as transformers has them."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    table = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    table += [-value for value in table]
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 16, (3, 10, 64), generator=generator)
    exponents = torch.tensor([0, 1, 100, 127, 128, 254])[torch.randint(0, 6, (3, 10, 2), generator=generator)]
    values = torch.tensor(table, dtype=torch.float64)[codes] * 2.0 ** (exponents.double() - 127).repeat_interleave(
        32, 2
    )
    blocks = (codes[..., 0::2] + 16 * codes[..., 1::2]).to(torch.uint8).view(3, 10, 2, 16)
    save_file({"x_blocks": blocks, "x_scales": exponents.to(torch.uint8)}, tmp_path / "model.safetensors")
    entries = read_headers(tmp_path)
    stored = stored_tensors(entries, Mxfp4(ModulePatterns()))
    assert {name: tensor.shape for name, tensor in stored.items()} == {"x": (3, 64, 10)}
    monkeypatch.setattr(reader_module, "PIECE_ELEMENTS", 50)
    expected = values.transpose(1, 2).float()
    oracle = convert_moe_packed_tensors(blocks, exponents.to(torch.uint8), dtype=torch.float32)
    assert torch.equal(oracle, expected)
    with TensorReader(stored, entries) as reader:
        assert torch.equal(read(reader, "x", range(3), range(64), range(10)), expected)
        assert torch.equal(read(reader, "x", range(1, 3), range(21, 50), range(4, 9)), expected[1:3, 21:50, 4:9])


def test_a_tensor_and_its_scales_may_be_in_different_files(plain: Path, tmp_path: Path) -> None:
    folder, values = quantized("gptq", plain, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map: dict[str, str] = {}
    for index, suffix in enumerate(("qweight", "qzeros", "scales", "g_idx", "weight")):
        file = f"model-{index}.safetensors"
        shard = {name: tensor for name, tensor in tensors.items() if name.endswith(f".{suffix}")}
        save_file(shard, folder / file)
        weight_map |= dict.fromkeys(shard, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with opened(folder) as reader:
        for key in (f"{Q}.weight", f"{DOWN}.weight", "model.norm.weight"):
            assert torch.equal(read(reader, key, *map(range, values[key].shape)), values[key])


@pytest.mark.parametrize(("layout", "zero"), [("gptq", 0.0), ("gptq_v2", 15.0)])
def test_a_zero_of_0_less_one_is_the_largest_number(layout: str, zero: float, plain: Path, tmp_path: Path) -> None:
    """As AutoGPTQ reads it: of four bits, 15 plus one is 0."""
    folder, _ = quantized("gptq", plain, tmp_path)
    change(folder, checkpoint_format=layout)
    tensors = load_file(folder / "model.safetensors")
    tensors[f"{Q}.qzeros"] = torch.full_like(tensors[f"{Q}.qzeros"], -1)  # eight times 15
    save_file(tensors, folder / "model.safetensors")
    words = tensors[f"{Q}.qweight"]
    numbers = torch.stack([words >> 4 * place & 15 for place in range(8)], dim=1).flatten(0, 1)
    scales = tensors[f"{Q}.scales"].float().repeat_interleave(32, dim=0)
    with opened(folder) as reader:
        found = read(reader, f"{Q}.weight", range(numbers.shape[1]), range(numbers.shape[0]))
    assert torch.equal(found, ((numbers - zero) * scales).T)


def test_biases_of_zeros_of_experts_are_left_aside(tmp_path: Path) -> None:
    folder = make_checkpoint("mixtral", tmp_path)
    quantize_checkpoint("gptq", folder)
    name = "model.layers.0.block_sparse_moe.experts.1.w2.bias"
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {name: torch.zeros(64)}, folder / "model.safetensors")
    check_weights(folder)
    save_file(tensors | {name: torch.ones(64)}, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=rf"tensor {name} is not zero, but not part of MixtralForCausalLM"):
        check_weights(folder)


def test_the_fingerprint_covers_what_numbers_mean(plain: Path, tmp_path: Path) -> None:
    """The same files with another convention of zeros are another model."""
    folder, _ = quantized("gptq", plain, tmp_path)
    before = model_fingerprint(folder, "bfloat16")
    change(folder, checkpoint_format="gptq_v2")
    assert model_fingerprint(folder, "bfloat16") != before


@pytest.mark.parametrize(
    ("patterns", "module", "matches"),
    [
        (["lm_head"], "lm_head", True),
        (["model.layers.1"], "model.layers.1.mlp.up_proj", True),
        (["model.layers.1"], "model.layers.11.mlp.up_proj", False),
        (["model.layers.*.self_attn"], "model.layers.7.self_attn.q_proj", True),
        (["mlp.gate"], "model.layers.7.mlp.gate_proj", False),
        (["gate"], "model.layers.7.mlp.gate", True),
        ([], "lm_head", False),
    ],
)
def test_names_that_are_not_converted(patterns: list[str], module: str, matches: bool) -> None:
    assert (module in ModulePatterns(tuple(patterns))) == matches


@pytest.mark.parametrize(
    ("targets", "module", "matches"),
    [
        (["lm_head"], "model.lm_head", False),
        (["re:.*lm_head"], "model.lm_head", True),
        (["re:.*mlp.gate$"], "model.layers.0.mlp.gate_proj", False),
        (["re:(a+)+$"], "a" * 60 + "!", False),
    ],
)
def test_targets_of_compressed_tensors(targets: list[str], module: str, matches: bool) -> None:
    assert (module in ModuleTargets(tuple(targets))) == matches


def test_biases_of_zeros_that_files_in_gptq_have_are_left_aside(plain: Path, tmp_path: Path) -> None:
    folder, _ = quantized("gptq", plain, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    before = load_parameters(folder, read_model_config(folder), torch.float32, CPU)
    save_file(tensors | {f"{Q}.bias": torch.zeros(64)}, folder / "model.safetensors")
    after = load_parameters(folder, read_model_config(folder), torch.float32, CPU)
    assert torch.equal(plain_of(before.layers[0].qkv_weight_QH), plain_of(after.layers[0].qkv_weight_QH))
    bias = torch.zeros(64)
    bias[63] = 1e-6
    save_file(tensors | {f"{Q}.bias": bias}, folder / "model.safetensors")
    message = rf"tensor {Q}\.bias is not zero, but not part of LlamaForCausalLM"
    with pytest.raises(ConfigError, match=message):
        load_parameters(folder, read_model_config(folder), torch.float32, CPU)
    with pytest.raises(ConfigError, match=message):
        check_weights(folder)


# ---------------------------------------------------------------- refusals


def change(folder: Path, **fields: Any) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"] = {**config["quantization_config"], **fields}
    file.write_text(json.dumps(config))


def change_group(folder: Path, **fields: Any) -> None:
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    group = config["config_groups"]["group_0"]
    change(folder, config_groups={"group_0": group | {"weights": group["weights"] | fields}})


Mend = Callable[[dict[str, Tensor]], None]


def without(name: str) -> Mend:
    return lambda tensors: tensors.__delitem__(name)


def with_value(name: str, value: float) -> Mend:
    def mend(tensors: dict[str, Tensor]) -> None:
        tensors[name].view(-1)[-1] = value

    return mend


def having(name: str, tensor: Callable[[Tensor], Tensor], of: str | None = None) -> Mend:
    def mend(tensors: dict[str, Tensor]) -> None:
        tensors[name] = tensor(tensors[of or name]).clone(memory_format=torch.contiguous_format)

    return mend


BROKEN_TENSORS: list[tuple[str, Mend, str]] = [
    (
        "fp8_block",
        without(f"{DOWN}.weight_scale_inv"),
        rf"{DOWN}.weight is quantized, but \S+scale_inv is missing",
    ),
    (
        "fp8_block",
        having(f"{DOWN}.weight_scale_inv", lambda t: t[:, :2]),
        rf"{DOWN}.weight_scale_inv has shape \[2, 2\]; \S+ \[64, 96\] requires \[2, 3\]",
    ),
    (
        "fp8_block",
        with_value(f"{DOWN}.weight_scale_inv", float("nan")),
        f"{DOWN}.weight_scale_inv has a scale that is not",
    ),
    (
        "fp8_block",
        having(f"{DOWN}.weight", lambda t: t.to(torch.float8_e5m2)),
        f"{DOWN}.weight is F8_E5M2; supported are F8_E4M3",
    ),
    (
        "fp8_block",
        having(f"{Q}.weight", lambda t: t.to(torch.int8)),
        f"{Q}.weight_scale_inv is not part of LlamaForCausalLM",
    ),
    ("fp8_exponents", with_value(f"{Q}.weight_scale_inv", 255), f"{Q}.weight_scale_inv has a scale that is not finite"),
    ("fp8_tensor", with_value(f"{Q}.weight_scale", float("inf")), f"{Q}.weight_scale has a scale that is not finite"),
    ("fp8_tensor", having(f"{Q}.weight_scale", lambda t: t.long()), f"{Q}.weight_scale is I64; supported are F32"),
    ("fp8_channel", having(f"{Q}.weight_scale", lambda t: t[:-1]), rf"{Q}.weight_scale has shape \[63, 1\]"),
    (
        "fp8_channel",
        having("lm_head.weight_scale", lambda t: t, of=f"{Q}.weight_scale"),
        "lm_head.weight_scale is not part of LlamaForCausalLM",
    ),
    (
        "packed_int4",
        without(f"{DOWN}.weight_scale"),
        rf"{DOWN}.weight_packed is quantized, but {DOWN}.weight_scale is missing",
    ),
    ("packed_int4", without(f"{DOWN}.weight_shape"), rf"\S+ is quantized, but {DOWN}.weight_shape is missing"),
    (
        "packed_int4",
        with_value(f"{DOWN}.weight_shape", 95),
        rf"{DOWN}.weight_shape says \[64, 95\], but \S+ has \[64, 96\]",
    ),
    (
        "packed_int4",
        having(f"{DOWN}.weight_packed", lambda t: t.long()),
        f"{DOWN}.weight_packed is I64; supported are I32",
    ),
    (
        "packed_int4",
        having(f"{DOWN}.weight_packed", lambda t: t[:, :-1]),
        f"{DOWN}.weight_packed has 88 input channels, no multiple of 32",
    ),
    ("packed_int4", having(f"{DOWN}.weight_scale", lambda t: t.T), rf"{DOWN}.weight_scale has shape \[3, 64\]"),
    (
        "packed_int4",
        with_value(f"{DOWN}.weight_scale", float("nan")),
        f"{DOWN}.weight_scale has a scale that is not finite",
    ),
    (
        "packed_int4",
        having(f"{Q}.weight", lambda t: t.float(), of=f"{Q}.weight_packed"),
        f"{Q}.weight is stored twice",
    ),
    (
        "packed_int4",
        having(f"{Q}.weight_zero_point", lambda t: t, of=f"{Q}.weight_packed"),
        f"{Q}.weight_zero_point is not part of LlamaForCausalLM",
    ),
    (
        "packed_int4_zeros",
        without(f"{Q}.weight_zero_point"),
        rf"\S+ is quantized, but {Q}.weight_zero_point is missing",
    ),
    (
        "packed_int4_zeros",
        having(f"{Q}.weight_zero_point", lambda t: t.repeat(2, 1)),
        rf"{Q}.weight_zero_point has shape \[16, 2\]; \S+ \[64, 8\] requires \[8, 2\]",
    ),
    ("packed_int4_order", without(f"{Q}.weight_g_idx"), rf"\S+ is quantized, but {Q}.weight_g_idx is missing"),
    ("packed_int4_order", with_value(f"{Q}.weight_g_idx", 2), f"{Q}.weight_g_idx names groups beyond the 2 of {Q}"),
    (
        "int8_channel",
        having(f"{Q}.weight", lambda t: t.to(torch.float8_e4m3fn)),
        f"{Q}.weight is F8_E4M3; supported are I8",
    ),
    (
        "int8_channel",
        having(f"{Q}.weight", lambda t: t[:, :32]),
        rf"{Q}.weight has shape \[64, 32\]; config.json requires",
    ),
    ("float8_channel", without(f"{Q}.weight_scale"), rf"\S+ is quantized, but {Q}.weight_scale is missing"),
    ("gptq", without(f"{Q}.qzeros"), f"{Q}.qweight is quantized, but {Q}.qzeros is missing"),
    ("gptq", without(f"{Q}.scales"), rf"\S+ is quantized, but {Q}.scales is missing"),
    (
        "gptq",
        without(f"{Q}.qweight"),
        f"tensor {Q}.qzeros is not part of|{Q}.scales is not part of|{Q}.g_idx is not part of",
    ),
    (
        "gptq",
        having(f"{Q}.qzeros", lambda t: t[:1]),
        rf"{Q}.qzeros has shape \[1, 8\]; \S+ \[8, 64\] requires \[2, 8\]",
    ),
    ("gptq", having(f"{DOWN}.qweight", lambda t: t[:-1]), f"{DOWN}.qweight has 88 input channels, no multiple of 32"),
    (
        "gptq",
        having(f"{DOWN}.qweight", lambda t: t[:, :-1]),
        f"{DOWN}.qweight has 63 output channels, no multiple of 8",
    ),
    ("gptq", with_value(f"{DOWN}.scales", float("-inf")), f"{DOWN}.scales has a scale that is not finite"),
    ("gptq", with_value(f"{DOWN}.g_idx", 0), f"{DOWN}.g_idx has groups out of order, but `desc_act` is false"),
    ("gptq", with_value(f"{DOWN}.g_idx", -1), f"{DOWN}.g_idx names groups beyond the 3"),
    ("gptq_order", without(f"{DOWN}.g_idx"), rf"\S+ is quantized, but {DOWN}.g_idx is missing"),
    ("awq", without(f"{Q}.qzeros"), rf"\S+ is quantized, but {Q}.qzeros is missing"),
    ("awq", having(f"{Q}.scales", lambda t: t.T), rf"{Q}.scales has shape \[64, 2\]; \S+ \[64, 8\] requires \[2, 64\]"),
    ("awq", with_value(f"{Q}.scales", float("nan")), f"{Q}.scales has a scale that is not finite"),
    ("awq", having(f"{Q}.qweight", lambda t: t[:33]), f"{Q}.qweight has 33 input channels, no multiple of 32"),
]


@pytest.mark.parametrize(("name", "mend", "message"), BROKEN_TENSORS, ids=range(len(BROKEN_TENSORS)))
def test_broken_tensors_are_refused(plain: Path, tmp_path: Path, name: str, mend: Mend, message: str) -> None:
    folder, _ = quantized(name, plain, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    mend(tensors)
    save_file(tensors, folder / "model.safetensors")
    for refuse in (
        check_weights,
        lambda folder: load_parameters(folder, read_model_config(folder), torch.bfloat16, CPU),
    ):
        with pytest.raises(ConfigError, match=rf"^{folder}/model\.safetensors: tensor ({message})"):
            refuse(folder)


BROKEN_FIELDS: list[tuple[str, dict[str, Any], str]] = [
    ("fp8_block", {"quant_method": "modelopt"}, "`quant_method` 'modelopt' is not supported"),
    ("fp8_block", {"quant_method": None}, "`quant_method` None is not supported"),
    ("fp8_block", {"fmt": "e5m2"}, "`fmt` 'e5m2' is not supported"),
    ("fp8_block", {"activation_scheme": "sometimes"}, "`activation_scheme` 'sometimes' is not supported"),
    ("fp8_block", {"expert_dtype": "fp4"}, "`expert_dtype` 'fp4' is not supported"),
    ("fp8_block", {"scale_fmt": "log"}, "`scale_fmt` 'log' is not supported"),
    (
        "fp8_block",
        {"weight_block_size": [128]},
        r"`weight_block_size` must be a list of 2 positive whole numbers, not \[128\]",
    ),
    ("fp8_block", {"weight_block_size": [0, 128]}, "`weight_block_size` must be a list of 2"),
    ("fp8_block", {"modules_to_not_convert": "lm_head"}, "`modules_to_not_convert` must be a list of names"),
    ("fp8_block", {"rotation": "hadamard"}, "`rotation` 'hadamard' is not known"),
    ("packed_int4", {"format": "marlin-24"}, "`format` 'marlin-24' is not supported"),
    ("packed_int4", {"quantization_status": "initialized"}, "`quantization_status` 'initialized' is not supported"),
    ("packed_int4", {"transform_config": {"config_groups": {}}}, "`transform_config` .* is not supported"),
    (
        "packed_int4",
        {"sparsity_config": {"format": "sparse-24-bitmask"}},
        "`format` 'sparse-24-bitmask' is not supported",
    ),
    ("packed_int4", {"config_groups": {}}, "`config_groups` is empty"),
    ("packed_int4", {"config_groups": None}, "`config_groups` is missing"),
    ("packed_int4", {"ignore": ["re:("]}, r"`ignore`: 're:\(' is no regular expression"),
    ("gptq", {"bits": 3}, "`bits` 3 is not supported; supported: 2, 4, 8"),
    ("gptq", {"bits": "4"}, "`bits` '4' is not supported"),
    ("gptq", {"group_size": 0}, "`group_size` must be -1 or positive, not 0"),
    ("gptq", {"group_size": None}, "`group_size` is missing"),
    ("gptq", {"checkpoint_format": "marlin"}, "`checkpoint_format` 'marlin' is not supported"),
    ("gptq", {"pack_dtype": "int16"}, "`pack_dtype` 'int16' is not supported"),
    ("gptq", {"dynamic": {"-:lm_head": {}}}, "`dynamic` .* is not supported"),
    ("gptq", {"desc_act": "yes"}, "`desc_act` must be true or false"),
    ("awq", {"bits": 8}, "`bits` 8 is not supported"),
    ("awq", {"version": "gemv"}, "`version` 'gemv' is not supported"),
    ("awq", {"zero_point": False}, "`zero_point` False is not supported"),
    ("awq", {"group_size": -1}, "`group_size` must be a whole number of at least 1"),
]


@pytest.mark.parametrize(("name", "fields", "message"), BROKEN_FIELDS, ids=range(len(BROKEN_FIELDS)))
def test_fields_that_are_not_supported_are_refused(
    plain: Path, tmp_path: Path, name: str, fields: dict[str, Any], message: str
) -> None:
    shutil.copy(plain / "config.json", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": FORMATS[name].config}))
    read_model_config(tmp_path)
    change(tmp_path, **fields)
    with pytest.raises(ConfigError, match=rf"^{tmp_path}/config\.json: \w+: {message}"):
        read_model_config(tmp_path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_bits": 3}, "`num_bits` 3 is not supported; supported: 4, 8"),
        ({"type": "float"}, "`type` 'float' is not supported; supported: 'int'"),
        ({"strategy": "tensor"}, "`strategy` 'tensor' is not supported; supported: 'channel', 'group'"),
        ({"dynamic": True}, "`dynamic` True is not supported"),
        ({"actorder": "random"}, "`actorder` 'random' is not supported"),
        ({"symmetric": "mostly"}, "`symmetric` must be true or false"),
        ({"group_size": None}, "`group_size` is missing"),
        ({"codebook": "k-means"}, "`codebook` 'k-means' is not known"),
    ],
)
def test_weights_of_a_group_that_are_not_supported_are_refused(
    plain: Path, tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    shutil.copy(plain / "config.json", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": FORMATS["packed_int4"].config}))
    read_model_config(tmp_path)
    change_group(tmp_path, **fields)
    with pytest.raises(ConfigError, match=rf"^{tmp_path}/config\.json: \w+: {message}"):
        read_model_config(tmp_path)


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("fp8_block", {"modules_to_not_convert": [DOWN]}, f"{DOWN}.weight is quantized, but .* excludes {DOWN}"),
        ("awq", {"modules_to_not_convert": ["down_proj"]}, r"down_proj.qweight is quantized, but .* excludes"),
        ("packed_int4", {"ignore": ["re:.*layers.1.mlp.*"]}, r"is quantized, but `quantization_config` excludes"),
        (
            "fp8_block",
            {"weight_block_size": [64, 64]},
            r"scale_inv has shape \[2, 3\]; \S+ \[64, 96\] requires \[1, 2\]",
        ),
        (
            "fp8_block",
            {"weight_block_size": None},
            r"scale_inv has shape \[2, 3\]; \S+ \[64, 96\] requires \[\] or \[1\]",
        ),
        ("gptq", {"bits": 8}, r"has \d+ input channels, no multiple of 32|requires"),
        ("gptq", {"group_size": 64}, r"requires|no multiple of 64"),
        ("awq", {"group_size": 16}, r"requires \[\d+, \d+\]"),
    ],
)
def test_fields_that_contradict_the_tensors_are_refused(
    plain: Path, tmp_path: Path, name: str, fields: dict[str, Any], message: str
) -> None:
    folder, _ = quantized(name, plain, tmp_path)
    change(folder, **fields)
    with pytest.raises(ConfigError, match=rf"^{folder}/model\.safetensors: tensor .*{message}"):
        load_parameters(folder, read_model_config(folder), torch.bfloat16, CPU)


def test_a_group_for_other_modules_is_refused(plain: Path, tmp_path: Path) -> None:
    folder, _ = quantized("packed_int4", plain, tmp_path)
    group = FORMATS["packed_int4"].config["config_groups"]["group_0"]
    change(folder, config_groups={"group_0": group | {"targets": ["re:.*self_attn.*"]}})
    with pytest.raises(
        ConfigError, match=r"mlp\.\w+_proj\.weight_packed is quantized, but no group of `config_groups`"
    ):
        load_parameters(folder, read_model_config(folder), torch.bfloat16, CPU)


@pytest.mark.parametrize(
    ("mend", "message"),
    [
        (without("x_scales"), "tensor x_blocks is quantized, but x_scales is missing"),
        (having("x_blocks", lambda t: t[..., :8]), "tensor x_blocks has blocks of 8 bytes, not of 16"),
        (having("x_blocks", lambda t: t.flatten(2)), r"x_blocks has shape \[3, 10, 32\]; it must have 4 dimensions"),
        (having("x_blocks", lambda t: t.int()), "x_blocks is I32; supported are U8"),
        (having("x_scales", lambda t: t[:, :9]), r"x_scales has shape \[3, 9, 2\]; .* requires \[3, 10, 2\]"),
        (with_value("x_scales", 255), "x_scales has a scale that is not finite"),
    ],
)
def test_broken_mxfp4_is_refused(tmp_path: Path, mend: Mend, message: str) -> None:
    tensors = {
        "x_blocks": torch.zeros(3, 10, 2, 16, dtype=torch.uint8),
        "x_scales": torch.full((3, 10, 2), 127, dtype=torch.uint8),
    }
    mend(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    entries = read_headers(tmp_path)
    with (
        pytest.raises(ConfigError, match=message),
        TensorReader(stored_tensors(entries, Mxfp4(ModulePatterns())), entries) as reader,
    ):
        read(reader, "x", range(3), range(64), range(10))
