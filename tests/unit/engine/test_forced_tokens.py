"""Answers under grammars are the same whether tokens that are forced have steps of their own or not: a model's, in
every way to choose, beside each other, in captured steps and over the ranks of a worker."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tokenizers import Tokenizer

from disagg.engine.commands import Add, Ended, PrefillComputed, TokenSampled
from disagg.engine.config import WorkerConfig
from disagg.engine.core.engine_core import EngineCore
from disagg.proto.ids import GatewayId, RequestId
from disagg.proto.messages import Sampling, SequenceSpec
from disagg.proto.token_ids import pack_token_ids
from tests.support.captured import captured_steps
from tests.support.engine import assert_idle, run_until_idle
from tests.support.stepping import make_runner
from tests.support.tiny_models import END_OF_TEXT_ID, make_checkpoint
from tests.unit.engine.parallel.ranks import running_group, running_ranks

SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["small", "large"]}, "many": {"type": "integer", "minimum": 10, "maximum": 99}},
    "required": ["kind", "many"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
GRAMMAR = json.dumps({"grammars": [{"json_schema": SCHEMA}]})
HOWS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": {"temperature": 1.0, "seed": 5},
    "filtered": {"temperature": 0.7, "seed": 6, "top_p": 0.9},
    "penalized": {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "logit_bias": ((40, 3.0), (70, -90.0))},
    "with logprobs": {"logprobs": 1},
    "without a grammar": {"grammar": "", "temperature": 1.0, "seed": 9},
}
ANSWERS = ('{"kind":"small","many":', '{"kind":"large","many":')
"""Up to two digits, a brace and the end."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("qwen3"))


def spec_of(name: str, **changes: Any) -> SequenceSpec:
    sampling = {"temperature": 0.0, "max_tokens": 48, "grammar": GRAMMAR, "stop_token_ids": (END_OF_TEXT_ID,)}
    number = list(HOWS).index(name) if name in HOWS else 0
    return SequenceSpec(
        request_id=RequestId(name),
        attempt=1,
        gateway_id=GatewayId("g"),
        prompt_token_ids=pack_token_ids([3 * number + i for i in range(20)]),
        sampling=Sampling(**{**sampling, **HOWS.get(name, {}), **changes}),
    )


def core_of(runner: Any) -> EngineCore:
    return EngineCore(runner, config=WorkerConfig(worker_id="w", roles=("prefill", "decode"), model_path="m"))


def answers(core: EngineCore, *specs: SequenceSpec) -> dict[str, list[int]]:
    for spec in specs:
        assert core.handle(Add(spec), 0.0) == []
    events = run_until_idle(core)
    assert_idle(core)
    found: dict[str, list[int]] = {spec.request_id: [] for spec in specs}
    for event in events:
        if isinstance(event, TokenSampled):
            assert event.index == len(found[event.key.request_id])
            assert (event.logprobs is None) == ("logprobs" not in HOWS.get(event.key.request_id, {}))
            found[event.key.request_id].append(event.token_id)
    return found


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, list[int]]:
    """Each alone, with a step for each token."""
    core = core_of(make_runner(folder, skip_forced=False))
    return {name: answers(core, spec_of(name))[name] for name in HOWS}


@contextmanager
def one_rank(folder: Path, **changes: Any) -> Iterator[Any]:
    yield make_runner(folder, **changes)


@contextmanager
def two_ranks(folder: Path, **changes: Any) -> Iterator[Any]:
    with running_ranks(folder, 2, roles=("prefill", "decode"), **changes) as ranks:
        yield ranks


def test_answers_are_what_the_schema_says(folder: Path, expected: dict[str, list[int]]) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for name, token_ids in expected.items():
        if name != "without a grammar":
            assert token_ids[-1] == END_OF_TEXT_ID
            assert tokenizer.decode(token_ids[:-4]) in ANSWERS


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("captured", [False, True])
def test_answers_are_the_same_with_and_without_skipping(
    folder: Path, expected: dict[str, list[int]], num_ranks: int, captured: bool
) -> None:
    """Alone and beside all others, on ranks each of which gets the step of several tokens, and where the steps are
    captured and padded, as on GPUs."""
    make = one_rank if num_ranks == 1 else two_ranks
    options = {"captures": True} if captured and num_ranks == 2 else {}
    with captured_steps() if captured else nullcontext(), make(folder, max_num_seqs=64, **options) as runner:
        core = core_of(runner)
        assert answers(core, *map(spec_of, HOWS)) == expected
        for name in ("greedy", "drawn", "penalized"):
            before = core.load().steps
            assert answers(core, spec_of(name))[name] == expected[name]
            assert core.load().steps - before < len(expected[name]) // 3


def test_a_choice_takes_a_step_and_what_is_forced_behind_it_none(folder: Path, expected: dict[str, list[int]]) -> None:
    core = core_of(make_runner(folder))
    core.handle(Add(spec_of("greedy")), 0.0)
    pieces: list[int] = []
    while core.has_work:
        pieces.append(sum(isinstance(event, TokenSampled) for event in core.step(0.0)))
    # {"kind":" | s or l, mall","many": | a digit | a digit, } and the end
    assert pieces == [9, 14, 1, 3]
    assert sum(pieces) == len(expected["greedy"])


@pytest.mark.parametrize("name", ["greedy", "drawn"])
def test_max_tokens_and_stop_ids_cut_a_forced_text(folder: Path, expected: dict[str, list[int]], name: str) -> None:
    core = core_of(make_runner(folder))
    for max_tokens in range(1, len(expected[name])):
        assert answers(core, spec_of(name, max_tokens=max_tokens))[name] == expected[name][:max_tokens]
    stop_id = expected[name][12]
    first = expected[name].index(stop_id)
    assert answers(core, spec_of(name, stop_token_ids=(stop_id,)))[name] == expected[name][: first + 1]


def test_a_prefill_worker_samples_one_token(folder: Path, expected: dict[str, list[int]]) -> None:
    core = core_of(make_runner(folder))
    core.handle(Add(spec_of("greedy"), hold_after_prefill=True), 0.0)
    events = core.step(0.0)
    assert [event.token_id for event in events if isinstance(event, TokenSampled)] == expected["greedy"][:1]
    assert [event.token_id for event in events if isinstance(event, PrefillComputed)] == expected["greedy"][:1]
    assert not any(isinstance(event, Ended) for event in events)


def test_first_tokens_are_the_same_while_chunks_of_other_prompts_are_in_flight(
    folder: Path, expected: dict[str, list[int]]
) -> None:
    """Of a worker of two stages: a grammar is compiled while the chunks are computed, and rank 0 samples by it when the
    logits of a last chunk come, behind whose launch it has launched others."""
    config = WorkerConfig(worker_id="w", roles=("prefill",), model_path="m", token_budget=16, pp=2)
    with running_group(folder, 1, pp=2) as group:
        core = EngineCore(group.runner, config=config)
        for name in HOWS:
            core.handle(Add(spec_of(name), hold_after_prefill=True), 0.0)
        events = run_until_idle(core)
    found = {event.key.request_id: event for event in events if isinstance(event, TokenSampled)}
    assert {name: event.token_id for name, event in found.items()} == {name: ids[0] for name, ids in expected.items()}
    assert [name for name, event in found.items() if event.logprobs is not None] == ["with logprobs"]


@pytest.mark.parametrize("num_known", range(1, 26))
def test_another_attempt_goes_on_behind_any_token(
    folder: Path, expected: dict[str, list[int]], num_known: int, drawing_core: EngineCore
) -> None:
    spec = spec_of("drawn")
    again = msgspec.structs.replace(spec, attempt=2, emitted_token_ids=tuple(expected["drawn"][:num_known]))
    drawing_core.handle(Add(again), 0.0)
    events = run_until_idle(drawing_core)
    found = [event.token_id for event in events if isinstance(event, TokenSampled)]
    assert found == expected["drawn"][num_known:]


@pytest.fixture(scope="module")
def drawing_core(folder: Path) -> EngineCore:
    return core_of(make_runner(folder))
