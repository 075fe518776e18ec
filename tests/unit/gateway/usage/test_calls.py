"""What calls are counted with, over both protocols: as their clients read it, or what was made; and who reads it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import override

from disagg.gateway.auth.auth import AnonymousAccess, Caller
from disagg.gateway.auth.shell.rights import usage_of
from disagg.gateway.config import UsageOptions
from disagg.gateway.requests.call_use import CallUse
from disagg.gateway.requests.request import Call
from disagg.gateway.text.tokenizer import ServedModel
from disagg.gateway.usage.counts import Counts
from disagg.gateway.usage.recorder import UsageRecorder
from disagg.proto.errors import UnavailableError
from disagg.router.api import Completion, RoutedRequest
from disagg.v1 import inference_pb2 as pb
from tests.support.gateway import MODEL_NAME, FakeRouter, Wait
from tests.support.http_app import NOW, AsgiCall, TestApp, error_of
from tests.support.waiting import eventually
from tests.unit.gateway.rpc.test_service import FakeContext, make

IDS: dict[str, Any] = {"prompt": [75, 76, 77]}
LETTERS = [[75], [76, 77], [78]]


@pytest.fixture
async def recorder(tmp_path: Path) -> AsyncIterator[UsageRecorder]:
    made = UsageRecorder(UsageOptions(folder=str(tmp_path), wait_ms=10_000), lambda: NOW)
    made.start()
    yield made
    await made.stop()


def app_of(model: ServedModel, recorder: UsageRecorder, script: Any = LETTERS, caller: Caller | None = None) -> TestApp:
    return TestApp(model, FakeRouter(script), AnonymousAccess(caller or Caller("a", False)), usage=recorder)


async def counts(recorder: UsageRecorder) -> Counts:
    (row,) = (await recorder.read(1, "a", 9)).rows
    assert row.key.model == MODEL_NAME
    return row.counts


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_over_http_counts_as_its_usage_says(
    model: ServedModel, recorder: UsageRecorder, stream: bool
) -> None:
    script = [*LETTERS, Completion("stop", 4, 2)]
    response = await app_of(model, recorder, script).text(**IDS, n=3, stream=stream)
    assert response.status_code == 200
    assert await counts(recorder) == Counts(1, 0, 3, 2, 12)


async def test_several_prompts_are_one_call(model: ServedModel, recorder: UsageRecorder) -> None:
    response = await app_of(model, recorder).text(prompt=[[75], [76, 77]], n=2)
    usage = response.json()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (3, 16)
    assert await counts(recorder) == Counts(1, 0, 3, 0, 16)


async def test_tokens_behind_a_stop_string_do_not_count(model: ServedModel, recorder: UsageRecorder) -> None:
    ids = model.tokenizer.encode_text("hello world", special=False)
    stop = model.tokenizer.decode(ids[:1])
    usage = (await app_of(model, recorder, [[token] for token in ids]).text(stop=stop)).json()["usage"]
    assert usage["completion_tokens"] == 1 < len(ids)
    found = await counts(recorder)
    assert (found.requests, found.completion_tokens, found.prompt_tokens) == (1, 1, usage["prompt_tokens"])


async def test_an_answer_that_fails_counts_what_was_made(model: ServedModel, recorder: UsageRecorder) -> None:
    script = [[75, 76], UnavailableError("gone", "no_decode_capacity")]
    assert error_of(await app_of(model, recorder, script).text(**IDS))[0] == 503
    assert await counts(recorder) == Counts(1, 1, 3, 0, 2)


async def test_wrong_requests_do_not_count_and_refused_ones_do(model: ServedModel, recorder: UsageRecorder) -> None:
    app = app_of(model, recorder)
    wrong_ones: list[dict[str, Any]] = [{"top_p": 7}, {"model": "another"}, {"prompt": []}]
    for wrong in wrong_ones:
        assert (await app.text(**{**IDS, **wrong})).status_code in (400, 404)
    app.router.refusal = UnavailableError("no", "no_decode_capacity")
    await app.text(**IDS)
    assert await counts(recorder) == Counts(1, 1)


async def test_a_client_that_leaves_pays_for_what_was_made(model: ServedModel, recorder: UsageRecorder) -> None:
    app = app_of(model, recorder, [[75, 76], Wait()])
    body = b'{"model": "%s", "prompt": [75, 76, 77], "stream": true}' % MODEL_NAME.encode()
    call = AsgiCall(app.app, "/v1/completions", body)
    await app.router.arrived.wait()
    await app.router.handles[0].waiting.wait()
    call.leave()
    await call.task
    app.router.script = lambda _: LETTERS
    await app.text(**IDS)
    assert await counts(recorder) == Counts(2, 0, 6, 0, 6)


@pytest.mark.parametrize("prompts", [[[75]], [[75], [76]]])
async def test_what_several_prompts_used_is_no_part_of_one_answer(
    model: ServedModel, recorder: UsageRecorder, monkeypatch: pytest.MonkeyPatch, prompts: list[list[int]]
) -> None:
    """Else whoever goes on with the answer to one of them would be counted less, by what the others used."""
    added: list[CallUse] = []
    monkeypatch.setattr(recorder._pending, "add", lambda tenant, day, use, **_: added.append(use))
    submitted = asyncio.Semaphore(0)

    def script(_: RoutedRequest) -> list[Any]:
        submitted.release()
        return [[75, 76], Wait()]

    app = app_of(model, recorder, script)
    fields = {"model": MODEL_NAME, "prompt": prompts, "seed": 7, "stream": True}
    call = AsgiCall(app.app, "/v1/completions", json.dumps(fields).encode())
    for _ in prompts:
        await submitted.acquire()
    for handle in app.router.handles:
        await handle.waiting.wait()
    call.leave()
    await call.task
    (use,) = added
    assert use.completion_tokens == 2 * len(prompts)
    assert bool(use.stream) is (len(prompts) == 1)


async def test_a_client_cannot_say_that_it_continues_what_it_did_not_get(
    model: ServedModel, recorder: UsageRecorder
) -> None:
    """Each time it leaves one token before the end, and names an event of the first one, with other settings."""

    async def leave_early(app: TestApp, event_id: str, **changes: Any) -> str:
        num_before = len(app.router.handles)
        fields = {"model": MODEL_NAME, "prompt": [75, 76, 77], "seed": 7, "stream": True, **changes}
        headers = {"last-event-id": event_id}
        call = AsgiCall(app.app, "/v1/completions", json.dumps(fields).encode(), headers)
        await eventually(lambda: len(app.router.handles) > num_before, every_s=0.0)
        await app.router.handles[-1].waiting.wait()
        await eventually(lambda: call.body.count(b"id: ") >= 1, every_s=0.0)
        call.leave()
        await call.task
        await eventually(lambda: not recorder.num_unwritten, every_s=0.0)
        return call.body.decode()

    script = [[75 + i % 3] for i in range(9)]
    app = app_of(model, recorder, [*script, Wait()])
    assert await leave_early(app, "0")
    for i in range(4):
        assert await leave_early(app, "7.0.1.", temperature=0.1 * i)
    assert await counts(recorder) == Counts(5, 0, 15, 0, 45)
    for _ in range(4):
        assert await leave_early(app, "7.9.1.")  # all tokens, and nearly none of their text
    assert (await counts(recorder)).completion_tokens == 45 + 7 + 8 + 8


class Ordered(UsageRecorder):
    """Notes when an answer is recorded, beside what the context of the call has written."""

    def __init__(self, context: FakeContext) -> None:
        super().__init__(None, lambda: NOW)
        self._context = context
        self.seen: list[int] = []
        self.calls: list[Call] = []

    @override
    async def finished(self, call: Call) -> None:
        self.seen.append(len(self._context.written))
        self.calls.append(call)
        await super().finished(call)


@pytest.mark.parametrize("num_answers", [1, 2])
async def test_the_last_message_of_a_stream_comes_after_its_use_is_recorded(
    model: ServedModel, num_answers: int
) -> None:
    context: Any = FakeContext()
    recorder = Ordered(context)
    request = pb.GenerateRequest(model=MODEL_NAME, token_ids=pb.TokenIds(ids=[75, 76, 77]), n=num_answers)
    service = make(model, FakeRouter(LETTERS), usage=recorder)
    await service.Generate(request, context)
    finishes = [i for i, message in enumerate(context.written) if message.HasField("finished")]
    assert (len(finishes), finishes[-1]) == (num_answers, len(context.written) - 1)
    assert recorder.seen[0] == len(context.written) - 1
    use = recorder.calls[0].use
    assert (use.prompt_tokens, use.completion_tokens, use.is_recorded) == (3, 4 * num_answers, True)


async def test_a_stream_has_the_same_identity_when_it_is_continued(model: ServedModel) -> None:
    """By tenant, prompt and all settings; only a continuation says that it is one."""

    async def use_of(**changes: Any) -> Any:
        context: Any = FakeContext()
        recorder = Ordered(context)
        given: dict[str, Any] = {"model": MODEL_NAME, "token_ids": pb.TokenIds(ids=[75, 76, 77])}
        request = pb.GenerateRequest(**{**given, "sampling": pb.SamplingParams(seed=7), **changes})
        service = make(model, FakeRouter(LETTERS), usage=recorder)
        await service.Generate(request, context)
        return recorder.calls[0].use

    first = await use_of()
    again = await use_of(resume=pb.Resume(token_ids=[80, 81]))
    others = [
        await use_of(sampling=pb.SamplingParams(seed=8)),
        await use_of(token_ids=pb.TokenIds(ids=[75, 76])),
        await use_of(sampling=pb.SamplingParams()),
        await use_of(n=2),
        await use_of(sampling=pb.SamplingParams(seed=7, temperature=0.5)),
        await use_of(sampling=pb.SamplingParams(seed=7, top_k=5)),
        await use_of(stopping=pb.StopConditions(max_tokens=9)),
        await use_of(stopping=pb.StopConditions(stop=["x"])),
        await use_of(stopping=pb.StopConditions(ignore_eos=True)),
        await use_of(cache_salt="x"),
        await use_of(structured=pb.StructuredOutput(json_object=True)),
    ]
    assert first.stream == again.stream != b""
    assert (list(first.token_ids), first.num_had) == ([75, 76, 77, 78], 0)
    assert (list(again.token_ids), again.num_had) == ([80, 81, 75, 76, 77, 78], 2)
    assert (first.continues, again.continues) == (False, True)
    assert again.completion_tokens == 6  # those that it had, and four
    assert first.stream not in {other.stream for other in others}
    assert [other.stream for other in others[2:4]] == [b"", b""]
    assert len({other.stream for other in others}) == len(others) - 1
    greedy = [await use_of(sampling=pb.SamplingParams(temperature=0, seed=seed)) for seed in (1, 2)]
    assert greedy[0].stream == greedy[1].stream == (await use_of(sampling=pb.SamplingParams(temperature=0))).stream


def test_a_key_reads_its_own_use_and_an_admin_all() -> None:
    admin, tenant = Caller("ops", True), Caller("a", False)
    assert [usage_of(admin, ""), usage_of(admin, "a"), usage_of(tenant, ""), usage_of(tenant, "a")] == [
        None,
        "a",
        "a",
        "a",
    ]
    with pytest.raises(Exception, match="scope admin, or of that name"):
        usage_of(tenant, "b")


async def test_the_list_over_http(model: ServedModel, recorder: UsageRecorder) -> None:
    app = app_of(model, recorder, caller=Caller("a", False, infers=False))
    found = await app.client.get("/v1/usage")
    assert found.json() == {
        "object": "list",
        "data": [],
        "first_date": "2023-11-08",
        "last_date": "2023-11-14",
        "has_more": False,
    }
    await app_of(model, recorder).text(**IDS)
    (row,) = (await app.client.get("/v1/usage?days=1&key=a&limit=5")).json()["data"]
    assert row == {
        "object": "usage",
        "date": "2023-11-14",
        "key": "a",
        "model": MODEL_NAME,
        "num_requests": 1,
        "num_failed": 0,
        "prompt_tokens": 3,
        "cached_tokens": 0,
        "completion_tokens": 4,
    }
    assert error_of(await app.client.get("/v1/usage?key=b"))[0] == 403
    for query, field in (
        ("days=0", "days"),
        ("days=%C2%B2", "days"),
        ("limit=10001", "limit"),
        (f"key={'k' * 65}", "key"),
    ):
        assert error_of(await app.client.get(f"/v1/usage?{query}"))[:2] == (400, field)
    none = TestApp(model, FakeRouter(), AnonymousAccess(Caller("a", False)))
    assert error_of(await none.client.get("/v1/usage")) == (503, None, "no_usage")
