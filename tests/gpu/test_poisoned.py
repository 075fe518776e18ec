"""A worker whose CUDA context is lost ends, instead of failing every request that it attracts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.tiny_models import make_checkpoint


@pytest.mark.gpu
def test_a_lost_context_ends_the_worker(device: torch.device, tmp_path: Path) -> None:
    """In a process of its own: nothing can be computed in this one afterwards."""
    folder = make_checkpoint("llama", tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.poisoned", str(device), str(folder)],
        capture_output=True,
        text=True,
        timeout=90.0,
        check=False,
    )
    found = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    # The error of whichever call is next: torch's class, or the plain one of a Triton launch or of cuBLAS.
    assert found.pop("raised", None) in {"AcceleratorError", "RuntimeError"}, done.stderr[-2000:]
    assert found == {"before": ["length"], "is_fatal": True}, done.stderr[-2000:]
