"""What a pair check asks of the router, and what it makes of the answer."""

from __future__ import annotations

import asyncio
import random

import pytest

from disagg.gateway.models.pair_check import TIMEOUT_S, PairCheckResult, RouterPairChecker
from disagg.proto.block_hash import chain_hashes
from disagg.proto.errors import InvalidRequestError, UnavailableError
from disagg.proto.ids import RequestId, WorkerId
from disagg.proto.messages import Load, WorkerInfo
from disagg.proto.token_ids import unpack_token_ids
from disagg.router.api import ClusterView, Completion, RequestTrace, RoutedRequest, WorkerView
from tests.support.gateway import FakeRouter, Wait
from tests.support.router import worker_info

P, D = WorkerId("p0"), WorkerId("d0")
NOW = 100.0
VOCAB_SIZE = 50


def checker_on(router: FakeRouter, *workers: WorkerInfo) -> RouterPairChecker:
    router.cluster = ClusterView(tuple(WorkerView(info, Load()) for info in workers), 0, 0)
    return RouterPairChecker(
        router, VOCAB_SIZE, clock=lambda: NOW, mint_id=lambda: RequestId("probe"), dice=random.Random(1)
    )


def moved(router: FakeRouter, num_bytes: int, **stages: float) -> None:
    router.traces[RequestId("probe")] = RequestTrace(
        request_id=RequestId("probe"), kv_bytes=num_bytes, transport="gloo", stages=stages
    )


async def submitted(*workers: WorkerInfo) -> RoutedRequest:
    router = FakeRouter([[1], [2]])
    moved(router, 0)
    await checker_on(router, *workers).run(P, D)
    ((request, arrival),) = router.submitted
    assert arrival == NOW
    return request


async def test_what_is_asked() -> None:
    request = await submitted(worker_info("p0"), worker_info("d0"))
    assert request.pair == (P, D)
    assert request.deadline == NOW + TIMEOUT_S
    assert request.num_prompt_tokens == 128  # one step of P
    assert all(0 <= token < VOCAB_SIZE for token in unpack_token_ids(request.prompt_token_ids))
    assert request.block_hashes == tuple(chain_hashes(request.root_hash, request.prompt_token_ids))
    assert (request.sampling.max_tokens, request.sampling.stop_token_ids) == (2, ())


@pytest.mark.parametrize(
    ("prefill", "decode", "num_tokens"),
    [
        ({"token_budget": 512}, {}, 512),
        ({"token_budget": 8}, {}, 8),
        ({}, {"max_model_len": 20}, 18),
        ({"num_blocks": 2}, {}, 30),
    ],
)
async def test_the_prompt_fits(prefill: dict[str, int], decode: dict[str, int], num_tokens: int) -> None:
    request = await submitted(worker_info("p0", **prefill), worker_info("d0", **decode))  # type: ignore[arg-type]
    assert request.num_prompt_tokens == num_tokens


async def test_no_two_pair_checks_share_a_prefix() -> None:
    router = FakeRouter([[1], [2]])
    moved(router, 0)
    checker = checker_on(router, worker_info("p0"), worker_info("d0"))
    await checker.run(P, D)
    await checker.run(P, D)
    (first, _), (second, _) = router.submitted
    assert first.root_hash != second.root_hash
    assert not set(first.block_hashes) & set(second.block_hashes)


async def test_what_moved() -> None:
    router = FakeRouter([[1], [2]])
    moved(router, 8192, first_token=NOW + 1.0, kv_transfer=NOW + 1.25)
    result = await checker_on(router, worker_info("p0"), worker_info("d0")).run(P, D)
    assert result == PairCheckResult(kv_bytes=8192, expected_bytes=128 * 64, exposed_s=0.25, transport="gloo")


async def test_a_hand_over_that_overtakes_the_first_token_exposes_nothing() -> None:
    router = FakeRouter([[1], [2]])
    moved(router, 8192, kv_transfer=NOW + 1.0, first_token=NOW + 1.25)
    assert (await checker_on(router, worker_info("p0"), worker_info("d0")).run(P, D)).exposed_s == 0.0


@pytest.mark.parametrize(
    ("pair", "field"), [((D, WorkerId("d9")), "decode_worker"), ((WorkerId("p9"), D), "prefill_worker")]
)
async def test_an_unknown_worker_is_named(pair: tuple[WorkerId, WorkerId], field: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"there is no worker '.9'; there are d0, p0$") as caught:
        await checker_on(FakeRouter(), worker_info("p0"), worker_info("d0")).run(*pair)
    assert caught.value.field == field


async def test_a_refusal_is_passed_on() -> None:
    refused = FakeRouter(refusal=UnavailableError("d0 has no room now", "no_room"))
    with pytest.raises(UnavailableError, match=r"^d0 has no room now$"):
        await checker_on(refused, worker_info("p0"), worker_info("d0")).run(P, D)


async def test_a_failure_on_the_way_cancels_what_is_left() -> None:
    router = FakeRouter([[1], UnavailableError("lost", "worker_lost")])
    with pytest.raises(UnavailableError, match=r"^lost$"):
        await checker_on(router, worker_info("p0"), worker_info("d0")).run(P, D)
    assert router.handles[0].num_cancels == 1


async def test_whoever_gives_up_leaves_nothing() -> None:
    router = FakeRouter([Wait()])
    task = asyncio.create_task(checker_on(router, worker_info("p0"), worker_info("d0")).run(P, D))
    await router.arrived.wait()
    await router.handles[0].waiting.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert router.handles[0].num_cancels == 1


async def test_nothing_is_cancelled_after_the_end() -> None:
    router = FakeRouter([[1], Completion("length", 2, 0)])
    moved(router, 0)
    await checker_on(router, worker_info("p0"), worker_info("d0")).run(P, D)
    assert router.handles[0].num_cancels == 0
