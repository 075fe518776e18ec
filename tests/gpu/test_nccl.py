"""Two processes that hand KV over by NCCL, on one GPU and, where there are two, on two; and what becomes of a receive
that is never served.

NCCL refuses two ranks on one device. It takes them where it believes that they are on different hosts (`NCCL_HOSTID`),
and then moves the bytes through a socket: slow, but everything above is as between two devices. On two devices it
chooses by itself.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu import reference
from tests.gpu.conftest import nccl_environment
from tests.gpu.pair_peer import NUM_TOKENS, PROMPT
from tests.support.tiny_models import make_checkpoint

END_S = 60.0


@dataclass
class Peer:
    """A process of `tests.gpu.pair_peer`."""

    process: subprocess.Popen[str]

    def line(self) -> str:
        """The next line that it prints."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def result(self) -> dict[str, Any]:
        """What it saw, once it has ended by itself."""
        output, _ = self.process.communicate(timeout=END_S)
        assert self.process.returncode == 0, f"it ended with {self.process.returncode}"
        found: dict[str, Any] = json.loads(output.strip().splitlines()[-1])
        return found


@contextmanager
def peer(side: str, scenario: str, device: torch.device, folder: Path | str, transport: str = "") -> Iterator[Peer]:
    """On `device`, or, where that has an index, the sender on that device and the receiver on the next one."""
    own = nccl_environment(side, apart=device.index is not None)
    if device.index is not None and side == "receiver":
        device = torch.device("cuda", device.index + 1)
    arguments = [sys.executable, "-m", "tests.gpu.pair_peer", side, scenario, str(device), str(folder), transport]
    environment = os.environ | own
    process = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        yield Peer(process)
    finally:
        process.kill()
        process.communicate()


@contextmanager
def pair(
    scenario: str, device: torch.device, folder: Path | str = "", transport: str = ""
) -> Iterator[tuple[Peer, Peer]]:
    """(sender, receiver), joined."""
    sides = [peer(side, scenario, device, folder, transport) for side in ("receiver", "sender")]
    with sides[0] as receiver, sides[1] as sender:
        address = receiver.line()
        assert address, "the receiver has an address"
        assert sender.process.stdin is not None
        sender.process.stdin.write(address + "\n")
        sender.process.stdin.flush()
        assert sender.line() == receiver.line() == "connected"
        yield sender, receiver


def test_payloads_arrive_to_the_bit(layout: torch.device) -> None:
    with pair("payloads", layout) as (sender, receiver):
        assert receiver.result() == {"ok": True}
        assert sender.result() == {"ok": True}


def test_many_pairs_wait_for_each_other_in_no_order(layout: torch.device) -> None:
    with pair("pairs", layout) as (sender, receiver):
        assert receiver.result() == {"ok": True}
        assert sender.result() == {"ok": True}


def test_kv_is_handed_over_between_processes(layout: torch.device, device: torch.device, tmp_path: Path) -> None:
    folder = make_checkpoint("qwen3", tmp_path)
    with pair("hand-over", layout, folder) as (sender, receiver):
        received, sent = receiver.result(), sender.result()
    assert received["ok"] is sent["ok"] is True
    assert received["checksum"] == sent["checksum"]
    expected = reference.greedy(folder, PROMPT, NUM_TOKENS + 1, device)[0]
    assert [sent["token_id"], *received["token_ids"]] == [expected[0], *expected[:NUM_TOKENS]]


@pytest.mark.parametrize("kill", [False, True], ids=["silent", "killed"])
def test_a_receive_that_is_never_served_is_answered(device: torch.device, kill: bool) -> None:
    """The receiver lives on; it ends by itself, not by its last resort."""
    with pair("kill" if kill else "abort", device) as (sender, receiver):
        if kill:
            sender.process.kill()
        found = receiver.result()
        assert found["ok"] is True, found
        assert found["took_s"] < 15.0
