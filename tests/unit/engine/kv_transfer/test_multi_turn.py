"""Conversations: what a turn leaves in the caches of P and D, and what the next one sends."""

from __future__ import annotations

import pytest

from disagg.engine.commands import Add, Ended, TokenSampled
from disagg.engine.fake_runner import fake_generate
from disagg.proto.block_hash import chain_hashes
from disagg.proto.token_ids import pack_token_ids
from tests.support.pair import BYTES_PER_TOKEN, ROOT, WorkerPair, prompt_of, spec_of


def take_turn(pair: WorkerPair, name: str, prompt: list[int], max_tokens: int) -> list[int]:
    """One turn from P to D; the answer."""
    key = pair.offer(spec_of(name, prompt, max_tokens=max_tokens))
    pair.run()
    answer = pair.answer(key)
    assert answer == fake_generate(prompt, max_tokens)
    return answer


def sent_by(pair: WorkerPair, name: str) -> tuple[int, int]:
    """Tokens that D had, and tokens that were sent, as both sides counted them."""
    (key,) = [key for key in pair.specs if key.request_id == name]
    p_over, d_over = pair.p_overs[key][0], pair.d_overs[key][0]
    assert (p_over.cached_tokens, p_over.kv_bytes) == (d_over.cached_tokens, d_over.kv_bytes)
    assert d_over.kv_bytes % BYTES_PER_TOKEN == 0
    return d_over.cached_tokens, d_over.kv_bytes // BYTES_PER_TOKEN


def num_kept(num_tokens: int) -> int:
    """Of an ended sequence: whole blocks, and the last token's KV was never computed."""
    return (num_tokens - 1) // 16 * 16


@pytest.mark.parametrize("num_new", [1, 15, 16, 40])
@pytest.mark.parametrize(("num_prompt", "num_answer"), [(40, 30), (5, 3), (16, 16), (16, 17), (31, 2)])
def test_a_turn_sends_what_d_lacks(num_prompt: int, num_answer: int, num_new: int) -> None:
    """D has prompt and answer of the turn before, P the prompt alone, so that it computes the answer's KV once more."""
    pair = WorkerPair()
    history = prompt_of(num_prompt)
    for turn in range(3):
        computed = pair.p.core.totals().cached_tokens
        answer = take_turn(pair, f"turn {turn}", history, num_answer)
        had_p = pair.p.core.totals().cached_tokens - computed
        if turn:
            cached, sent = sent_by(pair, f"turn {turn}")
            assert cached == num_kept(len(history) - num_new)
            assert sent == len(history) - cached
            assert had_p == (len(history) - num_new - num_answer) // 16 * 16
        history = [*history, *answer, *prompt_of(num_new, 1000 * (turn + 1))]
    pair.assert_at_rest()


def test_the_answer_is_found_on_d_alone() -> None:
    pair = WorkerPair()
    prompt = prompt_of(40)
    answer = take_turn(pair, "first", prompt, 40)
    hashes = chain_hashes(ROOT, pack_token_ids([*prompt, *answer]))
    on_p, on_d = (set(side.core.prefix_snapshot().hashes) for side in (pair.p, pair.d))
    assert on_p == set(hashes[:2])
    assert on_d == set(hashes[:4])  # Of 80 tokens the KV of the last one is missing, so the fifth block is not full.


def test_a_turn_that_d_computes_itself_computes_what_is_new() -> None:
    pair = WorkerPair()
    prompt = prompt_of(40)
    history = [*prompt, *take_turn(pair, "first", prompt, 40), *prompt_of(12, 1000)]
    events = pair.d.core.handle(Add(spec_of("second", history, max_tokens=4)), 0.0)
    num_computed = 0
    while pair.d.core.has_work:
        events += pair.d.core.step(0.0)
        num_computed += pair.d.core.last_plan.num_tokens
    assert [e.token_id for e in events if isinstance(e, TokenSampled)] == fake_generate(history, 4)
    (ended,) = [e for e in events if isinstance(e, Ended)]
    assert ended.cached_tokens == 64
    assert num_computed == len(history) - 64 + 3
    pair.assert_at_rest()


@pytest.mark.parametrize("on_p", [0, 32, 48, 96])
@pytest.mark.parametrize("on_d", [0, 32, 48, 96])
def test_prefixes_on_either_side_in_any_combination(on_p: int, on_d: int) -> None:
    """None, a part, or all of the prompt but its last token; also where D has more than P."""
    pair = WorkerPair()
    prompt = prompt_of(97)
    if on_p:
        pair.p.run_alone(spec_of("warm", prompt[:on_p], max_tokens=1))
    if on_d:
        pair.d.run_alone(spec_of("warm", prompt[:on_d], max_tokens=1))
    take_turn(pair, "turn", prompt, 6)
    assert sent_by(pair, "turn") == (on_d, 97 - on_d)
    assert pair.p.core.totals().cached_tokens == on_p
    pair.assert_at_rest()


def test_another_branch_of_a_conversation_shares_what_is_common() -> None:
    """The client changes its second message: the first turn is still there, and the other branch too."""
    pair = WorkerPair()
    prompt = prompt_of(40)
    history = [*prompt, *take_turn(pair, "first", prompt, 30)]
    for name, start in (("one", 1000), ("other", 2000)):
        take_turn(pair, name, [*history, *prompt_of(30, start)], 5)
        assert sent_by(pair, name) == (64, 36)
    take_turn(pair, "one again", [*history, *prompt_of(30, 1000), 7], 5)
    assert sent_by(pair, "one again") == (96, 5)
    pair.assert_at_rest()


def test_what_d_had_to_evict_is_sent_again() -> None:
    """Of twelve blocks the conversation has eight, and the stranger takes six. The head of a chain stays longest."""
    pair = WorkerPair(d_blocks=12)
    prompt = prompt_of(64)
    history = [*prompt, *take_turn(pair, "first", prompt, 65), *prompt_of(10, 1000)]
    pair.d.run_alone(spec_of("stranger", prompt_of(90, 3000), max_tokens=1))
    take_turn(pair, "second", history, 4)
    assert sent_by(pair, "second") == (96, len(history) - 96)
    pair.assert_at_rest()
