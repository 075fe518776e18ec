from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from concurrent.futures import Executor, Future
from contextlib import aclosing
from typing import Any

import pytest

from disagg.proto.block_hash import chain_hashes, root_hash
from disagg.proto.errors import (
    DeadlineError,
    DisaggError,
    InternalError,
    InvalidRequestError,
    OverloadedError,
    RequestCancelledError,
    UnavailableError,
)
from disagg.proto.ids import RequestId, WorkerId
from disagg.proto.messages import Sampling
from disagg.router.api import Completion, RequestTrace, RoutedRequest, TokenBatch
from disagg.router.gateway.generation import Delta, Finish, Generator
from disagg.router.gateway.tokenizer import ServedModel
from disagg.v1 import inference_pb2 as pb
from tests.support.gateway import EOS, FINGERPRINT, IM_END, MODEL_NAME, FakeHandle, FakeRouter, Wait, forever, limits_of

ID = RequestId("r1")
PROMPT = list(range(5, 45))


class Clock:
    """Stands still unless told; `then` is what it shows from the second reading on."""

    def __init__(self, now: float = 100.0, then: float | None = None) -> None:
        self._now, self._then = now, then

    def __call__(self) -> float:
        now = self._now
        self._now = now if self._then is None else self._then
        return now


class CountingExecutor(Executor):
    """Does the work at once, and counts."""

    def __init__(self) -> None:
        self.num_jobs = 0

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.num_jobs += 1
        done: Future[Any] = Future()
        try:
            done.set_result(fn(*args, **kwargs))
        except DisaggError as error:
            done.set_exception(error)
        return done


def make(model: ServedModel, router: FakeRouter, clock: Clock | None = None, **options: Any) -> Generator:
    return Generator(
        model, router, limits_of(model), FINGERPRINT, clock=clock or Clock(), mint_seed=lambda: 77, **options
    )


def request(stop: tuple[str, ...] = (), **stopping: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        model=MODEL_NAME,
        token_ids=pb.TokenIds(ids=PROMPT),
        stopping=pb.StopConditions(stop=stop, **stopping),
    )


async def collect(run: AsyncGenerator[Delta | Finish, None]) -> list[Delta | Finish]:
    async with aclosing(run) as events:
        return [event async for event in events]


async def read_into(seen: list[Delta | Finish], events: AsyncIterator[Delta | Finish]) -> None:
    """Read to the end; `seen` has what came before an error."""
    async for event in events:
        seen.append(event)  # noqa: PERF401 - a comprehension would lose what came before an error


def ids(model: ServedModel, text: str) -> list[int]:
    return model.tokenizer.encode_text(text)[1:]


async def test_a_whole_answer(model: ServedModel) -> None:
    a, b = ids(model, "hello"), ids(model, " wörld")
    router = FakeRouter([a, b, [EOS], Completion("stop", 99, 16)])
    events = await collect(make(model, router).run(request(), ID))
    assert events == [
        Delta(0, tuple(a), "hello"),
        Delta(len(a), tuple(b), " wörld"),
        Delta(len(a) + len(b), (EOS,), ""),
        Finish(ID, "stop", len(PROMPT), 16, len(a) + len(b) + 1),
    ]
    assert router.handles[0].num_cancels == 0


async def test_what_the_router_gets(model: ServedModel) -> None:
    router = FakeRouter()
    await collect(make(model, router).run(request(max_tokens=4, ignore_eos=True), ID, deadline=150.0))
    root = root_hash(FINGERPRINT)
    expected = RoutedRequest(
        request_id=ID,
        prompt_token_ids=tuple(PROMPT),
        block_hashes=tuple(chain_hashes(root, PROMPT)),
        root_hash=root,
        sampling=Sampling(seed=77, max_tokens=4),
        deadline=150.0,
    )
    assert router.submitted == [(expected, 100.0)]
    assert len(expected.block_hashes) == 2


async def test_text_and_chat_are_tokenized(model: ServedModel) -> None:
    router = FakeRouter()
    generator = make(model, router)
    chat = pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="hi")])
    await collect(generator.run(pb.GenerateRequest(model=MODEL_NAME, text="hello"), ID))
    await collect(generator.run(pb.GenerateRequest(model=MODEL_NAME, chat=chat), ID))
    texts = [model.tokenizer.decode(routed.prompt_token_ids) for routed, _ in router.submitted]
    assert texts == ["hello", "user\nhi\nassistant\n"]


async def test_the_end_gives_what_was_held_back(model: ServedModel) -> None:
    cut = ids(model, "🙂")[:2]
    router = FakeRouter([ids(model, "ab"), cut, Completion("length", 4, 0)])
    events = await collect(make(model, router).run(request(stop=("bc",)), ID))
    assert events == [
        Delta(0, tuple(ids(model, "ab")), "a"),
        Delta(2, tuple(cut), ""),
        Delta(4, (), "b\ufffd"),
        Finish(ID, "length", len(PROMPT), 0, 4),
    ]


@pytest.mark.parametrize(
    ("prefill", "cached"), [("prefill-0", 32), (None, 16)], ids=["disaggregated", "prefilled on decode"]
)
async def test_a_stop_string_ends_and_cancels(model: ServedModel, prefill: str | None, cached: int) -> None:
    router = FakeRouter([ids(model, "x S"), ids(model, "TOP y"), Wait()])
    router.traces[ID] = RequestTrace(
        request_id=ID,
        prefill_worker=None if prefill is None else WorkerId(prefill),
        prefill_cached_tokens=32,
        decode_cached_tokens=16,
    )
    events = await collect(make(model, router).run(request(stop=("STOP",)), ID))
    first, second = ids(model, "x S"), ids(model, "TOP")
    assert events == [
        Delta(0, tuple(first), "x "),
        Delta(len(first), tuple(second), ""),
        Finish(ID, "stop", len(PROMPT), cached, len(first) + len(second)),
    ]
    assert router.handles[0].num_cancels == 1


async def test_a_stop_string_waits_for_min_tokens(model: ServedModel) -> None:
    x = ids(model, "x")
    router = FakeRouter(lambda _: forever(x))
    events = await collect(make(model, router).run(request(stop=("x",), min_tokens=3), ID))
    assert [event.text for event in events if isinstance(event, Delta)] == ["x", "x", ""]
    assert events[-1] == Finish(ID, "stop", len(PROMPT), 0, 3)
    assert router.submitted[0][0].sampling.min_tokens == 3


async def test_a_stop_string_in_the_last_text_is_a_stop(model: ServedModel) -> None:
    router = FakeRouter([ids(model, "a🙂")[:2], Completion("length", 2, 8)])
    events = await collect(make(model, router).run(request(stop=("\ufffd",)), ID))
    assert events[-1] == Finish(ID, "stop", len(PROMPT), 0, 2)
    assert "".join(event.text for event in events if isinstance(event, Delta)) == "a"


@pytest.mark.parametrize(
    "error", [UnavailableError("lost", "worker_lost"), InternalError("x"), RequestCancelledError("x"), OSError("bug")]
)
async def test_an_error_comes_after_the_tokens_before_it_and_cancels(model: ServedModel, error: Exception) -> None:
    router = FakeRouter([[40], error])
    seen: list[Delta | Finish] = []
    with pytest.raises(type(error)) as caught:
        await read_into(seen, make(model, router).run(request(), ID))
    assert caught.value is error
    assert [type(event) for event in seen] == [Delta]
    assert router.handles[0].num_cancels == 1


async def test_a_refusal_of_the_router_holds_nothing(model: ServedModel) -> None:
    router = FakeRouter(refusal=OverloadedError("full", 2.0))
    with pytest.raises(OverloadedError):
        await collect(make(model, router).run(request(), ID))
    assert router.handles == []


async def test_a_wrong_request_never_reaches_the_router(model: ServedModel) -> None:
    router = FakeRouter()
    with pytest.raises(InvalidRequestError):
        await collect(make(model, router).run(request(max_tokens=0), ID))
    with pytest.raises(InvalidRequestError, match="max_tokens"):
        await collect(make(model, router).run(request(max_tokens=1000), ID))
    assert router.submitted == []


async def test_a_consumer_that_leaves_cancels(model: ServedModel) -> None:
    router = FakeRouter(lambda _: forever([40]))
    run = make(model, router).run(request(), ID)
    assert isinstance(await anext(run), Delta)
    await run.aclose()
    assert router.handles[0].num_cancels == 1


async def test_a_cancelled_task_cancels(model: ServedModel) -> None:
    router = FakeRouter([Wait()])
    task = asyncio.create_task(collect(make(model, router).run(request(), ID)))
    await router.arrived.wait()
    await router.handles[0].waiting.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert router.handles[0].num_cancels == 1


async def test_nothing_is_read_that_nobody_asks_for(model: ServedModel) -> None:
    router = FakeRouter(lambda _: forever([40]))
    async with aclosing(make(model, router).run(request(), ID)) as events:
        for num_reads in (1, 2, 3):
            await anext(events)
            for _ in range(10):
                await asyncio.sleep(0)
            assert router.handles[0].num_reads == num_reads


async def test_a_deadline_that_passed(model: ServedModel) -> None:
    router = FakeRouter()
    with pytest.raises(DeadlineError):
        await collect(make(model, router).run(request(), ID, deadline=100.0))
    assert router.submitted == []


async def test_a_deadline_that_passes_while_tokenizing(model: ServedModel) -> None:
    router = FakeRouter()
    with pytest.raises(DeadlineError):
        await collect(make(model, router, Clock(100.0, then=151.0)).run(request(), ID, deadline=150.0))
    assert router.submitted == []


async def test_a_deadline_that_passes_while_the_router_is_silent(model: ServedModel) -> None:
    router = FakeRouter([[40], Wait()])
    clock = Clock()
    run = make(model, router, clock).run(request(), ID, deadline=150.0)
    assert isinstance(await anext(run), Delta)
    clock._now = 150.0
    with pytest.raises(DeadlineError):
        await anext(run)
    assert router.handles[0].num_cancels == 1


async def test_a_timeout_of_another_kind_is_not_the_deadline(model: ServedModel) -> None:
    router = FakeRouter([TimeoutError("a bug")])
    with pytest.raises(TimeoutError, match="a bug"):
        await collect(make(model, router).run(request(), ID, deadline=150.0))


async def test_only_large_prompts_go_to_a_thread(model: ServedModel) -> None:
    executor = CountingExecutor()
    generator = make(model, FakeRouter(), executor=executor, inline_prompt_bytes=160)
    await collect(generator.run(request(), ID))
    assert executor.num_jobs == 0
    large = request()
    large.token_ids.ids.append(7)
    await collect(generator.run(large, ID))
    assert executor.num_jobs == 1
    with pytest.raises(InvalidRequestError, match="context"):
        await collect(generator.run(pb.GenerateRequest(model=MODEL_NAME, text="qz" * 200), ID))
    assert executor.num_jobs == 2


class EndsSilently(FakeHandle):
    """Breaks the contract: no completion at the end."""

    async def __anext__(self) -> TokenBatch:
        raise StopAsyncIteration


async def test_a_router_that_ends_without_a_completion_is_a_fault(
    model: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.support.gateway.FakeHandle", EndsSilently)
    router = FakeRouter()
    with pytest.raises(InternalError, match="r1 ended without a completion"):
        await collect(make(model, router).run(request(), ID))
    assert router.handles[0].num_cancels == 1


async def test_stop_ids_reach_the_worker(model: ServedModel) -> None:
    router = FakeRouter()
    await collect(make(model, router).run(request(stop_token_ids=[9]), ID))
    assert router.submitted[0][0].sampling.stop_token_ids == (9, IM_END, EOS)
