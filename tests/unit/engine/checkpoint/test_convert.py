from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
from safetensors.torch import load_file

from disagg.engine.checkpoint import convert
from disagg.engine.checkpoint.gguf_models import GGUF_MODELS
from disagg.proto.errors import ConfigError
from tests.support import checkpoints


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    folder = tmp_path_factory.mktemp("gguf")
    stored = checkpoints.write_gguf(folder / "tiny.gguf")
    target = folder / "out"
    target.mkdir()
    convert.convert_gguf(folder / "tiny.gguf", target)
    return target, stored


def refusal(tmp_path: Path, source: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        convert.convert_gguf(source, tmp_path)
    assert not (tmp_path / "model.safetensors").exists()
    return str(caught.value)


def test_files_and_config(converted: tuple[Path, dict[str, np.ndarray]]) -> None:
    folder, _ = converted
    assert sorted(path.name for path in folder.iterdir()) == [
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    config = json.loads((folder / "config.json").read_bytes())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (checkpoints.HEADS, checkpoints.KV_HEADS)
    assert (config["dtype"], config["eos_token_id"], config["tie_word_embeddings"]) == ("bfloat16", 2, True)
    assert json.loads((folder / "generation_config.json").read_bytes())["eos_token_id"] == 2
    assert (folder / "chat_template.jinja").read_text() == checkpoints.CHAT_TEMPLATE


def test_weights_are_the_stored_ones_rounded_to_bf16(converted: tuple[Path, dict[str, np.ndarray]]) -> None:
    folder, stored = converted
    tensors = load_file(folder / "model.safetensors")
    assert len(tensors) == len(stored)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    for gguf_name, name in (
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("blk.1.attn_v.weight", "model.layers.1.self_attn.v_proj.weight"),
        ("blk.0.ffn_down.weight", "model.layers.0.mlp.down_proj.weight"),
        ("output_norm.weight", "model.norm.weight"),
    ):
        assert torch.equal(tensors[name], torch.from_numpy(stored[gguf_name]).to(torch.bfloat16))


@pytest.mark.parametrize(("part", "num_heads"), [("q", checkpoints.HEADS), ("k", checkpoints.KV_HEADS)], ids=["q", "k"])
def test_rotary_rows_are_put_back_in_order(
    converted: tuple[Path, dict[str, np.ndarray]], part: str, num_heads: int
) -> None:
    folder, stored = converted
    weight = load_file(folder / "model.safetensors")[f"model.layers.0.self_attn.{part}_proj.weight"]
    rows = torch.from_numpy(stored[f"blk.0.attn_{part}.weight"]).to(torch.bfloat16)
    head_dim = checkpoints.HIDDEN // checkpoints.HEADS
    for head in range(num_heads):
        for dim in range(head_dim):
            half, pair = divmod(dim, head_dim // 2)
            assert torch.equal(weight[head * head_dim + dim], rows[head * head_dim + 2 * pair + half])


def test_tokenizer_splits_digits_before_it_merges_spaces(converted: tuple[Path, dict[str, np.ndarray]]) -> None:
    folder, _ = converted
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode("ab  12<|im_end|>").tokens == ["ab", "ĠĠ", "1", "2", "<|im_end|>"]
    assert tokenizer.decode(tokenizer.encode("ab  12").ids) == "ab  12"


@pytest.mark.parametrize(("pre", "ignores_merges"), [("smollm", False), ("llama-bpe", True), ("gpt-4o", False)])
def test_merges_are_ignored_where_the_file_says_so(tmp_path: Path, pre: str, ignores_merges: bool) -> None:
    checkpoints.write_gguf(tmp_path / "x.gguf", pre=pre)
    convert.save_tokenizer(convert.open_gguf(tmp_path / "x.gguf"), tmp_path / "x.gguf", tmp_path, 128)
    assert json.loads((tmp_path / "tokenizer.json").read_bytes())["model"]["ignore_merges"] is ignores_merges


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["It", "'s", "Ġ1234", "Ġab"]),
        ("refact", ["It", "'s", "Ġ", "1", "2", "3", "4", "Ġab"]),
        ("qwen2", ["It", "'s", "Ġ", "1", "2", "3", "4", "Ġab"]),
        ("llama-bpe", ["It", "'s", "Ġ", "123", "4", "Ġab"]),
        ("gpt-4o", ["It's", "Ġ", "123", "4", "Ġab"]),
    ],
)
def test_where_texts_are_cut(pre: str, pieces: list[str]) -> None:
    assert [piece for piece, _ in convert.pre_tokenizer(pre).pre_tokenize_str("It's 1234 ab")] == pieces


def test_a_file_without_chat_template_gives_none(tmp_path: Path) -> None:
    checkpoints.write_gguf(tmp_path / "base.gguf", template=None)
    (tmp_path / "out").mkdir()
    convert.convert_gguf(tmp_path / "base.gguf", tmp_path / "out")
    assert not (tmp_path / "out" / "chat_template.jinja").exists()


def test_a_tensor_of_another_kind_of_model_is_refused(tmp_path: Path) -> None:
    checkpoints.write_gguf(tmp_path / "x.gguf", extra_tensor="blk.0.attn_sinks.weight")
    assert refusal(tmp_path, tmp_path / "x.gguf") == (
        "tensor 'blk.0.attn_sinks.weight' is not part of a decoder that this engine runs; "
        "import the safetensors version"
    )


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    checkpoints.write_gguf(tmp_path / "x.gguf", leave_out="blk.1.ffn_up.weight")
    assert refusal(tmp_path, tmp_path / "x.gguf") == (
        "1 tensors do not fit the architecture, such as model.layers.1.mlp.up_proj.weight: the file has None, "
        "LlamaForCausalLM needs (64, 32)"
    )


def test_a_value_that_is_not_finite_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = checkpoints.gguf_tensors()
    tensors["blk.1.attn_q.weight"][3, 4] = np.inf
    monkeypatch.setattr(checkpoints, "gguf_tensors", lambda: tensors)
    checkpoints.write_gguf(tmp_path / "x.gguf")
    with pytest.raises(
        ConfigError, match=r"tensor for model\.layers\.1\.self_attn\.q_proj\.weight has a value that is"
    ):
        convert.convert_gguf(tmp_path / "x.gguf", tmp_path)


def test_an_unknown_pre_tokenizer_is_refused(tmp_path: Path) -> None:
    checkpoints.write_gguf(tmp_path / "x.gguf", pre="mystery")
    assert refusal(tmp_path, tmp_path / "x.gguf") == (
        "pre-tokenizer 'mystery' of this GGUF file is not known (there is dbrx, gpt-2, gpt-4o, llama-bpe, qwen2, "
        "refact, smaug-bpe, smollm); "
        "import the safetensors version"
    )


def test_an_unsupported_architecture_is_refused(tmp_path: Path) -> None:
    checkpoints.write_gguf(tmp_path / "x.gguf", architecture="mamba")
    assert refusal(tmp_path, tmp_path / "x.gguf") == (
        "x.gguf: architecture 'mamba' is not supported; there is gemma2, gemma3, gpt-oss, granite, llama, phi3, qwen2, "
        "qwen3, qwen3moe, smollm3"
    )


def test_as_a_program_a_broken_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"not a model")
    done = subprocess.run(
        [sys.executable, "-m", "disagg.engine.checkpoint.convert", str(tmp_path / "x.gguf"), str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(f"error: {tmp_path / 'x.gguf'}: not a readable GGUF file (")


@pytest.mark.parametrize(
    ("gguf_name", "name"),
    [
        ("blk.12.attn_q.bias", "model.layers.12.self_attn.q_proj.bias"),
        ("blk.0.attn_k_norm.weight", "model.layers.0.self_attn.k_norm.weight"),
        ("output.weight", "lm_head.weight"),
    ],
)
def test_tensor_names(gguf_name: str, name: str) -> None:
    assert convert.hf_name(gguf_name, GGUF_MODELS["qwen3"]) == name
