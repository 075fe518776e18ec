"""Sequences of a model with windows: what they hold, what they leave behind, where they are resumed. Whatever is freed
or resumed wrongly gives other tokens."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from disagg.engine.commands import (
    Add,
    Ended,
    Extend,
    Gather,
    Gathered,
    Hold,
    Join,
    Joined,
    Reserve,
    Reserved,
    ReserveRefused,
    Scatter,
    Scattered,
)
from disagg.engine.core.engine_core import EngineCore
from disagg.engine.fake_runner import FakeModelRunner, fake_generate
from disagg.engine.request import Sequence as EngineSequence
from disagg.proto.block_hash import chain_hashes
from disagg.proto.ids import BlockHash
from disagg.proto.messages import ResumeRemoved, ResumeStored
from disagg.proto.token_ids import pack_token_ids
from tests.support.engine import (
    ROOT,
    VOCAB_SIZE,
    assert_idle,
    end_of,
    handle_all,
    key_of,
    kv_of,
    make_core,
    make_prompt,
    make_spec,
    run_until_idle,
    token_ids_of,
)

WINDOW = 40
"""Three blocks."""
PROMPT = make_prompt(200)


def core_of(pool: int = 40, window: int = WINDOW, token_budget: int = 48) -> EngineCore:
    return make_core(100, decode_reserve_tokens=16, token_budget=token_budget, windows=((window, pool),))


def generated(prompt: Sequence[int], num_tokens: int, window: int = WINDOW) -> list[int]:
    return fake_generate(prompt, num_tokens, VOCAB_SIZE, windows=(window,))


def hashes_of(token_ids: Sequence[int]) -> list[BlockHash]:
    return list(chain_hashes(ROOT, pack_token_ids(token_ids)))


def answered(core: EngineCore, name: str, prompt: Sequence[int], num_tokens: int = 4, tenant: bytes = b"") -> int:
    """The sequence runs to its end and answers as the model does; tokens that were cached."""
    spec = msgspec.structs.replace(make_spec(name, prompt, max_tokens=num_tokens), tenant_tag=tenant)
    events = handle_all(core, Add(spec)) + run_until_idle(core)
    assert token_ids_of(events, name) == generated(prompt, num_tokens)
    return end_of(events, name).cached_tokens


def joined(core: EngineCore, name: str, known: Sequence[int]) -> None:
    """All KV that is due arrives, and then the sequence joins."""
    cached, num_tokens = only(core).cached_tokens, len(known)
    for number, group in enumerate(core._groups):
        start = max(cached, group.kept_from(num_tokens))
        data = kv_of(known, start, num_tokens)
        handle_all(core, Scatter(key_of(name), number, start, num_tokens, data, group=number))
    (token_id,) = generated(known, 1)
    events = handle_all(core, Join(key_of(name), token_id))
    assert Joined(key_of(name)) in events


def only(core: EngineCore) -> EngineSequence:
    (sequence,) = core._scheduler.sequences.values()
    return sequence


def test_a_sequence_holds_its_window_however_long_it_is() -> None:
    core = core_of()
    handle_all(core, Add(make_spec("a", PROMPT, max_tokens=150)))
    most = 0
    while core.has_work:
        core.step(0.0)
        for sequence in core._scheduler.sequences.values():
            (held,) = sequence.windows
            most = max(most, held.num_held)
            assert held.first == max(0, sequence.num_computed_tokens // 16 - 3)
            assert held.block_table[: held.first] == [0] * held.first
    assert most == 3 + 1
    assert_idle(core)


@pytest.mark.parametrize("window", [1, 15, 16, 17, 40, 48, 200, 4000])
@pytest.mark.parametrize("token_budget", [7, 48, 400])
def test_answers_are_those_of_the_model(window: int, token_budget: int) -> None:
    core = core_of(300, window, token_budget=token_budget)
    events = handle_all(core, Add(make_spec("a", PROMPT, max_tokens=60))) + run_until_idle(core)
    assert token_ids_of(events, "a") == generated(PROMPT, 60, window)


def test_the_end_of_a_prompt_and_of_an_answer_are_resumed() -> None:
    core = core_of()
    assert answered(core, "a", PROMPT, 40) == 0
    history = [*PROMPT, *generated(PROMPT, 40)]
    assert answered(core, "same", PROMPT, 4) == 192
    assert answered(core, "next", [*history, 5, 6, 7], 4) == 224  # of 239 computed tokens
    points = [hashes_of(history)[length // 16 - 1] for length in (192, 224)]
    assert set(core.prefix_snapshot().resume) >= set(points)


def test_a_common_prefix_is_resumed_from_its_third_request_on() -> None:
    """The first one leaves no point there; its blocks that left the window are evicted by the strangers."""
    core = core_of(pool=24)
    cached = []
    for seed in (1, 2, 3):
        cached.append(answered(core, str(seed), [*PROMPT[:96], *make_prompt(60, seed)], 4))
        answered(core, f"stranger {seed}", make_prompt(290, 10 + seed), 4)
    assert cached == [0, 0, 96]


def test_a_prefix_that_happened_to_be_there_is_kept_for_the_next_one() -> None:
    """The second request finds the blocks of the window behind the common part, as nobody needed them yet."""
    core = core_of(pool=24)
    cached = []
    for seed in (1, 2, 3):
        cached.append(answered(core, str(seed), [*PROMPT[:96], *make_prompt(60, seed)], 4))
        if seed == 2:
            answered(core, "stranger", make_prompt(290, 10), 4)
    assert cached == [0, 96, 96]


def test_a_point_keeps_blocks_that_had_left_a_window_before() -> None:
    """Of the window behind the common part one block is evicted when the second request comes; it finds the others as
    they were left by the first one, to be evicted first. The strangers pass more blocks than are free."""
    core = core_of(pool=24)
    cached = []
    for seed in (1, 2, 3):
        cached.append(answered(core, str(seed), [*PROMPT[:96], *make_prompt(60, seed)], 4))
        if seed == 1:
            window = core._scheduler.kv_cache.windows[0].blocks
            while window.prefix.block_of(hashes_of(PROMPT[:96])[-1]) is not None:
                window.release(window.allocate(window.num_free + 1, reserved=False))
            assert window.prefix.block_of(hashes_of(PROMPT[:80])[-1]) is not None
        if seed == 2:
            answered(core, "stranger", make_prompt(290, 10), 4)
    assert cached == [0, 0, 96]


def test_a_conversation_keeps_four_points() -> None:
    core = core_of(pool=60)
    history: list[int] = []
    for turn in range(5):
        history += make_prompt(40, turn)
        cached = answered(core, str(turn), history, 20)
        assert cached == (len(history) - 40 - 1) // 16 * 16 if turn else cached == 0
        history += generated(history, 20)
    assert len(core.prefix_snapshot().resume) == 4
    assert core.prefix_snapshot().resume[-1] == hashes_of(history)[len(history) // 16 - 1]


def test_a_point_is_forgotten_with_the_first_of_its_blocks() -> None:
    core = core_of(pool=10)
    answered(core, "a", PROMPT[:100], 2)
    (stored,) = [event for event in core.drain_kv_events() if isinstance(event, ResumeStored)]
    assert stored.hashes == (hashes_of(PROMPT[:96])[-1],)
    for seed in range(1, 4):
        answered(core, str(seed), make_prompt(150, seed), 2)
    gone = [each for event in core.drain_kv_events() if isinstance(event, ResumeRemoved) for each in event.hashes]
    assert stored.hashes[0] in gone
    assert stored.hashes[0] not in core.prefix_snapshot().resume
    assert answered(core, "again", PROMPT[:100], 2) == 0


def test_blocks_that_left_a_window_go_before_those_of_points() -> None:
    core = core_of(pool=12)
    answered(core, "a", PROMPT[:100], 2)
    answered(core, "b", make_prompt(150, 1), 2)  # passes more blocks than are free
    assert answered(core, "again", PROMPT[:100], 2) == 96


def test_blocks_without_use_go_before_the_points_of_the_largest_tenant() -> None:
    core = core_of(pool=24)
    prompts = [make_prompt(100, seed) for seed in (1, 2, 3, 4)]
    for number, prompt in enumerate(prompts):
        answered(core, f"a{number}", prompt, 2, tenant=b"a")
    answered(core, "b", make_prompt(290, 10), 2, tenant=b"b")
    assert [answered(core, f"again{number}", prompts[number], 2, tenant=b"a") for number in range(4)] == [96] * 4


def test_admission_names_the_window_that_is_short() -> None:
    core = core_of(pool=3 + 10)  # a step takes three blocks, a sequence five
    handle_all(core, *(Add(make_spec(name, PROMPT[:100], max_tokens=50)) for name in "ab"))
    for _ in range(6):
        core.step(0.0)
    (refused,) = handle_all(core, Reserve(make_spec("c", make_prompt(100, 3))))
    assert refused == ReserveRefused(key_of("c"), "not enough free KV blocks of the window of 40 tokens")
    run_until_idle(core)
    assert_idle(core)


def test_a_short_sequence_is_promised_what_it_needs() -> None:
    """A window takes 12 blocks, and three sequences of 3 blocks begin beside each other, however long their answers may
    become; as these grow, there is room for one only."""
    core = core_of(pool=3 + 14, window=160)
    prompts = {name: make_prompt(20, seed) for seed, name in enumerate("abc")}
    events = handle_all(core, *(Add(make_spec(name, prompt, max_tokens=230)) for name, prompt in prompts.items()))
    for _ in range(3):
        events += core.step(0.0)
    assert len(core._scheduler.running) == 3
    events += run_until_idle(core)
    assert core.totals().preemptions > 0
    for name, prompt in prompts.items():
        assert token_ids_of(events, name) == generated(prompt, 230, 160)
    assert_idle(core)


@pytest.mark.parametrize(("pool", "num_running"), [(3 + 10, 1), (3 + 14, 2), (3 + 5, 1)])
def test_the_watermark_of_a_window_stays_free(pool: int, num_running: int) -> None:
    """Three of 13 blocks, and four of 17; a sequence takes five. One that is alone needs it not."""
    core = make_core(100, decode_reserve_tokens=16, token_budget=48, watermark=0.25, windows=((WINDOW, pool),))
    handle_all(core, *(Add(make_spec(name, make_prompt(70, ord(name)), max_tokens=50)) for name in "ab"))
    for _ in range(5):
        core.step(0.0)
    assert len(core._scheduler.running) == num_running
    run_until_idle(core)
    assert_idle(core)


def test_one_that_moves_is_refused_what_a_window_lacks() -> None:
    core = core_of(pool=3 + 14, window=160)
    reserve = (
        Reserve(make_spec("a", PROMPT[:20], max_tokens=100)),
        Reserve(make_spec("b", PROMPT[:150], max_tokens=100)),
    )
    assert all(isinstance(event, Reserved) for event in handle_all(core, *reserve))
    for num_tokens, is_refused in [(28, False), (1, True)]:
        events = handle_all(core, Extend(key_of("a"), (1,) * num_tokens))
        assert [isinstance(event, Ended) for event in events] == [True] * is_refused


def test_the_load_shows_the_group_that_is_short() -> None:
    """In blocks of the first group, of which there are 100."""
    core = core_of(pool=3 + 10)
    for name, reserved in [("a", 50 - 7), ("b", 100 - 14)]:
        handle_all(core, Add(make_spec(name, make_prompt(100, ord(name)), max_tokens=50)))
        for _ in range(4):
            core.step(0.0)
        load = core.load()
        assert (load.blocks_total, load.blocks_reserved) == (100, reserved)
    run_until_idle(core)
    assert (core.load().blocks_active, core.load().blocks_reserved) == (0, 0)


def test_where_the_first_group_is_short_the_load_shows_that() -> None:
    core = make_core(12, decode_reserve_tokens=32, windows=((WINDOW, 100),))
    handle_all(core, Add(make_spec("a", make_prompt(64), max_tokens=50)))
    core.step(0.0)
    assert (core.load().blocks_active, core.load().blocks_reserved) == (4, 2)


def test_a_pool_that_holds_no_sequence_is_refused() -> None:
    with pytest.raises(ValueError, match="the pool of the window of 40 tokens has 7 blocks; one sequence and one step"):
        core_of(pool=7)


class TestHandOver:
    def test_d_takes_the_end_of_a_window(self) -> None:
        """And has all that its answer needs, and a resume point."""
        core = core_of()
        (reserved,) = handle_all(core, Reserve(make_spec("a", PROMPT, max_tokens=30)))
        assert reserved == Reserved(key_of("a"), 0)
        for seq, (group, start, end) in enumerate([(0, 0, 200), (1, 144, 190), (1, 190, 200)]):
            command = Scatter(key_of("a"), seq, start, end, kv_of(PROMPT, start, end), group=group)
            assert handle_all(core, command) == [Scattered(key_of("a"), seq, ok=True)]
        (held,) = only(core).windows
        assert (held.first, held.num_held) == (9, 4)

    @pytest.mark.parametrize(("num_tokens", "point"), [(192, 192), (200, 192), (207, 192), (208, 208)])
    def test_d_can_be_resumed_behind_the_last_full_block(self, num_tokens: int, point: int) -> None:
        core = core_of()
        prompt = make_prompt(num_tokens)
        handle_all(core, Reserve(make_spec("a", prompt, max_tokens=30)))
        joined(core, "a", prompt)
        assert core.prefix_snapshot().resume == (hashes_of(prompt)[point // 16 - 1],)

    def test_one_that_moved_can_be_resumed_where_it_joined(self) -> None:
        core = core_of()
        known = [*PROMPT, *generated(PROMPT, 40)]
        handle_all(core, Reserve(make_spec("a", PROMPT, max_tokens=100)), Extend(key_of("a"), tuple(known[200:240])))
        joined(core, "a", known[:240])
        assert core.prefix_snapshot().resume == (hashes_of(known[:240])[-1],)

    @pytest.mark.parametrize(
        ("group", "start", "end"), [(1, 143, 150), (1, 150, 201), (1, 150, 150), (2, 150, 160), (-1, 150, 160)]
    )
    def test_what_is_not_due_is_refused(self, group: int, start: int, end: int) -> None:
        core = core_of()
        handle_all(core, Reserve(make_spec("a", PROMPT)))
        command = Scatter(key_of("a"), 0, start, end, kv_of(PROMPT, start, 200), group=group)
        assert handle_all(core, command) == [Scattered(key_of("a"), 0, ok=False)]

    def test_what_has_left_the_window_is_not_gathered(self) -> None:
        core = core_of()
        handle_all(core, Add(make_spec("a", PROMPT), hold_after_prefill=True))
        run_until_idle(core)
        for group, start, ok in [(0, 0, True), (1, 144, True), (1, 143, False), (2, 144, False), (-1, 144, False)]:
            out = kv_of([0] * 200, start, 200)
            (gathered,) = handle_all(core, Gather(key_of("a"), 0, start, 200, out, group=group))
            assert isinstance(gathered, Gathered)
            assert gathered.ok is ok
            assert not ok or out.tolist() == kv_of(PROMPT, start, 200).tolist()

    def test_a_cached_prefix_counts_though_it_has_no_point(self) -> None:
        """Its window comes from P; so does what it lacks of the window where the prefix reaches into it."""
        core = core_of(pool=20)
        answered(core, "a", PROMPT, 2)
        for length, cached in [(150, 144), (200, 192)]:
            for seed in range(3):  # what left the window of `a` has other content then
                answered(core, f"{length} {seed}", make_prompt(90, 4 + seed), 2)
            (reserved,) = handle_all(core, Reserve(make_spec(f"b {length}", PROMPT[:length])))
            assert isinstance(reserved, Reserved)
            assert core._groups[1].kept_from(length) <= reserved.cached_tokens <= cached


def test_a_sequence_that_is_held_keeps_its_window() -> None:
    core = core_of()
    handle_all(core, Add(make_spec("a", PROMPT, max_tokens=100)))
    for _ in range(40):
        core.step(0.0)
    (held,) = handle_all(core, Hold(key_of("a"), 200))
    assert held.ok  # type: ignore[union-attr]  # a `Held`
    sequence = only(core)
    known = sequence.num_computed_tokens
    start = core._groups[1].kept_from(known)
    out = kv_of([0] * known, start, known)
    (gathered,) = handle_all(core, Gather(key_of("a"), 0, start, known, out, group=1))
    assert gathered.ok  # type: ignore[union-attr]  # a `Gathered`
    assert out.tolist() == kv_of(sequence.token_ids, start, known).tolist()


@pytest.mark.parametrize("num_slots", [9, 0])
def test_a_preempted_sequence_comes_back_with_its_window(num_slots: int) -> None:
    runner = FakeModelRunner(10, 16, 4096, VOCAB_SIZE, windows=((WINDOW, 40), (5, 40)))
    core = make_core(runner=runner, decode_reserve_tokens=0, swap_bytes=num_slots * 128 * 8, token_budget=48)
    prompts = {name: make_prompt(60, seed) for seed, name in enumerate("ab")}
    events = handle_all(core, *(Add(make_spec(name, prompt, max_tokens=60)) for name, prompt in prompts.items()))
    events += run_until_idle(core)
    assert core.totals().preemptions > 0
    assert (core.totals().swapped_out_blocks > 0) == (num_slots > 0)
    for name, prompt in prompts.items():
        assert token_ids_of(events, name) == fake_generate(prompt, 60, VOCAB_SIZE, windows=(WINDOW, 5))
    assert_idle(core)
