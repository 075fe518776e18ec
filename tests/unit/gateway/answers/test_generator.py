from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing
from typing import Any

import pytest

from disagg.gateway.answers.generator import Generator
from disagg.gateway.auth.auth import Caller
from disagg.gateway.event_loop.shell.offload import Offload
from disagg.gateway.requests.answer_events import Delta, Finish
from disagg.gateway.requests.request import Call, ChatPrompt, GenerationInput, IdsPrompt, Targets, TextPrompt
from disagg.gateway.text.chat_template import ChatTurn
from disagg.gateway.text.tokenizer import ServedModel
from disagg.proto.block_hash import chain_hashes, root_hash
from disagg.proto.errors import (
    ContextLengthError,
    DeadlineError,
    InternalError,
    InvalidRequestError,
    OverloadedError,
    RequestCancelledError,
    UnavailableError,
)
from disagg.proto.ids import RequestId, WorkerId
from disagg.proto.messages import Sampling, TokenLogprobs
from disagg.proto.token_ids import pack_token_ids, unpack_token_ids
from disagg.router.api import Completion, RequestTrace, RoutedRequest, TokenBatch
from tests.support.calls import answer
from tests.support.gateway import (
    EOS,
    FINGERPRINT,
    IM_END,
    MAX_MODEL_LEN,
    MODEL_NAME,
    FakeHandle,
    FakeRouter,
    Step,
    Wait,
    forever,
    limits_of,
)

ID = RequestId("r1")
CALL = Call(request_id=ID)
PROMPT = list(range(5, 45))


class Clock:
    """Stands still unless told; `then` is what it shows from the second reading on."""

    def __init__(self, now: float = 100.0, then: float | None = None) -> None:
        self._now, self._then = now, then

    def __call__(self) -> float:
        now = self._now
        self._now = now if self._then is None else self._then
        return now


class TickingClock(Clock):
    """One second later at every reading."""

    def __call__(self) -> float:
        self._now += 1
        return self._now


def make(model: ServedModel, router: FakeRouter, clock: Clock | None = None, **options: Any) -> Generator:
    return Generator(
        model,
        router,
        limits_of(model),
        FINGERPRINT,
        clock=clock or Clock(),
        mint_seed=lambda: 77,
        mint_id=lambda: RequestId("another"),
        **options,
    )


def asked(stop: tuple[str, ...] = (), **fields: Any) -> GenerationInput:
    usual: dict[str, Any] = {"model": MODEL_NAME, "prompt": IdsPrompt(tuple(PROMPT)), "stop": stop}
    return GenerationInput(**usual | fields)


def until(deadline: float) -> Call:
    return Call(request_id=ID, deadline=deadline)


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
    events = await collect(answer(make(model, router), asked(), CALL))
    assert events == [
        Delta(0, tuple(a), "hello"),
        Delta(len(a), tuple(b), " wörld"),
        Delta(len(a) + len(b), (EOS,), ""),
        Finish(ID, "stop", len(PROMPT), 16, len(a) + len(b) + 1),
    ]
    assert router.handles[0].num_cancels == 0


async def test_what_the_router_gets(model: ServedModel) -> None:
    router = FakeRouter()
    await collect(answer(make(model, router), asked(max_tokens=4, ignore_eos=True), until(150.0)))
    root = root_hash(FINGERPRINT)
    expected = RoutedRequest(
        request_id=ID,
        prompt_token_ids=pack_token_ids(PROMPT),
        block_hashes=tuple(chain_hashes(root, pack_token_ids(PROMPT))),
        root_hash=root,
        sampling=Sampling(seed=77, max_tokens=4),
        deadline=150.0,
    )
    assert router.submitted == [(expected, 100.0)]
    assert len(expected.block_hashes) == 2


async def test_what_the_router_gets_of_the_call(model: ServedModel) -> None:
    router = FakeRouter()
    call = Call(request_id=ID, targets=Targets(0.5, 0.02), caller=Caller("acme", False), trace_parent="00-a-b-01")
    await collect(answer(make(model, router), asked(), call))
    ((routed, _),) = router.submitted
    assert (routed.ttft_slo_s, routed.tpot_slo_s) == (0.5, 0.02)
    assert (routed.tenant, routed.trace_parent) == ("acme", "00-a-b-01")


async def test_cached_prefixes_are_separate_for_each_tenant_and_salt(model: ServedModel) -> None:
    router = FakeRouter()
    pairs = [("", ""), ("a", ""), ("b", ""), ("", "a"), ("a", "b"), ("ab", ""), ("", "ab"), ("é", ""), ("a", "b\0")]
    for tenant, salt in pairs * 2:
        call = Call(request_id=ID, caller=Caller(tenant, False))
        await collect(answer(make(model, router), asked(cache_salt=salt), call))
    roots = [routed.root_hash for routed, _ in router.submitted]
    assert roots[: len(pairs)] == roots[len(pairs) :]
    assert len(set(roots)) == len(pairs)
    assert roots[0] == root_hash(FINGERPRINT)
    for routed, _ in router.submitted:
        assert routed.block_hashes == tuple(chain_hashes(routed.root_hash, pack_token_ids(PROMPT)))


async def test_text_and_chat_are_tokenized(model: ServedModel) -> None:
    router = FakeRouter()
    generator = make(model, router)
    for prompt in (TextPrompt("hello"), ChatPrompt((ChatTurn("user", "hi"),))):
        await collect(answer(generator, asked(prompt=prompt), CALL))
    texts = [model.tokenizer.decode(unpack_token_ids(routed.prompt_token_ids)) for routed, _ in router.submitted]
    assert texts == ["hello", "user\nhi\nassistant\n"]


async def test_the_end_gives_what_was_held_back(model: ServedModel) -> None:
    cut = ids(model, "🙂")[:2]
    router = FakeRouter([ids(model, "ab"), cut, Completion("length", 4, 0)])
    events = await collect(answer(make(model, router), asked(stop=("bc",)), CALL))
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
    events = await collect(answer(make(model, router), asked(stop=("STOP",)), CALL))
    first, second = ids(model, "x S"), ids(model, "TOP")
    assert events == [
        Delta(0, tuple(first), "x "),
        Delta(len(first), tuple(second), ""),
        Finish(ID, "stop", len(PROMPT), cached, len(first) + len(second)),
    ]
    assert router.handles[0].num_cancels == 1
    assert router.handles[0].num_answered == len(first) + len(second)


async def test_a_stop_string_waits_for_min_tokens(model: ServedModel) -> None:
    x = ids(model, "x")
    router = FakeRouter(lambda _: forever(x))
    events = await collect(answer(make(model, router), asked(stop=("x",), min_tokens=3), CALL))
    assert [event.text for event in events if isinstance(event, Delta)] == ["x", "x", ""]
    assert events[-1] == Finish(ID, "stop", len(PROMPT), 0, 3)
    assert router.submitted[0][0].sampling.min_tokens == 3


async def test_a_stop_string_in_the_last_text_is_a_stop(model: ServedModel) -> None:
    router = FakeRouter([ids(model, "a🙂")[:2], Completion("length", 2, 8)])
    events = await collect(answer(make(model, router), asked(stop=("\ufffd",)), CALL))
    assert events[-1] == Finish(ID, "stop", len(PROMPT), 0, 2)
    assert "".join(event.text for event in events if isinstance(event, Delta)) == "a"


@pytest.mark.parametrize(
    "error", [UnavailableError("lost", "worker_lost"), InternalError("x"), RequestCancelledError("x"), OSError("bug")]
)
async def test_an_error_comes_after_the_tokens_before_it_and_cancels(model: ServedModel, error: Exception) -> None:
    router = FakeRouter([[40], error])
    seen: list[Delta | Finish] = []
    with pytest.raises(type(error)) as caught:
        await read_into(seen, answer(make(model, router), asked(), CALL))
    assert caught.value is error
    assert [type(event) for event in seen] == [Delta]
    assert router.handles[0].num_cancels == 1


async def test_a_refusal_of_the_router_holds_nothing(model: ServedModel) -> None:
    router = FakeRouter(refusal=OverloadedError("full", 2.0))
    with pytest.raises(OverloadedError):
        await collect(answer(make(model, router), asked(), CALL))
    assert router.handles == []


async def test_a_wrong_request_never_reaches_the_router(model: ServedModel) -> None:
    router = FakeRouter()
    with pytest.raises(InvalidRequestError):
        await collect(answer(make(model, router), asked(max_tokens=0), CALL))
    with pytest.raises(InvalidRequestError, match="1000 tokens in the completion"):
        await collect(answer(make(model, router), asked(max_tokens=1000), CALL))
    assert router.submitted == []


async def test_a_consumer_that_leaves_cancels(model: ServedModel) -> None:
    router = FakeRouter(lambda _: forever([40]))
    run = answer(make(model, router), asked(), CALL)
    assert isinstance(await anext(run), Delta)
    await run.aclose()
    assert router.handles[0].num_cancels == 1


async def test_a_cancelled_task_cancels(model: ServedModel) -> None:
    router = FakeRouter([Wait()])
    task = asyncio.create_task(collect(answer(make(model, router), asked(), CALL)))
    await router.arrived.wait()
    await router.handles[0].waiting.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert router.handles[0].num_cancels == 1


async def test_nothing_is_read_that_nobody_asks_for(model: ServedModel) -> None:
    router = FakeRouter(lambda _: forever([40]))
    async with aclosing(answer(make(model, router), asked(), CALL)) as events:
        for num_reads in (1, 2, 3):
            await anext(events)
            for _ in range(10):
                await asyncio.sleep(0)
            assert router.handles[0].num_reads == num_reads


LOGPROBS = [TokenLogprobs(-float(i), (i,), (-0.5,)) for i in range(4)]


async def test_logprobs_come_with_their_tokens(model: ServedModel) -> None:
    a, b, c, d = (ids(model, letter)[0] for letter in "abcd")
    steps: list[Step] = [TokenBatch([a], LOGPROBS[:1]), TokenBatch([b, c, d], LOGPROBS[1:]), Wait()]
    router = FakeRouter(steps)
    events = await collect(answer(make(model, router), asked(stop=("c",), logprobs=1), CALL))
    assert events == [
        Delta(0, (a,), "a", (LOGPROBS[0],)),
        Delta(1, (b, c), "b", (LOGPROBS[1], LOGPROBS[2])),
        Finish(ID, "stop", len(PROMPT), 0, 3),
    ]
    assert router.submitted[0][0].sampling.logprobs == 1


async def test_logprobs_that_are_missing_are_a_fault(model: ServedModel) -> None:
    router = FakeRouter([TokenBatch([5, 6], LOGPROBS[:1])])
    with pytest.raises(InternalError, match="r1 has 1 logprobs of 2 tokens"):
        await collect(answer(make(model, router), asked(logprobs=0), CALL))
    assert router.handles[0].num_cancels == 1


async def test_how_long_the_text_took_is_noted(model: ServedModel) -> None:
    router = FakeRouter([[5], [6]])
    router.traces[ID] = RequestTrace(request_id=ID)
    await collect(answer(make(model, router, TickingClock()), asked(), CALL))
    assert router.traces[ID].detokenize_s == 2.0


async def test_a_deadline_that_passed(model: ServedModel) -> None:
    router = FakeRouter()
    with pytest.raises(DeadlineError):
        await collect(answer(make(model, router), asked(), until(100.0)))
    assert router.submitted == []


async def test_a_deadline_that_passes_while_tokenizing(model: ServedModel) -> None:
    router = FakeRouter()
    with pytest.raises(DeadlineError):
        await collect(answer(make(model, router, Clock(100.0, then=151.0)), asked(), until(150.0)))
    assert router.submitted == []


async def test_a_deadline_that_passes_while_the_router_is_silent(model: ServedModel) -> None:
    router = FakeRouter([[40], Wait()])
    clock = Clock()
    run = answer(make(model, router, clock), asked(), until(150.0))
    assert isinstance(await anext(run), Delta)
    clock._now = 150.0
    with pytest.raises(DeadlineError):
        await anext(run)
    assert router.handles[0].num_cancels == 1


async def test_a_timeout_of_another_kind_is_not_the_deadline(model: ServedModel) -> None:
    router = FakeRouter([TimeoutError("a bug")])
    with pytest.raises(TimeoutError, match="a bug"):
        await collect(answer(make(model, router), asked(), until(150.0)))


@pytest.fixture
def offload() -> Iterator[Offload]:
    it = Offload(1, inline_bytes=40, max_bytes=1 << 20, max_tenant_bytes=1 << 20, clock=lambda: 0.0)
    yield it
    it.close()


async def test_only_large_prompts_wait_for_a_thread(model: ServedModel, offload: Offload) -> None:
    router = FakeRouter()
    generator = make(model, router, TickingClock(), offload=offload)
    await collect(answer(generator, asked(), Call(request_id=ID)))
    await collect(answer(generator, asked(prompt=IdsPrompt((*PROMPT, 7))), Call(request_id=ID)))
    assert [routed.tokenize_queue_s for routed, _ in router.submitted] == [0.0, 1.0]
    assert offload.num_bytes == 0


async def test_a_large_prompt_is_refused_before_it_waits_where_the_queue_is_full(
    model: ServedModel, offload: Offload
) -> None:
    router = FakeRouter()
    router.no_room = OverloadedError("4 requests are waiting", 1.0)
    generator = make(model, router, offload=offload)
    with pytest.raises(OverloadedError, match="4 requests are waiting"):
        await collect(answer(generator, asked(prompt=TextPrompt("hello" * 20)), CALL))
    assert router.submitted == []
    assert offload.num_bytes == 0


async def test_text_that_can_never_fit_is_refused_by_its_size(model: ServedModel) -> None:
    generator = make(model, FakeRouter())
    longest = model.tokenizer.max_bytes_per_token
    assert longest is not None
    num_bytes = longest * (MAX_MODEL_LEN - 1) + 1
    with pytest.raises(ContextLengthError, match=f"{num_bytes} bytes, which are more than {MAX_MODEL_LEN - 1} tokens"):
        await collect(answer(generator, asked(prompt=TextPrompt("a" * num_bytes)), CALL))


async def test_text_with_far_too_many_tokens_is_refused_by_a_prefix(model: ServedModel) -> None:
    generator = make(model, FakeRouter())
    with pytest.raises(ContextLengthError, match="the first 1024 of 1100 characters are more than 254 tokens"):
        await collect(answer(generator, asked(prompt=TextPrompt("qz" * 550)), CALL))


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
        await collect(answer(make(model, router), asked(), CALL))
    assert router.handles[0].num_cancels == 1


async def test_stop_ids_reach_the_worker(model: ServedModel) -> None:
    router = FakeRouter()
    await collect(answer(make(model, router), asked(stop_token_ids=(9,)), CALL))
    assert router.submitted[0][0].sampling.stop_token_ids == (9, IM_END, EOS)


# ---------------------------------------------------------------- answers that are resumed


async def test_an_answer_is_the_same_wherever_it_is_resumed(model: ServedModel) -> None:
    """A character and a stop string may span the break; indices and the count go on."""
    stop, tokens = ("sat on",), [*ids(model, "a 🙂 the cat sat on the mat")]

    def script(routed: RoutedRequest) -> list[Step]:
        return [*([token_id] for token_id in tokens[len(routed.resumed_token_ids) :]), Completion("length", 99, 0)]

    whole = await collect(answer(make(model, FakeRouter(script)), asked(stop, seed=5), CALL))
    deltas = [event for event in whole if isinstance(event, Delta)]
    assert "".join(event.text for event in deltas) == "a 🙂 the cat "
    num_tokens = sum(len(event.token_ids) for event in deltas)
    for had in range(1, num_tokens):
        router = FakeRouter(script)
        rest = await collect(answer(make(model, router), asked(stop, seed=5, resumed=tuple(tokens[:had])), CALL))
        assert rest == whole[had:]
        ((routed, _),) = router.submitted
        assert routed.resumed_token_ids == tuple(tokens[:had])
        known = pack_token_ids([*PROMPT, *tokens[:had]])
        assert routed.block_hashes == tuple(chain_hashes(routed.root_hash, known))
        assert routed.prompt_token_ids == pack_token_ids(PROMPT)


@pytest.mark.parametrize(
    ("text", "fields", "reason", "tail"),
    [
        ("hello there", {"max_tokens": 2}, "length", ""),
        ("a 🙂", {"max_tokens": 3}, "length", "\ufffd"),
        ("hello there", {"stop": (" there",)}, "stop", ""),
        ("hello</s>", {}, "stop", ""),
    ],
)
async def test_of_a_complete_answer_only_the_end_is_missing(
    model: ServedModel, text: str, fields: dict[str, Any], reason: Any, tail: str
) -> None:
    router = FakeRouter()
    had = tuple(ids(model, text))[: fields.get("max_tokens")]
    events = await collect(answer(make(model, router), asked(**fields, seed=5, resumed=had), CALL))
    expected: list[Delta | Finish] = [Delta(len(had), (), tail)] if tail else []
    assert events == [*expected, Finish(ID, reason, len(PROMPT), 0, len(had))]
    assert router.submitted == []


async def test_what_comes_after_a_stop_string_is_refused(model: ServedModel) -> None:
    had = (*ids(model, "hello there"), *ids(model, "the"))
    with pytest.raises(InvalidRequestError) as caught:
        await collect(answer(make(model, FakeRouter()), asked((" there",), seed=5, resumed=had), CALL))
    assert caught.value.field == f"resume.token_ids[{len(had) - 1}]"
