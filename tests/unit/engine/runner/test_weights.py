"""Weight files: every parameter lands where it belongs, every mistake in the files is refused by name."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from disagg.engine.checkpoint.checkpoint import read_model_config
from disagg.engine.checkpoint.weight_headers import TensorEntry, read_header, weight_files
from disagg.engine.runner.model.parameters import DenseParameters, ModelParameters, plain
from disagg.engine.runner.weight_targets import checkpoint_tensors
from disagg.engine.runner.weights import load_parameters
from disagg.proto.errors import ConfigError
from tests.support.tiny_models import KINDS, make_checkpoint

CPU = torch.device("cpu")
GATE = "model.layers.1.mlp.gate_proj.weight"
HEAD = "lm_head.weight"


def load(folder: Path, dtype: torch.dtype = torch.float32) -> ModelParameters:
    return load_parameters(folder, read_model_config(folder), dtype, CPU)


def stored(folder: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = load_file(folder / "model.safetensors")
    return tensors


def store(folder: Path, tensors: dict[str, Tensor]) -> None:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


@pytest.mark.parametrize("kind", KINDS)
def test_every_tensor_of_the_checkpoint_is_loaded(tmp_path: Path, kind: str) -> None:
    folder = make_checkpoint(kind, tmp_path)
    parameters = load(folder)
    loaded = checkpoint_tensors(read_model_config(folder), parameters)
    expected = stored(folder)
    assert loaded.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(loaded[name].parameter, tensor), name


def test_fused_parameters_hold_q_k_v_and_gate_up_in_order(tmp_path: Path) -> None:
    folder = make_checkpoint("qwen2", tmp_path)
    tensors = stored(folder)
    layer = load(folder).layers[2]
    prefix = "model.layers.2."
    qkv = [tensors[f"{prefix}self_attn.{part}_proj.weight"] for part in "qkv"]
    bias = [tensors[f"{prefix}self_attn.{part}_proj.bias"] for part in "qkv"]
    gate_up = [tensors[f"{prefix}mlp.{part}_proj.weight"] for part in ("gate", "up")]
    assert torch.equal(plain(layer.qkv_weight_QH), torch.cat(qkv))
    assert layer.qkv_bias_Q is not None
    assert torch.equal(layer.qkv_bias_Q, torch.cat(bias))
    assert isinstance(layer.ffn, DenseParameters)
    assert torch.equal(plain(layer.ffn.gate_up_weight_2IH), torch.cat(gate_up))


def test_shards_hold_the_same_as_one_file(tmp_path: Path) -> None:
    whole = make_checkpoint("qwen3", tmp_path / "whole")
    shards = make_checkpoint("qwen3", tmp_path / "shards", shard_bytes=100_000)
    assert len(list(shards.glob("*.safetensors"))) > 2
    one = checkpoint_tensors(read_model_config(whole), load(whole))
    other = checkpoint_tensors(read_model_config(shards), load(shards))
    assert all(torch.equal(one[name].parameter, other[name].parameter) for name in one)


def test_weights_are_cast(tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path)
    parameters = load(folder, torch.bfloat16)
    assert torch.equal(plain(parameters.lm_head_VH), stored(folder)[HEAD].to(torch.bfloat16))
    assert {
        target.parameter.dtype for target in checkpoint_tensors(read_model_config(folder), parameters).values()
    } == {torch.bfloat16}


def test_tied_embeddings_are_one_tensor(tmp_path: Path) -> None:
    parameters = load(make_checkpoint("llama_tied", tmp_path))
    assert parameters.lm_head_VH is parameters.embedding_VH


def test_a_stored_head_beside_tied_embeddings_must_equal_them(tmp_path: Path) -> None:
    folder = make_checkpoint("llama_tied", tmp_path)
    tensors = stored(folder)
    embedding = tensors["model.embed_tokens.weight"]
    store(folder, {**tensors, HEAD: embedding.clone()})
    assert torch.equal(load(folder).embedding_VH, embedding)

    store(folder, {**tensors, HEAD: embedding + 1})
    with pytest.raises(ConfigError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight, but `tie_word"):
        load(folder)


def test_stored_rope_frequencies_are_left_aside(tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path)
    tensors = stored(folder)
    store(folder, {**tensors, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})
    assert torch.equal(load(folder).embedding_VH, tensors["model.embed_tokens.weight"])


def test_missing_tensors_are_named(tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path)
    tensors = stored(folder)
    store(folder, {name: tensor for name, tensor in tensors.items() if name != GATE})
    with pytest.raises(ConfigError, match=rf"the weights lack {GATE}$"):
        load(folder)
    store(folder, {name: tensor for name, tensor in tensors.items() if "mlp" not in name})
    with pytest.raises(ConfigError, match=r"the weights lack (model\.layers\S+, ){2}model\.layers\S+ and 6 more$"):
        load(folder)


def test_an_unexpected_shape_is_named_with_both_shapes(tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path)
    store(folder, {**stored(folder), GATE: torch.zeros(96, 63)})
    with pytest.raises(ConfigError, match=rf"tensor {GATE} has shape \[96, 63\]; config.json requires \[96, 64\]"):
        load(folder)


def test_a_tensor_of_another_model_is_refused(tmp_path: Path) -> None:
    """A Llama config over weights with biases would quietly leave them out."""
    folder = make_checkpoint("llama", tmp_path)
    name = "model.layers.0.self_attn.q_proj.bias"
    store(folder, {**stored(folder), name: torch.zeros(64)})
    with pytest.raises(ConfigError, match=f"tensor {name} is not part of LlamaForCausalLM"):
        load(folder)


def test_integers_are_refused(tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path)
    store(folder, {**stored(folder), GATE: torch.zeros((96, 64), dtype=torch.int8)})
    with pytest.raises(ConfigError, match=rf"tensor {GATE} is I8; supported are F64, F32, BF16, F16"):
        load(folder)


def test_a_file_that_is_cut_short_is_refused(tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(ConfigError, match=r"model\.safetensors: cut short: \d+ bytes of \d+"):
        load(folder)


def test_a_header_whose_tensors_overlap_is_refused(tmp_path: Path) -> None:
    """What our own reading of the header lets pass, the library's check does not."""
    folder = make_checkpoint("llama", tmp_path)
    file = folder / "model.safetensors"
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header[GATE]["data_offsets"] = header["model.layers.1.mlp.up_proj.weight"]["data_offsets"]
    changed = json.dumps(header).encode()
    file.write_bytes(len(changed).to_bytes(8, "little") + changed + content[8 + length :])
    with pytest.raises(ConfigError, match=r"model\.safetensors: cannot be read: "):
        load(folder)


def test_a_missing_shard_is_refused(tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path, shard_bytes=100_000)
    shard = sorted(folder.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ConfigError, match=f"{shard.name}: the shard is missing"):
        load(folder)


def test_pickles_are_never_read(tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="weights must be safetensors"):
        load(folder)


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("stream", "shown"), [(_Terminal(), True), (io.StringIO(), False)])
def test_progress_shows_on_a_terminal_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: io.StringIO, shown: bool
) -> None:
    folder = make_checkpoint("llama", tmp_path)
    monkeypatch.setattr(sys, "stderr", stream)
    load(folder)
    assert ("loading weights" in stream.getvalue()) == shown


# ---------------------------------------------------------------- weight files


def write_weights(file: Path, **tensors: Tensor) -> Path:
    save_file(tensors, file)
    return file


def write_index(folder: Path, weight_map: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_one_weight_file_goes_before_an_index(tmp_path: Path) -> None:
    write_index(tmp_path, {"a": "model-1.safetensors"})
    single = write_weights(tmp_path / "model.safetensors", a=torch.zeros(3))
    assert weight_files(tmp_path) == (single,)


def test_shards_come_sorted_and_once(tmp_path: Path) -> None:
    files = [write_weights(tmp_path / f"model-{i}.safetensors", a=torch.zeros(1)) for i in range(3)]
    write_index(tmp_path, {"a": files[2].name, "b": files[0].name, "c": files[1].name, "d": files[0].name})
    assert weight_files(tmp_path) == tuple(files)


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"a": "model-1.safetensors"}, r"model-1\.safetensors: the shard is missing; model\.safetensors\.index\.json"),
        ({"a": "../other.safetensors"}, "must name files of this folder"),
        ({"a": 3}, "must name files of this folder"),
        ({}, "`weight_map` is missing or empty"),
        (None, "`weight_map` is missing or empty"),
    ],
)
def test_a_bad_index_is_refused(tmp_path: Path, weight_map: object, message: str) -> None:
    write_index(tmp_path, weight_map)
    with pytest.raises(ConfigError, match=message):
        weight_files(tmp_path)


def test_a_folder_without_safetensors_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ConfigError, match=r"there is no model\.safetensors and no model\.safetensors\.index\.json"):
        weight_files(tmp_path)


def test_a_header_names_types_and_shapes(tmp_path: Path) -> None:
    file = write_weights(tmp_path / "w", a=torch.zeros(2, 3), b=torch.zeros(4, dtype=torch.float16))
    size = file.stat().st_size
    assert read_header(file) == {
        "a": TensorEntry(file, "F32", (2, 3), size - 32, size - 8),
        "b": TensorEntry(file, "F16", (4,), size - 8, size),
    }


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    file = write_weights(tmp_path / "w", a=torch.zeros(2, 3))
    content = file.read_bytes()
    for size, message in (
        (0, "not a safetensors file"),
        (7, "not a safetensors file"),
        (20, "cut short within its header"),
        (len(content) - 1, f"cut short: {len(content) - 1} bytes of {len(content)}"),
    ):
        file.write_bytes(content[:size])
        with pytest.raises(ConfigError, match=message):
            read_header(file)


@pytest.mark.parametrize("header", [b"no json", b"[]", b'{"a": 3}', b'{"a": {"dtype": "F32", "shape": [1]}}'])
def test_a_broken_header_is_refused(tmp_path: Path, header: bytes) -> None:
    (tmp_path / "w").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ConfigError, match="w: broken safetensors header"):
        read_header(tmp_path / "w")
