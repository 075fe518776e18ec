"""The engine with one kernel switched off at a time answers what it answers with all of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from disagg.engine.core.engine_core import EngineCore
from disagg.engine.runner.model_runner import TorchModelRunner
from disagg.kernels import dispatch
from disagg.kernels.settings.switches import TRITON_OPS, VARIABLE
from disagg.proto.messages import Sampling
from tests.gpu import reference
from tests.gpu.test_engine import PROMPT, answers, config_of
from tests.support.stepping import generate, make_runner, make_sequence
from tests.support.tiny_models import make_checkpoint

NUM_TOKENS = 3
BLOCKS, OTHERS = [9, 2, 31, 0, 17, 5], [12, 30, 4, 8, 22, 21]


TOKENS = PROMPT[:35]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module")
def expected(folder: Path, device: torch.device) -> list[int]:
    return reference.greedy(folder, TOKENS, NUM_TOKENS, device)[0]


def forget() -> None:
    for cache in (dispatch._choice, dispatch._triton, dispatch._elsewhere):
        cache.cache_clear()


def switch(monkeypatch: pytest.MonkeyPatch, device: torch.device, *offs: str) -> None:
    """In this process, until `forget` is called with another environment."""
    monkeypatch.setenv(VARIABLE, ",-".join(("auto" if device.type == "cuda" else "triton", *offs)))
    forget()


@pytest.fixture(autouse=True)
def chosen_again() -> Iterator[None]:
    """Tests of other files find what they had."""
    yield
    forget()


@pytest.mark.parametrize("op", TRITON_OPS)
def test_tokens_kv_and_captures_are_those_of_all_kernels(
    folder: Path, device: torch.device, op: str, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    switch(monkeypatch, device, op)
    runner = make_runner(folder, device=str(device), max_num_seqs=2)
    runner.capture_steps()
    if device.type == "cuda":
        assert runner._replayed is not None
        assert len(runner._replayed._captured) == 2, "steps are captured without the kernel, too"
    sequence = make_sequence(TOKENS, BLOCKS)
    generate(runner, sequence, NUM_TOKENS, chunk_tokens=20)
    assert sequence.token_ids[len(TOKENS) :] == expected
    sent, back = (runner.new_staging(30 * runner.layout.bytes_per_token) for _ in range(2))
    checksum = runner.gather(BLOCKS, 3, 33, sent)
    runner.scatter(OTHERS, 3, 33, sent)
    assert runner.gather(OTHERS, 3, 33, back) == checksum
    assert torch.equal(torch.as_tensor(back), torch.as_tensor(sent))


def test_draws_on_the_host_are_those_of_the_kernel(
    folder: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    samplings = [
        Sampling(temperature=0.9, max_tokens=1, seed=7),
        Sampling(temperature=1.2, max_tokens=2, seed=2**64 - 5, top_k=40, top_p=0.9),
    ]
    found = []
    for offs in (("draw_rows",), ()):
        switch(monkeypatch, device, *offs)
        config = config_of(folder, device, num_blocks=40, max_num_seqs=4)
        runner = TorchModelRunner(config)
        assert (runner._draws is None) == bool(offs)
        found.append(answers(EngineCore(runner, config=config), samplings))
    assert found[0] == found[1]
