"""A real controller, twenty workers without engines, and a router that follows: the list of workers comes once."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from disagg.cluster.config.cluster_config import parse_config
from disagg.cluster.control.controller_thread import ControllerThread
from disagg.cluster.control.plan import GatewaySpec, plan_cluster
from disagg.gateway.models.membership import ControllerLink
from disagg.proto.control import ControlState, ScaleRequest
from disagg.proto.ids import GatewayId, WorkerId
from disagg.router.config import RouterConfig
from disagg.router.shell.router_servers import RouterServers
from disagg.router.shell.server import RouterServer
from tests.support.secret import SECRET
from tests.support.waiting import eventually
from tests.support.worker_fleet import CONFIG, FleetLauncher, FleetProcess

SIDE = 10
WAIT_S = 60.0


class NoGateway(FleetLauncher):
    """The test's own router is the only gateway."""

    def start_gateway(self, launch: GatewaySpec, controller_address: str) -> None: ...


def all_ready(state: ControlState, count: int) -> bool:
    return [worker.phase for worker in state.workers] == ["ready"] * count


async def test_workers_join_and_leave_by_differences(tmp_path: Path) -> None:
    names = [WorkerId(f"{pool}-{index}") for pool in ("decode", "prefill") for index in range(SIDE)]
    with FleetProcess(SECRET) as fleet:
        controller = ControllerThread(plan_cluster(parse_config(CONFIG)), NoGateway(tmp_path, SECRET, [fleet]), SECRET)
        address = await asyncio.to_thread(controller.start)
        gateway_id = GatewayId("g")
        router = RouterServer(RouterConfig(), gateway_id, [], SECRET)
        link = ControllerLink(gateway_id, lambda: address, RouterServers({"": router}), SECRET)

        def known() -> list[WorkerId]:
            return sorted(worker.info.worker_id for worker in router.view().workers)

        try:
            await router.start()
            link.start("127.0.0.1:1", os.getpid())
            await eventually(lambda: known() == ["decode-0", "prefill-0"])
            for side in (SIDE, SIDE - 1):  # up, and then one of each drains, is empty, and goes
                await asyncio.to_thread(controller.control, ScaleRequest(sizes={"prefill": side, "decode": side}))
                await eventually(lambda: all_ready(controller.state(), 2 * side))  # noqa: B023
                await eventually(lambda: known() == [n for n in sorted(names) if int(n[-1]) < side])  # noqa: B023
            assert (link.counters["snapshot"], link.counters["gap"]) == (1, 0)
            assert link.counters["change"] >= 2 * (SIDE - 1) + 2, "one for each that joins or leaves"
            assert router.check_integrity() == []
            assert set(router.holdings().values()) == {0}
        finally:
            await link.stop()
            await router.stop()
            await asyncio.to_thread(controller.stop)
    assert not fleet.is_alive
