"""Each family through two engines with real models, in fp32, to the tokens of transformers: prompts computed by one,
decoded by the other, with prefixes that are cached on both sides and sequences swapped out and in again; and sequences
that move in the middle of their answers."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from disagg.engine.commands import (
    Add,
    End,
    Event,
    Export,
    Exported,
    Extend,
    Gather,
    Held,
    Hold,
    Join,
    PrefillComputed,
    Release,
    Reserve,
    Reserved,
    Scatter,
)
from disagg.engine.core.engine_core import EngineCore
from disagg.engine.runner.model_runner import TorchModelRunner
from disagg.proto.ids import AttemptKey
from disagg.proto.messages import KvLayout, SequenceSpec
from disagg.proto.token_ids import unpack_token_ids
from tests.support.engine import handle_all, key_of, make_core, make_spec, run_until_idle, token_ids_of
from tests.support.stepping import make_runner
from tests.support.tiny_models import FAMILY_KINDS, VOCAB_SIZE, make_checkpoint, reference_generate

FIRST = tuple((7 * i * i + 3 * i + 5) % VOCAB_SIZE for i in range(50))
SECOND = (*FIRST[:32], *FIRST[3:20])
"""Two blocks are those of the first."""
NUM_TOKENS = 30


def hand_over(source: EngineCore, target: EngineCore, spec: SequenceSpec, layout: KvLayout) -> tuple[int, int]:
    """Compute the prompt on one side and join on the other; how much each had cached."""
    key, num_tokens = key_of(spec.request_id), len(unpack_token_ids(spec.prompt_token_ids))
    (reserved,) = handle_all(target, Reserve(spec))
    assert isinstance(reserved, Reserved)
    handle_all(source, Add(spec, hold_after_prefill=True))
    (computed,) = [event for event in run_until_idle(source) if isinstance(event, PrefillComputed)]
    move(source, target, key, range(reserved.cached_tokens, num_tokens), layout)
    handle_all(source, Release(key))
    handle_all(target, Join(key, computed.token_id))
    return computed.cached_tokens, reserved.cached_tokens


def move(source: EngineCore, target: EngineCore, key: AttemptKey, tokens: range, layout: KvLayout) -> None:
    """Of each cache group what is kept, in chunks of 13 tokens."""
    seqs = itertools.count()
    for number, group in enumerate(layout.groups):
        for start in range(max(tokens.start, group.kept_from(tokens.stop)), tokens.stop, 13):
            seq, end = next(seqs), min(start + 13, tokens.stop)
            buffer = np.empty((end - start) * group.bytes_per_token, dtype=np.uint8)
            handle_all(source, Gather(key, seq, start, end, buffer, group=number))
            handle_all(target, Scatter(key, seq, start, end, buffer, group=number))


@pytest.mark.parametrize("kind", FAMILY_KINDS)
def test_tokens_are_those_of_transformers(tmp_path: Path, kind: str) -> None:
    """Six blocks for two sequences that come to need eight."""
    folder = make_checkpoint(kind, tmp_path)
    runners: list[TorchModelRunner] = [make_runner(folder, num_blocks=num_blocks) for num_blocks in (16, 6)]
    source = make_core(runner=runners[0], roles=("prefill",))
    target = make_core(runner=runners[1], roles=("decode",), decode_reserve_tokens=0, swap_bytes=1 << 22)
    cached, events = [], list[Event]()
    for name, prompt in (("first", FIRST), ("second", SECOND)):
        spec = make_spec(name, prompt, max_tokens=NUM_TOKENS)
        cached.append(hand_over(source, target, spec, runners[0].layout))
    events += run_until_idle(target)

    assert cached == [(0, 0), (32, 32)]
    for name, prompt in (("first", FIRST), ("second", SECOND)):
        expected, _ = reference_generate(folder, list(prompt), NUM_TOKENS)
        assert token_ids_of(events, name) == expected[1:]
    assert target._scheduler.totals["preemptions"] >= 1
    assert target._scheduler.totals["swapped_in_blocks"] >= 1


@pytest.mark.parametrize("kind", FAMILY_KINDS)
def test_a_sequence_moves_in_the_middle_of_its_answer(tmp_path: Path, kind: str) -> None:
    folder, key = make_checkpoint(kind, tmp_path), key_of("first")
    runners: list[TorchModelRunner] = [make_runner(folder, num_blocks=16) for _ in range(2)]
    source, target = (make_core(runner=runner) for runner in runners)
    events = handle_all(source, Add(make_spec("first", FIRST, max_tokens=NUM_TOKENS)))
    while len(token_ids_of(events, "first")) < 12:
        events += source.step(0.0)

    (exported,) = handle_all(source, Export(key))
    assert isinstance(exported, Exported)
    assert exported.spec is not None
    num_computed = len(FIRST) + 11
    (held,) = handle_all(source, Hold(key, num_computed))
    assert isinstance(held, Held)
    handle_all(target, Reserve(exported.spec))
    move(source, target, key, range(num_computed), runners[0].layout)
    handle_all(target, Extend(key, held.token_ids), Join(key, held.token_id))
    handle_all(source, End(key, "moved", ""))
    moved = run_until_idle(target)

    expected, _ = reference_generate(folder, list(FIRST), NUM_TOKENS)
    assert token_ids_of(events, "first") == expected[:12]
    assert token_ids_of(moved, "first") == expected[12:]
