"""A whole cluster of a prefill and a decode worker on one GPU, by each transport that they can share it with, under
load: every answer is that of transformers. Needs what the gateway needs (grpc and so on), which the other tests do
without.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from disagg.engine.device_environment import ONE_GPU_VARIABLE
from tests.gpu import reference
from tests.support.tiny_models import VOCAB_SIZE, make_checkpoint
from tests.support.transports import NIXL

NUM_REQUESTS, NUM_AT_ONCE, NUM_TOKENS = 48, 12, 16
START_S, STOP_S, ANSWER_S = 75.0, 20.0, 60.0
"""Together less than the section has, so that a start that takes too long shows its log."""


def prompt_of(number: int) -> list[int]:
    return [(11 * i * i + (number + 2) * i + 1) % VOCAB_SIZE for i in range(20 + 5 * (number % 9))]


CONFIG = """
model: {{path: {folder}, dtype: float32}}
pools:
  prefill: {{device: "{device}", kv_cache_bytes: 64MiB, token_budget: 64}}
  decode: {{device: "{device}", kv_cache_bytes: 64MiB, max_num_seqs: 16}}
transfer: {{transport: {transport}, chunk_bytes: 64KiB, staging_bytes: 512KiB}}
gateway: {{port: {port}, http_port: null}}
"""


@contextmanager
def running(config: Path, log: Path, environ: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "disagg.cli", "up", "--config", str(config), "--launcher", "processes"],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=dict(environ),
            start_new_session=True,
        )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.mark.parametrize("transport", ["shm", NIXL, pytest.param("nccl", marks=pytest.mark.gpu)])
def test_a_prefill_and_a_decode_worker_on_one_device_under_load(
    transport: str, device: torch.device, tmp_path: Path
) -> None:
    """Right, not fast: the two take turns on the device, and NCCL goes through sockets."""
    pytest.importorskip("grpc")
    client = pytest.importorskip("disagg.client")
    from tests.support.ports import free_port

    folder = make_checkpoint("qwen3", tmp_path / "model")
    logs = Path(os.environ.get("DISAGG_GPU_CHECK_LOGS", tmp_path))
    port, config, log = free_port(), tmp_path / "cluster.yaml", logs / f"serving-{transport}-up.log"
    name = "cuda:0" if device.type == "cuda" else "cpu"
    config.write_text(CONFIG.format(folder=folder, device=name, port=port, transport=transport))
    environ = os.environ | ({ONE_GPU_VARIABLE: "1"} if transport == "nccl" else {})
    with running(config, log, environ) as process, client.Client(f"127.0.0.1:{port}") as gateway:
        ends_at = time.monotonic() + START_S
        while process.poll() is None and time.monotonic() < ends_at and not answers(gateway):
            time.sleep(0.2)
        assert answers(gateway), log.read_text()[-3000:]

        def generate(number: int) -> list[int]:
            found = gateway.generate(
                prompt_of(number), temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, timeout_s=ANSWER_S
            )
            return list(found.token_ids)

        with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
            found = list(pool.map(generate, range(NUM_REQUESTS)))
    for number, token_ids in enumerate(found):
        assert token_ids == reference.greedy(folder, prompt_of(number), NUM_TOKENS, device)[0], number


def answers(gateway: object) -> bool:
    """Whether the gateway serves."""
    from disagg.proto.errors import DisaggError

    try:
        return bool(gateway.models())  # type: ignore[attr-defined]
    except DisaggError:
        return False
