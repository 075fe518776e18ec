"""Conversations: the router knows what a decode worker keeps of a turn, and sends the next one there.

The workers' caches are real engine cores over the fake model, and tell the router what they hold as workers do."""

from __future__ import annotations

import pytest

from disagg.engine.commands import Add, Ended, Event, Join, Release, Reserve, Scatter, TokenSampled
from disagg.proto.block_hash import chain_hashes
from disagg.proto.ids import WorkerId
from disagg.proto.messages import BlocksSnapshot, KvLayout, SequenceSpec
from disagg.proto.token_ids import pack_token_ids, unpack_token_ids
from disagg.router.config import RouterConfig
from tests.support.engine import expected_output, handle_all, kv_of, make_core, make_prompt, run_until_idle
from tests.support.placing import samples
from tests.support.router import (
    Scenario,
    end_update,
    routed_request,
    tokens_update,
    worker_info,
    worker_report,
)

SPEED = samples(base_ms=2.0, prefill_token_ms=1.0, decode_ms=0.5)
LAYOUT = KvLayout.dense(num_layers=30, num_kv_heads=3, head_dim=64, dtype="bfloat16", bytes_per_token=23_040)
NUM_ANSWER = 40


class Conversation:
    """One prefill and two decode workers; turns are computed as they are dispatched."""

    def __init__(self, config: RouterConfig) -> None:
        names = ("p0", "d0", "d1")
        infos = [
            worker_info(name, calibration=SPEED, kv_layout=LAYOUT, num_blocks=200, max_model_len=2048) for name in names
        ]
        self.router = Scenario(*infos, config=config)
        self.cores = {name: make_core(200, token_budget=512) for name in names}
        self.num_reports = dict.fromkeys(names, 0)
        for name in names:
            self.report(name)

    def report(self, name: str) -> None:
        """What the worker's cache has to tell."""
        number, events = self.num_reports[name], self.cores[name].drain_kv_events()
        first = () if number else (BlocksSnapshot(hashes=()),)
        assert self.router.report(worker_report(name, number, *first, *events)) == []
        self.num_reports[name] += 1

    def turn(self, name: str, prompt: list[int]) -> tuple[str, list[int]]:
        """Where it went, as `p0 d0` or `d0`, and its answer."""
        request = routed_request(name, prompt, max_tokens=NUM_ANSWER)
        (line,) = self.router.submit(request)
        dispatch = self.router.dispatched[f"{name}/0"]
        peer, spec = dispatch.message.decode_peer, dispatch.message.spec
        if peer is None:
            where, answer = str(dispatch.worker_id), self.compute_alone(dispatch.worker_id, spec)
        else:
            where = f"{dispatch.worker_id} {peer.worker_id}"
            answer = self.compute_on_pair(dispatch.worker_id, peer.worker_id, spec)
        assert line.split()[1] == dispatch.worker_id
        assert answer == expected_output(tuple(prompt), NUM_ANSWER)
        self.router.at(self.router.now + 10.0)  # Nothing that was only predicted counts any more.
        return where, answer

    def compute_alone(self, worker_id: WorkerId, spec: SequenceSpec) -> list[int]:
        core, name = self.cores[worker_id], str(spec.request_id)
        events = handle_all(core, Add(spec)) + run_until_idle(core)
        answer = _tokens(events)
        (ended,) = [event for event in events if isinstance(event, Ended)]
        end = end_update(name, 0, "length", cached_tokens=ended.cached_tokens)
        self.router.update(worker_id, tokens_update(name, 0, 0, *answer), end)
        self.report(worker_id)
        return answer

    def compute_on_pair(self, prefill: WorkerId, decode: WorkerId, spec: SequenceSpec) -> list[int]:
        p, d, name = self.cores[prefill], self.cores[decode], str(spec.request_id)
        first = _tokens(handle_all(p, Add(spec, hold_after_prefill=True)) + run_until_idle(p))[0]
        known = unpack_token_ids(spec.prompt_token_ids)
        handle_all(d, Reserve(spec))
        cached = d._scheduler.sequences[spec.key].cached_tokens
        scatter = Scatter(spec.key, 0, cached, len(known), kv_of(known, cached, len(known)))
        answer = _tokens(handle_all(d, scatter, Join(spec.key, first)) + run_until_idle(d))
        handle_all(p, Release(spec.key))
        self.router.hand_over(name, prefill, decode, first)
        self.router.update(decode, tokens_update(name, 0, 0, *answer), end_update(name, 0, "length"))
        self.report(prefill)
        self.report(decode)
        return answer


def _tokens(events: list[Event]) -> list[int]:
    return [event.token_id for event in events if isinstance(event, TokenSampled)]


@pytest.mark.parametrize("turn_of_the_draw", [0, 1])
def test_the_next_turn_goes_where_the_last_one_was_answered(turn_of_the_draw: int) -> None:
    """Both decode workers are idle; the one that answered need not be sent what it has."""
    it = Conversation(RouterConfig(local_prefill="never"))
    if turn_of_the_draw:
        it.turn("other", list(make_prompt(20, seed=9)))
    history = list(make_prompt(960))
    where, answer = it.turn("first", history)
    for number in range(3):
        history += [*answer, *make_prompt(20, seed=number + 1)]
        there, answer = it.turn(f"turn {number}", history)
        assert there == where


@pytest.mark.parametrize("turn_of_the_draw", [0, 1])
def test_a_decode_worker_computes_the_few_new_tokens_of_a_turn_itself(turn_of_the_draw: int) -> None:
    it = Conversation(RouterConfig(local_prefill="auto"))
    if turn_of_the_draw:
        it.turn("other", list(make_prompt(20, seed=9)))
    history = list(make_prompt(960))
    where, answer = it.turn("first", history)
    holder = where.split()[-1]
    history += [*answer, *make_prompt(20, seed=1)]
    assert it.turn("second", history)[0] == holder
    trace = it.router.core.trace(it.router.dispatched["second/0"].message.spec.request_id)
    assert trace is not None
    assert (trace.prefill_worker, trace.decode_cached_tokens, trace.kv_bytes) == (None, 992, 0)


def test_the_index_has_what_decode_filled() -> None:
    it = Conversation(RouterConfig(local_prefill="never"))
    prompt = list(make_prompt(100))
    where, answer = it.turn("first", prompt)
    p, d = where.split()
    root = it.router.dispatched["first/0"].message.spec.root_hash
    chain = chain_hashes(root, pack_token_ids([*prompt, *answer]))
    index = it.router.core._fleet.index
    assert index.match(chain) == {p: 6, d: 8}
