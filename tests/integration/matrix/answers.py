"""What a row asks for, what the plain run answers, and what the row's answer must be made of it."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx

from disagg.client import AsyncClient, Options, TokenLogprob
from disagg.gateway.guardrails.config import GuardrailOptions, RuleOptions
from disagg.gateway.requests.sampling import answer_seed
from tests.integration.matrix.factors import EQUAL_RANKS, OFF, ON
from tests.integration.matrix.front_end import MODEL
from tests.support.covering import Row
from tests.support.tiny_models import VOCAB_SIZE

BLOCK = 16
NUM_PREFIX, NUM_PROMPT = 4 * BLOCK, 5 * BLOCK + 5
NUM_TOKENS, NUM_TOKENS_OF_RUNS = 160, 480
"""Tokens of an answer; of one of which steps bring several at a time."""
TIMEOUT_S = 60.0
LOGPROB_TOLERANCE = 1e-3
NUM_TOP = 2
TOP_K = 8
"""Where several ranks add up parts, logits differ in their last bits from those of one rank: a token that is drawn from
all of them, among hundreds, is another one once in some thousand tokens."""
LIKELY_IDS, LIKELY_BIAS = tuple(ord(letter) - ord("!") for letter in "abcs"), 100.0
"""Four tokens and a bias that leaves no others: what stood behind two of them before, as lookup proposes, often stands
there again, and often does not."""
REPLACEMENT = "<#>"
_FORCING = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"kind": {"enum": ["small", "large"]}, "code": {"type": "string", "pattern": "^[abc]{12}$"}},
        "required": ["kind", "code"],
        "additionalProperties": False,
    },
    "minItems": 60,
}
_FREE = "([a-lx .,][m-vyz0-9]){300}"
"""An expression that leaves a choice at each token of an answer, another one at every second, and has none of the words
of several letters."""
_FORCED_BEGINNING, _FREE_BEGINNING = r'\[\s*\{\s*"kind"', "([a-lx .,][m-vyz0-9]){30}"


@dataclass
class Got:
    """An answer as a client has it."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    reason: str = ""


@dataclass(frozen=True)
class Question:
    """The request of a row, but for its stop string and guardrails, which are made from the plain answers."""

    row: Row
    number: int
    """A question with another number has another prompt and another seed."""

    @property
    def prompt(self) -> list[int]:
        dice = random.Random(f"prompt {self.number}")
        return [dice.randrange(VOCAB_SIZE) for _ in range(NUM_PROMPT)]

    @property
    def max_tokens(self) -> int:
        return NUM_TOKENS_OF_RUNS if ON in (self.row["forced"], self.row["speculation"]) else NUM_TOKENS

    @property
    def num_answers(self) -> int:
        return 2 if self.row["several"] == ON else 1

    @property
    def options(self) -> Options:
        """What chooses the tokens."""
        options = self.without_penalties
        if self.row["penalties"] == ON:
            options |= {"presence_penalty": 0.6, "frequency_penalty": 0.4, "repetition_penalty": 1.15}
        return options

    @property
    def without_penalties(self) -> Options:
        """The same without penalties, which would choose other tokens."""
        options: Options = {"temperature": 0.9, "seed": 100 + self.number, "max_tokens": self.max_tokens}
        if self.row["ranks"] != EQUAL_RANKS:
            options["top_k"] = TOP_K
        if self.row["speculation"] == ON:
            options["logit_bias"] = dict.fromkeys(LIKELY_IDS, LIKELY_BIAS)
        if self.row["grammar"] == OFF:
            options["ignore_eos"] = True
        elif self.row["forced"] == ON:
            options["json_schema"] = _FORCING
        else:
            options["regex"] = _FREE
        return options


@dataclass(frozen=True)
class Expected:
    """The plain answers, and what the row's request adds to them."""

    plain: Sequence[Got]
    stop: str
    replaced: str
    """Texts that end an answer and that a guardrail replaces; empty for none."""
    has_form: bool
    """Whether the answers follow a grammar: then a guardrail ends what it would replace."""
    has_logprobs: bool

    @property
    def guardrails(self) -> tuple[GuardrailOptions, ...]:
        if not self.replaced:
            return ()
        pattern = "".join(f"[{char}]" if char.isalnum() or char == " " else f"\\{char}" for char in self.replaced)
        rule = RuleOptions(pattern=pattern, action="replace", replacement=REPLACEMENT, applies_to="answers")
        return (GuardrailOptions(name="words", rules=(rule,)),)

    def check(self, answers: Sequence[Got]) -> None:
        """Texts, tokens, reasons and logprobs."""
        assert len(answers) == len(self.plain)
        for got, plain in zip(answers, self.plain, strict=True):
            text, reason = plain.text, plain.reason
            if self.stop and self.stop in text:
                text, reason = text[: text.index(self.stop)], "stop"
            if self.replaced and self.replaced in text:
                if self.has_form:
                    text, reason = text[: text.index(self.replaced)], "content_filter"
                else:
                    text = text.replace(self.replaced, REPLACEMENT)
            assert (got.text, got.reason) == (text, reason)
            if got.token_ids:
                self._check_tokens(got, plain)

    def num_tokens(self, answers: Sequence[Got]) -> int:
        """Tokens of the longest answer: of the plain one where a client got text only."""
        pairs = zip(answers, self.plain, strict=True)
        return max(len(got.token_ids) or len(plain.token_ids) for got, plain in pairs)

    def _check_tokens(self, got: Got, plain: Got) -> None:
        """The tokens are the plain ones, all of them where nothing ends an answer before or replaces a part of it; and
        so are their logprobs, up to the first token that is left out."""
        num_alike = _num_alike(got.token_ids, plain.token_ids)
        rest = iter(plain.token_ids[num_alike:])
        if self.replaced and not self.has_form:
            assert all(token_id in rest for token_id in got.token_ids[num_alike:])
        else:
            assert got.token_ids == plain.token_ids[:num_alike]
        if not self.replaced and not self.stop:
            assert num_alike == len(plain.token_ids)
        assert len(got.logprobs) == (len(got.token_ids) if self.has_logprobs else 0)
        for one, other in zip(got.logprobs[:num_alike], plain.logprobs, strict=False):
            assert abs(one.logprob - other.logprob) < LOGPROB_TOLERANCE
            assert len(one.top) == NUM_TOP or self.replaced  # a list ends before what a guardrail looks for
            pairs = zip(one.top, other.top, strict=False)
            assert all(abs(mine - its) < LOGPROB_TOLERANCE for (_, mine), (_, its) in pairs)


def _num_alike(some: Sequence[int], others: Sequence[int]) -> int:
    pairs = zip(some, others, strict=False)
    return next((i for i, (one, other) in enumerate(pairs) if one != other), min(len(some), len(others)))


async def plain_answers(client: AsyncClient, question: Question) -> Expected:
    """Each answer on its own, with logprobs; the texts to stop at and to replace stand in the first one."""
    answers = []
    for index in range(question.num_answers):
        options = question.options
        options["seed"] = answer_seed(options["seed"], index)
        options["logprobs"] = NUM_TOP
        answer = await client.generate(question.prompt, timeout_s=TIMEOUT_S, **options)
        answers.append(Got(answer.text, list(answer.token_ids), list(answer.logprobs), answer.reason))
    row, text = question.row, answers[0].text
    if row["penalties"] == ON:
        without = await client.generate(question.prompt, timeout_s=TIMEOUT_S, **question.without_penalties)
        assert list(without.token_ids) != answers[0].token_ids
    if row["grammar"] == ON:
        assert re.match(_FORCED_BEGINNING if row["forced"] == ON else _FREE_BEGINNING, text)
    return Expected(
        plain=answers,
        stop=text_at(text, 0.82) if row["stop"] == ON else "",
        replaced=text_at(text, 0.6) if row["guardrails"] == ON else "",
        has_form=row["grammar"] == ON,
        has_logprobs=row["logprobs"] == ON,
    )


def text_at(text: str, place: float) -> str:
    """A part of `text` that begins about there and stands nowhere before."""
    begin = int(place * len(text))
    for at in range(begin, len(text) - 24):
        for size in range(3, 24):
            part = text[at : at + size]
            if not part.isascii() or not part.isprintable():
                break
            if text.index(part) == at:
                return part
    raise AssertionError(f"no part of the text behind character {begin} is new there: {text!r}")


# ---------------------------------------------------------------- over the wire


def speculation_of(question: Question) -> Literal["auto", "off"]:
    """The option of the row's request."""
    return "auto" if question.row["speculation"] == ON else "off"


async def ask(address: str, question: Question, expected: Expected) -> list[Got]:
    """Over gRPC. A client whose gateway dies continues by the tokens that it has."""
    options = question.options
    if question.num_answers > 1:
        options["n"] = question.num_answers
    if question.row["logprobs"] == ON:
        options["logprobs"] = NUM_TOP
    if expected.stop:
        options["stop"] = expected.stop
    options["speculation"] = speculation_of(question)
    answers = [Got() for _ in range(question.num_answers)]
    async with AsyncClient(address) as client:
        async for delta in client.stream(question.prompt, timeout_s=TIMEOUT_S, **options):
            got = answers[delta.answer_index]
            got.text += delta.text
            got.token_ids += delta.token_ids
            got.logprobs += delta.logprobs
            if delta.finished is not None:
                got.reason = delta.finished.reason
    return answers


class EventStream:
    """The same over HTTP, as events that have ids, which `leave` ends and another request continues."""

    def __init__(self, url: str, question: Question, expected: Expected) -> None:
        self._url = url
        self._body = body_of(question, expected)
        self._leaves = False

    def leave(self) -> None:
        """Close the connection at the next event, and continue behind it."""
        self._leaves = True

    async def read(self) -> list[Got]:
        got, last_id = Got(), "0"
        async with httpx.AsyncClient(base_url=self._url, timeout=TIMEOUT_S, trust_env=False) as http:
            while not got.reason:
                last_id = await self._read_from(http, last_id, got)
        return [got]

    async def _read_from(self, http: httpx.AsyncClient, last_id: str, got: Got) -> str:
        """Read until the end, or until it was left; returns the id of the last event."""
        headers = {"last-event-id": last_id}
        async with http.stream("POST", "/v1/completions", json=self._body, headers=headers) as reply:
            assert reply.status_code == 200, await reply.aread()
            async for line in reply.aiter_lines():
                if line.startswith("id: "):
                    last_id = line.removeprefix("id: ")
                elif line.startswith("data: {"):
                    (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                    got.text += choice["text"]
                    got.reason = choice["finish_reason"] or ""
                    if self._leaves and not got.reason:
                        self._leaves = False
                        return last_id
        return last_id


def body_of(question: Question, expected: Expected) -> dict[str, Any]:
    """The question as the body of a completion."""
    options: Mapping[str, Any] = question.options
    names = {"json_schema": "json", "regex": "regex"}
    body = {name: value for name, value in options.items() if name not in names}
    structured = {names[name]: options[name] for name in names if name in options}
    if structured:
        body["structured_outputs"] = structured
    if expected.stop:
        body["stop"] = expected.stop
    body["speculation"] = speculation_of(question)
    return {"model": MODEL, "prompt": question.prompt, "stream": True, **body}
