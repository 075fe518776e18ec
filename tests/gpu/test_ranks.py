"""A worker of two ranks: its tokens against transformers, over NCCL on one GPU or two, with replayed decode steps; on a
CPU over gloo."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import torch

from tests.gpu import reference
from tests.gpu.conftest import nccl_environment
from tests.support.tiny_models import VOCAB_SIZE, make_checkpoint

PROMPT = [(11 * i * i + 2 * i + 1) % VOCAB_SIZE for i in range(75)]
NUM_TOKENS = 12
END_S = 90.0


def test_two_ranks_sample_what_transformers_does(layout: torch.device, device: torch.device, tmp_path: Path) -> None:
    folder = make_checkpoint("qwen3", tmp_path)
    answer = reference.greedy(folder, PROMPT, NUM_TOKENS, device)[0]
    with ExitStack() as stack:
        ranks = [start(stack, rank, layout, folder, answer) for rank in (0, 1)]
        address = line(ranks[0])
        assert address, "rank 0 has an address"
        assert ranks[1].stdin is not None
        ranks[1].stdin.write(address + "\n")
        ranks[1].stdin.flush()
        found = [json.loads(line(rank)) for rank in ranks]
        for rank in ranks:
            rank.communicate(timeout=END_S)
        assert [rank.returncode for rank in ranks] == [0, 0]
    num_captured = 2 if device.type == "cuda" else 0
    assert found[0] == {"sampled": answer, "captured": num_captured, "errors": [""] * num_captured}
    assert found[1] == {"sampled": [], "captured": num_captured, "errors": [""] * num_captured}


def start(stack: ExitStack, rank: int, layout: torch.device, folder: Path, answer: list[int]) -> subprocess.Popen[str]:
    device = str(layout) if layout.index is None else f"cuda:{layout.index + rank}"
    arguments = [str(rank), device, str(folder), json.dumps(PROMPT), json.dumps(answer)]
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.gpu.rank_peer", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | nccl_environment(f"rank-{rank}", apart=layout.index is not None),
    )
    stack.callback(process.wait)
    stack.callback(process.kill)
    return process


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()
