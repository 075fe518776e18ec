"""A prefill and a decode worker on two hosts, KV by gloo over the link between them: it serves; a link that is cut in
mid-transfer costs what was under way, and nothing else. The hosts are network namespaces."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any, cast

import pytest

from disagg.engine.config import TransferLimits, WorkerConfig
from disagg.engine.fake_runner import fake_generate
from disagg.proto.messages import RoleName, WorkerInfo
from tests.integration.faults.hosts import TwoHosts, two_hosts, why_not_here, workers_on
from tests.support.workers import Answer, GatewayStub, audit, open_gateway, prompt_of, wait_until_workers_idle

WHY_NOT = why_not_here()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "it can")]

LEASE_S = 1.0
HEARTBEAT_S = 0.1
LATE_S = 2 * HEARTBEAT_S + 0.5
"""Between the end of a lease and its report: a tick, and what a busy machine adds."""
PINGS_END_S = 6.0
"""A connection whose pings are not answered has ended by then."""
DIAL_S = 8.0
"""How long the system may try to reach a host that is not there."""
SERVES_AGAIN_S = 8.0
"""After the link is back: TCP waits longer and longer between its tries. One second was seen."""
MANY_TOKENS = 60_000
PROMPT_TOKENS = 4000


def config(role: str, address: str) -> WorkerConfig:
    """Short leases, and chunks so small that transfers take long."""
    values: dict[str, Any] = {
        "host": address,
        "plaintext_kv": True,
        "num_blocks": 8192,
        "max_model_len": 70_000,
        "token_budget": 256,
        "transfer": TransferLimits(
            chunk_bytes=40 * 8, staging_bytes=2 * 40 * 8, heartbeat_s=HEARTBEAT_S, lease_timeout_s=LEASE_S
        ),
    }
    return WorkerConfig(worker_id=f"{role}-0", roles=(cast(RoleName, role),), model_path="fake", **values)


@pytest.fixture(scope="module")
def hosts() -> Iterator[TwoHosts]:
    with two_hosts() as made:
        yield made


@pytest.fixture(scope="module")
def workers(hosts: TwoHosts) -> Iterator[list[WorkerInfo]]:
    with workers_on(hosts, {role: config(role, address) for role, address in hosts.address.items()}) as infos:
        yield infos


async def run(gateway: GatewayStub, length: int) -> tuple[Answer, list[int]]:
    """A request through both hosts; the answer and what it should be."""
    prompt = prompt_of(length)
    return await gateway.run(prompt, worker="prefill-0", to="decode-0", max_tokens=8), fake_generate(prompt, 8)


async def start_transfers(gateway: GatewayStub, info: WorkerInfo) -> list[Answer]:
    """Submit long prompts until their chunks are on the way."""
    answers = [
        gateway.submit(prompt_of(PROMPT_TOKENS), worker="prefill-0", to="decode-0", max_tokens=MANY_TOKENS)[1]
        for _ in range(6)
    ]
    deadline = time.monotonic() + 10
    while not (await audit(info)).counts.get("sending_chunks"):
        assert time.monotonic() < deadline, "no transfer was seen"
    return answers


async def wait_until_served(gateway: GatewayStub) -> None:
    """Submit, and submit again where that fails, as the router would."""
    began = time.monotonic()
    while True:
        answer, expected = await run(gateway, 100)
        if answer.reason == "length":
            assert answer.token_ids == expected
            return
        assert answer.reason in ("failed", "refused"), answer.ends
        assert time.monotonic() - began < SERVES_AGAIN_S, answer.ends
        await asyncio.sleep(0.1)


async def test_prompts_go_from_one_host_to_the_other(hosts: TwoHosts, workers: list[WorkerInfo]) -> None:
    assert [info.address.rpartition(":")[0] for info in workers] == list(hosts.address.values())
    async with open_gateway(workers) as gateway:
        for length in (1, 8, 15, 16, 17, 300):
            answer, expected = await run(gateway, length)
            assert (answer.reason, answer.token_ids) == ("length", expected)
            (moved,) = answer.handed_over
            assert (moved.transport, moved.kv_bytes) == ("gloo", length * workers[0].kv_layout.bytes_per_token)
        together = await asyncio.gather(*(run(gateway, 50 + length) for length in range(8)))
        assert all(answer.token_ids == expected for answer, expected in together)


async def test_a_cut_link_costs_what_was_under_way_and_the_pair_forms_again(
    hosts: TwoHosts, workers: list[WorkerInfo]
) -> None:
    async with open_gateway(workers) as gateway:
        await wait_until_served(gateway)
        for role in hosts.names:  # at P's end, then at D's
            answers = await start_transfers(gateway, workers[0])
            hosts.cut(role)
            moved = [answer for answer in answers if answer.handed_over]
            lost = [answer for answer in answers if not answer.handed_over]
            assert lost, "all were handed over before the link was cut"
            await asyncio.wait_for(asyncio.gather(*(a.ended.wait() for a in lost)), LEASE_S + LATE_S)
            assert {end.reason for answer in lost for end in answer.ends} == {"failed"}
            for key, answer in gateway.answers.items():
                if answer in moved:
                    gateway.cancel(key)
            # P gives its blocks up with its lease, D with its own; chunks that were cleared go with the pair.
            await wait_until_workers_idle(workers, timeout_s=2 * LEASE_S + LATE_S)
            hosts.mend()
            await wait_until_served(gateway)


async def test_a_pair_that_was_cut_while_idle_serves_again(hosts: TwoHosts, workers: list[WorkerInfo]) -> None:
    """D's host vanishes for so long that the control stream ends, and P dials in vain."""
    async with open_gateway(workers) as gateway:
        await wait_until_served(gateway)
        hosts.cut("decode")
        answer = await gateway.run(prompt_of(100), worker="prefill-0", to="decode-0")
        assert answer.reason == "failed"
        await asyncio.sleep(PINGS_END_S)
        _, answer = gateway.submit(prompt_of(100), worker="prefill-0", to="decode-0")
        await asyncio.wait_for(answer.ended.wait(), DIAL_S)
        assert answer.reason == "refused"
        await wait_until_workers_idle(workers)
        hosts.mend()
        await wait_until_served(gateway)
