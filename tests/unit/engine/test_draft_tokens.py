"""Answers are the same with and without drafts, right ones and wrong ones: a model's, in every way to choose a token,
beside each other, in captured steps, over the ranks of a worker, and whoever goes on with them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import msgspec
import pytest

from disagg.engine.commands import Add, Ended, TokenSampled
from disagg.engine.config import SpeculationOptions, WorkerConfig
from disagg.engine.core.engine_core import EngineCore
from disagg.proto.ids import GatewayId, RequestId
from disagg.proto.messages import Sampling, SequenceSpec, TokenLogprobs
from disagg.proto.token_ids import pack_token_ids
from tests.support.captured import captured_steps
from tests.support.drafting import KnownDrafts, draft
from tests.support.engine import assert_idle, run_until_idle
from tests.support.stepping import make_runner
from tests.support.tiny_models import END_OF_TEXT_ID, VOCAB_SIZE, make_checkpoint
from tests.unit.engine.parallel.ranks import running_ranks

SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["small", "large"]}, "many": {"type": "integer", "minimum": 10, "maximum": 99}},
    "required": ["kind", "many"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
GRAMMAR = json.dumps({"grammars": [{"json_schema": SCHEMA}]})
STOPS: dict[str, Any] = {"grammar": GRAMMAR, "stop_token_ids": (END_OF_TEXT_ID,)}
HOWS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "drawn": {"seed": 5},
    "filtered": {"temperature": 0.7, "seed": 6, "top_p": 0.9, "top_k": 20},
    "likely": {"seed": 7, "min_p": 0.02},
    "repetition": {"temperature": 0.0, "repetition_penalty": 1.3},
    "penalized": {"seed": 8, "presence_penalty": 0.6, "frequency_penalty": 0.5, "logit_bias": ((40, 3.0), (70, -90.0))},
    "logprobs": {"seed": 9, "logprobs": 3},
    "least tokens": {"temperature": 0.0, "min_tokens": 9, "stop_token_ids": tuple(range(40, 200, 3))},
    "grammar": {"temperature": 0.0, **STOPS},
    "drawn by a grammar": {"seed": 11, "temperature": 1.5, **STOPS},
    "grammar with penalties": {"seed": 12, "repetition_penalty": 1.2, **STOPS},
    "grammar with logprobs": {"seed": 13, "logprobs": 0, **STOPS},
}
MAX_TOKENS = 40
Answer = list[tuple[int, TokenLogprobs | None]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("qwen3"))


def spec_of(name: str, **changes: Any) -> SequenceSpec:
    number = list(HOWS).index(name)
    return SequenceSpec(
        request_id=RequestId(name),
        attempt=1,
        gateway_id=GatewayId("g"),
        prompt_token_ids=pack_token_ids([(3 * number + 7 * i) % VOCAB_SIZE for i in range(20)]),
        sampling=Sampling(**{"max_tokens": MAX_TOKENS, **HOWS[name], **changes}),
    )


def core_of(runner: Any, **changes: Any) -> EngineCore:
    return EngineCore(
        runner, config=WorkerConfig(worker_id="w", roles=("prefill", "decode"), model_path="m", **changes)
    )


def answers(core: EngineCore, *specs: SequenceSpec) -> dict[str, Answer]:
    for spec in specs:
        assert core.handle(Add(spec), 0.0) == []
    events = run_until_idle(core)
    assert_idle(core)
    found: dict[str, Answer] = {spec.request_id: [] for spec in specs}
    for event in events:
        if isinstance(event, TokenSampled):
            answer = found[event.key.request_id]
            assert event.index == len(answer)
            answer.append((event.token_id, event.logprobs))
    ends = [event for event in events if isinstance(event, Ended)]
    assert {end.reason for end in ends} <= {"length", "stop"}
    assert len(ends) == len(specs)
    return found


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, Answer]:
    """Each alone, without drafts."""
    core = core_of(make_runner(folder))
    return {name: answers(core, spec_of(name))[name] for name in HOWS}


def tokens(found: dict[str, Answer]) -> dict[str, list[int]]:
    return {name: [token for token, _ in answer] for name, answer in found.items()}


@contextmanager
def one_rank(folder: Path, **changes: Any) -> Iterator[Any]:
    yield make_runner(folder, **changes)


@contextmanager
def two_ranks(folder: Path, **changes: Any) -> Iterator[Any]:
    with running_ranks(folder, 2, roles=("prefill", "decode"), **changes) as ranks:
        yield ranks


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("captured", [False, True])
def test_answers_are_the_same_with_and_without_drafts(
    folder: Path, expected: dict[str, Answer], num_ranks: int, captured: bool
) -> None:
    """Alone and beside all others, with drafts of which most are right, and all of which are wrong."""
    make = one_rank if num_ranks == 1 else two_ranks
    options = {"captures": True} if captured and num_ranks == 2 else {}
    with captured_steps() if captured else nullcontext(), make(folder, max_num_seqs=96, **options) as runner:
        core = core_of(runner)
        for right in (0.9, 0.0):
            known = KnownDrafts(tokens(expected), right=right, vocab_size=VOCAB_SIZE)
            draft(core, known)
            together = answers(core, *map(spec_of, HOWS))
            assert tokens(together) == tokens(expected)
            assert set(+known.planned) == set(HOWS)
            assert (known.totals.accepted > 100) == (right > 0.0)
        known = KnownDrafts(tokens(expected), right=1.0, vocab_size=VOCAB_SIZE)
        draft(core, known)
        for name in HOWS:
            before = core.load().steps
            found = answers(core, spec_of(name))
            assert tokens(found)[name] == tokens(expected)[name]
            assert core.load().steps - before <= 2 + len(expected[name]) // 4


def test_logprobs_are_those_of_the_token(folder: Path, expected: dict[str, Answer]) -> None:
    core = core_of(make_runner(folder))
    draft(core, KnownDrafts(tokens(expected), right=0.8, vocab_size=VOCAB_SIZE))
    for name in ("logprobs", "grammar with logprobs", "greedy"):
        found = answers(core, spec_of(name))[name]
        for (token, logprobs), (known, known_logprobs) in zip(found, expected[name], strict=True):
            assert token == known
            assert (logprobs is None) == (known_logprobs is None)
            if logprobs is not None and known_logprobs is not None:
                assert logprobs.logprob == pytest.approx(known_logprobs.logprob, abs=1e-5)
                assert logprobs.top_ids == known_logprobs.top_ids


@pytest.mark.parametrize("name", ["drawn", "greedy", "drawn by a grammar"])
def test_max_tokens_and_stop_ids_cut_an_answer_among_drafts(
    folder: Path, expected: dict[str, Answer], name: str
) -> None:
    core = core_of(make_runner(folder))
    answer = tokens(expected)[name]
    draft(core, KnownDrafts(tokens(expected), right=1.0, vocab_size=VOCAB_SIZE))
    for max_tokens in range(1, len(answer)):
        assert tokens(answers(core, spec_of(name, max_tokens=max_tokens)))[name] == answer[:max_tokens]
    for place in range(len(answer)):
        stops = (*spec_of(name).sampling.stop_token_ids, answer[place])
        assert (
            tokens(answers(core, spec_of(name, stop_token_ids=stops)))[name]
            == answer[: answer.index(answer[place]) + 1]
        )


@pytest.mark.parametrize("num_known", range(1, 24, 2))
def test_another_attempt_goes_on_behind_any_token(
    folder: Path, expected: dict[str, Answer], num_known: int, drafting_core: EngineCore
) -> None:
    for name in ("penalized", "drawn by a grammar"):
        answer = tokens(expected)[name]
        again = msgspec.structs.replace(spec_of(name), attempt=2, emitted_token_ids=tuple(answer[:num_known]))
        drafting_core.handle(Add(again), 0.0)
        events = run_until_idle(drafting_core)
        found = [event.token_id for event in events if isinstance(event, TokenSampled)]
        assert found == answer[num_known:]


@pytest.fixture(scope="module")
def drafting_core(folder: Path, expected: dict[str, Answer]) -> EngineCore:
    core = core_of(make_runner(folder))
    draft(core, KnownDrafts(tokens(expected), right=0.9, vocab_size=VOCAB_SIZE))
    return core


def test_a_request_may_go_without_drafts(folder: Path, expected: dict[str, Answer]) -> None:
    core = core_of(make_runner(folder))
    known = KnownDrafts(tokens(expected), right=1.0, vocab_size=VOCAB_SIZE)
    draft(core, known)
    spec = msgspec.structs.replace(spec_of("greedy"), speculation=False)
    assert tokens(answers(core, spec))["greedy"] == tokens(expected)["greedy"]
    assert known.planned["greedy"] == 0


def test_lookup_finds_drafts_in_an_answer_that_repeats_itself(folder: Path) -> None:
    """The one configured way: a bias makes the tiny model repeat a token."""
    plain = core_of(make_runner(folder))
    spec = spec_of("greedy", max_tokens=200, logit_bias=((40, 30.0),))
    expected = tokens(answers(plain, spec))
    core = core_of(make_runner(folder), speculation=SpeculationOptions(method="lookup", max_draft=5))
    assert tokens(answers(core, spec)) == expected
    speculation = core._scheduler.speculation
    assert speculation is not None
    assert speculation.totals.accepted > 50
    assert plain._scheduler.speculation is None
    assert core.load().steps < plain.load().steps
