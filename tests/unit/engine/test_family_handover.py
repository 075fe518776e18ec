"""Each family through two engines with real models, in fp32, to the tokens of transformers, whatever the ranks of
either: prompts computed by one and decoded by the other, with prefixes that are cached on both sides and sequences
swapped out and in again; a sequence that moves back in the middle of its answer; and one that goes on behind the tokens
of an attempt that was lost. Ranks are threads."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from disagg.engine.commands import (
    Add,
    End,
    Event,
    Export,
    Exported,
    Extend,
    Gather,
    Gathered,
    Gathering,
    Held,
    Hold,
    Join,
    PrefillComputed,
    Release,
    Reserve,
    Reserved,
    Scatter,
    Scattered,
)
from disagg.engine.core.engine_core import EngineCore
from disagg.engine.plan import Buffer, ModelRunner
from disagg.engine.sharding.kv_routes import plan_pair
from disagg.proto.ids import AttemptKey
from disagg.proto.messages import SequenceSpec
from tests.support.engine import assert_idle, handle_all, key_of, make_core, make_spec, run_until_idle, token_ids_of
from tests.support.rank_connections import carry
from tests.support.ranks import (
    FOUR,
    FOUR_EP,
    ONE,
    THREE_STAGES,
    TWO,
    TWO_BY_TWO,
    TWO_BY_TWO_EP,
    TWO_EP,
    TWO_STAGES,
    Ranks,
)
from tests.support.secret import checksum
from tests.support.stepping import make_runner
from tests.support.tiny_models import EXPERT_KINDS, FAMILY_KINDS, VOCAB_SIZE, make_checkpoint, reference_generate
from tests.unit.engine.parallel.ranks import running_group

FIRST = tuple((7 * i * i + 3 * i + 5) % VOCAB_SIZE for i in range(50))
SECOND = (*FIRST[:32], *FIRST[3:20])
"""Two blocks are those of the first."""
NUM_TOKENS = 30
NUM_BEFORE = 12
"""Tokens of an answer before it moves, or its worker is lost."""

LIKE_LLAMA = ("llama3_rope", "mistral", "qwen2", "qwen3")
PAIRS = ((ONE, ONE), (ONE, TWO), (TWO, ONE), (ONE, FOUR), (FOUR, ONE), (TWO, FOUR), (FOUR, TWO))
"""Four ranks share the two KV heads."""
EXPERT_PAIRS = (
    (ONE, TWO_EP),
    (TWO_EP, ONE),
    (ONE, FOUR_EP),
    (FOUR_EP, ONE),
    (TWO, TWO_EP),
    (TWO_EP, TWO),
    (TWO, FOUR_EP),
    (FOUR_EP, TWO),
    (TWO_EP, FOUR),
    (FOUR, TWO_EP),
    (TWO_EP, FOUR_EP),
    (FOUR_EP, TWO_EP),
)
STAGE_PAIRS = (
    (ONE, TWO_STAGES),
    (TWO_STAGES, ONE),
    (TWO_STAGES, THREE_STAGES),
    (THREE_STAGES, TWO_STAGES),
    (TWO_STAGES, TWO),
    (TWO, TWO_STAGES),
    (TWO_BY_TWO, TWO),
    (FOUR, TWO_BY_TWO),
    (TWO_BY_TWO, THREE_STAGES),
)
"""All families have three layers."""
EXPERT_STAGE_PAIRS = ((TWO_BY_TWO_EP, TWO_STAGES), (TWO_STAGES, TWO_BY_TWO_EP), (TWO_BY_TWO_EP, TWO_BY_TWO))
QUICK = {False: ((ONE, TWO), (TWO, ONE)), True: ((ONE, TWO_EP), (TWO_EP, ONE))}
"""One of these for each family in continuous integration, of families without and with experts."""
QUICK_STAGES = {
    ("mistral", THREE_STAGES, TWO_STAGES),
    ("qwen3_moe", TWO_BY_TWO_EP, TWO_STAGES),
    ("deepseek_v3", TWO_STAGES, TWO),
    ("gemma3", TWO_STAGES, THREE_STAGES),
    ("gpt_oss", TWO, TWO_STAGES),
}


def cases() -> list[Any]:
    """Of each family all pairs that it can have."""
    found = []
    for number, kind in enumerate((*LIKE_LLAMA, *FAMILY_KINDS)):
        has_experts = kind in EXPERT_KINDS
        quick = QUICK[has_experts][number % 2]
        for pair in (*PAIRS, *STAGE_PAIRS, *((*EXPERT_PAIRS, *EXPERT_STAGE_PAIRS) if has_experts else ())):
            marks = () if pair == quick or (kind, *pair) in QUICK_STAGES else pytest.mark.slow
            found.append(pytest.param(kind, *pair, id=f"{kind}-{pair[0]}-to-{pair[1]}", marks=marks))
    return found


@functools.cache
def expected(folder: Path, prompt: tuple[int, ...]) -> list[int]:
    return reference_generate(folder, list(prompt), NUM_TOKENS)[0]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Checkpoints, each made when it is first asked for."""
    root = tmp_path_factory.mktemp("checkpoints")
    return functools.cache(lambda kind: make_checkpoint(kind, root / kind))


@dataclass
class Engine:
    """One worker."""

    core: EngineCore
    runner: ModelRunner
    part: Callable[[Buffer, int], Buffer]
    """What a rank has of a staging buffer."""


@contextmanager
def running_engine(folder: Path, ranks: Ranks, num_blocks: int, **options: Any) -> Iterator[Engine]:
    """`options` are of `make_core`."""
    if ranks.num_ranks == 1:
        runner = make_runner(folder, num_blocks=num_blocks)
        runner.checksum = checksum
        yield Engine(make_core(runner=runner, **options), runner, lambda buffer, _: buffer)
    else:
        with running_group(folder, ranks.tp, pp=ranks.pp, ep=ranks.ep, num_blocks=num_blocks) as group:
            yield Engine(make_core(runner=group.runner, **options), group.runner, group.part)


def hand_over(source: Engine, target: Engine, spec: SequenceSpec) -> list[Event]:
    """Compute the known tokens on one side and join on the other."""
    (reserved,) = handle_all(target.core, Reserve(spec))
    assert isinstance(reserved, Reserved)
    handle_all(source.core, Add(spec, hold_after_prefill=True))
    (computed,) = [event for event in run_until_idle(source.core) if isinstance(event, PrefillComputed)]
    move(source, target, spec.key, range(reserved.cached_tokens, spec.num_known_tokens))
    handle_all(source.core, Release(spec.key))
    return [computed, reserved, *handle_all(target.core, Join(spec.key, computed.token_id))]


def move(source: Engine, target: Engine, key: AttemptKey, tokens: range) -> None:
    """Of each cache group what is kept, in chunks of 13 tokens."""
    plan = plan_pair(source.runner.layout, source.runner.shape, target.runner.shape)
    seqs = itertools.count()
    for number, group in enumerate(plan.groups):
        for start in range(group.first_token(tokens.stop, tokens.start), tokens.stop, 13):
            seq, end = next(seqs), min(start + 13, tokens.stop)
            nbytes = (end - start) * group.token_bytes
            sent, received = source.runner.new_staging(nbytes), target.runner.new_staging(nbytes)
            gather = Gather(key, seq, start, end, sent, target.runner.shape, group=number)
            (gathered,) = handle_all(source.core, gather)
            if isinstance(gathered, Gathering):  # as of several stages, whose last one may be the last to copy
                gathered.copying.wait()
                gathered = Gathered(key, seq, True, gathered.copying.checksum())
            slices = carry(group, nbytes, partial(source.part, sent), partial(target.part, received))
            assert gathered == Gathered(key, seq, True, checksum.combined([checksum(each) for each in slices]))
            scatter = Scatter(key, seq, start, end, received, source.runner.shape, group=number)
            assert handle_all(target.core, scatter) == [Scattered(key, seq, True)]


def check_swapped(folder: Path, source: Engine, target: Engine) -> None:
    """Six blocks for two sequences that come to need eight. The second one's prefix is cached on both sides."""
    events, cached = list[Event](), []
    for name, prompt in (("first", FIRST), ("second", SECOND)):
        handed = hand_over(source, target, make_spec(name, prompt, max_tokens=NUM_TOKENS))
        cached.append([event.cached_tokens for event in handed if isinstance(event, PrefillComputed | Reserved)])
        events += handed
    events += run_until_idle(target.core)
    assert cached == [[0, 0], [32, 32]]
    assert token_ids_of(events, "first") == expected(folder, FIRST)
    assert token_ids_of(events, "second") == expected(folder, SECOND)
    assert target.core.totals().preemptions >= 1
    assert target.core.totals().swapped_in_blocks >= 1


def check_moved(folder: Path, source: Engine, target: Engine) -> None:
    """Back to where its prompt was computed, with a token that it grew by after it was offered. No side has any of it
    cached."""
    key = key_of("moving")
    events = hand_over(source, target, make_spec("moving", FIRST, max_tokens=NUM_TOKENS, cached=False))
    while len(token_ids_of(events, "moving")) < NUM_BEFORE:
        events += target.core.step(0.0)
    (exported,) = handle_all(target.core, Export(key))
    assert isinstance(exported, Exported)
    assert exported.spec is not None
    events += target.core.step(0.0)
    tokens = token_ids_of(events, "moving")
    (held,) = handle_all(target.core, Hold(key, exported.spec.num_known_tokens))
    assert isinstance(held, Held)
    assert held.token_ids == tuple(tokens[NUM_BEFORE - 1 : -1])
    handle_all(source.core, Reserve(exported.spec), Extend(key, held.token_ids))
    move(target, source, key, range(len(FIRST) + len(tokens) - 1))
    moved = handle_all(source.core, Join(key, held.token_id))
    handle_all(target.core, End(key, "moved", ""))
    moved += run_until_idle(source.core)
    assert tokens == expected(folder, FIRST)[: len(tokens)]
    assert token_ids_of(moved, "moving") == expected(folder, FIRST)[len(tokens) - 1 :]


def check_retried(folder: Path, source: Engine, target: Engine) -> None:
    """The tokens of the lost attempt are computed beside the rest of the prompt, whose beginning is cached."""
    emitted = expected(folder, FIRST)[:NUM_BEFORE]
    spec = make_spec("first", FIRST, emitted=emitted, attempt=2, max_tokens=NUM_TOKENS)
    events = hand_over(source, target, spec)
    assert isinstance(events[0], PrefillComputed)
    assert events[0].cached_tokens == 48
    events += run_until_idle(target.core)
    assert token_ids_of(events, "first", attempt=2) == expected(folder, FIRST)[NUM_BEFORE:]


@pytest.mark.parametrize(("kind", "prefill", "decode"), cases())
def test_tokens_are_those_of_transformers(
    folder_of: Callable[[str], Path], kind: str, prefill: Ranks, decode: Ranks
) -> None:
    folder = folder_of(kind)
    with (
        running_engine(folder, prefill, 16) as source,
        running_engine(folder, decode, 6, roles=("decode",), decode_reserve_tokens=0, swap_bytes=1 << 22) as target,
    ):
        for check in (check_swapped, check_moved, check_retried):
            check(folder, source, target)
            assert_idle(source.core)
            assert_idle(target.core)
