"""Real worker processes, and what must not hurt them: peers that die or hang, gateways that vanish, come back or stop
reading, transports that cannot be formed, a stop under load. Who is left holds nothing, and goes on."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest

from disagg.decode_worker.role import DecodeRole
from disagg.engine.commands import Release
from disagg.engine.config import DiskTier, TierOptions, TransferLimits, WorkerConfig
from disagg.engine.fake_runner import fake_generate
from disagg.engine.kv_transfer.transport import SET_UP_TIMEOUT_S
from disagg.engine.shell.role import RoleContext
from disagg.engine.shell.worker import Worker
from disagg.proto.errors import ConfigError
from disagg.proto.frames import frame_of
from disagg.proto.handover import PairHello
from disagg.proto.messages import RoleName, WorkerInfo
from disagg.proto.services import CHANNEL_OPTIONS, TRANSFER
from tests.support.secret import SECRET
from tests.support.transports import NIXL
from tests.support.waiting import eventually
from tests.support.workers import Answer, GatewayStub, audit, prompt_of, running_workers, wait_until_workers_idle

MANY_TOKENS = 60_000
"""An answer that takes far longer than any of these tests."""
PROMPT_TOKENS = 4000
LIMITS = TransferLimits(chunk_bytes=40 * 8, staging_bytes=2 * 40 * 8, heartbeat_s=0.1)


def config(worker_id: str, **values: Any) -> WorkerConfig:
    """A worker whose role is in its name, with chunks that make a transfer long."""
    role: RoleName = "prefill" if worker_id.startswith("prefill") else "decode"
    defaults: dict[str, Any] = {
        "num_blocks": 8192,
        "max_model_len": 70_000,
        "token_budget": 256,
        "transfer": LIMITS,
    }
    return WorkerConfig(worker_id=worker_id, roles=(role,), model_path="fake", **{**defaults, **values})


@asynccontextmanager
async def gateway_to(*infos: WorkerInfo) -> AsyncIterator[GatewayStub]:
    """A gateway stub without an audit at the end, since some of the workers may be dead by then."""
    stub = GatewayStub()
    try:
        for info in infos:
            await stub.connect(info)
        yield stub
    finally:
        await stub.close()


async def stop_in_mid_transfer(gateway: GatewayStub, stopped: WorkerInfo, peer: WorkerInfo, what: str) -> list[Answer]:
    """Submit long prompts, and stop worker `stopped` in the middle of transfers: its `peer` holds some of `what`."""
    answers: list[Answer] = []
    deadline = time.monotonic() + 30
    while True:
        answers += [
            gateway.submit(prompt_of(PROMPT_TOKENS), worker="prefill-0", to="decode-0", max_tokens=MANY_TOKENS)[1]
            for _ in range(6)
        ]
        while not (await audit(peer)).counts.get(what) and not all(answer.handed_over for answer in answers):
            assert time.monotonic() < deadline, "no transfer was seen"
        os.kill(stopped.pid, signal.SIGSTOP)
        if (await audit(peer)).counts.get(what):
            return answers
        os.kill(stopped.pid, signal.SIGCONT)  # they had ended by then: their blocks must be free for the next ones
        for key in list(gateway.answers):
            gateway.cancel(key)
        await wait_until_workers_idle([stopped, peer])
        answers.clear()


async def assert_serves(gateway: GatewayStub, prefill: str, decode: str) -> None:
    prompt = prompt_of(100)
    answer = await gateway.run(prompt, worker=prefill, to=decode, max_tokens=5)
    assert (answer.reason, answer.token_ids) == ("length", fake_generate(prompt, 5))


# ---------------------------------------------------------------- peers


@pytest.mark.parametrize("transport", ["gloo", NIXL])
async def test_a_decode_worker_is_killed_in_mid_transfer(transport: str) -> None:
    with running_workers(
        config("prefill-0", transport=transport),
        config("decode-0", transport=transport),
        config("decode-1", transport=transport),
    ) as (prefill, dead, other):
        async with gateway_to(prefill, dead, other) as gateway:
            answers = await stop_in_mid_transfer(gateway, dead, prefill, "sending_chunks")
            os.kill(dead.pid, signal.SIGKILL)
            await wait_until_workers_idle([prefill])
            # What was handed over before ends with D's session, which is for the gateway to see.
            await eventually(lambda: all(answer.ends or answer.handed_over for answer in answers))
            assert {end.reason for answer in answers for end in answer.ends} == {"failed"}
            await assert_serves(gateway, "prefill-0", "decode-1")
            await wait_until_workers_idle([prefill, other])


@pytest.mark.parametrize("transport", ["gloo", NIXL])
async def test_a_prefill_worker_is_killed_in_mid_transfer(transport: str) -> None:
    with running_workers(
        config("prefill-0", transport=transport),
        config("prefill-1", transport=transport),
        config("decode-0", transport=transport),
    ) as (dead, other, decode):
        async with gateway_to(dead, other, decode) as gateway:
            answers = await stop_in_mid_transfer(gateway, dead, decode, "receiving_chunks")
            os.kill(dead.pid, signal.SIGKILL)
            await until_not_receiving(decode)
            for key, answer in gateway.answers.items():
                if answer.handed_over:
                    gateway.cancel(key)
            await wait_until_workers_idle([decode])
            assert not [end for answer in answers for end in answer.ends]
            await assert_serves(gateway, "prefill-1", "decode-0")
            await wait_until_workers_idle([other, decode])


async def until_not_receiving(decode: WorkerInfo) -> None:
    deadline = time.monotonic() + 20
    while any(count for name, count in (await audit(decode)).counts.items() if name.startswith("receiving")):
        assert time.monotonic() < deadline, "transfers of a dead worker were kept"
        await asyncio.sleep(0.02)


@pytest.mark.parametrize("transport", ["gloo", NIXL])
async def test_a_decode_worker_hangs_in_mid_transfer(transport: str) -> None:
    """It is silent, but its sockets stand: the lease ends the attempts, and then the pair."""
    configs = [
        config(name, transport=transport, transfer=msgspec.structs.replace(LIMITS, lease_timeout_s=0.5))
        for name in ("prefill-0", "decode-0", "decode-1")
    ]
    with running_workers(*configs) as (prefill, hung, other):
        async with gateway_to(prefill, hung, other) as gateway:
            answers = await stop_in_mid_transfer(gateway, hung, prefill, "sending_chunks")
            try:
                await wait_until_workers_idle([prefill])
                assert any("lease lost" in end.detail for answer in answers for end in answer.ends)
                await assert_serves(gateway, "prefill-0", "decode-1")
            finally:
                os.kill(hung.pid, signal.SIGCONT)
            for key in list(gateway.answers):
                gateway.cancel(key)
            await wait_until_workers_idle([prefill, hung, other])
            await assert_serves(gateway, "prefill-0", "decode-0")


async def test_a_transport_that_cannot_be_formed_is_a_refusal() -> None:
    """D names a transport that exists only within its own process. P fails at once; D would wait for it."""
    with running_workers(config("prefill-0"), config("decode-0", transport="local")) as (prefill, decode):
        async with gateway_to(prefill, decode) as gateway:
            answers = await asyncio.gather(
                *(gateway.run(prompt_of(20), worker="prefill-0", to="decode-0") for _ in range(12))
            )
            assert {answer.reason for answer in answers} == {"refused"}
            await wait_until_workers_idle([prefill, decode])
            started = time.monotonic()
        # And D ends at once at SIGTERM, though threads of it still wait for a peer.
    assert time.monotonic() - started < SET_UP_TIMEOUT_S - 5


async def test_peers_that_greet_and_never_come_hold_up_nobody() -> None:
    """Ten of them: a real pair forms beside them, and the worker ends although it waits for them."""
    with running_workers(config("prefill-0"), config("decode-0")) as (prefill, decode):
        async with grpc.aio.insecure_channel(decode.address, options=CHANNEL_OPTIONS) as channel:
            for _ in range(10):
                call: Any = channel.stream_stream(TRANSFER, None, None)(None, metadata=SECRET.metadata)
                await call.write(frame_of(PairHello(info=prefill, receiver_incarnation=decode.incarnation)))
                await call.read()
            async with gateway_to(prefill, decode) as gateway:
                started = time.monotonic()
                await assert_serves(gateway, "prefill-0", "decode-0")
                assert time.monotonic() - started < SET_UP_TIMEOUT_S / 2


async def test_an_attempt_that_waits_for_its_pair_keeps_its_deadline() -> None:
    """D accepts the connection and then does nothing, so that the pair stays half formed."""
    with running_workers(config("prefill-0"), config("decode-0")) as (prefill, decode):
        async with gateway_to(prefill, decode) as gateway:
            os.kill(decode.pid, signal.SIGSTOP)
            try:
                answer = await gateway.run(prompt_of(20), worker="prefill-0", to="decode-0", timeout_s=0.3)
                assert answer.reason == "deadline"
                await wait_until_workers_idle([prefill])
            finally:
                os.kill(decode.pid, signal.SIGCONT)
            await assert_serves(gateway, "prefill-0", "decode-0")


# ---------------------------------------------------------------- gateways


async def test_a_new_session_of_a_gateway_ends_what_the_old_one_left() -> None:
    with running_workers(config("prefill-0"), config("decode-0")) as (prefill, decode):
        async with gateway_to(prefill, decode) as old:
            _, answer = old.submit(prompt_of(100), worker="prefill-0", to="decode-0", max_tokens=MANY_TOKENS)
            await eventually(lambda: bool(answer.handed_over))
            async with gateway_to(prefill, decode) as new:  # the old session is never closed from this side
                new.answers.update(old.answers)  # tokens that were sampled already may still come, and are dropped
                await wait_until_workers_idle([prefill, decode])
                await assert_serves(new, "prefill-0", "decode-0")
                await wait_until_workers_idle([prefill, decode])


async def test_what_comes_for_a_gateway_without_a_session_is_ended() -> None:
    """The gateway's session with D broke, and the attempt arrives by way of P."""
    with running_workers(config("prefill-0"), config("decode-0")) as (prefill, decode):
        async with gateway_to(prefill) as gateway:
            gateway.infos["decode-0"] = decode
            prompt = prompt_of(100)
            _, answer = gateway.submit(prompt, worker="prefill-0", to="decode-0", max_tokens=MANY_TOKENS)
            await asyncio.wait_for(answer.first_token.wait(), 60)
            await wait_until_workers_idle([prefill, decode])
            assert answer.token_ids == fake_generate(prompt, 1)  # of P; D has no session to send to


async def test_bad_dispatches_end_alone() -> None:
    with running_workers(config("prefill-0"), config("decode-0")) as (prefill, decode):
        async with gateway_to(prefill, decode) as gateway:
            key, good = gateway.submit(prompt_of(100), worker="prefill-0", to="decode-0", max_tokens=MANY_TOKENS)
            await eventually(lambda: bool(good.handed_over))
            empty = await gateway.run([], worker="prefill-0", to="decode-0")
            assert (empty.reason, empty.ends[0].detail) == ("failed", "the prompt is empty")
            endless = await gateway.run(prompt_of(3000), worker="prefill-0", to="decode-0", timeout_s=float("inf"))
            assert (endless.reason, endless.ends[0].detail) == ("length", "")
            alien = await gateway.run([1, 2, 10**9], worker="prefill-0", to="decode-0")
            assert alien.reason == "refused"
            await offer_a_key_twice(gateway)
            assert not good.ends
            gateway.cancel(key)
            await wait_until_workers_idle([prefill, decode])


async def offer_a_key_twice(gateway: GatewayStub) -> None:
    """The second dispatch comes while the first one is being given up, or after it."""
    queue: Any = gateway._queues["prefill-0"]
    key, answer = gateway.submit(prompt_of(2000), worker="prefill-0", to="decode-0", max_tokens=MANY_TOKENS)
    dispatch = queue.get_nowait()
    queue.put_nowait(dispatch)
    gateway.cancel(key)
    queue.put_nowait(dispatch)
    await asyncio.wait_for(answer.ended.wait(), 60)
    gateway.cancel(key)


# ---------------------------------------------------------------- stopping


@pytest.mark.parametrize("delay_s", [0.0, pytest.param(0.02, marks=pytest.mark.slow), 0.2])
async def test_workers_that_are_told_to_stop_under_load_end_by_themselves(delay_s: float) -> None:
    """`running_workers` asserts that none had to be killed, and that no log has a traceback."""
    async with contextlib.AsyncExitStack() as stack:
        with running_workers(config("prefill-0"), config("decode-0")) as (prefill, decode):
            gateway = await stack.enter_async_context(gateway_to(prefill, decode))
            for _ in range(20):
                gateway.submit(prompt_of(1000), worker="prefill-0", to="decode-0", max_tokens=MANY_TOKENS)
            await asyncio.sleep(delay_s)


class _Unstartable(DecodeRole):
    async def start(self) -> None:
        raise OSError("no rendezvous")


class _Unstoppable(DecodeRole):
    async def stop(self) -> None:
        await super().stop()
        raise OSError("cannot stop")


class _Slipping(DecodeRole):
    """Raises at its first tick."""

    def tick(self, now: float) -> None:
        raise KeyError("a fault of ours")


def test_a_worker_whose_role_does_not_start_leaves_no_thread() -> None:
    worker = Worker(config("decode-0"), [_Unstartable], SECRET)
    with pytest.raises(OSError, match="no rendezvous"):
        worker.start()
    worker.stop()
    assert not worker.crashed.is_set()


def test_a_worker_that_cannot_start_lets_go_of_its_folder(tmp_path: Path) -> None:
    tiers = TierOptions(disk=DiskTier(path=str(tmp_path / "own"), bytes=4096))
    for _ in range(2):
        worker = Worker(config("prefill-0", num_blocks=512, max_model_len=8192, tiers=tiers), [], SECRET)
        with pytest.raises(ConfigError, match=r"disk\.bytes: 4096 is less than the KV of max_model_len"):
            worker.start()


def test_a_worker_stops_twice_and_whatever_its_roles_do() -> None:
    worker = Worker(config("decode-0"), [_Unstoppable, DecodeRole], SECRET)
    worker.start()
    worker.stop()
    worker.stop()
    assert not worker.crashed.is_set()


def test_a_fault_in_a_timer_ends_the_worker() -> None:
    worker = Worker(config("decode-0"), [_Slipping], SECRET)
    worker.start()
    assert worker.crashed.wait(60)
    worker.stop()


def test_a_fault_in_a_callback_ends_the_worker() -> None:
    def fail() -> None:
        raise KeyError("a fault of ours")

    worker = Worker(config("decode-0"), [DecodeRole], SECRET)
    worker.start()
    worker.call_soon(fail)
    assert worker.crashed.wait(60)
    worker.stop()


def test_a_fault_in_the_engine_ends_the_worker() -> None:
    contexts: list[RoleContext] = []

    def make_role(context: RoleContext) -> DecodeRole:
        contexts.append(context)
        return DecodeRole(context)

    worker = Worker(config("decode-0"), [make_role], SECRET)
    worker.start()
    contexts[0].post(msgspec.structs.replace)  # type: ignore[arg-type]  # No command at all.
    assert worker.crashed.wait(60)
    worker.stop()
    contexts[0].post(Release)  # type: ignore[arg-type]  # It is no longer processed.
