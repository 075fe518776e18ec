"""At every level of processors that this machine has: steps are captured, and neither the rows beside it nor what was
cached changes a bit of a row."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from disagg.engine.plan import ScheduledSequence, StepPlan
from disagg.engine.runner.model_runner import TorchModelRunner
from disagg.kernels import dispatch
from disagg.kernels.cpu import build
from tests.support.stepping import chunk, decodes_of, make_runner, make_sequence, prefill
from tests.support.tiny_models import VOCAB_SIZE, make_checkpoint

LEVELS = ["", *(level.name for level in build.levels_here()[1:])]
DTYPES: list[tuple[str, str, str]] = [
    ("float32", "none", "auto"),
    ("bfloat16", "none", "auto"),
    ("bfloat16", "int8", "auto"),
    ("bfloat16", "none", "int8"),
]
"""Of activations, of weights, and of KV."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama_bias", tmp_path_factory.mktemp("llama"))


@pytest.fixture(params=LEVELS, ids=lambda name: name or "native")
def level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Ops are dispatched as on such a processor."""
    monkeypatch.setenv(build.LEVEL, request.param)
    dispatch._choice.cache_clear()
    if dispatch.packing_name(torch.bfloat16) is None:
        pytest.skip(dispatch.describe())
    yield request.param
    dispatch._choice.cache_clear()


def prompt(seed: int, num_tokens: int) -> list[int]:
    return [(seed * i * i + 3 * i + seed) % VOCAB_SIZE for i in range(num_tokens)]


def blocks_of(index: int) -> list[int]:
    return [4 * index + 3, 4 * index + 1, 4 * index, 4 * index + 2]


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize(("dtype", "quantization", "kv_dtype"), DTYPES)
def test_a_row_does_not_depend_on_the_batch(folder: Path, dtype: str, quantization: str, kv_dtype: str) -> None:
    runner = make_runner(folder, dtype=dtype, quantization=quantization, kv_cache_dtype=kv_dtype, max_num_seqs=16)
    sequences = [make_sequence(prompt(seed, 9 + 4 * seed), blocks_of(seed)) for seed in range(13)]
    for sequence in sequences:
        sequence.token_ids.append(int(prefill(runner, sequence).argmax()))
    alone = [runner.forward(decodes_of([sequence]))[0] for sequence in sequences]
    for rows in (2, 3, 5, 13):
        assert torch.equal(runner.forward(decodes_of(sequences[:rows])), torch.stack(alone[:rows]))
    assert captures(runner) == 5
    mixed = StepPlan(decodes=decodes_of(sequences[:3]).decodes, prefills=(chunk(sequences[4], 0, 20),))
    assert torch.equal(runner.forward(mixed)[:3], torch.stack(alone[:3]))


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize(("dtype", "quantization", "kv_dtype"), DTYPES)
def test_a_prefix_that_was_cached_changes_nothing(folder: Path, dtype: str, quantization: str, kv_dtype: str) -> None:
    runner = make_runner(folder, dtype=dtype, quantization=quantization, kv_cache_dtype=kv_dtype)
    sequence = make_sequence(prompt(5, 61), blocks_of(0))
    expected = prefill(runner, sequence).clone()
    kv = runner._cache.tensor_NL2KBD.clone()
    for start, chunk_tokens in ((16, 64), (48, 64), (32, 7), (0, 16), (60, 1)):
        assert torch.equal(prefill(runner, sequence, start=start, chunk_tokens=chunk_tokens), expected)
        assert torch.equal(runner._cache.tensor_NL2KBD, kv)


def captures(runner: TorchModelRunner) -> int:
    assert runner._replayed is not None
    return len(runner._replayed._captured)


def tell(
    runner: TorchModelRunner, token_ids: list[int], prompt_tokens: int, chunk_tokens: int, rows: int
) -> tuple[Tensor, Tensor]:
    """The logits behind a text, and its KV. Its first tokens are computed as a prompt, in chunks, the others as
    decodes, `rows` in a step."""
    cache, num_tokens = runner._cache.tensor_NL2KBD, len(token_ids)
    cache.zero_()
    sequence = make_sequence(token_ids[:prompt_tokens], list(range(-(-num_tokens // 16))))
    logits = prefill(runner, sequence, chunk_tokens=chunk_tokens)
    sequence.token_ids += token_ids[prompt_tokens:]
    for first in range(prompt_tokens, num_tokens, rows):
        places = range(first, min(first + rows, num_tokens))
        entries = tuple(ScheduledSequence(sequence, place, 1, samples=True) for place in places)
        logits = runner.forward(StepPlan(decodes=entries))[-1]
    return logits.clone(), cache.clone()


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize(("dtype", "quantization", "kv_dtype"), DTYPES)
@pytest.mark.parametrize("seed", range(3))
def test_a_token_has_the_same_bits_however_it_is_computed(
    folder: Path, dtype: str, quantization: str, kv_dtype: str, seed: int
) -> None:
    """In a prompt, in a chunk of it, behind a cached prefix, as a decode, as one of several rows of a step."""
    draw = random.Random(seed)
    num_tokens = draw.choice((40, 257, 290))
    runner = make_runner(folder, dtype=dtype, quantization=quantization, kv_cache_dtype=kv_dtype, max_num_seqs=16)
    token_ids = prompt(seed + 2, num_tokens)
    logits, kv = tell(runner, token_ids, num_tokens, num_tokens, 1)
    for prompt_tokens, chunk_tokens, rows in (
        (num_tokens, draw.randint(1, num_tokens), 1),
        (num_tokens, 7, 1),
        (num_tokens - 20, num_tokens, 1),
        (num_tokens - 20, 33, 16),
        (draw.randint(1, num_tokens - 1), 64, draw.randint(2, 16)),
    ):
        found_logits, found_kv = tell(runner, token_ids, prompt_tokens, chunk_tokens, rows)
        assert torch.equal(found_kv, kv), (prompt_tokens, chunk_tokens, rows)
        assert torch.equal(found_logits, logits), (prompt_tokens, chunk_tokens, rows)
