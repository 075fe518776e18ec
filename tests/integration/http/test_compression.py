"""Compressed messages are refused unread, whatever their content and sender."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import pytest

from disagg.cluster.config.cluster_config import parse_config
from disagg.cluster.hosts.processes import ProcessCluster
from disagg.proto.services import CHANNEL_OPTIONS, CONTROL
from tests.support.ports import free_port

INFLATED_BYTES = 128 << 20
SPARE_BYTES = 32 << 20


def peak_bytes(pid: int) -> int:
    (line,) = (line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) << 10


def test_a_compressed_message_is_refused_and_takes_no_memory() -> None:
    config = {
        "model": {"path": "fake"},
        "mode": "colocated",
        "gateway": {"port": 0},
        "pools": {"colocated": {"size": 1, "num_blocks": 64}},
        "controller": {"port": free_port()},
    }
    with ProcessCluster(parse_config(config)) as cluster:
        controller = f"127.0.0.1:{cluster.plan.config.controller.port}"
        check, worker = "/grpc.health.v1.Health/Check", cluster.workers[0]
        for address, path in (
            (cluster.address, check),
            (cluster.address, "/disagg.v1.InferenceService/ListModels"),
            (worker.address, "/any.Service/Method"),
            (controller, CONTROL),
        ):
            for algorithm in (grpc.Compression.Gzip, grpc.Compression.Deflate):
                assert refusal(address, path, 100, algorithm) == (path, grpc.StatusCode.UNIMPLEMENTED)
        for address, pid in ((cluster.address, cluster.pid("gateway")), (worker.address, worker.pid)):
            before = peak_bytes(pid)
            refusal(address, check, INFLATED_BYTES, grpc.Compression.Gzip)
            assert peak_bytes(pid) < before + SPARE_BYTES


def refusal(address: str, path: str, num_bytes: int, algorithm: grpc.Compression) -> tuple[str, grpc.StatusCode]:
    with grpc.insecure_channel(address, options=CHANNEL_OPTIONS[2:]) as channel:
        call: Any = channel.unary_unary(path, None, None)
        with pytest.raises(grpc.RpcError) as caught:
            call(bytes(num_bytes), compression=algorithm, timeout=60)
    return path, caught.value.code()
