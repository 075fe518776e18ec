"""Tiers with a real model in fp32, and with real files: tokens are those of transformers, computed or loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from disagg.connections.cluster_secret import ClusterSecret
from disagg.engine.shell.extent_files import ExtentFiles
from disagg.engine.tiers.extent_file import extent_format
from disagg.engine.tiers.sizes import extent_bytes
from tests.support.engine import assert_idle, make_spec
from tests.support.stepping import make_runner
from tests.support.tiers import FileDisk, TierWorker
from tests.support.tiny_models import VOCAB_SIZE, make_checkpoint, reference_generate

NUM_TOKENS = 12
PROMPTS = {
    name: [(seed * i * i + 3 * i + seed) % (VOCAB_SIZE - 10) for i in range(150 + seed)]
    for name, seed in (("a", 5), ("b", 7), ("c", 11))
}


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_loaded_prefixes_give_the_tokens_of_transformers(tmp_path: Path, tier: str, kind: str) -> None:
    """The device cache holds one prompt and a half; with files the worker starts again with an empty one."""
    checkpoint = make_checkpoint(kind, tmp_path / "model")
    expected = {name: reference_generate(checkpoint, prompt, NUM_TOKENS)[0] for name, prompt in PROMPTS.items()}
    num_bytes = 0
    for start in range(2 if tier == "disk" else 1):
        runner = make_runner(checkpoint, num_blocks=18, max_model_len=200)
        disk: FileDisk | None = None
        num_bytes = extent_bytes(runner.layout, 1)
        if tier == "disk":
            secret = ClusterSecret(b"s" * 32)
            format_ = extent_format(runner.fingerprint, runner.layout, 1, num_bytes, secret)
            files = ExtentFiles(tmp_path / "own", format_, is_shared=False)
            disk = FileDisk(files)
        size = {"host_extents": 8} if disk is None else {"disk_extents": 8}
        worker = TierWorker(**size, disk=disk, num_blocks=18, runner=runner, extent_bytes=num_bytes)  # type: ignore[arg-type]
        for number in range(2):
            for name, prompt in PROMPTS.items():
                assert worker.run(make_spec(f"{name}{number}", prompt, max_tokens=NUM_TOKENS)) == expected[name]
        assert worker.core.totals().loaded_tokens == 128 * len(PROMPTS) * (1 + start)
        assert_idle(worker.core)
        if disk is not None:
            files.close()
