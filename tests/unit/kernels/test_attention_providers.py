"""Providers of attention: which one is used and why not another, and the same results by each.

FlashInfer's module is played; on a GPU `make gpu-check` has the real one, where it is installed.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from disagg.engine.config import WorkerConfig
from disagg.engine.plan import StepPlan
from disagg.engine.runner import model_runner
from disagg.engine.runner.model_runner import TorchModelRunner
from disagg.kernels import attention, attention_choice
from disagg.kernels.attention import FlashInfer, OwnKernels, prompts
from disagg.kernels.attention_choice import Choice, ProviderError, choose
from disagg.kernels.ops import AttentionForm, AttentionSpec
from disagg.kernels.triton.ops import TritonOps
from disagg.proto.errors import ConfigError
from tests.support import flashinfer_played
from tests.support.stepping import chunk, last_token, make_runner, make_sequence, prefill
from tests.support.tiny_models import make_checkpoint

GPU = AttentionSpec(
    device="cuda:0",
    dtype="bfloat16",
    kv_dtype="bfloat16",
    num_heads=8,
    num_kv_heads=2,
    head_dim=64,
    block_size=16,
    scale=0.125,
)
CPU = dataclasses.replace(GPU, device="cpu", dtype="float32", kv_dtype="float32")


@pytest.fixture
def played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """FlashInfer is installed."""
    flashinfer_played.install(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "flashinfer", raising=False)
    return tmp_path


# ---------------------------------------------------------------- the choice


def test_auto_is_the_first_provider_without_a_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_choice, "probe", lambda *_: pytest.fail("auto probes nothing"))
    choice = choose("auto", GPU)
    assert isinstance(choice.provider, OwnKernels)
    assert str(choice) == "triton; flashinfer: it is not installed (pip install flashinfer-python)"


def test_the_one_that_is_named_is_probed(played: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    probed = []
    monkeypatch.setattr(attention_choice, "probe", lambda name, spec: probed.append((name, spec)))
    monkeypatch.setattr(FlashInfer, "of", classmethod(lambda cls, spec: OwnKernels(spec)))
    assert choose("flashinfer", GPU).reasons == {"triton": "used where kernels.attention names it"}
    assert choose("triton", GPU).reasons == {"flashinfer": "used where kernels.attention names it"}
    assert probed == [("flashinfer", GPU), ("triton", GPU)]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"device": "cpu"}, "it is for CUDA devices, not for cpu"),
        ({"dtype": "float32", "kv_dtype": "float32"}, "it takes bfloat16 and float16, not float32"),
        ({"kv_dtype": "float8_e4m3fn"}, "KV in float8_e4m3fn beside bfloat16 was not tried with it"),
        ({"windows": (128,)}, "windows, soft caps and sinks were not tried with it"),
        ({"has_soft_cap": True}, "windows, soft caps and sinks were not tried with it"),
        ({"has_sinks": True}, "windows, soft caps and sinks were not tried with it"),
        ({"head_dim": 80}, "it takes heads of 64, 128 and 256, not of 80"),
    ],
)
def test_what_flashinfer_does_not_take(played: Path, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ProviderError, match=f"flashinfer: {reason}"):
        choose("flashinfer", dataclasses.replace(GPU, **changes))


def test_what_triton_does_not_take() -> None:
    assert OwnKernels.takes(GPU) is None
    assert OwnKernels.takes(dataclasses.replace(GPU, kv_dtype="float8_e4m3fn")) is None
    assert "head_dim=512" in (OwnKernels.takes(dataclasses.replace(GPU, head_dim=512)) or "")


def test_a_failed_probe_is_the_reason(played: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_choice, "probe", lambda *_: "its probe ended with status -11: no output")
    with pytest.raises(ProviderError, match="flashinfer: its probe ended with status -11: no output"):
        choose("flashinfer", GPU)


# ---------------------------------------------------------------- results


def test_flashinfer_computes_the_chunks_of_a_step_together(played: Path) -> None:
    """Behind two rows of decodes, which it leaves alone: chunks of any length, behind any context."""
    random = torch.Generator().manual_seed(3)
    keys, values = torch.randn((2, 20, 2, 16, 64), generator=random)
    q_TND = torch.randn((2 + 33 + 1 + 16, 8, 64), generator=random)
    tables = torch.randperm(20, generator=random).to(torch.int32)
    chunks = ((tables[:3], 0, 33), (tables[3:10], 100, 1), (tables[10:12], 16, 16))
    results = []
    for provider in (OwnKernels.of(CPU), FlashInfer.of(CPU)):
        out_TND = torch.full_like(q_TND, 7.0)
        provider.plan(prompts(provider, *chunks, first_row=2))
        provider.attend(q_TND, keys, values, AttentionForm(CPU.scale), out_TND)
        assert (out_TND[:2] == 7.0).all()
        results.append(out_TND)
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=1e-5)


def test_only_our_own_kernels_have_a_list_of_work(played: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "plan_prefills", TritonOps().plan_prefills)
    chunks = ((torch.tensor([4, 2], dtype=torch.int32), 0, 20), (torch.tensor([7], dtype=torch.int32), 9, 3))
    planned = prompts(OwnKernels.of(CPU), *chunks, first_row=1).planned[None]
    assert planned.numbers.tolist() == planned.work.numbers.tolist()
    assert sorted(planned.work.items[:, [0, 1, 2, 3]].tolist())[-1] == [21, 3, 9, 2]
    assert planned.block_tables.tolist() == [4, 2, 7]
    assert prompts(FlashInfer.of(CPU), *chunks, first_row=1).planned == {}


def test_a_model_computes_the_same_by_each(
    played: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_checkpoint("llama", tmp_path_factory.mktemp("llama"))
    ours = make_runner(folder)
    monkeypatch.setattr(model_runner, "choose", lambda setting, spec: Choice(FlashInfer.of(spec)))
    theirs = make_runner(folder)
    assert isinstance(theirs._attention, FlashInfer)
    logits = []
    for runner in (ours, theirs):
        decoding, second, third = (
            make_sequence(list(range(seed, seed + length)), [4 * row + i for i in range(4)])
            for row, (seed, length) in enumerate(((1, 20), (5, 40), (9, 33)))
        )
        prefill(runner, decoding)
        prefill(runner, second, chunk_tokens=24)
        decoding.token_ids.append(3)
        second.token_ids += [4, 5, 6]
        plan = StepPlan(decodes=(last_token(decoding),), prefills=(chunk(second, 40, 43), chunk(third, 0, 33)))
        logits.append(runner.forward(plan))
    torch.testing.assert_close(logits[1], logits[0], rtol=0, atol=1e-3)


def test_a_worker_that_cannot_have_the_named_one_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = WorkerConfig(
        worker_id="w", roles=("prefill",), model_path=str(make_checkpoint("llama", tmp_path)), attention="flashinfer"
    )
    with pytest.raises(ConfigError, match=r"^attention: flashinfer is for device cuda, not cpu"):
        TorchModelRunner(config)
    monkeypatch.setattr(model_runner, "check_attention", lambda *_: None)
    with pytest.raises(ConfigError, match=r"^kernels\.attention: flashinfer: it is for CUDA devices, not for cpu"):
        TorchModelRunner(config)
