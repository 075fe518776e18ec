"""The requests that are measured, with their prompts computed: made by plain runs of the engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import tokenizers

from benchmarks.speculation import requests
from benchmarks.speculation.copying import copied_share, is_copying
from benchmarks.speculation.hostile import TEMPERATURE, hostile_prompt
from benchmarks.speculation.requests import DRAWN, KINDS, Request
from benchmarks.speculation.rig import Prefilled, Rig
from disagg.engine.checkpoint.checkpoint import read_model_config
from disagg.engine.core.engine_core import EngineCore
from disagg.proto.messages import Sampling
from tests.support.reports import REPOSITORY

CHOSEN_AT_A_TIME = 8
"""Batch in which plain answers are made to choose by."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """Requests of one sort."""

    name: str
    prefilled: tuple[Prefilled, ...]
    copied: tuple[float, ...] = ()
    """Share of copied trigrams of each plain answer, for copying work."""

    def part(self, first: int, count: int) -> list[Prefilled]:
        """`count` requests from one on; the first follows the last."""
        start = first % len(self.prefilled)
        return list(islice(cycle(self.prefilled), start, start + count))


class Works:
    """Makes works with one rig; `plain` is a core of it without drafts."""

    def __init__(self, rig: Rig, plain: EngineCore, model_path: Path, max_tokens: int) -> None:
        self._rig = rig
        self._plain = plain
        self._tokenizer = tokenizers.Tokenizer.from_file(str(model_path / "tokenizer.json"))
        self._ends = tuple(read_model_config(model_path).eos_token_ids)
        self._max_tokens = max_tokens

    def tokenize(self, text: str) -> list[int]:
        """Ids of a text with special tokens in it."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def text_of(self, request: Request) -> str:
        """The text of a prompt, with its special tokens."""
        return str(self._tokenizer.decode(list(request.prompt), skip_special_tokens=False))

    def copying(self, most: int) -> Work:
        """Up to `most` requests whose plain answers copy; see copying.py.

        Raises:
            RuntimeError: no answer does.
        """
        chosen: list[Prefilled] = []
        shares: list[float] = []
        waiting = iter(self._asked(requests.copying_questions(REPOSITORY), KINDS["greedy"]))
        while len(chosen) < most and (some := list(islice(waiting, 2 * CHOSEN_AT_A_TIME))):
            prefilled = self._rig.prefill(some)
            answers = self._rig.run(self._plain, prefilled, CHOSEN_AT_A_TIME).answers
            for one, answer in zip(prefilled, answers, strict=True):
                if is_copying(one.request.prompt, answer.token_ids):
                    chosen.append(one)
                    shares.append(copied_share(one.request.prompt, answer.token_ids))
        if not chosen:
            raise RuntimeError("no plain answer is copying work")
        return Work(name="copying", prefilled=tuple(chosen[:most]), copied=tuple(shares[:most]))

    def chat(self, most: int) -> Work:
        """Up to `most` drawn answers to questions about anything."""
        named = [("chat", question) for question in requests.chat_questions()]
        return Work(name="chat", prefilled=tuple(self._rig.prefill(self._asked(named[:most], DRAWN))))

    def hostile(self, most: int) -> Work:
        """`most` requests whose prompts hold the trigrams of their answers with wrong continuations.

        Raises:
            RuntimeError: an answer depends on its prompt after all.
        """
        known = self._hostile_requests([(0,)] * most)
        answers = self._drawn(known)
        prompts = [
            tuple(hostile_prompt(answer, self._rig.runner.vocab_size, seed)) for seed, answer in enumerate(answers)
        ]
        made = self._hostile_requests(prompts)
        if self._drawn(made) != answers:
            raise RuntimeError("the hostile answers depend on their prompts")
        return Work(name="hostile", prefilled=tuple(made))

    def kinds(self, copying: Work, most: int) -> Iterator[Work]:
        """The prompts of copying work with each way to choose tokens, up to `most` requests of each."""
        texts = [one.request for one in copying.part(0, most)]
        for kind, given in KINDS.items():
            made = [
                Request(name=f"{kind}, {one.name}", prompt=one.prompt, sampling=self._sampling(given, seed))
                for seed, one in enumerate(texts)
            ]
            yield Work(name=kind, prefilled=tuple(self._rig.prefill(made)))

    def _asked(self, questions: Sequence[tuple[str, str]], given: Mapping[str, Any]) -> list[Request]:
        return requests.asked(questions, self.tokenize, lambda seed: self._sampling(given, seed))

    def _sampling(self, given: Mapping[str, Any], seed: int) -> Sampling:
        return requests.sampling_of(given, seed=seed, max_tokens=self._max_tokens, ends=self._ends)

    def _hostile_requests(self, prompts: Sequence[tuple[int, ...]]) -> list[Prefilled]:
        return self._rig.prefill(
            [
                Request(
                    name=f"hostile {seed}",
                    prompt=prompt,
                    sampling=Sampling(temperature=TEMPERATURE, seed=seed, max_tokens=self._max_tokens),
                )
                for seed, prompt in enumerate(prompts)
            ]
        )

    def _drawn(self, prefilled: Sequence[Prefilled]) -> list[list[int]]:
        answers = self._rig.run(self._plain, prefilled, CHOSEN_AT_A_TIME).answers
        return [answer.token_ids for answer in answers]
