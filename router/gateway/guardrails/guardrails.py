"""All guardrails of a gateway: asked about prompts before they are queued, and about answers while they come.

    prompt ──> each guardrail in its order ──> allowed, with other texts, or `ContentFilterError`
    answer ──> one `AnswerGuard`, whose stages are the guardrails in their order

Built-in rules on large prompts run on the threads of `Offload`, at the tenant's turn. RE2 gives the interpreter's lock
back while it searches.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, TypeVar

from disagg.proto.errors import ContentFilterError, UnavailableError
from disagg.proto.ids import RequestId
from disagg.router.api import RequestTrace
from disagg.router.gateway.guardrails.answers import AnswerGuard
from disagg.router.gateway.guardrails.config import GuardrailOptions
from disagg.router.gateway.guardrails.judges import Asked, FunctionJudge, Judge, load_function
from disagg.router.gateway.guardrails.rules import Rules
from disagg.router.gateway.guardrails.service import ServiceJudge
from disagg.router.gateway.guardrails.stream import Chain, PieceStage, Stage
from disagg.router.gateway.guardrails.verdicts import Decision, Decisions, Question, Replace, Stop, Subject, Verdict
from disagg.router.gateway.requests.request import Call, ChatPrompt, IdsPrompt, Prompt, TextPrompt
from disagg.router.gateway.text.tokenizer import ServedModel

T = TypeVar("T")
Offloaded = Callable[[int, Callable[[], T]], Awaitable[T]]

NUM_REFUSED: Final = 256
"""Refused prompts that are kept for `explain`."""
_NO_REPLACEMENT: Final = "; it cannot be replaced there"


@dataclass(frozen=True, slots=True)
class _Text:
    """A text of a prompt."""

    field: str
    role: str
    text: str
    may_replace: bool


@dataclass(frozen=True, slots=True)
class CheckedPrompt:
    """A prompt that may be queued."""

    prompt: Prompt
    decisions: Decisions


class Guardrails:
    """Used on one event loop; owner of the services' connections and the functions' threads.

    Args:
        options: checked, see `check_guardrails`.
        path: of the options in the configuration.
        clock: monotonic seconds, the clock of the deadlines.

    Raises:
        ConfigError: if a function cannot be loaded.
    """

    def __init__(
        self,
        options: Sequence[GuardrailOptions],
        *,
        path: str = "gateway.guardrails",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._options = options
        self._rules: dict[str, Rules] = {}
        self._asked: dict[str, Asked] = {}
        for i, each in enumerate(options):
            judge = _judge(each, f"{path}[{i}]")
            if judge is None:
                self._rules[each.name] = Rules(each.name, each.rules)
            else:
                self._asked[each.name] = Asked(each, judge, clock)
        self.counts: Counter[tuple[str, Subject, str]] = Counter()
        """By guardrail, subject and action: prompts, answers to which rules did something, and questions of those that
        are asked."""
        self._refused: deque[RequestTrace] = deque(maxlen=NUM_REFUSED)
        self.looks_at_answers = any(self._is_for(each, "answer") for each in options)

    # ---------------------------------------------------------------- prompts

    async def check_prompt(
        self, prompt: Prompt, call: Call, model: ServedModel, offload: Offloaded[list[_Text]]
    ) -> CheckedPrompt:
        """The prompt, or what takes its place; its size is to be checked again then.

        Args:
            prompt: checked.
            call: of the request.
            model: that answers it.
            offload: does work on a text of some bytes, on a thread where it is large.

        Raises:
            ContentFilterError: if a guardrail stops it.
            UnavailableError: if one gives no verdict, and without one nothing may pass.
        """
        decisions = Decisions()
        try:
            texts = await offload(prompt.num_bytes, lambda: _texts(prompt, model))
            before = texts
            for each in self._options:
                if not self._is_for(each, "prompt"):
                    continue
                if each.name in self._rules:
                    texts = await self._by_rules(each.name, texts, decisions, partial(offload, prompt.num_bytes))
                else:
                    texts = await self._by_verdict(each.name, texts, call, model.info.name, decisions)
        except (ContentFilterError, UnavailableError) as error:
            self._refuse(call, error.code, decisions)
            raise
        return CheckedPrompt(prompt if texts == before else _with_texts(prompt, texts), decisions)

    async def _by_rules(
        self,
        name: str,
        texts: list[_Text],
        decisions: Decisions,
        offload: Callable[[Callable[[], list[_Text]]], Awaitable[list[_Text]]],
    ) -> list[_Text]:
        action = "stop"
        try:
            found = await offload(lambda: _ruled(self._rules[name], name, texts, decisions))
            action = "allow" if found == texts else "replace"
        finally:
            self.counts[name, "prompt", action] += 1
        return found

    async def _by_verdict(
        self, name: str, texts: list[_Text], call: Call, model: str, decisions: Decisions
    ) -> list[_Text]:
        question = Question(
            subject="prompt",
            guardrail=name,
            texts=tuple(one.text for one in texts),
            roles=tuple(one.role for one in texts),
            request_id=call.request_id,
            model=model,
            tenant=call.caller.tenant,
        )
        verdict = await self._ask(question, call, decisions)
        if isinstance(verdict, Stop):
            decisions.add(Decision(name, "", "prompt", "stop", verdict.reason))
            raise ContentFilterError(texts[0].field, _refusal(name, verdict.reason))
        if not isinstance(verdict, Replace):
            return texts
        decisions.add(Decision(name, "", "prompt", "replace", verdict.reason))
        found = [replace(one, text=text) for one, text in zip(texts, verdict.texts, strict=True)]
        for one, before in zip(found, texts, strict=True):
            if one != before and not one.may_replace:
                raise ContentFilterError(one.field, _refusal(name, verdict.reason + _NO_REPLACEMENT))
        return found

    def _refuse(self, call: Call, outcome: str, decisions: Decisions) -> None:
        now = self._clock()
        self._refused.append(
            RequestTrace(
                request_id=call.request_id,
                arrival=now,
                stages={"end": now},
                outcome=outcome,
                tenant=call.caller.tenant,
                trace_parent=call.trace_parent,
                parent_span=call.parent_span,
                guardrails=decisions.counts,
            )
        )

    # ---------------------------------------------------------------- answers

    def on_answer(
        self, call: Call, request_id: RequestId, model: str, may_replace: bool, prompt: Decisions
    ) -> AnswerGuard | None:
        """The guardrails of one answer; None where no one is for it.

        Args:
            call: of the request.
            request_id: of the answer.
            model: its name.
            may_replace: whether the answer may be any text.
            prompt: what was decided on its prompt.
        """
        decisions = Decisions(Counter(prompt.counts))
        if not self.looks_at_answers:
            return None
        stages: list[Stage] = []
        for each in self._options:
            if each.name in self._rules:
                stages += self._rules[each.name].stages("answer", may_replace, decisions.add)
            elif self._is_for(each, "answer"):
                question = partial(_about, each.name, request_id, model, call.caller.tenant)
                pieces = each.piece_chars if isinstance(each.piece_chars, int) else None
                stages.append(PieceStage(each.name, question, pieces, each.context_chars, may_replace, decisions.add))

        async def ask(question: Question) -> Verdict:
            return await self._ask(question, call, decisions)

        return AnswerGuard(Chain(stages), ask, decisions, partial(self._answer_ended, decisions))

    def _answer_ended(self, decisions: Decisions) -> None:
        """Count what rules did to an answer; what was asked about is counted by question."""
        for name, rules in self._rules.items():
            if not rules.is_for("answer"):
                continue
            actions = {action for own, _, subject, action, _ in decisions.counts if own == name and subject == "answer"}
            action = "stop" if "stop" in actions else "replace" if "replace" in actions else "allow"
            self.counts[name, "answer", action] += 1

    # ---------------------------------------------------------------- views

    @property
    def seconds(self) -> dict[str, float]:
        """By guardrail that is asked: how long its verdicts took, in all."""
        return {name: asked.seconds for name, asked in self._asked.items()}

    @property
    def open_circuits(self) -> dict[str, bool]:
        """By guardrail that is asked: whether it fails so often that it is not asked."""
        return {name: asked.is_open for name, asked in self._asked.items()}

    def refused(self) -> Iterator[RequestTrace]:
        """Prompts that were refused lately, the latest first."""
        return reversed(self._refused)

    async def close(self) -> None:
        """End what is held. Idempotent."""
        for asked in self._asked.values():
            await asked.close()

    # ---------------------------------------------------------------- inside

    async def _ask(self, question: Question, call: Call, decisions: Decisions) -> Verdict:
        def count(action: str) -> None:
            self.counts[question.guardrail, question.subject, action] += 1

        asked, is_sole = self._asked[question.guardrail], call.caller.limits.is_sole
        return await asked.ask(question, call.deadline, decisions.add, count, is_sole)

    def _is_for(self, each: GuardrailOptions, subject: Subject) -> bool:
        if each.name in self._rules:
            return self._rules[each.name].is_for(subject)
        return each.applies_to in ("both", f"{subject}s")


def _judge(options: GuardrailOptions, path: str) -> Judge | None:
    """What gives the verdicts; None for rules. Raises `ConfigError`."""
    if options.service is not None:
        return ServiceJudge(options.service.url, options.max_running)
    if options.python is not None:
        return FunctionJudge(load_function(options.python, f"{path}.python"), options.max_running)
    return None


def _texts(prompt: Prompt, model: ServedModel) -> list[_Text]:
    """What is looked at. May run on a thread."""
    match prompt:
        case TextPrompt(text):
            return [_Text(prompt.field, "", text, True)]
        case IdsPrompt(token_ids):
            return [_Text(prompt.field, "", model.tokenizer.decode(token_ids), False)]
        case ChatPrompt(turns, tools):
            found = [
                _Text(f"{prompt.field}[{i}].content", turn.role, turn.content, True) for i, turn in enumerate(turns)
            ]
            for i, turn in enumerate(turns):
                if turn.extra:
                    found.append(_Text(f"{prompt.field}[{i}].tool_calls", turn.role, turn.extra, False))
            if tools:
                found.append(_Text("tools", "tools", tools, False))
            if prompt.options.variables:
                found.append(_Text("chat_template_kwargs", "template", prompt.options.variables, False))
            return found


def _about(name: str, request_id: RequestId, model: str, tenant: str, piece: str, before: str, ended: bool) -> Question:
    return Question(
        subject="answer",
        texts=(piece,),
        before=before,
        ended=ended,
        guardrail=name,
        request_id=request_id,
        model=model,
        tenant=tenant,
    )


def _ruled(rules: Rules, name: str, texts: list[_Text], decisions: Decisions) -> list[_Text]:
    """The texts after the rules. Raises `ContentFilterError`. May run on a thread."""
    if (length := rules.max_chars["prompt"]) is not None:
        rule, max_chars = length
        if sum(len(one.text) for one in texts) > max_chars:
            decisions.add(Decision(name, rule.name, "prompt", "stop", rule.reason))
            raise ContentFilterError(texts[0].field, _refusal(name, rule.reason))
    found: list[_Text] = []
    for one in texts:
        chain = Chain(rules.stages("prompt", one.may_replace, decisions.add))
        text = "".join(run.text for run in chain.scan(one.text, ended=True))
        if chain.stopped is not None:
            raise ContentFilterError(one.field, _refusal(name, chain.stopped.reason))
        found.append(one if text == one.text else replace(one, text=text))
    return found


def _refusal(name: str, reason: str) -> str:
    return f"the guardrail {name} refuses it" + (f": {reason}" if reason else "")


def _with_texts(prompt: Prompt, texts: Sequence[_Text]) -> Prompt:
    if isinstance(prompt, ChatPrompt):
        turns = tuple(turn._replace(content=one.text) for turn, one in zip(prompt.turns, texts, strict=False))
        return replace(prompt, turns=turns)
    return TextPrompt(texts[0].text)
