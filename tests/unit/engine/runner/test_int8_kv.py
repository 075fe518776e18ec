"""Models with KV in 8 bits: what is refused, how many blocks there are, and that a token has the same bits in any batch
and behind what moved here, whatever the form of attention."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from disagg.engine.plan import StepPlan
from disagg.engine.runner.model_runner import TorchModelRunner
from disagg.proto.errors import ConfigError
from tests.support.stepping import chunk, decode, generate, make_runner, make_sequence, prefill
from tests.support.tiny_models import VOCAB_SIZE, make_checkpoint

PROMPT = [(11 * i * i + 2 * i + 1) % VOCAB_SIZE for i in range(75)]
BLOCKS = [9, 2, 31, 0, 17, 5, 40]
OTHER_BLOCKS = [3, 30, 4, 12, 60, 7, 1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("qwen3"))


def test_latent_attention_is_refused_before_weights_are_read(tmp_path: Path) -> None:
    checkpoint = make_checkpoint("deepseek_v2", tmp_path)
    (checkpoint / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"^kv_cache_dtype: int8 is not supported for latent attention"):
        make_runner(checkpoint, kv_cache_dtype="int8")


def test_a_gpu_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"^kv_cache_dtype: int8 is for device cpu, not cuda$"):
        make_runner(folder, kv_cache_dtype="int8", device="cuda")


@pytest.mark.parametrize(("kv", "num_blocks"), [("auto", 34), ("int8", 64)])  # heads of 32 numbers: 64 or 34 bytes
def test_the_same_bytes_have_more_blocks(folder: Path, kv: str, num_blocks: int) -> None:
    changes = {"num_blocks": None, "kv_cache_bytes": 34 * 16 * 3 * 2 * 2 * 64, "dtype": "bfloat16"}
    runner = make_runner(folder, kv_cache_dtype=kv, **changes)
    assert runner.num_blocks == num_blocks
    assert runner._cache.nbytes <= 34 * 16 * 3 * 2 * 2 * 64


@pytest.mark.parametrize("kind", ["qwen3", "gpt_oss", "gemma2", "phi3", "olmo3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_have_the_same_bits_alone_and_in_a_batch(
    tmp_path: Path, kind: str, dtype: str, caplog: pytest.LogCaptureFixture
) -> None:
    """With norms of heads, windows, sinks, soft caps and rotated parts; no step leaves the compiled kernels."""
    runner = make_runner(make_checkpoint(kind, tmp_path), dtype=dtype, kv_cache_dtype="int8")
    prompts, tables = [PROMPT[:31], PROMPT[5:22], PROMPT[40:]], [[20, 21, 22], [23, 24], [25, 26, 27]]
    alone = [make_sequence(prompt, table) for prompt, table in zip(prompts, tables, strict=True)]
    expected = [generate(runner, sequence, 4) for sequence in alone]
    together = [make_sequence(prompt, table) for prompt, table in zip(prompts, tables, strict=True)]
    first = runner.forward(StepPlan(prefills=tuple(chunk(each, 0, each.num_tokens) for each in together)))
    for sequence, row in zip(together, first, strict=True):
        sequence.token_ids.append(int(row.argmax()))
    for rows, wanted, row in zip(decode(runner, together, 3), expected, first, strict=True):
        assert torch.equal(torch.cat((row[None], rows)), wanted)
    assert "cannot be captured" not in caplog.text
    assert "does not take" not in caplog.text


def moved(source: TorchModelRunner, target: TorchModelRunner, start: int, end: int) -> int:
    """KV of tokens from BLOCKS to OTHER_BLOCKS of another worker; the bytes of it."""
    buffer = source.new_staging(source.layout.bytes_of(end, start))
    source.gather(BLOCKS, start, end, buffer)
    target.scatter(OTHER_BLOCKS, start, end, buffer)
    return len(buffer)


def test_what_is_handed_over_goes_on_with_the_same_bits(folder: Path) -> None:
    source, target = (make_runner(folder, dtype="bfloat16", kv_cache_dtype="int8") for _ in range(2))
    sequence = make_sequence(PROMPT, BLOCKS)
    expected = generate(source, sequence, 8)
    there = make_sequence(PROMPT, OTHER_BLOCKS)
    prefill(source, make_sequence(PROMPT, BLOCKS))
    in_bf16 = make_runner(folder, dtype="bfloat16").layout.bytes_of(75)
    assert moved(source, target, 0, 16) + moved(source, target, 16, 75) == 34 / 64 * in_bf16
    there.token_ids.append(int(expected[0].argmax()))
    assert torch.equal(decode(target, [there], 7)[0], expected[1:])
