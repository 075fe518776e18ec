"""Penalties from counts that are kept: what a count of the whole text gives, however the text came to be."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from disagg.engine.commands import Add, Join, Reserve, Scatter
from disagg.engine.request import Sequence, SequenceState
from disagg.engine.runner.logits import _penalize_on_device, counts_of, penalize_rows
from disagg.engine.text_counts import TextCounts
from tests.support.engine import handle_all, key_of, kv_of, make_core, make_prompt, make_spec, run_until_idle
from tests.support.sampling import SampledRunner

VOCAB_SIZE = 40
ALL: dict[str, float] = {"repetition_penalty": 1.5, "presence_penalty": 0.25, "frequency_penalty": 0.125}
KINDS: list[dict[str, float]] = [
    ALL,
    {"repetition_penalty": 0.5},
    {"presence_penalty": -2.0},
    {"frequency_penalty": 2.0},
    {"presence_penalty": 0.5, "frequency_penalty": -0.3},
    {"repetition_penalty": 100.0, "frequency_penalty": 0.1},
    {},
]


def make_sequence(token_ids: list[int], num_prompt_tokens: int, **sampling: Any) -> Sequence:
    spec = make_spec("r", token_ids[:num_prompt_tokens], cached=False)
    spec = msgspec.structs.replace(spec, sampling=msgspec.structs.replace(spec.sampling, **sampling))
    return Sequence(spec, SequenceState.RUNNING, token_ids=list(token_ids))


def expected_row(row: list[float], sequence: Sequence) -> list[float]:
    """The definition, one id at a time, in fp32."""
    sampling, f32 = sequence.spec.sampling, np.float32
    output = sequence.token_ids[sequence.num_prompt_tokens :]
    found = [f32(value) for value in row]
    for token_id in set(sequence.token_ids):
        value, penalty = found[token_id], f32(sampling.repetition_penalty)
        value = value / penalty if value > 0 else value * penalty
        if count := output.count(token_id):
            value -= f32(sampling.presence_penalty) + f32(sampling.frequency_penalty) * f32(count)
        found[token_id] = value
    return [float(value) for value in found]


def logits(num_rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 4


@pytest.mark.parametrize("kind", KINDS)
def test_rows_get_what_a_count_of_the_whole_text_gives_at_every_length(kind: dict[str, float]) -> None:
    rng = random.Random(str(kind))
    sequences = [make_sequence([rng.randrange(VOCAB_SIZE) for _ in range(9)], num, **kind) for num in (9, 5, 1)]
    for step in range(90):
        rows = logits(3, step)
        expected = torch.tensor([expected_row(rows[i].tolist(), each) for i, each in enumerate(sequences)])
        on_device = rows.clone()
        penalize_rows(rows, sequences)
        assert torch.equal(rows, expected)
        if kind:
            _penalize_on_device(on_device, sequences, [0, 1, 2])
            assert torch.equal(on_device, expected)
        for sequence in sequences:
            for _ in range(rng.choice((0, 1, 1, 1, 3))):
                sequence.token_ids.append(rng.randrange(VOCAB_SIZE))


def test_only_the_rows_that_ask_are_changed() -> None:
    rows = logits(3)
    before = rows.clone()
    penalize_rows(rows, [make_sequence([1, 2], 1), make_sequence([1, 2], 1, **ALL), make_sequence([1, 2], 1)])
    assert torch.equal(rows[[0, 2]], before[[0, 2]])
    assert (rows[1] != before[1]).nonzero().flatten().tolist() == [1, 2]


def test_counts_grow_with_the_text_and_no_faster() -> None:
    """A new token is counted alone: what was counted before is not read again."""
    text = [7, 3, 7, 9]
    counts = TextCounts(text, 2)
    assert (counts.ids.tolist(), counts.outputs.tolist()) == ([3, 7, 9], [0, 1, 1])
    counts.extend([-1, -1, -1, -1, 3, 500, 7])
    assert (counts.ids.tolist(), counts.outputs.tolist()) == ([3, 7, 9, 500], [1, 2, 1, 1])
    counts.extend([-1] * 7)
    assert counts.ids.tolist() == [3, 7, 9, 500]


@pytest.mark.parametrize("num_new", [1, 63, 64, 65, 200, 5000])
def test_any_number_of_new_tokens_is_counted(num_new: int) -> None:
    rng = random.Random(num_new)
    text = [rng.randrange(1000) for _ in range(50)]
    counts = TextCounts(text, 30)
    text += [rng.randrange(3000) for _ in range(num_new)]
    counts.extend(text)
    anew = TextCounts(text, 30)
    assert counts.ids.tolist() == anew.ids.tolist() == sorted(set(text))
    assert counts.outputs.tolist() == anew.outputs.tolist() == [text[30:].count(each) for each in sorted(set(text))]


def test_ids_past_what_there_is_room_for() -> None:
    counts = TextCounts([0], 1)
    text = [0]
    for token_id in range(1000, 0, -1):
        text.append(token_id)
        counts.extend(text)
    assert counts.ids.tolist() == list(range(1001))
    assert counts.outputs.tolist() == [0.0] + [1.0] * 1000


def test_a_sequence_that_is_handed_over_or_tried_again_has_the_same_answer() -> None:
    """It counts its ids anew, with the emitted ones as output; one that is preempted goes on counting."""
    spec = make_spec("a", make_prompt(40), max_tokens=12)
    spec = msgspec.structs.replace(spec, sampling=msgspec.structs.replace(spec.sampling, **ALL))
    core = make_core(runner=SampledRunner(100))
    sampled = handle_all(core, Add(spec)) + run_until_idle(core)
    answer = [event.token_id for event in sampled if hasattr(event, "token_id")]
    assert len(answer) == 12

    handed = make_core(runner=SampledRunner(100))
    prompt = make_prompt(40)
    handle_all(
        handed, Reserve(spec), Scatter(key_of("a"), 0, 0, 40, kv_of(prompt, 0, 40)), Join(key_of("a"), answer[0])
    )
    assert [e.token_id for e in run_until_idle(handed) if hasattr(e, "token_id")] == answer[1:]

    again = msgspec.structs.replace(spec, attempt=2, emitted_token_ids=tuple(answer[:7]), block_hashes=())
    retried = make_core(runner=SampledRunner(100))
    events = handle_all(retried, Add(again)) + run_until_idle(retried)
    assert [e.token_id for e in events if hasattr(e, "token_id")] == answer[7:]


def test_counts_are_the_sequences_own() -> None:
    sequence, other = make_sequence([1, 2, 3], 1, **ALL), make_sequence([1, 2, 3], 1, **ALL)
    counts = counts_of(sequence)
    assert counts_of(sequence) is counts
    assert counts_of(other) is not counts
    assert make_sequence([1], 1).text_counts is None
