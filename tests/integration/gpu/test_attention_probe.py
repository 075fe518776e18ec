"""The probe of a provider of attention, in real children: FlashInfer's module is played, Triton is interpreted."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from disagg.kernels.attention_choice import probe
from disagg.kernels.ops import AttentionSpec
from tests.support import flashinfer_played

REPOSITORY = Path(__file__).resolve().parents[3]
SPEC = AttentionSpec(
    device="cpu",
    dtype="float32",
    kv_dtype="float32",
    num_heads=2,
    num_kv_heads=1,
    head_dim=64,
    block_size=16,
    scale=64**-0.5,
)
LONG_S = 120.0


@pytest.fixture(autouse=True)
def played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """FlashInfer is installed for our children."""
    flashinfer_played.install(tmp_path)
    path = [str(tmp_path), str(REPOSITORY), str(REPOSITORY / "src"), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
    return tmp_path


def test_right_results_pass() -> None:
    assert probe("flashinfer", SPEC, LONG_S) is None


def test_triton_passes_in_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("DISAGG_KERNELS", "triton")
    assert probe("triton", SPEC, LONG_S) is None


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ("BatchPrefillWithPagedKVCacheWrapper.wrong_by = 0.5", "it differs from the reference by 0.5"),
        ("BatchPrefillWithPagedKVCacheWrapper.wrong_by = float('nan')", "it differs from the reference by inf"),
        ("import os; os.abort()", "its probe ended with status -6: "),
        ("raise ImportError('no nvcc here')", "its probe ended with status 1: ImportError: no nvcc here"),
    ],
)
def test_a_provider_that_is_wrong_or_ends_its_process(played: Path, more: str, reason: str) -> None:
    flashinfer_played.install(played, more)
    found = probe("flashinfer", SPEC, LONG_S)
    assert found is not None
    assert found.startswith(reason)


def test_a_probe_that_hangs_is_ended_with_all_that_it_started(played: Path) -> None:
    """Its grandchild keeps the pipe open: only the end of both closes that."""
    flashinfer_played.install(played, "import subprocess, time; subprocess.Popen(['sleep', '600']); time.sleep(600)")
    assert probe("flashinfer", SPEC, 8.0) == "its probe did not end within 8 s"
