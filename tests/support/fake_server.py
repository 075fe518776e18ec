"""The fake server of the load tests (loadtests/generator/fake_server.py) as a process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from disagg.cluster.system.cores import available_cores
from disagg.loadtests.generator.fake_server import FakeTiming


@dataclass
class FakeServer:
    """A running fake server; `lag` is there when it has ended."""

    address: str
    lag: dict[str, float]


@contextmanager
def fake_server(timing: FakeTiming, nice: int = 0) -> Iterator[FakeServer]:
    """A fake server for as long as the block, pinned to the last core."""
    options = {
        "ttft-ms": timing.ttft_s * 1e3,
        "tpot-ms": timing.tpot_s * 1e3,
        "spread": timing.spread,
        "stall-at-s": timing.stall_at_s,
        "stall-s": timing.stall_s,
        "refuse-every": timing.refuse_every,
        "fail-every": timing.fail_every,
        "core": available_cores()[-1],
        "nice": nice,
    }
    arguments = [f"--{name}={value}" for name, value in options.items() if value is not None]
    command = [sys.executable, "-m", "disagg.loadtests.generator.fake_server", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            server = FakeServer(json.loads(process.stdout.readline())["address"], {})
            yield server
        finally:
            process.terminate()
            output = process.stdout.read()
        server.lag |= json.loads(output)
