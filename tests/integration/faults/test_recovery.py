"""Workers that hang while their connections stay open: their streams continue elsewhere, and they are killed and
restarted; without a kill they drop the requests that were moved, and serve again."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

from disagg.client import Client
from disagg.cluster.config.cluster_config import parse_config
from disagg.cluster.hosts.processes import ProcessCluster
from disagg.cluster.system.process_tools import ProcessRef
from disagg.engine.config import WorkerConfig
from disagg.engine.fake_runner import fake_generate
from disagg.proto.block_hash import chain_hashes, root_hash
from disagg.proto.ids import GatewayId, RequestId, WorkerId
from disagg.proto.messages import Sampling, WorkerInfo
from disagg.proto.token_ids import pack_token_ids
from disagg.router.api import RoutedRequest
from disagg.router.config import RouterConfig
from disagg.router.shell.server import RouterServer
from tests.integration.scaling.test_scaling import endless_streams, replaced
from tests.support.secret import SECRET
from tests.support.waiting import eventually
from tests.support.workers import running_workers, wait_until_workers_idle

POOLS = {"prefill": {"size": 1}, "decode": {"size": 2}}
FAKE = {
    "model": {"path": "fake"},
    "transfer": {"transport": "shm"},
    "gateway": {"port": 0},
    "placement": {"local_prefill": "never"},
    "pools": POOLS,
}
NUM_TOKENS = 7000
"""An answer that is far from its end when its worker is stopped."""
ROOM = {"max_model_len": 8192, "num_blocks": 2048}


def test_a_worker_that_hangs_costs_no_answer_and_is_replaced() -> None:
    recovery = {"suspect_after_s": 1.5, "kill_after_s": 2.0}
    with ProcessCluster(parse_config({**FAKE, "recovery": recovery})) as cluster:
        with endless_streams(cluster.address) as wait_for_all:
            wait_for_all()
            hung = ProcessRef.of(cluster.pid("decode-1"))
            os.kill(hung.pid, signal.SIGSTOP)
            assert replaced(cluster, "decode-1", hung.pid)
            assert not hung.is_alive()
            wait_for_all()
        details = {str(record.worker_id): record.detail for record in cluster.state().workers}
        assert details["decode-1"].startswith("it was unresponsive for ")
        assert details["decode-1"].endswith(" s and was killed")
        asyncio.run(wait_until_workers_idle(cluster.workers, cluster.secret))
    assert cluster.killed == []


def test_a_gateway_that_hangs_is_replaced_at_its_address() -> None:
    with ProcessCluster(parse_config({**FAKE, "recovery": {"kill_after_s": 2.0}})) as cluster:
        address, hung = cluster.address, ProcessRef.of(cluster.pid("gateway"))
        os.kill(hung.pid, signal.SIGSTOP)
        assert replaced(cluster, "gateway", hung.pid)
        assert not hung.is_alive()
        assert cluster.address == address
        with Client(address) as client:
            answer = client.generate(range(40), max_tokens=20, temperature=0.0, ignore_eos=True, timeout_s=60)
            assert list(answer.token_ids) == fake_generate(range(40), 20)
    assert cluster.killed == []


def worker_config(name: str, **values: Any) -> WorkerConfig:
    role: Any = "prefill" if name.startswith("prefill") else "decode"
    return WorkerConfig(worker_id=name, roles=(role,), model_path="fake", **values)


def test_a_worker_that_goes_on_gives_up_what_was_taken_from_it_and_serves_again() -> None:
    """No controller kills it here. Its late messages change no answer."""
    names = ("prefill-0", "decode-0", "decode-1")
    with running_workers(*(worker_config(name, **ROOM) for name in names)) as infos:
        asyncio.run(_check_stop_and_resume(infos))


async def _check_stop_and_resume(infos: list[WorkerInfo]) -> None:
    config = RouterConfig(local_prefill="never", policy="least_loaded", silent_after_s=1.0)
    router = RouterServer(config, GatewayId("g"), infos, SECRET)
    await router.start()
    try:
        await router.wait_until_connected(60)
        await _until_used(router, "before", {"decode-0", "decode-1"})  # the pairs are formed
        await wait_until_workers_idle(infos)
        await eventually(lambda: all(view.load.num_running == 0 for view in router.view().workers))
        streams = [asyncio.create_task(_answer(router, f"r{i}", i)) for i in range(4)]
        stopped = infos[1]
        decodes = [info.worker_id for info in infos[1:]]
        await eventually(
            lambda: (
                sum(_running(router, name) for name in decodes) == 4 and all(_running(router, name) for name in decodes)
            )
        )
        num_stopped = _running(router, stopped.worker_id)
        os.kill(stopped.pid, signal.SIGSTOP)
        try:
            await eventually(lambda: not _is_used(router, stopped))
            assert [answer == _expected(i) for i, answer in enumerate(await asyncio.gather(*streams))] == [True] * 4
            # On a starved machine the keepalive of its session may end before the failure detector is sure.
            counters = router.counters()
            assert counters.get("worker_suspected", 0) + counters.get("worker_lost", 0) == num_stopped
            assert await _answer(router, "r4", 4, num_tokens=9) == fake_generate(_prompt(4), 9)
            (trace,) = router.recent(1)
            assert (trace.request_id, trace.decode_worker) == ("r4", "decode-1")
        finally:
            os.kill(stopped.pid, signal.SIGCONT)
        await eventually(lambda: _is_used(router, stopped))
        await wait_until_workers_idle(infos)
        await eventually(lambda: all(view.load.num_running == 0 for view in router.view().workers))  # as they report
        await _until_used(router, "after", {"decode-0", "decode-1"})
        await wait_until_workers_idle(infos)
    finally:
        await router.stop()


def _prompt(index: int) -> tuple[int, ...]:
    return tuple(range(index, index + 40))


def _expected(index: int) -> list[int]:
    return fake_generate(_prompt(index), NUM_TOKENS)


def _running(router: RouterServer, name: WorkerId) -> int:
    return sum(view.load.num_running for view in router.view().workers if view.info.worker_id == name)


async def _until_used(router: RouterServer, name: str, decode_workers: set[str]) -> None:
    """Short answers, two at a time, until these have made one. A pair that broke may cost an attempt."""
    missing = set(decode_workers)
    for turn in range(20):
        answers = await asyncio.gather(*(_answer(router, f"{name}-{turn}-{i}", i, num_tokens=9) for i in range(2)))
        assert answers == [fake_generate(_prompt(i), 9) for i in range(2)]
        missing -= {str(trace.decode_worker) for trace in router.recent(2)}
        if not missing:
            return
        await asyncio.sleep(0.1)
    raise AssertionError(f"{missing} made no answer")


async def _answer(router: RouterServer, request_id: str, index: int, num_tokens: int = NUM_TOKENS) -> list[int]:
    prompt, root = pack_token_ids(_prompt(index)), root_hash("fake")
    request = RoutedRequest(
        request_id=RequestId(request_id),
        prompt_token_ids=prompt,
        block_hashes=tuple(chain_hashes(root, prompt)),
        root_hash=root,
        sampling=Sampling(max_tokens=num_tokens, temperature=0.0),
    )
    return [token async for batch in router.submit(request, 0.0) for token in batch.token_ids]


def _is_used(router: RouterServer, info: WorkerInfo) -> bool:
    """Whether the router has a session with this worker and does not suspect it."""
    return any(not view.is_suspected for view in router.view().workers if view.info == info)
