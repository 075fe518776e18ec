"""Each family against transformers, in fp32: tokens and logits, also in chunks and on two ranks; in bf16 a row has the
same bits in any batch. Windows are shorter than the prompts."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from disagg.engine.checkpoint.checkpoint import read_model_config
from disagg.engine.checkpoint.weight_headers import read_header, weight_files
from disagg.engine.plan import StepPlan
from disagg.engine.runner.model_runner import TorchModelRunner
from disagg.simulator.durations.model_shapes import shape_of
from tests.support.stepping import (
    assert_logits_close,
    chunk,
    decode,
    generate,
    last_token,
    make_runner,
    make_sequence,
    prefill,
)
from tests.support.tiny_models import FAMILY_KINDS, VOCAB_SIZE, make_checkpoint, reference_generate, reference_logits
from tests.unit.engine.parallel.ranks import running_ranks

PROMPT = [(7 * i * i + 3 * i + 5) % VOCAB_SIZE for i in range(50)]
BLOCKS = [9, 2, 31, 0, 17, 5, 40, 8, 11, 60]
NUM_TOKENS = 42


class Folders(dict[str, Path]):
    """Checkpoints, each made when it is first asked for."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self._root = root

    def __missing__(self, kind: str) -> Path:
        self[kind] = make_checkpoint(kind, self._root / kind)
        return self[kind]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tmp_path_factory.mktemp("checkpoints"))


@pytest.mark.parametrize("kind", FAMILY_KINDS)
def test_tokens_and_logits_are_those_of_transformers(folders: Folders, kind: str) -> None:
    """The prompt at once, and in chunks of 13 tokens."""
    expected_ids, expected_logits = reference_generate(folders[kind], PROMPT, NUM_TOKENS)
    assert len(set(expected_ids)) > NUM_TOKENS // 4
    runner = make_runner(folders[kind])
    for options in ({}, {"chunk_tokens": 13}):
        sequence = make_sequence(PROMPT, BLOCKS)
        logits = generate(runner, sequence, NUM_TOKENS, **options)
        assert sequence.token_ids[len(PROMPT) :] == expected_ids
        assert_logits_close(logits, expected_logits)


@pytest.mark.parametrize(
    ("kind", "size"),
    [
        *((kind, 2) for kind in FAMILY_KINDS),
        *((kind, 4) for kind in ("olmo3", "gemma3", "phi3", "deepseek_v2_lite", "deepseek_v3")),
    ],
)
def test_ranks_compute_the_same(folders: Folders, kind: str, size: int) -> None:
    """Four ranks share the two KV heads; all ranks have the latents."""
    whole, parts = make_sequence(PROMPT, BLOCKS), make_sequence(PROMPT, BLOCKS)
    expected = generate(make_runner(folders[kind]), whole, 12)
    with running_ranks(folders[kind], size) as ranks:
        logits = generate(ranks, parts, 12, chunk_tokens=33)
    assert parts.token_ids == whole.token_ids
    assert_logits_close(logits, expected)


@pytest.mark.parametrize("kind", ["gemma2", "olmo3"])
def test_logits_deep_in_a_long_context_are_those_of_transformers(folders: Folders, kind: str) -> None:
    """Behind a chunk and a decode that begin in another piece of 256 tokens than their windows do."""
    token_ids = (PROMPT * 6)[:290]
    expected = reference_logits(folders[kind], token_ids)
    runner, sequence = make_runner(folders[kind]), make_sequence(token_ids[:260], list(range(20)))
    assert_logits_close(prefill(runner, sequence, chunk_tokens=129), expected[259])
    for position in range(260, 290):
        sequence.token_ids.append(token_ids[position])
        logits = runner.forward(StepPlan(decodes=(last_token(sequence),)))[0]
        if position in (260, 271, 272, 289):
            assert_logits_close(logits, expected[position])


@pytest.mark.parametrize("kind", FAMILY_KINDS)
def test_the_number_of_parameters_is_that_of_the_checkpoint(folders: Folders, kind: str) -> None:
    (file,) = weight_files(folders[kind])
    num_parameters = sum(math.prod(entry.shape) for entry in read_header(file).values())
    assert shape_of(read_model_config(folders[kind]), kind).num_parameters == num_parameters


def test_long_sequences_take_the_long_factors_of_longrope(folders: Folders) -> None:
    token_ids = (PROMPT * 3)[:140]
    expected = reference_logits(folders["phi3_longrope"], token_ids)[-1]
    runner = make_runner(folders["phi3_longrope"], max_model_len=200)
    assert_logits_close(prefill(runner, make_sequence(token_ids, BLOCKS), chunk_tokens=64), expected)


@pytest.mark.parametrize(
    ("kind", "architecture", "names"),
    [
        ("gemma3", "Gemma3ForConditionalGeneration", ("", "language_model.")),
        ("ministral3", "Mistral3ForConditionalGeneration", ("model.", "model.language_model.")),
    ],
)
def test_the_text_of_a_model_of_images_is_that_of_the_model_of_text(
    folders: Folders, tmp_path: Path, kind: str, architecture: str, names: tuple[str, str]
) -> None:
    """With the names of transformers 4 and 5; what is read of the encoder is nothing."""
    text = json.loads((folders[kind] / "config.json").read_text())
    outer = {"architectures": [architecture], "text_config": text, "vision_config": {"hidden_size": 8}}
    outer["tie_word_embeddings"] = text.pop("tie_word_embeddings")
    (tmp_path / "config.json").write_text(json.dumps(outer))
    tensors = {"vision_tower.patches.weight": torch.zeros(3)}
    for name, tensor in load_file(folders[kind] / "model.safetensors").items():
        tensors[re.sub(f"^{names[0]}", names[1], name)] = tensor
    save_file(tensors, tmp_path / "model.safetensors")

    whole, beside_images = make_sequence(PROMPT, BLOCKS), make_sequence(PROMPT, BLOCKS)
    expected = generate(make_runner(folders[kind]), whole, 3)
    assert torch.equal(generate(make_runner(tmp_path), beside_images, 3), expected)


@pytest.mark.parametrize("kind", FAMILY_KINDS)
def test_bf16_rows_have_the_same_bits_alone_and_in_a_batch(
    folders: Folders, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """And no step leaves the compiled kernels, where there are some."""
    runner: TorchModelRunner = make_runner(folders[kind], dtype="bfloat16")
    prompts, tables = [PROMPT[:31], PROMPT[5:22], PROMPT[40:]], [[20, 21, 22], [23, 24], [25, 26]]
    alone = [make_sequence(prompt, table) for prompt, table in zip(prompts, tables, strict=True)]
    expected = [generate(runner, sequence, 4) for sequence in alone]

    together = [make_sequence(prompt, table) for prompt, table in zip(prompts, tables, strict=True)]
    plan = StepPlan(prefills=tuple(chunk(sequence, 0, sequence.num_tokens) for sequence in together))
    first = runner.forward(plan)
    for sequence, row in zip(together, first, strict=True):
        sequence.token_ids.append(int(row.argmax()))
    logits = decode(runner, together, 3)

    for rows, wanted, row in zip(logits, expected, first, strict=True):
        assert torch.equal(torch.cat((row[None], rows)), wanted)
    assert "cannot be captured" not in caplog.text


@pytest.mark.parametrize("kind", ["gemma3", "olmo3", "granite", "deepseek_v3"])
def test_bf16_is_close_to_fp32(folders: Folders, kind: str) -> None:
    """As close as transformers in bf16 is, which rounds between ops as the engine does."""
    token_ids = PROMPT
    expected = reference_logits(folders[kind], token_ids)[-1]
    runner = make_runner(folders[kind], dtype="bfloat16")
    sequence = make_sequence(token_ids[:-1], BLOCKS)
    prefill(runner, sequence)
    sequence.token_ids.append(token_ids[-1])
    logits = runner.forward(StepPlan(decodes=(last_token(sequence),)))[0]
    error = (logits.float() - expected).square().mean().sqrt()
    assert error < 0.15 * expected.std()
