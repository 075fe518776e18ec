"""Sequences with adapters in an engine: they wait for theirs and hold nothing meanwhile, and nobody gets another's."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from disagg.engine.commands import (
    Add,
    Command,
    End,
    Ended,
    Event,
    Join,
    PrefillComputed,
    Release,
    Reserve,
    Reserved,
    ReserveRefused,
)
from disagg.engine.config import WorkerConfig
from disagg.engine.core.engine_core import RESERVE_WAIT_S, EngineCore
from disagg.engine.fake_runner import FAKE_FINGERPRINT, FakeModelRunner, fake_generate
from disagg.proto.messages import Adapter, Pooling, SequenceSpec
from tests.support.adapters import Orders, options_of, small_adapter, with_adapter
from tests.support.engine import (
    IDLE,
    VOCAB_SIZE,
    assert_sound,
    end_of,
    handle_all,
    key_of,
    make_prompt,
    make_spec,
    move_kv,
    run_until_idle,
    token_ids_of,
)

PROMPT = make_prompt(40)


class World:
    """A core over the fake model with slots for two adapters, of which there are four."""

    def __init__(self, folder: Path, max_loaded: int = 2) -> None:
        self.folder = folder
        self.adapters = [small_adapter(folder, f"adapter-{number}", seed=number) for number in range(4)]
        options = options_of(folder, max_loaded)
        self.runner = FakeModelRunner(40, 16, 4096, VOCAB_SIZE, adapters=options)
        self.orders = Orders(self.runner)
        config = WorkerConfig(
            worker_id="w", roles=("prefill", "decode"), model_path="fake", adapters=options, max_num_seqs=8,
            token_budget=64, decode_reserve_tokens=16,
        )  # fmt: skip
        self.core = EngineCore(self.runner, config=config, order_adapter=self.orders.order)

    def spec(self, name: str, adapter: Adapter | None = None, **fields: object) -> SequenceSpec:
        spec = make_spec(name, PROMPT, **fields)  # type: ignore[arg-type]  # of make_spec
        return spec if adapter is None else with_adapter(spec, adapter, FAKE_FINGERPRINT)

    def handle(self, *commands: Command, now: float = 0.0) -> list[Event]:
        return handle_all(self.core, *commands, now=now)

    def run(self) -> list[Event]:
        return self.orders.run(self.core)

    def assert_idle(self) -> None:
        assert self.core.audit() == ({**IDLE, "adapter_uses": 0}, [])


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def answer(adapter: Adapter | None = None, num_tokens: int = 4) -> list[int]:
    fingerprint = "" if adapter is None else adapter.fingerprint
    return fake_generate(PROMPT, num_tokens, VOCAB_SIZE, adapter=fingerprint)


def test_each_sequence_gets_the_tokens_of_its_own_adapter(world: World) -> None:
    first, second = world.adapters[:2]
    assert len({tuple(answer(each)) for each in (None, first, second)}) == 3
    events = world.handle(Add(world.spec("base")), Add(world.spec("a", first)), Add(world.spec("b", second)))
    events += world.run()
    assert token_ids_of(events, "base") == answer()
    assert token_ids_of(events, "a") == answer(first)
    assert token_ids_of(events, "b") == answer(second)
    assert [(state.fingerprint, state.uses) for state in world.core.adapters()] == [
        (first.fingerprint, 0),
        (second.fingerprint, 0),
    ]
    world.assert_idle()


def test_what_waits_for_its_adapter_holds_nothing(world: World) -> None:
    world.handle(Add(world.spec("a", world.adapters[0])))
    assert world.core.audit()[0] == {**IDLE, "sequences": 1, "adapter_uses": 1}
    assert not world.core.has_work
    assert world.core.load().num_waiting == 1
    assert len(world.orders.waiting) == 1
    world.handle(Add(world.spec("same", world.adapters[0])))
    assert len(world.orders.waiting) == 1  # both wait for the same load
    events = world.run()
    assert token_ids_of(events, "a") == token_ids_of(events, "same") == answer(world.adapters[0])


def test_two_contents_of_one_name_share_no_kv(world: World) -> None:
    name = world.adapters[0].name
    world.handle(Add(world.spec("old", world.adapters[0])))
    world.run()
    replaced = small_adapter(world.folder, name, seed=9)
    assert replaced.fingerprint != world.adapters[0].fingerprint
    world.handle(Add(world.spec("new", replaced)))
    events = world.run()
    assert token_ids_of(events, "new") == answer(replaced)
    assert end_of(events, "new").cached_tokens == 0
    events = world.handle(Add(world.spec("again", replaced))) + world.run()
    assert end_of(events, "again").cached_tokens == 32


def test_an_adapter_whose_content_changed_is_refused(world: World) -> None:
    old = world.adapters[0]
    small_adapter(world.folder, old.name, seed=9)
    events = world.handle(Add(world.spec("old", old))) + world.run()
    ended = end_of(events, "old")
    assert ended.reason == "refused"
    assert ended.detail.startswith("adapter adapter-0: adapter changed: ")
    assert world.core.adapters() == ()
    world.assert_idle()


@pytest.mark.parametrize(("path", "reason"), [("nowhere", "refused"), ("../elsewhere", "invalid")])
def test_an_adapter_that_cannot_be_read_ends_what_waits_for_it(world: World, path: str, reason: str) -> None:
    adapter = msgspec.structs.replace(world.adapters[0], path=path)
    events = world.handle(Add(world.spec("a", adapter)), Reserve(world.spec("b", adapter))) + world.run()
    assert end_of(events, "a").reason == reason
    assert end_of(events, "a").detail.startswith("adapter adapter-0: ")
    assert [event.key for event in events if isinstance(event, ReserveRefused)] == [key_of("b")]
    world.assert_idle()


def test_the_adapter_that_was_not_used_for_longest_makes_room_and_none_in_use_does(world: World) -> None:
    for name, number in (("a", 0), ("b", 1), ("again", 0), ("c", 2)):
        world.handle(Add(world.spec(name, world.adapters[number], cached=False)))
        world.run()
    loaded = {state.fingerprint for state in world.core.adapters()}
    assert loaded == {world.adapters[0].fingerprint, world.adapters[2].fingerprint}
    for name, number in (("x", 0), ("y", 2), ("z", 3)):
        world.handle(Add(world.spec(name, world.adapters[number])))
    assert not world.orders.waiting  # both slots are used
    assert world.core.audit()[0]["adapter_uses"] == 3
    events = world.run()
    assert token_ids_of(events, "z") == answer(world.adapters[3])
    world.assert_idle()


def test_swaps_under_load_drop_nothing(world: World) -> None:
    """Four adapters take turns in two slots, while sequences of the base run."""
    events: list[Event] = []
    for number in range(24):
        adapter = None if number % 5 == 4 else world.adapters[number % 5]
        events += world.handle(Add(world.spec(f"r{number}", adapter, max_tokens=6)))
        events += world.core.step(0.0)
        if world.orders.waiting:
            events += world.orders.read(world.core)
        if number % 7 == 3:
            world.core.unload_adapter(world.adapters[number % 4].fingerprint)
            assert_sound(world.core)
    events += world.run()
    for number in range(24):
        adapter = None if number % 5 == 4 else world.adapters[number % 5]
        assert token_ids_of(events, f"r{number}") == answer(adapter, 6)
    world.assert_idle()


def test_an_adapter_leaves_once_nobody_uses_it(world: World) -> None:
    first = world.adapters[0]
    events = world.handle(Add(world.spec("a", first))) + world.orders.read(world.core)
    assert world.core.unload_adapter(first.fingerprint) == (True, 1)
    assert world.core.unload_adapter("another") == (False, 0)
    assert len(world.core.adapters()) == 1
    events += world.run()
    assert token_ids_of(events, "a") == answer(first)
    assert world.core.adapters() == ()


def test_an_operators_load_takes_a_free_slot_only(world: World) -> None:
    loaded = [world.runner.read_adapter(each) for each in world.adapters]
    assert world.core.keep_adapter(loaded[0], world.adapters[0], 5.0) == 5.0
    assert world.core.keep_adapter(loaded[0], world.adapters[0], 6.0) == 0.0
    assert [state.load_ms for state in world.core.adapters()] == [5.0]
    for name, number in (("a", 0), ("b", 1)):
        world.handle(Add(world.spec(name, world.adapters[number])))
    assert world.core.keep_adapter(loaded[2], world.adapters[2], 7.0) == 7.0
    world.run()
    assert world.adapters[2].fingerprint not in {state.fingerprint for state in world.core.adapters()}


@pytest.mark.parametrize("how", ["end", "release", "deadline"])
@pytest.mark.parametrize("command", [Add, Reserve])
def test_what_waits_can_end(world: World, how: str, command: type[Add] | type[Reserve]) -> None:
    world.handle(command(world.spec("a", world.adapters[0], timeout_s=5.0)))
    key = key_of("a")
    if how == "deadline":
        assert world.core.next_deadline == 5.0
        events = world.core.plan_step(5.0)
    else:
        events = world.handle(End(key, "cancelled", "") if how == "end" else Release(key))
    if how == "release":
        assert events == []
    else:
        assert [type(event) for event in events] == [Ended if command is Add else ReserveRefused]
    world.assert_idle()
    assert world.orders.read(world.core) == []
    world.assert_idle()


def test_an_offer_does_not_wait_for_long(world: World) -> None:
    world.handle(Reserve(world.spec("a", world.adapters[0])))
    assert world.core.next_deadline == RESERVE_WAIT_S
    (refused,) = world.core.plan_step(RESERVE_WAIT_S)
    assert isinstance(refused, ReserveRefused)
    world.assert_idle()


def test_an_offer_that_waited_has_its_own_deadline_again(world: World) -> None:
    world.handle(Reserve(world.spec("a", world.adapters[0], timeout_s=60.0)))
    (reserved,) = world.orders.read(world.core)
    assert isinstance(reserved, Reserved)
    assert world.core.next_deadline == 60.0
    world.handle(Release(key_of("a")))
    world.assert_idle()


def test_a_hand_over_is_decoded_with_the_adapter(tmp_path: Path) -> None:
    source, target = World(tmp_path / "p"), World(tmp_path / "d")
    adapter = source.adapters[1]
    spec = source.spec("a", adapter, max_tokens=6)
    assert target.handle(Reserve(spec)) == []
    (reserved,) = target.orders.read(target.core)
    assert isinstance(reserved, Reserved)
    events = source.handle(Add(spec, hold_after_prefill=True)) + source.run()
    (computed,) = [event for event in events if isinstance(event, PrefillComputed)]
    move_kv(source.core, target.core, spec.key, [(0, 40)])
    source.handle(Release(spec.key))
    events = target.handle(Join(spec.key, computed.token_id)) + run_until_idle(target.core)
    assert token_ids_of(events, "a") == answer(adapter, 6)
    source.assert_idle()
    target.assert_idle()


def test_a_pooled_request_may_have_an_adapter(world: World) -> None:
    spec = msgspec.structs.replace(
        world.spec("a", world.adapters[0], cached=False), pooling=Pooling(kind="last"), root_hash=b"", block_hashes=()
    )
    base = msgspec.structs.replace(spec, request_id="base", adapter=None)
    events = world.handle(Add(spec), Add(base)) + world.run()
    assert end_of(events, "a").vector != end_of(events, "base").vector
    world.assert_idle()


def test_a_worker_without_a_folder_refuses(world: World) -> None:
    config = WorkerConfig(worker_id="w", roles=("prefill", "decode"), model_path="fake")
    core = EngineCore(FakeModelRunner(10, 16, 4096, VOCAB_SIZE), config=config)
    (ended,) = handle_all(core, Add(world.spec("a", world.adapters[0])))
    assert isinstance(ended, Ended)
    assert (ended.reason, ended.detail) == ("refused", "adapter adapter-0: this worker takes no adapters")


def test_a_spec_without_a_fingerprint_fails(world: World) -> None:
    adapter = msgspec.structs.replace(world.adapters[0], fingerprint="")
    (ended,) = world.handle(Add(world.spec("a", adapter)))
    assert isinstance(ended, Ended)
    assert ended.reason == "failed"


def test_what_cannot_be_put_into_its_slot_leaves_it(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def put(slot: int, loaded: object) -> None:
        raise ValueError("too large")

    with monkeypatch.context() as patched:
        patched.setattr(world.core._adapters, "_put", put)
        world.handle(Add(world.spec("a", world.adapters[0])))
        end = end_of(world.run(), "a")
        assert (end.reason, "not put into its slot: ValueError('too large')" in end.detail) == ("refused", True)
        read = world.runner.read_adapter(world.adapters[0])
        with pytest.raises(ValueError, match="too large"):
            world.core.keep_adapter(read, world.adapters[0], 1.0)
    assert world.core.adapters() == ()
    world.assert_idle()
    world.handle(*(Add(world.spec(name, each)) for name, each in zip("bc", world.adapters, strict=False)))
    events = world.run()
    assert [token_ids_of(events, name) for name in "bc"] == [answer(each) for each in world.adapters[:2]]
