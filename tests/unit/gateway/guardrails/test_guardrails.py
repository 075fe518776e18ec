"""Guardrails around the generator: prompts before they are queued, answers while they come, resumed ones."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from contextlib import aclosing
from typing import Any, Literal, TypeVar

import msgspec
import pytest

from disagg.gateway.answers.generator import Generator
from disagg.gateway.answers.guarded import deltas
from disagg.gateway.guardrails.circuit import FAILURES, PAUSE_S
from disagg.gateway.guardrails.config import GuardrailOptions, PythonOptions, RuleOptions
from disagg.gateway.guardrails.shell.guardrails import Guardrails
from disagg.gateway.guardrails.shell.judges import Asked, Judge, JudgeError
from disagg.gateway.requests.answer_events import Delta, Finish
from disagg.gateway.requests.request import Call, ChatPrompt, GenerationInput, IdsPrompt, Prompt, TextPrompt
from disagg.gateway.requests.structured import StructuredOutput
from disagg.gateway.requests.verdicts import (
    ALLOW,
    CannotJudgeError,
    Decision,
    Decisions,
    Question,
    Replace,
    Stop,
    Verdict,
)
from disagg.gateway.text.answer_splitter import answer_splitter
from disagg.gateway.text.chat_template import ChatTurn, TemplateOptions
from disagg.gateway.text.reasoning import Phase
from disagg.gateway.text.tokenizer import ServedModel
from disagg.gateway.text.tool_calls import tool_parser
from disagg.proto.errors import (
    ContentFilterError,
    DeadlineError,
    InvalidRequestError,
    OverloadedError,
    UnavailableError,
)
from disagg.proto.ids import RequestId
from disagg.proto.messages import TokenLogprobs
from disagg.proto.token_ids import unpack_token_ids
from disagg.router.api import Completion, RequestTrace, TokenBatch
from tests.support.calls import answer
from tests.support.gateway import FINGERPRINT, MODEL_NAME, FakeRouter, limits_of

T = TypeVar("T")
asked: list[Question] = []


def note(question: Question) -> None:
    asked.append(question)


async def at_once(num_bytes: int, work: Callable[[], T]) -> T:
    return work()


def encode(value: Any) -> str:
    return msgspec.json.encode(value).decode()


ID = RequestId("r1")
CALL = Call(request_id=ID)
HELD = "tests.unit.gateway.guardrails.test_guardrails:"


def rules(*options: RuleOptions, name: str = "g") -> GuardrailOptions:
    return GuardrailOptions(name=name, rules=options)


def function(attribute: str, **options: Any) -> GuardrailOptions:
    return GuardrailOptions(name="f", python=PythonOptions(object=HELD + attribute), **options)


NUMBERS = RuleOptions(name="numbers", pattern="[0-9]{4}", action="replace", replacement="#", reason="a number")
CATS = RuleOptions(name="cats", pattern=r"\bcat\b", reason="no cats")


class Setup:
    def __init__(self, model: ServedModel, router: FakeRouter, *options: GuardrailOptions) -> None:
        self.model, self.router = model, router
        self.guardrails = Guardrails(options, clock=lambda: 100.0)
        router.traces[ID] = RequestTrace(request_id=ID)
        self.generator = Generator(
            model,
            router,
            limits_of(model),
            FINGERPRINT,
            clock=lambda: 100.0,
            mint_seed=lambda: 77,
            mint_id=lambda: RequestId("another"),
            guardrails=self.guardrails,
        )

    async def run(self, prompt: Prompt | None = None, **fields: Any) -> list[Delta | Finish]:
        given = GenerationInput(model=MODEL_NAME, prompt=prompt or TextPrompt("hello"), **fields)
        try:
            async with aclosing(answer(self.generator, given, CALL)) as events:
                return [event async for event in events]
        finally:
            await self.guardrails.close()

    @property
    def submitted(self) -> str:
        """The text of the prompt that was queued."""
        return self.model.tokenizer.decode(list(unpack_token_ids(self.router.submitted[0][0].prompt_token_ids)))


def script(model: ServedModel, *texts: str) -> list[Any]:
    """A batch of tokens for each text."""
    return [[*model.tokenizer.encode_text(text)[1:]] for text in texts]


def text_of(events: Sequence[Delta | Finish]) -> str:
    return "".join(event.text for event in events if isinstance(event, Delta))


def end_of(events: Sequence[Delta | Finish]) -> Finish:
    end = events[-1]
    assert isinstance(end, Finish)
    return end


class TestPrompts:
    async def test_what_is_allowed_passes_as_it_is(self, model: ServedModel) -> None:
        setup = Setup(model, FakeRouter([[5], Completion("length", 1, 0)]), rules(CATS, NUMBERS))
        events = await setup.run(TextPrompt("concatenate 123"))
        assert (setup.submitted, end_of(events).reason) == ("concatenate 123", "length")
        assert dict(setup.guardrails.counts) == {("g", "prompt", "allow"): 1, ("g", "answer", "allow"): 1}

    async def test_what_is_stopped_is_never_queued(self, model: ServedModel) -> None:
        setup = Setup(model, FakeRouter(), rules(CATS))
        turns = (ChatTurn("system", "be nice"), ChatTurn("user", "a cat"))
        with pytest.raises(ContentFilterError) as caught:
            await setup.run(ChatPrompt(turns))
        assert caught.value.field == "chat.messages[1].content"
        assert caught.value.message == "chat.messages[1].content: the guardrail g refuses it: no cats"
        assert setup.router.submitted == []
        (refused,) = setup.guardrails.refusals.traces.latest(9)
        assert (refused.request_id, refused.outcome) == (ID, "content_filter")
        assert dict(refused.guardrails) == {Decision("g", "cats", "prompt", "stop", "no cats"): 1}
        assert dict(setup.guardrails.counts) == {("g", "prompt", "stop"): 1}

    async def test_texts_are_replaced_turn_by_turn_and_guardrails_compose(self, model: ServedModel) -> None:
        second = RuleOptions(pattern="#", action="replace", replacement="[n]")
        setup = Setup(model, FakeRouter(), rules(NUMBERS), rules(second, name="h"))
        await setup.run(ChatPrompt((ChatTurn("user", "call 1234 or 5678"), ChatTurn("user", "now"))))
        assert setup.submitted == "user\ncall [n] or [n]\nuser\nnow\nassistant\n"
        assert dict(setup.router.traces[ID].guardrails) == {
            Decision("g", "numbers", "prompt", "replace", "a number"): 2,
            Decision("h", "0", "prompt", "replace", "it has text that is not allowed"): 2,
        }

    async def test_token_ids_are_looked_at_as_text_and_cannot_be_replaced(self, model: ServedModel) -> None:
        ids = IdsPrompt(tuple(model.tokenizer.encode_text("call 1234")))
        setup = Setup(model, FakeRouter(), rules(NUMBERS))
        with pytest.raises(ContentFilterError, match=r"prompt\.token_ids: the guardrail g refuses it: a number"):
            await setup.run(ids)

    @pytest.mark.parametrize("where", ["reasoning", "arguments", "tools", "variables"])
    @pytest.mark.parametrize("text", ["its\nAKIAABCDEFGHIJKLMNOP", "a\ncat", 'say "no"', "1\n2"])
    async def test_json_is_looked_at_as_what_it_says(self, model: ServedModel, where: str, text: str) -> None:
        given = {
            "reasoning": ChatPrompt((ChatTurn("assistant", "", encode({"reasoning_content": text})),)),
            "arguments": ChatPrompt((ChatTurn("assistant", "", encode({"tool_calls": [{"arguments": {"a": text}}]})),)),
            "tools": ChatPrompt((ChatTurn("user", "u"),), encode([{"description": text}])),
            "variables": ChatPrompt((ChatTurn("user", "u"),), options=TemplateOptions(encode({"v": [text]}))),
        }[where]
        quoted = RuleOptions(pattern='say "no"')
        setup = Setup(model, FakeRouter(), rules(CATS, quoted, RuleOptions(pattern=r"1\s2"), RuleOptions(secrets=True)))
        with pytest.raises(ContentFilterError):
            await setup.run(given)
        assert setup.router.submitted == []

    async def test_what_json_says_does_not_count_twice(self, model: ServedModel) -> None:
        given = ChatPrompt((ChatTurn("assistant", "", encode({"reasoning_content": "a\nb"})),))
        await Setup(model, FakeRouter(), rules(RuleOptions(max_chars=len(given.turns[0].extra)))).run(given)

    async def test_the_length_is_that_of_all_texts(self, model: ServedModel) -> None:
        limit = rules(RuleOptions(max_chars=10))
        turns = (ChatTurn("user", "12345"), ChatTurn("user", "12345"))
        await Setup(model, FakeRouter(), limit).run(ChatPrompt(turns))
        with pytest.raises(ContentFilterError, match="it has more than 10 characters"):
            await Setup(model, FakeRouter(), limit).run(ChatPrompt((*turns, ChatTurn("user", "6"))))

    async def test_what_takes_its_place_is_checked(self, model: ServedModel) -> None:
        longer = RuleOptions(pattern="a", action="replace", replacement="b" * 1000)
        setup = Setup(model, FakeRouter(), rules(longer))
        with pytest.raises(InvalidRequestError, match=r"prompt\.text: at most 4096 bytes, not 9000 characters"):
            await setup.run(TextPrompt("a" * 9))

    async def test_secrets(self, model: ServedModel) -> None:
        key = "AKIA" + "ABCDEFGHIJKLMNOP"
        setup = Setup(model, FakeRouter(), rules(RuleOptions(name="keys", secrets=True)))
        with pytest.raises(ContentFilterError, match=r"looks like a secret \(aws-access-key\)"):
            await setup.run(TextPrompt(f"my key is {key}."))
        assert setup.router.submitted == []


class TestAnswers:
    async def test_a_stop_ends_the_answer_and_the_request_on_the_workers(self, model: ServedModel) -> None:
        router = FakeRouter(script(model, "a", " ca", "t,", " and more"))
        setup = Setup(model, router, rules(CATS))
        events = await setup.run()
        assert text_of(events) == "a "
        tokens = [token for batch in script(model, "a", " ca", "t,") for token in batch]
        assert end_of(events) == Finish(ID, "content_filter", 2, 0, len(tokens))
        shown = [token for event in events if isinstance(event, Delta) for token in event.token_ids]
        assert model.tokenizer.decode(shown) == "a "
        assert (router.handles[0].num_cancels, router.handles[0].num_answered) == (1, len(tokens))
        assert dict(router.traces[ID].guardrails) == {Decision("g", "cats", "answer", "stop", "no cats"): 1}
        assert setup.guardrails.counts["g", "answer", "stop"] == 1

    async def test_the_answer_is_the_same_in_any_batches(self, model: ServedModel) -> None:
        (tokens,) = script(model, "call 1234 now, 56789 or a wörld, a dog")
        ends = [*range(1, len(tokens), 3), len(tokens)]
        pieces = [tokens[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]
        found = []
        for batches in ([tokens], [[token] for token in tokens], pieces):
            router = FakeRouter([*batches, Completion("length", len(tokens), 0)])
            setup = Setup(model, router, rules(NUMBERS))
            events = await setup.run()
            deltas = [event for event in events if isinstance(event, Delta)]
            indices = [delta.first_index + i for delta in deltas for i in range(len(delta.token_ids))]
            found.append((text_of(events), indices, end_of(events)))
        assert found[0] == found[1] == found[2]
        text, indices, end = found[0]
        assert text == "call # now, #9 or a wörld, a dog"
        assert (end.reason, end.num_output_tokens) == ("length", len(tokens))
        assert "".join(model.tokenizer.decode([tokens[i]]) for i in indices if tokens[i] < 128) != ""
        assert not any(char in "12345678" for i in indices for char in model.tokenizer.decode([tokens[i]]))

    async def test_probabilities_go_with_their_tokens(self, model: ServedModel) -> None:
        (tokens,) = script(model, "a 1234 b")
        batch = TokenBatch(tokens, [TokenLogprobs(-float(i), (), ()) for i in range(len(tokens))])
        setup = Setup(model, FakeRouter([batch, Completion("length", len(tokens), 0)]), rules(NUMBERS))
        events = await setup.run(logprobs=0)
        deltas = [event for event in events if isinstance(event, Delta) and event.token_ids]
        for delta in deltas:
            indices = range(delta.first_index, delta.first_index + len(delta.token_ids))
            assert [tokens[i] for i in indices] == list(delta.token_ids)
            assert [-one.logprob for one in delta.logprobs] == list(indices)
        offset = len(text_of(events)) - len("".join(delta.text for delta in deltas[1:]))
        assert text_of(events) == "a # b"
        assert sum(num for delta in deltas for _, num in delta.skipped) == len("a # b") - sum(
            len(model.tokenizer.decode([token])) for delta in deltas for token in delta.token_ids
        )
        assert offset > 0

    async def test_the_likeliest_tokens_show_nothing_that_is_stopped(self, model: ServedModel) -> None:
        the, cat = (model.tokenizer.encode_text(text, special=False)[0] for text in (" the", " cat"))
        top = TokenLogprobs(-1.0, (the, cat, the + 1), (-0.1, -0.2, -0.3))
        first = msgspec.structs.replace(top, prompt=(top, top))
        router = FakeRouter([TokenBatch([the, the], [first, top]), Completion("length", 2, 0)])
        events = await Setup(model, router, rules(CATS)).run(IdsPrompt((the, the, the)), logprobs=3, prompt_logprobs=3)
        shown = [one for event in events if isinstance(event, Delta) for one in event.logprobs]
        assert [one.top_ids for one in (*shown, *shown[0].prompt)] == [(the,)] * 4

    @pytest.mark.parametrize("structured", [True, False])
    async def test_an_answer_with_a_form_is_stopped_where_it_would_be_replaced(
        self, model: ServedModel, structured: bool
    ) -> None:
        router = FakeRouter([*script(model, '"1234"'), Completion("stop", 6, 0)])
        setup = Setup(model, router, rules(NUMBERS))
        setup.generator._grammars.known = lambda grammar: ""  # type: ignore[method-assign]
        form = StructuredOutput("json_object") if structured else None
        events = await setup.run(structured=form)
        found = (text_of(events), end_of(events).reason)
        assert found == (('"', "content_filter") if structured else ('"#"', "stop"))

    async def test_each_of_several_answers_has_its_own(self, model: ServedModel) -> None:
        texts = iter(["a cat", "a dog"])
        router = FakeRouter(lambda _: [*script(model, next(texts)), Completion("length", 3, 0)])
        events = await Setup(model, router, rules(CATS)).run(n=2)
        found = {i: text_of([event for event in events if event.answer_index == i]) for i in (0, 1)}
        reasons = {event.answer_index: event.reason for event in events if isinstance(event, Finish)}
        assert found == {0: "a ", 1: "a dog"}
        assert reasons == {0: "content_filter", 1: "length"}

    async def test_the_part_before_a_stop_string_is_looked_at_whole(self, model: ServedModel) -> None:
        router = FakeRouter(script(model, "a ca", "t|", "x"))
        events = await Setup(model, router, rules(CATS)).run(stop=("|",))
        end = end_of(events)
        assert (text_of(events), end.reason, end.stop_string) == ("a ", "content_filter", "")

    @pytest.mark.parametrize("stop", ["|", "z"])
    async def test_what_is_used_is_what_the_client_reads(self, model: ServedModel, stop: str) -> None:
        router = FakeRouter(script(model, "a dog|", " a cat"))
        setup = Setup(model, router, rules(CATS))
        call = Call(request_id=ID)
        given = GenerationInput(model=MODEL_NAME, prompt=TextPrompt("hello"), stop=(stop,))
        router.traces[ID].num_output_tokens = 40  # workers are ahead
        async with aclosing(answer(setup.generator, given, call)) as events:
            end = end_of([event async for event in events])
        assert end.reason == ("stop" if stop == "|" else "content_filter")
        assert call.use.completion_tokens == end.num_output_tokens < 40


class TestResumed:
    async def test_it_is_a_text_of_the_prompt_too(self, model: ServedModel) -> None:
        """Whoever resumes an answer says what it was."""
        ids = tuple(model.tokenizer.encode_text("a cat and", special=False))
        only_prompts = RuleOptions(name="cats", pattern=r"\bcat\b", applies_to="prompts")
        setup = Setup(model, FakeRouter(), rules(only_prompts))
        with pytest.raises(ContentFilterError, match=r"resume\.token_ids: the guardrail g refuses it"):
            await setup.run(resumed=ids, temperature=0.0)
        assert setup.router.submitted == []
        word = tuple(model.tokenizer.encode_text("a cat", special=False))  # which may go on as "cats"
        await Setup(model, FakeRouter(), rules(only_prompts)).run(resumed=word, temperature=0.0)
        long = Setup(model, FakeRouter(), rules(RuleOptions(max_chars=5, applies_to="prompts")))
        assert end_of(await long.run(resumed=ids, temperature=0.0)).num_output_tokens == len(ids)

    async def test_whoever_is_asked_gets_it_as_the_assistant_text(self, model: ServedModel) -> None:
        asked.clear()
        ids = tuple(model.tokenizer.encode_text("so far", special=False))
        await Setup(model, FakeRouter(), function("note", applies_to="prompts")).run(resumed=ids, temperature=0.0)
        assert [(one.texts, one.roles) for one in asked] == [(("hello", "so far"), ("", "assistant"))]

    @pytest.mark.parametrize("had", range(1, 12))
    async def test_it_goes_on_with_the_same_text_and_the_same_end(self, model: ServedModel, had: int) -> None:
        """After any number of tokens that a client may have: those that went out with their text."""
        (tokens,) = script(model, "he concatenates a cat, and more")
        whole = await Setup(model, FakeRouter([tokens]), rules(CATS)).run(temperature=0.0)
        shown = [token for event in whole if isinstance(event, Delta) for token in event.token_ids]
        had = min(had, len(shown))
        before = model.tokenizer.decode(shown[:had])
        rest = FakeRouter([tokens[had:]])
        events = await Setup(model, rest, rules(CATS)).run(temperature=0.0, resumed=tuple(shown[:had]))
        assert before + text_of(events) == text_of(whole) == "he concatenates a "
        assert end_of(events) == end_of(whole)

    async def test_tokens_of_a_text_that_would_be_replaced_are_no_client_s(self, model: ServedModel) -> None:
        (tokens,) = script(model, "a 1234 b")
        numbers = RuleOptions(pattern="[0-9]{4}", action="replace", applies_to="answers")
        setup = Setup(model, FakeRouter(), rules(numbers))
        with pytest.raises(InvalidRequestError, match=r"resume\.token_ids: have a text that a guardrail replaces"):
            await setup.run(temperature=0.0, resumed=tuple(tokens))
        assert setup.router.submitted == []


SEEN: list[Question] = []


def look(question: Question) -> Verdict | None:
    SEEN.append(question)
    if "stop" in question.texts[-1]:
        return Stop("by the function")
    if "swap" in question.texts[-1]:
        return Replace(tuple(text.replace("swap", "done") for text in question.texts))
    return None


def fail(question: Question) -> Verdict:
    raise RuntimeError("broken")


def refuse(question: Question) -> Verdict:
    raise CannotJudgeError("it is too long")


class Made:
    def __init__(self, word: str) -> None:
        self._word = word

    def __call__(self, question: Question) -> Verdict:
        return Stop("a word") if self._word in question.texts[0] else ALLOW


class TestFunctions:
    async def test_of_prompts_and_pieces_of_answers(self, model: ServedModel) -> None:
        SEEN.clear()
        router = FakeRouter([*script(model, "abc", "de swap", " x"), Completion("length", 9, 0)])
        setup = Setup(model, router, function("look", piece_chars=5, context_chars=3))
        events = await setup.run(TextPrompt("please swap"))
        assert setup.submitted == "please done"
        assert text_of(events) == "abcde done x"
        assert [(one.subject, one.texts, one.before, one.ended) for one in SEEN] == [
            ("prompt", ("please swap",), "", True),
            ("answer", ("abcde",), "", False),
            ("answer", (" swap",), "cde", False),
            ("answer", (" x",), "wap", True),
        ]
        assert {(one.guardrail, one.model, one.request_id) for one in SEEN} == {("f", MODEL_NAME, ID)}
        assert dict(setup.guardrails.counts) == {
            ("f", "prompt", "replace"): 1,
            ("f", "answer", "allow"): 2,
            ("f", "answer", "replace"): 1,
        }

    async def test_whole_answers(self, model: ServedModel) -> None:
        SEEN.clear()
        router = FakeRouter([*script(model, "abc", " stop", " x"), Completion("length", 9, 0)])
        events = await Setup(model, router, function("look", applies_to="answers")).run()
        assert (text_of(events), end_of(events).reason) == ("", "content_filter")
        assert [one.texts for one in SEEN] == [("abc stop x",)]

    async def test_a_class_takes_options(self, model: ServedModel) -> None:
        made = PythonOptions(object=f"{HELD}Made", options={"word": "hell"})
        setup = Setup(model, FakeRouter(), GuardrailOptions(name="f", python=made))
        with pytest.raises(ContentFilterError, match="the guardrail f refuses it: a word"):
            await setup.run(TextPrompt("hello"))

    @pytest.mark.parametrize("on_failure", ["allow", "stop"])
    async def test_one_that_fails_at_a_text(self, model: ServedModel, on_failure: str) -> None:
        """Whatever is set: one failure is no outage."""
        setup = Setup(model, FakeRouter(), function("fail", on_failure=on_failure, applies_to="prompts"))
        with pytest.raises(UnavailableError, match="the guardrail f gives no verdict") as caught:
            await setup.run()
        assert caught.value.code == "guardrail_unavailable"
        (refused,) = setup.guardrails.refusals.traces.latest(9)
        assert dict(refused.guardrails) == {Decision("f", "", "prompt", "failed", "it raised RuntimeError: broken"): 1}
        assert dict(setup.guardrails.counts) == {("f", "prompt", "failed"): 1}

    async def test_one_that_is_down(self, model: ServedModel) -> None:
        options = function("fail", on_failure="allow", applies_to="prompts")
        setup = Setup(model, FakeRouter(), options)
        for _ in range(FAILURES - 1):
            with pytest.raises(UnavailableError):
                await setup.guardrails.check_prompt(TextPrompt("hello"), CALL, model, at_once)
        await setup.run()
        assert dict(setup.router.traces[ID].guardrails) == {
            Decision("f", "", "prompt", "failed", "it raised RuntimeError: broken"): 1
        }

    @pytest.mark.parametrize("on_failure", ["allow", "stop"])
    async def test_one_that_cannot_judge_a_text(self, model: ServedModel, on_failure: str) -> None:
        setup = Setup(model, FakeRouter(), function("refuse", on_failure=on_failure, applies_to="prompts"))
        for _ in range(2 * FAILURES):
            with pytest.raises(ContentFilterError, match="the guardrail f refuses it: it cannot be judged"):
                await setup.guardrails.check_prompt(TextPrompt("hello"), CALL, model, at_once)
        await setup.guardrails.close()
        assert setup.guardrails.open_circuits == {"f": False}
        assert dict(setup.guardrails.counts) == {("f", "prompt", "stop"): 2 * FAILURES}


class ScriptedJudge(Judge):
    """Gives the next of its verdicts; None does not answer."""

    def __init__(self, verdicts: Sequence[Any]) -> None:
        self.verdicts = list(verdicts)
        self.closed = False

    async def judge(self, question: Question) -> Verdict:
        verdict: Any = self.verdicts.pop(0)
        if isinstance(verdict, Exception):
            raise verdict
        return await asyncio.get_running_loop().create_future() if verdict is None else verdict  # type: ignore[no-any-return]

    async def close(self) -> None:
        self.closed = True


class HeldJudge(Judge):
    """Takes no notice of being cancelled until it may end."""

    def __init__(self) -> None:
        self.begun, self.ends = asyncio.Event(), asyncio.Event()

    async def judge(self, question: Question) -> Verdict:
        self.begun.set()
        while not self.ends.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await self.ends.wait()
        return ALLOW

    async def close(self) -> None:
        pass


class TestJudges:
    async def test_one_that_fails_again_and_again_is_not_asked_for_a_while(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.INFO)
        now, counts = [0.0], list[str]()
        judge = ScriptedJudge([JudgeError("down")] * FAILURES + [JudgeError("still"), ALLOW, ALLOW])
        asked = Asked(GuardrailOptions(name="s", on_failure="allow"), judge, lambda: now[0])

        noted: list[Decision] = []

        async def ask() -> str:
            await asked.ask(Question(subject="prompt", texts=("a",)), None, noted.append, counts.append)
            return counts.pop()

        for _ in range(FAILURES - 1):
            with pytest.raises(UnavailableError):  # no outage is known yet
                await ask()
        assert await ask() == "failed"
        states = [asked.is_open]
        now[0] += 2.0
        assert (await ask(), len(judge.verdicts)) == ("failed", 3)
        assert noted[-1].reason == (
            "after 5 failures in a row it has not been asked for 2 s, but for a trial every 5 s"
        )
        now[0] += PAUSE_S
        assert (await ask(), len(judge.verdicts)) == ("failed", 2)
        assert (await ask(), len(judge.verdicts)) == ("failed", 2)
        now[0] += PAUSE_S
        assert [await ask(), await ask()] == ["allow", "allow"]
        assert [*states, asked.is_open] == [True, False]
        assert [record.message for record in caplog.records] == [
            "guardrail s: 5 questions in a row failed, last: down. Requests pass without it from now on; it is tried "
            "again every 5 s",
            "guardrail s: gives verdicts again",
        ]

    async def test_time_is_bounded(self) -> None:
        noted: list[Decision] = []
        options = GuardrailOptions(name="s", on_failure="allow", timeout_s=0.001)
        asked = Asked(options, ScriptedJudge([None]), lambda: 5.0)
        question = Question(subject="answer", texts=("a",))
        with pytest.raises(UnavailableError):
            await asked.ask(question, 6.0, noted.append, lambda _: None)
        assert noted == [Decision("s", "", "answer", "failed", "no verdict in 0.001 s")]

    async def test_deadlines_of_clients_neither_let_pass_nor_open_the_circuit(self) -> None:
        noted: list[Decision] = []
        asked = Asked(GuardrailOptions(name="s", on_failure="allow"), ScriptedJudge([None] * FAILURES), lambda: 5.0)
        question = Question(subject="answer", texts=("a",))
        for _ in range(FAILURES):
            with pytest.raises(DeadlineError, match="the deadline passed while the guardrail s was asked"):
                await asked.ask(question, 5.0, noted.append, lambda _: None)
        assert (noted, asked.is_open) == ([], False)

    async def test_a_tenant_neither_fills_the_places_nor_opens_the_circuit_of_others(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        options = GuardrailOptions(name="s", on_failure="allow", max_running=2, max_waiting=8, timeout_s=60)
        judge = ScriptedJudge([None, ALLOW, *[JudgeError("slow")] * FAILURES, ALLOW])
        asked, counts = Asked(options, judge, lambda: 5.0), list[str]()

        async def ask(tenant: str, deadline: float | None = None) -> str:
            question = Question(subject="prompt", texts=("a",), tenant=tenant)
            await asked.ask(question, deadline, lambda _: None, counts.append, is_sole=False)
            return counts.pop()

        waiting = [asyncio.create_task(ask("a")) for _ in range(2)]
        await asyncio.sleep(0)
        assert await ask("b") == "allow"
        with pytest.raises(DeadlineError):
            await ask("a", 5.0)
        assert len(judge.verdicts) == 1 + FAILURES
        waiting[0].cancel()
        for _ in range(FAILURES - 1):
            with pytest.raises(UnavailableError):
                await ask("a")
        with pytest.raises(UnavailableError):
            await waiting[1]
        assert (await ask("b"), judge.verdicts) == ("allow", [])
        assert [record.message for record in caplog.records] == [
            "guardrail s: 5 questions of tenant a in a row failed, last: slow. Requests of tenant a fail from now on; "
            "it is tried again every 5 s"
        ]

    async def test_a_tenants_own_failures_let_none_of_its_texts_pass(self) -> None:
        """Else whoever knows a text at which the judge fails could switch it off."""
        judge = ScriptedJudge([*[JudgeError("status 500")] * FAILURES, Stop("forbidden"), *[JudgeError("down")] * 5])
        asked, noted = Asked(GuardrailOptions(name="s", on_failure="allow"), judge, lambda: 5.0), list[Decision]()

        async def ask(tenant: str) -> Verdict:
            question = Question(subject="prompt", texts=("a",), tenant=tenant)
            return await asked.ask(question, None, noted.append, lambda _: None, is_sole=False)

        for _ in range(FAILURES + 1):
            with pytest.raises(UnavailableError, match="the guardrail s gives no verdict"):
                await ask("a")
        assert await ask("b") == Stop("forbidden")
        for tenant in "bcbc":
            with pytest.raises(UnavailableError):
                await ask(tenant)
        assert [await ask(tenant) for tenant in "cab"] == [ALLOW] * 3  # an outage
        assert judge.verdicts == []

    @pytest.mark.parametrize("on_failure", ["allow", "stop"])
    async def test_what_a_service_refuses_is_stopped_and_no_failure_of_it(
        self, caplog: pytest.LogCaptureFixture, on_failure: Literal["allow", "stop"]
    ) -> None:
        options = GuardrailOptions(name="s", on_failure=on_failure)
        judge = ScriptedJudge([*[JudgeError("status 413", is_refusal=True)] * 2 * FAILURES, ALLOW])
        asked, counts, verdicts = Asked(options, judge, lambda: 5.0), list[str](), list[Verdict]()
        for _ in range(2 * FAILURES + 1):
            question = Question(subject="prompt", texts=("a",))
            verdicts.append(await asked.ask(question, None, lambda _: None, counts.append))
        assert verdicts == [*[Stop("it cannot be judged")] * 2 * FAILURES, ALLOW]
        assert (counts, asked.is_open) == (["stop"] * 2 * FAILURES + ["allow"], False)
        assert [record.message for record in caplog.records] == [
            "guardrail s: a question was refused, so its request is stopped: status 413. The next line about that "
            "comes in 60 s at the earliest; disagg_guardrail_decisions_total counts all"
        ]

    async def test_waiting_for_a_place_is_bounded_and_no_failure_of_the_service(self) -> None:
        options = GuardrailOptions(name="s", on_failure="allow", max_running=1, timeout_s=0.001)
        judge, noted = HeldJudge(), list[Decision]()
        asked, question = Asked(options, judge, lambda: 5.0), Question(subject="prompt", texts=("a",))

        async def ask() -> None:
            await asked.ask(question, None, noted.append, lambda _: None)

        first = asyncio.create_task(ask())
        await judge.begun.wait()
        others = [asyncio.create_task(ask()) for _ in range(2 * FAILURES)]
        errors = await asyncio.gather(*others, return_exceptions=True)
        assert {(type(error), str(error)) for error in errors} == {
            (OverloadedError, "the guardrail s is busy: no place for a question in 0.001 s")
        }
        assert (noted, asked.is_open) == ([], False)
        judge.ends.set()
        await first

    async def test_the_number_of_questions_is_bounded(self) -> None:
        options = GuardrailOptions(name="s", on_failure="allow", max_running=1, max_waiting=1, timeout_s=60)
        asked = Asked(options, ScriptedJudge([None, None]))
        noted: list[Decision] = []
        question = Question(subject="prompt", texts=("a",))
        running = [asyncio.create_task(asked.ask(question, None, noted.append, lambda _: None)) for _ in range(2)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError, match="the guardrail s is busy: 2 questions run or wait") as caught:
            await asked.ask(question, None, noted.append, lambda _: None)
        assert (caught.value.http_status, caught.value.retry_after_s, noted) == (429, 1.0, [])
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    @pytest.mark.parametrize(
        ("verdict", "message"),
        [
            ("no", "it gave no verdict but str"),
            (Replace(()), "it replaced 1 texts by 0"),
            (Replace(("\ud800",)), "its replacement is no text, or too long"),
            (Replace(("a" * ((1 << 20) + 1),)), "its replacement is no text, or too long"),
            (Stop(reason=5), "its reason is no text"),  # type: ignore[arg-type]
            (Replace(None), "it gave no verdict: TypeError: 'NoneType' object is not iterable"),  # type: ignore[arg-type]
        ],
    )
    async def test_what_is_no_verdict(self, verdict: object, message: str) -> None:
        noted: list[Decision] = []
        asked = Asked(GuardrailOptions(name="s"), ScriptedJudge([verdict]))
        with pytest.raises(UnavailableError):
            await asked.ask(Question(subject="prompt", texts=("a",)), None, noted.append, lambda _: None)
        assert [one.reason for one in noted] == [message]

    async def test_the_trial_of_an_open_circuit_may_fail_in_any_way(self) -> None:
        now = [0.0]
        wrong: Any = Replace(None)  # type: ignore[arg-type]
        judge = ScriptedJudge([*[JudgeError("down")] * FAILURES, wrong, ALLOW])
        asked = Asked(GuardrailOptions(name="s", on_failure="allow"), judge, lambda: now[0])
        for wait_s in (*[0.0] * FAILURES, PAUSE_S, PAUSE_S):
            now[0] += wait_s
            with contextlib.suppress(UnavailableError):
                await asked.ask(Question(subject="prompt", texts=("a",)), None, lambda _: None, lambda _: None)
        assert (judge.verdicts, asked.is_open) == ([], False)


@pytest.mark.parametrize(
    ("pieces", "reasoning", "text", "reason", "num_reasoning"),
    [
        (["<thi", "nk>", "so 1234", " it", "</think>", " is", " 5678."], "so # it", "is #.", None, 5),
        (["<think>", "a", " cat ", "</think>", "yes"], "a ", "", "no cats", 4),
        (["<think>", "a", "</think>", " a ", "cat", "."], "a", "a ", "no cats", 3),
    ],
)
async def test_reasoning_is_looked_at_like_the_rest(
    model: ServedModel, pieces: list[str], reasoning: str, text: str, reason: str | None, num_reasoning: int
) -> None:
    guardrails = Guardrails([rules(NUMBERS, CATS)], clock=lambda: 0.0)
    splitter = answer_splitter(Phase.UNDECIDED, None)
    guard = guardrails.on_answer(CALL, ID, model, True, Decisions(), splitter)
    assert guard is not None
    found: list[Delta] = []
    for i, piece in enumerate(pieces):
        await guard.push(i, piece, None)
        if guard.stopped is not None:
            break
        found += deltas(guard, 0, 1, ended=False)
    else:
        await guard.finish("")
    found += deltas(guard, 0, 1, ended=True)
    assert "".join(delta.reasoning for delta in found) == reasoning
    assert "".join(delta.text for delta in found) == text
    assert (None if guard.stopped is None else guard.stopped.reason) == reason
    assert guard.num_reasoning_tokens == num_reasoning


@pytest.mark.parametrize("name", ["cat", "\\u0063at", "c\\u0061t"])
async def test_the_name_of_a_call_is_looked_at_as_it_is_sent(model: ServedModel, name: str) -> None:
    rule = RuleOptions(pattern="cat", applies_to="answers")
    splitter = answer_splitter(Phase.AFTER, tool_parser("hermes", {"cat"}))
    guard = Guardrails([rules(rule)], clock=lambda: 0.0).on_answer(CALL, ID, model, True, Decisions(), splitter)
    assert guard is not None
    await guard.push(0, f'<tool_call>{{"name": "{name}", "arguments": {{}}}}</tool_call>', None)
    assert guard.stopped is not None
