"""Two gateway processes at one port, with the deterministic model: both protocols, metrics, the death of one."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from disagg.client import AsyncClient, Client
from disagg.cluster.config.cluster_config import parse_config
from disagg.cluster.hosts.processes import ProcessCluster
from disagg.engine.fake_runner import fake_generate
from disagg.proto.control import ControlState, GatewayRecord, StateRequest
from tests.integration.scaling.test_scaling import replaced
from tests.support.waiting import eventually
from tests.support.workers import wait_until_workers_idle

NUM_TOKENS = 1500
ROOM = {"max_model_len": 8192}
POOL = {"num_blocks": 16384, "max_num_seqs": 64}
CONFIG = {
    "model": {"path": "fake", **ROOM},
    "transfer": {"transport": "shm"},
    "gateway": {"port": 0, "replicas": 2},
    "placement": {"local_prefill": "never"},
    "pools": {"prefill": POOL, "decode": {"size": 2, **POOL}},
}
PROMPT = list(range(40))
SHORT = {"model": "fake", "prompt": PROMPT, "max_tokens": 20, "temperature": 0, "ignore_eos": True}


@pytest.fixture
def cluster() -> Iterator[ProcessCluster]:
    with ProcessCluster(parse_config(CONFIG)) as cluster:
        yield cluster
    assert cluster.killed == []


def gateways(cluster: ProcessCluster) -> tuple[GatewayRecord, ...]:
    """With the counts that each sent last."""
    reply = cluster.control(StateRequest())
    assert isinstance(reply, ControlState)
    return reply.gateways


def num_running(cluster: ProcessCluster) -> dict[str, int]:
    return {record.name: record.counts.num_running if record.counts else 0 for record in gateways(cluster)}


def test_both_serve_both_protocols_and_one_shows_the_sums(cluster: ProcessCluster) -> None:
    first, second = gateways(cluster)
    assert (first.name, second.name) == ("gateway", "gateway-1")
    assert first.address == second.address == cluster.address
    assert first.http_address == second.http_address == cluster.http_address
    own = {first.own_address, second.own_address, cluster.address}
    assert len(own) == len(own | {first.own_http_address, second.own_http_address, cluster.http_address}) - 3 == 3
    expected = fake_generate(PROMPT, 20)
    for address in (cluster.address, first.own_address, second.own_address):
        with Client(address) as client:
            answer = client.generate(PROMPT, max_tokens=20, temperature=0.0, ignore_eos=True)
            assert list(answer.token_ids) == expected
            assert [(g.name, g.phase) for g in client.cluster_state().gateways] == [
                ("gateway", "ready"),
                ("gateway-1", "ready"),
            ]
    with Client(cluster.address) as client:
        text = client.detokenize(expected)
    for address in (cluster.http_address, first.own_http_address, second.own_http_address):
        response = httpx.post(f"http://{address}/v1/completions", json=SHORT)
        assert response.json()["choices"][0]["text"] == text
    metrics = [httpx.get(f"http://{record.own_http_address}/metrics").text for record in (first, second)]
    for record, shown in zip((first, second), metrics, strict=True):
        assert f'disagg_gateway_info{{gateway="{record.name}"}} 1.0' in shown
    assert ['disagg_kv_blocks{instance="decode-0"' in shown for shown in metrics] == [True, False]
    served = [int(float(re.findall(r"^disagg_output_tokens_total (.*)$", shown, re.M)[0])) for shown in metrics]
    assert all(served)
    assert sum(served) == 6 * 20


async def test_a_gateway_that_is_killed_costs_a_pause(cluster: ProcessCluster) -> None:
    """Streams of both gateways come whole; who comes new is served at once; all of it is given back."""
    answers: list[asyncio.Task[list[int]]] = []
    async with AsyncExitStack() as stack:

        async def begin() -> None:
            """One more stream, on a connection of its own: the kernel chooses its gateway."""
            client = await stack.enter_async_context(AsyncClient(cluster.address))
            answers.append(asyncio.create_task(stream(client, len(answers))))

        async def both_run() -> bool:
            while sum(not answer.done() for answer in answers) < 16:
                await begin()
            return all((await asyncio.to_thread(num_running, cluster)).values())

        await eventually(both_run, every_s=0.25)
        (state,) = [gateway for gateway in gateways(cluster) if gateway.name == "gateway-1"]
        os.kill(state.pid, signal.SIGKILL)
        await until_gone(state.pid)
        with Client(cluster.address) as client:
            answer = await asyncio.to_thread(
                client.generate, range(40), max_tokens=20, temperature=0.0, ignore_eos=True
            )
            assert list(answer.token_ids) == fake_generate(range(40), 20)
        whole = await asyncio.gather(*answers)
        assert [tokens == fake_generate(prompt_of(i), NUM_TOKENS) for i, tokens in enumerate(whole)] == [True] * len(
            answers
        )
    assert await asyncio.to_thread(replaced, cluster, "gateway-1", state.pid)
    assert {gateway.address for gateway in gateways(cluster)} == {cluster.address}
    await wait_until_workers_idle(cluster.workers, cluster.secret)


def prompt_of(index: int) -> range:
    return range(index, index + 40)


async def stream(client: AsyncClient, index: int) -> list[int]:
    deltas = client.stream(prompt_of(index), max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, timeout_s=60)
    return [token async for delta in deltas for token in delta.token_ids]


async def test_a_stream_over_http_continues_after_the_last_event(cluster: ProcessCluster) -> None:
    (doomed,) = [gateway for gateway in gateways(cluster) if gateway.name == "gateway-1"]
    body = {**SHORT, "max_tokens": 2000, "stream": True, "temperature": 1.0}
    texts: list[str] = []
    last_id = ""
    async with httpx.AsyncClient(timeout=60.0) as http:
        url, label = f"http://{doomed.own_http_address}/v1/completions", {"last-event-id": "0"}
        is_killed = is_cut = False
        async with http.stream("POST", url, json=body, headers=label) as response:
            try:
                async for line in response.aiter_lines():
                    last_id = take(line, texts) or last_id
                    if len(texts) == 50 and not is_killed:  # lines without text follow, and by then it may be gone
                        is_killed = True
                        os.kill(doomed.pid, signal.SIGKILL)
            except httpx.HTTPError:
                is_cut = True
        assert is_cut
        await until_gone(doomed.pid)
        num_before = len(texts)
        url = f"http://{cluster.http_address}/v1/completions"
        async with http.stream("POST", url, json=body, headers={"last-event-id": last_id}) as response:
            assert response.status_code == 200
            async for line in response.aiter_lines():
                take(line, texts)
    assert 50 <= num_before < len(texts)
    seed = int(last_id.split(".")[0], 16)
    with Client(cluster.address) as client:
        whole = client.generate(PROMPT, max_tokens=2000, temperature=1.0, seed=seed, ignore_eos=True, timeout_s=60)
    assert "".join(texts) == whole.text


async def until_gone(pid: int) -> None:
    """Wait for a killed process to be reaped: only then all its threads have ended, and it takes no connection any
    more. A zombie may still have threads that hold its sockets."""
    await eventually(lambda: not Path(f"/proc/{pid}").exists())


def take(line: str, texts: list[str]) -> str | None:
    """Read a line of a stream: a text, or the id of the event that begins, which is returned."""
    if line.startswith("id: "):
        return line.removeprefix("id: ")
    if line.startswith("data: {"):
        (choice,) = json.loads(line.removeprefix("data: "))["choices"]
        texts.append(choice["text"])
    return None


def test_without_replicas_a_taken_port_is_refused() -> None:
    config: Any = {**CONFIG, "gateway": {"port": 0}}
    with ProcessCluster(parse_config(config)) as cluster:
        port = int(cluster.address.rpartition(":")[2])
        (gateway,) = gateways(cluster)
        assert (gateway.own_address, gateway.own_http_address) == ("", "")
        with pytest.raises(Exception, match=f"cannot listen on 127.0.0.1:{port}"):
            ProcessCluster(parse_config({**CONFIG, "gateway": {"port": port, "replicas": 2}})).start()
