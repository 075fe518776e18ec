"""Two processes on one GPU that hand KV over through the host's memory, or by NIXL from device memory.

In a contact on a CPU the same processes run there, and stage nothing.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.gpu import reference
from tests.gpu.pair_peer import NUM_TOKENS, PROMPT
from tests.gpu.test_nccl import pair
from tests.support.tiny_models import make_checkpoint
from tests.support.transports import HAS_NIXL, NIXL


@pytest.mark.parametrize("transport", ["gloo", "shm", "auto", NIXL])
def test_kv_is_handed_over_on_one_gpu(device: torch.device, tmp_path: Path, transport: str) -> None:
    folder = make_checkpoint("qwen3", tmp_path)
    with pair("hand-over", device, folder, transport) as (sender, receiver):
        received, sent = receiver.result(), sender.result()
    assert received["ok"] is sent["ok"] is True
    assert received["checksum"] == sent["checksum"]
    chosen = transport if transport != "auto" else "nixl" if HAS_NIXL else "shm"
    assert sent["transport"] == chosen
    expected = reference.greedy(folder, PROMPT, NUM_TOKENS + 1, device)[0]
    assert [sent["token_id"], *received["token_ids"]] == [expected[0], *expected[:NUM_TOKENS]]
