"""What the engine orders, reserves and pins for prefixes that are fetched, by exact commands."""

from __future__ import annotations

import math

import numpy as np
import pytest

from disagg.engine.commands import (
    Add,
    End,
    Ended,
    Export,
    FetchEnded,
    FetchGivenUp,
    FetchOrdered,
    FetchOver,
    FetchPrefix,
    Gather,
    Gathered,
    Held,
    Hold,
    Join,
    Pin,
    Pinned,
    Release,
    Reserve,
    Reserved,
    ReserveRefused,
    Scatter,
    Scattered,
)
from disagg.engine.config import WorkerConfig
from disagg.engine.core.engine_core import EngineCore
from disagg.engine.core.fetching import fetch_key
from disagg.engine.core.scheduler import Scheduler
from disagg.engine.fake_runner import FakeModelRunner
from disagg.engine.kv_transfer.transport import UNKEYED
from disagg.proto.errors import ConfigError
from disagg.proto.ids import Incarnation, WorkerId
from disagg.proto.messages import Fetched, FetchFrom, PeerRef, SequenceSpec
from disagg.proto.token_ids import unpack_token_ids
from tests.support.engine import (
    BLOCK,
    VOCAB_SIZE,
    assert_idle,
    handle_all,
    key_of,
    make_core,
    make_prompt,
    make_spec,
    run_until_idle,
    token_ids_of,
)
from tests.support.queueing import QueueingRunner
from tests.support.tiers import TierWorker

PEER = PeerRef(worker_id=WorkerId("source"), incarnation=Incarnation("source.1"), address="source:1")
PROMPT = make_prompt(300)
KEY = fetch_key(key_of("a"))


def fetch_of(spec: SequenceSpec, end_token: int = 256, timeout_ms: float = 1000.0) -> FetchPrefix:
    return FetchPrefix(spec, FetchFrom(peer=PEER, end_token=end_token, timeout_ms=timeout_ms))


def order_of(core: EngineCore, spec: SequenceSpec, end_token: int = 256, timeout_ms: float = 1000.0) -> FetchOrdered:
    """The order for a sequence that waits then."""
    (order,) = handle_all(core, fetch_of(spec, end_token, timeout_ms), Add(spec))
    assert isinstance(order, FetchOrdered)
    return order


def gathered(core: EngineCore, request_id: str, start: int, end: int) -> bytes:
    """The KV of tokens [start, end)."""
    out = np.zeros((end - start) * 8, dtype=np.uint8)
    (answer,) = handle_all(core, Gather(key_of(request_id), 0, start, end, out))
    assert isinstance(answer, Gathered)
    assert answer.ok
    return out.tobytes()


def kv_of(prompt: tuple[int, ...]) -> dict[int, bytes]:
    """The KV of each block of 16 tokens, from a worker that computed it."""
    core = make_core(64)
    handle_all(core, Add(make_spec("source", prompt, max_tokens=1)))
    run_until_idle(core)
    handle_all(core, Pin(make_spec("fetch-source", prompt[: len(prompt) // BLOCK * BLOCK], max_tokens=1)))
    numbers = range(len(prompt) // BLOCK)
    found = {number: gathered(core, "fetch-source", number * BLOCK, (number + 1) * BLOCK) for number in numbers}
    handle_all(core, Release(key_of("fetch-source")))
    assert_idle(core)
    return found


def scatter(number: int, kv: dict[int, bytes]) -> Scatter:
    data = np.frombuffer(kv[number], dtype=np.uint8)
    return Scatter(KEY, number, number * BLOCK, (number + 1) * BLOCK, data)


def test_the_prefix_is_ordered_as_a_sequence_of_its_own() -> None:
    core = make_core(64)
    spec = make_spec("a", PROMPT, timeout_s=9.0)
    order = order_of(core, spec)
    assert (order.key, order.peer, order.from_token) == (KEY, PEER, 0)
    assert tuple(unpack_token_ids(order.spec.prompt_token_ids)) == PROMPT[:256]
    assert order.spec.block_hashes == spec.block_hashes[:16]
    assert (order.spec.root_hash, order.spec.gateway_id) == (spec.root_hash, "")
    assert order.spec.timeout_s == pytest.approx(1.0)
    load = core.load()
    assert (load.num_waiting, load.num_running, load.uncomputed_prompt_tokens) == (1, 0, 300 - 256)
    assert not core.has_work


@pytest.mark.parametrize(
    ("num_tokens", "end_token", "end"),
    [(300, 256, 256), (300, 384, 288), (256, 256, 240), (16, 128, 0), (17, 128, 16)],
)
def test_never_the_last_token_and_whole_blocks_only(num_tokens: int, end_token: int, end: int) -> None:
    core = make_core(64)
    spec = make_spec("a", PROMPT[:num_tokens])
    orders = handle_all(core, fetch_of(spec, end_token))
    assert [len(order.spec.block_hashes) * BLOCK for order in orders if isinstance(order, FetchOrdered)] == [end] * (
        end > 0
    )


def test_a_fetch_alone_takes_what_nobody_needs_soon_and_half_where_others_wait() -> None:
    core = make_core(21)
    (order,) = handle_all(core, fetch_of(make_spec("a", PROMPT)))
    assert isinstance(order, FetchOrdered)
    assert len(order.spec.block_hashes) == 16
    handle_all(core, FetchOver(order.key, "refused", ""), Add(make_spec("other", make_prompt(40, seed=7))))
    (order,) = handle_all(core, fetch_of(make_spec("b", PROMPT)))
    assert isinstance(order, FetchOrdered)
    assert len(order.spec.block_hashes) == 10


def test_what_was_not_cached_at_the_gateway_is_not_fetched() -> None:
    core = make_core(64)
    spec = make_spec("a", PROMPT, cached=False)
    assert handle_all(core, fetch_of(spec), Add(spec)) == []
    assert core.has_work


def test_a_spec_that_cannot_be_run_orders_nothing() -> None:
    core = make_core(64)
    spec = make_spec("a", (*PROMPT, VOCAB_SIZE))
    assert handle_all(core, fetch_of(spec)) == []
    (ended,) = handle_all(core, Add(spec))
    assert isinstance(ended, Ended)
    assert_idle(core)


def test_blocks_are_used_as_they_are_filled_in_order() -> None:
    core, kv = make_core(64), kv_of(PROMPT)
    order = order_of(core, make_spec("a", PROMPT))
    assert handle_all(core, Reserve(order.spec, is_prefix=True)) == [Reserved(KEY, 0)]
    assert core.audit()[0]["blocks_reserved"] == 16
    for number, num_cached in ((1, 0), (0, 2), (3, 2), (2, 4)):
        assert handle_all(core, scatter(number, kv)) == [Scattered(KEY, number, ok=True)]
        assert len(core.prefix_snapshot().hashes) == num_cached
    assert handle_all(core, Release(KEY)) == []
    assert (core.load().blocks_cached, core.load().blocks_copied) == (4, 0)  # they are evicted last
    (ended,) = handle_all(core, FetchOver(KEY, "failed", "the pair broke"), now=0.5)
    message = Fetched(
        request_id=key_of("a").request_id,
        attempt=1,
        source=WorkerId("source"),
        outcome="failed",
        tokens=64,
        kv_bytes=64 * 8,
        transfer_s=0.5,
        detail="the pair broke",
    )
    assert ended == FetchEnded(key_of("a"), make_spec("a", PROMPT).gateway_id, message)
    events = run_until_idle(core)
    plain = make_core(64)
    handle_all(plain, Add(make_spec("a", PROMPT)))
    assert token_ids_of(events, "a") == token_ids_of(run_until_idle(plain), "a")
    totals = core.totals()
    assert (totals.cached_tokens, totals.fetched_tokens, dict(totals.fetches)) == (64, 64, {"failed": 1})
    assert_idle(core)


@pytest.mark.parametrize("is_queued", [True, False])
def test_what_a_device_copies_is_used_once_its_digest_is_the_announced_one(is_queued: bool) -> None:
    """Behind a step that is under way, or at once."""
    core, kv = make_core(runner=QueueingRunner(64)), kv_of(PROMPT)
    if is_queued:
        handle_all(core, Add(make_spec("b", make_prompt(15, seed=1), max_tokens=30)))
        core.step(0.0)
        core.step(0.0)
    order = order_of(core, make_spec("a", PROMPT))
    handle_all(core, Reserve(order.spec, is_prefix=True))
    events, num_published = [], []
    for number, flipped in ((0, 0), (1, 1), (2, 0)):
        data = np.frombuffer(kv[number], dtype=np.uint8)
        digest = UNKEYED(data) ^ flipped
        events += handle_all(core, Scatter(KEY, number, number * BLOCK, (number + 1) * BLOCK, data, digest=digest))
        num_published.append(sum(block in order.spec.block_hashes for block in core.prefix_snapshot().hashes))
    assert num_published == ([0, 0, 0] if is_queued else [1, 1, 1])
    if is_queued:
        events = [event for event in core.step(0.0) if event.key == KEY]
    assert events == [
        Scattered(KEY, 0, ok=True),
        Scattered(KEY, 1, ok=False, intact=False),
        Scattered(KEY, 2, ok=True),
    ]
    handle_all(core, Release(KEY), FetchOver(KEY, "failed"))
    run_until_idle(core)
    assert (core.totals().cached_tokens, core.totals().fetched_tokens) == (16, 16)
    assert_idle(core)


def test_a_worker_with_a_fetch_is_not_idle() -> None:
    core = make_core(64)
    handle_all(core, fetch_of(make_spec("a", PROMPT)))
    states = [core.is_idle]
    assert core.idle_step_at(5.0) == math.inf
    handle_all(core, FetchOver(KEY, "refused"))
    assert [*states, core.is_idle] == [False, True]
    assert_idle(core)


def test_a_prefix_never_joins_and_takes_no_place() -> None:
    core = make_core(64, max_num_seqs=1)
    order = order_of(core, make_spec("a", PROMPT))
    handle_all(core, Add(make_spec("b", make_prompt(20, seed=1), max_tokens=100)))
    core.step(0.0)
    assert handle_all(core, Reserve(order.spec, is_prefix=True)) == [Reserved(KEY, 0)]
    (ended,) = handle_all(core, Join(KEY, 1))
    assert isinstance(ended, Ended)
    assert (ended.reason, ended.detail) == ("failed", "joined while loading")


def test_a_second_reservation_of_a_prefix_ends_both() -> None:
    core = make_core(64)
    order = order_of(core, make_spec("a", PROMPT))
    handle_all(core, Reserve(order.spec, is_prefix=True))
    ended, refused = handle_all(core, Reserve(order.spec, is_prefix=True))
    assert isinstance(ended, Ended)
    assert isinstance(refused, ReserveRefused)
    assert core.audit()[0]["blocks_reserved"] == 0


def test_a_fetch_for_which_nobody_waits_any_more_is_given_up() -> None:
    core = make_core(64)
    order = order_of(core, make_spec("a", PROMPT))
    handle_all(core, fetch_of(make_spec("b", PROMPT)), Add(make_spec("b", PROMPT)))
    assert handle_all(core, Release(key_of("a"))) == []
    assert handle_all(core, End(key_of("b"), "cancelled")) == [
        Ended(key_of("b"), make_spec("b", PROMPT).gateway_id, "cancelled"),
        FetchGivenUp(KEY),
    ]
    assert handle_all(core, Reserve(order.spec, is_prefix=True)) == [
        ReserveRefused(KEY, "nobody waits for this prefix")
    ]
    assert core.audit()[0]["fetches"] == 1
    assert handle_all(core, FetchOver(KEY, "done")) == []
    assert dict(core.totals().fetches) == {}
    assert_idle(core)


def test_a_prefix_lives_for_as_long_as_somebody_waits_for_it() -> None:
    core = make_core(64)
    order = order_of(core, make_spec("a", PROMPT), timeout_ms=100.0)
    handle_all(core, fetch_of(make_spec("b", PROMPT), timeout_ms=300.0), Add(make_spec("b", PROMPT)))
    handle_all(core, Reserve(order.spec, is_prefix=True))
    core.step(0.2)
    assert core.audit()[0]["blocks_reserved"] >= 16
    assert handle_all(core, scatter(0, kv_of(PROMPT))) == [Scattered(KEY, 0, ok=True)]
    handle_all(core, Release(KEY), FetchOver(KEY, "failed"), now=0.2)
    run_until_idle(core, 0.2)
    assert_idle(core)


def test_a_deadline_in_the_middle_ends_the_sequence_and_its_fetch() -> None:
    core = make_core(64)
    order = order_of(core, make_spec("a", PROMPT, timeout_s=0.5))
    handle_all(core, Reserve(order.spec, is_prefix=True))
    ended, given_up = core.step(0.5)
    assert isinstance(ended, Ended)
    assert ended.reason == "deadline"
    assert given_up == FetchGivenUp(KEY)
    handle_all(core, Release(KEY), FetchOver(KEY, "failed"))
    assert_idle(core)


def test_who_is_late_begins_and_the_others_wait_on() -> None:
    core = make_core(64)
    order_of(core, make_spec("a", PROMPT), timeout_ms=100.0)
    handle_all(core, fetch_of(make_spec("b", PROMPT), timeout_ms=200.0), Add(make_spec("b", PROMPT)))
    assert core.next_deadline == pytest.approx(0.1)
    late = core.step(0.1)[0]
    assert isinstance(late, FetchEnded)
    assert (late.key, late.message.outcome) == (key_of("a"), "late")
    assert core.next_deadline == pytest.approx(0.2)
    assert core.load().num_waiting == 1
    last, given_up = [event for event in core.step(0.2) if isinstance(event, FetchEnded | FetchGivenUp)]
    assert last.key == key_of("b")
    assert given_up == FetchGivenUp(KEY)
    handle_all(core, FetchOver(KEY, "late"))
    assert dict(core.totals().fetches) == {"late": 1}
    run_until_idle(core, 0.2)
    assert_idle(core)


def test_while_preempted_sequences_wait_nothing_is_fetched_or_pinned() -> None:
    core = make_core(4, decode_reserve_tokens=1)
    for seed, name in enumerate(("x", "y")):
        handle_all(core, Add(make_spec(name, make_prompt(30, seed), max_tokens=30)))
    while not core.load().num_preempted:
        core.step(0.0)
    assert handle_all(core, fetch_of(make_spec("a", make_prompt(200, seed=2)), 128)) == []
    prefix = make_spec("fetch-x", make_prompt(16), max_tokens=1)
    assert handle_all(core, Pin(prefix)) == [Pinned(prefix.key, 0, "preempted sequences go first")]


class TestSource:
    def test_what_is_cached_is_held_until_it_is_released(self) -> None:
        core = make_core(25)
        handle_all(core, Add(make_spec("x", PROMPT[:100], max_tokens=1)))
        run_until_idle(core)
        prefix = make_spec("fetch-a", PROMPT[:128], max_tokens=1)
        assert handle_all(core, Pin(prefix)) == [Pinned(prefix.key, 96)]
        assert core.audit()[0]["blocks_active"] == 6
        handle_all(core, Add(make_spec("y", make_prompt(300, seed=5), max_tokens=1)))
        run_until_idle(core)  # it needs all blocks but the held ones
        kv = kv_of(PROMPT[:100])
        for number in range(6):
            assert gathered(core, "fetch-a", number * BLOCK, (number + 1) * BLOCK) == kv[number]
        beyond = Gather(prefix.key, 1, 96, 112, np.zeros(16 * 8, dtype=np.uint8))
        assert handle_all(core, beyond) == [Gathered(prefix.key, 1, ok=False)]
        handle_all(core, Release(prefix.key))
        assert_idle(core)

    def test_it_does_not_decode_or_move(self) -> None:
        core = make_core(24)
        handle_all(core, Add(make_spec("x", PROMPT[:100], max_tokens=1)))
        run_until_idle(core)
        prefix = make_spec("fetch-a", PROMPT[:96], max_tokens=1)
        handle_all(core, Pin(prefix))
        assert not core.has_work
        (exported,) = handle_all(core, Export(prefix.key))
        assert exported.spec is None  # type: ignore[union-attr]
        assert handle_all(core, Hold(prefix.key, 96)) == [Held(prefix.key, ok=False)]
        assert handle_all(core, Pin(prefix)) == [Pinned(prefix.key, 0, "this key is in use")]

    def test_nobody_holds_it_beyond_its_time_limit(self) -> None:
        core = make_core(24)
        handle_all(core, Add(make_spec("x", PROMPT[:100], max_tokens=1)))
        run_until_idle(core)
        prefix = make_spec("fetch-a", PROMPT[:96], max_tokens=1, timeout_s=0.5)
        handle_all(core, Pin(prefix))
        assert core.next_deadline == pytest.approx(0.5)
        (ended,) = core.step(0.5)
        assert isinstance(ended, Ended)
        assert ended.key == prefix.key
        assert_idle(core)

    def test_nothing_is_pinned_that_is_gone_or_malformed(self) -> None:
        core = make_core(24)
        prefix = make_spec("fetch-a", PROMPT[:96], max_tokens=1)
        assert handle_all(core, Pin(prefix)) == [Pinned(prefix.key, 0, "nothing of it is cached any more")]
        wrong = make_spec("fetch-b", (VOCAB_SIZE, *PROMPT[:95]), max_tokens=1)
        assert handle_all(core, Pin(wrong)) == [Pinned(wrong.key, 0, "a token id is not in the vocabulary")]
        assert_idle(core)

    def test_streams_without_slack_go_first(self, monkeypatch: pytest.MonkeyPatch) -> None:
        core = make_core(24)
        handle_all(core, Add(make_spec("x", PROMPT[:40])))
        run_until_idle(core)
        monkeypatch.setattr(Scheduler, "has_time", lambda _: False)
        prefix = make_spec("fetch-a", PROMPT[:16], max_tokens=1)
        assert handle_all(core, Pin(prefix)) == [Pinned(prefix.key, 0, "its sequences have no slack")]


def test_models_with_windows_are_refused_by_name() -> None:
    config = WorkerConfig(worker_id="w", roles=("prefill",), model_path="fake", token_budget=64, fetch=True)
    with pytest.raises(ConfigError, match=r"kv_cache.fetch: .* this one has 2 cache groups"):
        EngineCore(FakeModelRunner(64, BLOCK, 1024, VOCAB_SIZE, windows=((32, 64),)), config=config)


class TestTiers:
    """A worker with host memory as a tier that has the prompt."""

    def _worker(self, prompt: tuple[int, ...]) -> TierWorker:
        worker = TierWorker(host_extents=12, min_tokens=64)
        worker.run(make_spec("x", prompt))
        for seed in (7, 8, 9):  # what else is computed takes all blocks
            worker.run(make_spec(f"other{seed}", make_prompt(300, seed)))
        return worker

    def test_what_is_in_a_tier_is_not_fetched(self) -> None:
        worker = self._worker(PROMPT)
        spec = make_spec("a", PROMPT)
        assert worker.core.handle(fetch_of(spec), worker.now) == []
        worker.run(spec)
        assert worker.core.totals().loaded_tokens == 256

    def test_a_fetch_that_fails_leaves_the_tier(self) -> None:
        worker = self._worker(PROMPT[:200])
        spec = make_spec("a", PROMPT)
        (order,) = worker.core.handle(fetch_of(spec), worker.now)
        worker.add(spec)
        assert worker.core.load().num_waiting == 1
        (ended,) = worker.core.handle(FetchOver(order.key, "refused"), worker.now)
        assert isinstance(ended, FetchEnded)
        worker.settle()
        totals = worker.core.totals()
        assert (totals.loaded_tokens, dict(totals.fetches)) == (128, {"refused": 1})
        plain = make_core(64)
        handle_all(plain, Add(make_spec("a", PROMPT)))
        assert token_ids_of(worker.events, "a") == token_ids_of(run_until_idle(plain), "a")
        assert_idle(worker.core)
