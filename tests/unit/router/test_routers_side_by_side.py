"""Several router cores that place on the same workers, whose reports come late: they do not herd."""

from __future__ import annotations

from collections import Counter

import pytest

from disagg.proto.ids import GatewayId, Incarnation, WorkerId
from disagg.proto.messages import BlocksSnapshot, Load, StepSample, WorkerReport
from disagg.router.config import RouterConfig
from disagg.router.requests.events import Dispatch, Submit, WorkerReported, WorkerUp
from disagg.router.requests.router_core import RouterCore
from tests.support.router import routed_request, worker_info

CALIBRATION = (
    *(StepSample(ms=25 + 0.3 * count, num_decodes=count, decode_context=100 * count) for count in range(1, 32)),
    *(StepSample(ms=25 + 0.05 * count, prefill_tokens=count, prefill_attended=count**2 // 2) for count in (16, 256)),
)
BLOCKS = 4096


class Cluster:
    """Two cores, one P, and decode workers. A request comes each millisecond, to the cores in turn."""

    def __init__(self, num_decodes: int) -> None:
        config = RouterConfig(local_prefill="never", migrations=0, num_gateways=2)
        self.cores = [RouterCore(config, GatewayId(f"g{i}")) for i in range(2)]
        self.decodes = [f"d{i}" for i in range(num_decodes)]
        self.placed: dict[str, list[int]] = {name: [] for name in self.decodes}
        self._reports: Counter[str] = Counter()
        for name in ("p0", *self.decodes):
            info = worker_info(
                name,
                num_blocks=BLOCKS,
                max_num_seqs=256,
                token_budget=8192,
                max_model_len=2048,
                calibration=CALIBRATION,
            )
            for core in self.cores:
                core.handle(WorkerUp(info), 0.0)
            self.report(name, 0)

    def report(self, name: str, count: int, now: float = 0.0) -> None:
        """The worker has so many sequences, of whatever router."""
        load = Load(num_running=count, blocks_total=BLOCKS, blocks_active=4 * count)
        events = (BlocksSnapshot(hashes=()),) if not self._reports[name] else ()
        report = WorkerReport(
            worker_id=WorkerId(name),
            incarnation=Incarnation("1"),
            sequence=self._reports[name],
            load=load,
            kv_events=events,
        )
        self._reports[name] += 1
        for core in self.cores:
            core.handle(WorkerReported(report), now)

    def submit(self, number: int) -> None:
        """One more request, placed at once."""
        request = routed_request(f"r{number}", 40, max_tokens=60)
        for command in self.cores[number % 2].handle(Submit(request, number / 1e3), number / 1e3):
            if isinstance(command, Dispatch):
                assert command.message.decode_peer is not None
                self.placed[command.message.decode_peer.worker_id].append(number)


@pytest.mark.parametrize("num_decodes", [2, 3, 4])
@pytest.mark.parametrize("every", [1, 4, 20, 64])
@pytest.mark.parametrize("lag", [0, 8, 16])
def test_a_burst_through_both_is_spread_evenly(num_decodes: int, every: int, lag: int) -> None:
    cluster = Cluster(num_decodes)
    for number in range(64):
        cluster.submit(number)
        for i, name in enumerate(cluster.decodes):
            if number % every == i % every:  # workers report at different times
                seen = sum(each <= number - lag for each in cluster.placed[name])
                cluster.report(name, seen, number / 1e3)
    counts = [len(each) for each in cluster.placed.values()]
    assert sum(counts) == 64
    assert max(counts) - min(counts) <= 3


def test_what_others_hold_for_longer_counts() -> None:
    cluster = Cluster(2)
    for turn in range(200):
        cluster.report("d0", 40, turn / 1e3)
        cluster.report("d1", 0, turn / 1e3)
    for number in range(20):
        cluster.submit(number)
    assert [len(cluster.placed[name]) for name in cluster.decodes] == [0, 20]
