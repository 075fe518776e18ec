"""Several answers to one prompt."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

import msgspec
import pytest

from disagg.gateway.answers.generator import Generator
from disagg.gateway.requests.answer_events import Delta, Finish
from disagg.gateway.requests.request import Call, GenerationInput, IdsPrompt
from disagg.gateway.requests.sampling import answer_seed
from disagg.gateway.text.tokenizer import ServedModel
from disagg.proto.errors import DisaggError, OverloadedError, UnavailableError
from disagg.proto.ids import RequestId
from disagg.router.api import Completion, RoutedRequest
from tests.support.calls import answer
from tests.support.gateway import FINGERPRINT, MODEL_NAME, FakeHandle, FakeRouter, Step, Wait, forever, limits_of

IDS = [RequestId("r1"), RequestId("r2"), RequestId("r3")]


def run(model: ServedModel, router: FakeRouter, **fields: Any) -> AsyncGenerator[Delta | Finish, None]:
    others = iter(IDS[1:])
    generator = Generator(
        model,
        router,
        limits_of(model),
        FINGERPRINT,
        clock=lambda: 1.0,
        mint_seed=lambda: 77,
        mint_id=lambda: next(others),
    )
    usual: dict[str, Any] = {"model": MODEL_NAME, "prompt": IdsPrompt(tuple(range(5, 45))), "n": 3}
    return answer(generator, GenerationInput(**usual | fields), Call(request_id=IDS[0], deadline=50.0))


async def read_into(seen: list[Delta | Finish], events: AsyncIterator[Delta | Finish]) -> None:
    async for event in events:
        seen.append(event)  # noqa: PERF401 - a comprehension would lose what came before an error


def by_answer(steps: dict[str, list[Step]]) -> FakeRouter:
    return FakeRouter(lambda routed: steps[routed.request_id])


async def test_each_answer_has_its_own_id_seed_and_end(model: ServedModel) -> None:
    router = by_answer({"r1": [[5], [6]], "r2": [[7, 8], Completion("stop", 2, 16)], "r3": [[9]]})
    seen: list[Delta | Finish] = []
    await read_into(seen, run(model, router))
    of = [[event for event in seen if event.answer_index == i] for i in range(3)]
    text = [model.tokenizer.decode([token_id]) for token_id in range(10)]
    assert of == [
        [Delta(0, (5,), text[5]), Delta(1, (6,), text[6]), Finish(IDS[0], "length", 40, 0, 2)],
        [Delta(0, (7, 8), text[7] + text[8], (), 1), Finish(IDS[1], "stop", 40, 16, 2, 1)],
        [Delta(0, (9,), text[9], (), 2), Finish(IDS[2], "length", 40, 0, 1, 2)],
    ]
    assert [handle.num_cancels for handle in router.handles] == [0, 0, 0]


async def test_answers_differ_in_id_and_seed_only(model: ServedModel) -> None:
    router, alone = FakeRouter(), FakeRouter()
    await read_into([], run(model, router, seed=11, temperature=0.5))
    await read_into([], run(model, alone, seed=11, temperature=0.5, n=1))
    routed = [one for one, _ in router.submitted]
    assert [one.request_id for one in routed] == IDS
    assert [one.sampling.seed for one in routed] == [11, answer_seed(11, 1), answer_seed(11, 2)]
    assert alone.submitted == [(routed[0], 1.0)]
    for one in routed[1:]:
        assert with_seed(msgspec.structs.replace(one, request_id=IDS[0]), 11) == routed[0]


def with_seed(routed: RoutedRequest, seed: int) -> RoutedRequest:
    return msgspec.structs.replace(routed, sampling=msgspec.structs.replace(routed.sampling, seed=seed))


async def test_a_minted_seed_is_shared_out_like_a_given_one(model: ServedModel) -> None:
    router = FakeRouter()
    await read_into([], run(model, router))
    assert [one.sampling.seed for one, _ in router.submitted] == [answer_seed(77, i) for i in range(3)]


def test_seeds_of_answers_do_not_meet() -> None:
    """Neighbouring seeds are what people choose: no answer of one may repeat an answer of another."""
    seeds = [answer_seed(seed, i) for seed, i in itertools.product([*range(100), 2**64 - 1], range(16))]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert (answer_seed(7, 0), answer_seed(7, 1)) == (7, 0xAD2FE2F2C894C1F1)


@pytest.mark.parametrize("error", [UnavailableError("lost", "worker_lost"), OSError("a bug")])
async def test_one_that_fails_ends_all(model: ServedModel, error: Exception) -> None:
    router = by_answer({"r1": [Wait()], "r2": [[7], error], "r3": [[9], Wait()]})
    seen: list[Delta | Finish] = []
    with pytest.raises(type(error)) as caught:
        await read_into(seen, run(model, router))
    assert caught.value is error
    assert sorted(event.answer_index for event in seen) == [1, 2]
    assert [handle.num_cancels for handle in router.handles] == [1, 1, 1]


class Refusing(FakeRouter):
    """Takes two requests."""

    def submit(self, request: RoutedRequest, arrival: float) -> FakeHandle:
        if len(self.handles) == 2:
            raise OverloadedError("full", 1.0)
        return super().submit(request, arrival)


async def test_one_that_is_refused_ends_all(model: ServedModel) -> None:
    router = Refusing([Wait()])
    with pytest.raises(DisaggError, match="full"):
        await read_into([], run(model, router))
    assert [handle.num_cancels for handle in router.handles] == [1, 1]


async def test_a_stop_string_ends_its_own_answer_at_once(model: ServedModel) -> None:
    x = model.tokenizer.encode_text("x")[1]
    router = by_answer({"r1": [[x], Wait()], "r2": [Wait()], "r3": [Wait()]})
    async with aclosing(run(model, router, stop=("x",))) as events:
        assert await anext(events) == Delta(0, (x,), "")
        assert await anext(events) == Finish(IDS[0], "stop", 40, 0, 1)
        assert [handle.num_cancels for handle in router.handles] == [1, 0, 0]
    assert [handle.num_cancels for handle in router.handles] == [1, 1, 1]


async def test_a_consumer_that_leaves_cancels_all_and_leaves_no_task(model: ServedModel) -> None:
    before = asyncio.all_tasks()
    router = FakeRouter(lambda _: forever([40]))
    events = run(model, router)
    await anext(events)
    await events.aclose()
    assert [handle.num_cancels for handle in router.handles] == [1, 1, 1]
    assert asyncio.all_tasks() == before


async def test_nothing_is_read_that_nobody_asks_for(model: ServedModel) -> None:
    router = FakeRouter(lambda _: forever([40]))
    async with aclosing(run(model, router)) as events:
        for num_asked in range(1, 5):
            await anext(events)
            for _ in range(10):
                await asyncio.sleep(0)
            assert sum(handle.num_reads for handle in router.handles) == 3 + num_asked - 1
