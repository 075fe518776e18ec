"""Rollouts in the controller's core, as transcripts."""

from __future__ import annotations

import pytest

from disagg.cluster.core import events
from disagg.cluster.core.core import ADOPT_GRACE_S
from disagg.cluster.core.rollout import MAX_FAILURES, Desired, Plan, Target
from disagg.proto.control import ApplyRequest, ControlRequest, DrainRequest, PoolName, ScaleRequest
from disagg.proto.ids import WorkerId
from tests.support.control import Driver, settled

Sizes = dict[PoolName, int]
Templates = dict[PoolName, str]


def target(generation: int, sizes: Sizes, config_hashes: Templates) -> Target:
    return Target(generation=generation, sizes=sizes, config_hashes=config_hashes)


def running(sizes: Sizes, config_hashes: Templates) -> Driver:
    """A cluster of generation 1 that serves."""
    return settled(sizes, Desired(target=target(1, sizes, config_hashes)))


def apply(
    driver: Driver, sizes: Sizes, config_hashes: Templates, *, surge: bool = True, limit_s: float = 60.0
) -> list[str]:
    new = target(driver.core.latest + 1, sizes, config_hashes)
    return driver(
        events.Apply(Plan(old=driver.core.target, new=new, surge=surge, ready_timeout_s=limit_s)),
    )


def replace(driver: Driver, name: str, incarnation: int = 2, fingerprint: str = "f") -> list[str]:
    """A worker that drains becomes empty, its process ends, the new one registers."""
    assert driver.empty(name)[-1] == f"stop {name}"
    (line,) = driver.stopped(name)
    assert line.startswith(f"start {name} as ")
    return driver.register(name, incarnation, fingerprint)


TWO: Templates = {"prefill": "p1", "decode": "d1"}


def test_workers_of_one_pool_are_replaced_one_after_the_other_behind_a_canary() -> None:
    control = running({"prefill": 1, "decode": 2}, TWO)
    assert apply(control, {"prefill": 1, "decode": 2}, {"prefill": "p1", "decode": "d2"}) == ["start decode-2 as d2"]
    state = control.core.state(control.now + 3)
    assert state.generation == 1
    assert state.rollout is not None
    assert (state.rollout.generation, state.rollout.previous, state.rollout.stage) == (2, 1, "canary")
    assert (state.rollout.num_done, state.rollout.num_workers, state.rollout.running_s) == (0, 2, 3)
    assert state.rollout.doing == "waits for the first new workers: decode-2 is starting"
    assert state.rollout.next == "replaces decode-0"
    assert control.register("decode-2") == [
        "accept decode-2",
        "configure 2",
        "publish prefill-0 decode-0(draining) decode-1 decode-2",
    ]
    assert replace(control, "decode-0") == [
        "accept decode-0",
        "publish prefill-0 decode-0 decode-1(draining) decode-2",
    ]
    assert replace(control, "decode-1")[0] == "accept decode-1"
    assert control.phases()["decode-2"] == "draining"
    assert control.empty("decode-2")[-1] == "stop decode-2"
    assert control.stopped("decode-2") == []
    state = control.core.state()
    assert (state.generation, state.rollout, state.rolled_back, state.is_settled) == (2, None, None, True)
    assert control.saved == Desired(
        target=target(2, {"prefill": 1, "decode": 2}, {"prefill": "p1", "decode": "d2"}), latest=2
    )
    control.exited("decode-1")
    control.tick(1)
    assert control.stopped("decode-1") == ["start decode-1 as d2"]


def test_the_last_workers_of_the_old_model_are_replaced_together() -> None:
    control = running({"prefill": 1, "decode": 3}, TWO)
    new: Templates = {"prefill": "p2", "decode": "d2"}
    assert apply(control, {"prefill": 1, "decode": 3}, new) == ["start prefill-1 as p2", "start decode-3 as d2"]
    assert control.register("prefill-1", fingerprint="g")[0] == "accept prefill-1"
    assert set(control.phases().values()) == {"ready", "starting"}, "a new P has no D yet"
    control.register("decode-3", fingerprint="g")
    order = []
    for draining in (["decode-0"], ["decode-1"], ["prefill-0", "decode-2"]):
        phases = control.phases()
        order.append([name for name, phase in phases.items() if phase == "draining"])
        for name in draining:
            replace(control, name, fingerprint="g")
    assert order == [["decode-0"], ["decode-1"], ["prefill-0", "decode-2"]]
    assert [n for n, phase in control.phases().items() if phase == "draining"] == ["prefill-1", "decode-3"]
    control.empty("prefill-1")
    control.empty("decode-3")
    control.stopped("prefill-1")
    control.stopped("decode-3")
    assert control.core.state().generation == 2


def test_a_new_worker_that_fits_neither_the_old_ones_nor_its_own_kind_is_refused() -> None:
    control = running({"prefill": 1, "decode": 1}, TWO)
    apply(control, {"prefill": 1, "decode": 1}, {"prefill": "p1", "decode": "d2"})
    why = "it runs another model (g) than prefill-0 (f)"
    assert control.register("decode-1", fingerprint="g") == [f"reject decode-1: {why}"]
    control = running({"prefill": 1, "decode": 1}, TWO)
    apply(control, {"prefill": 1, "decode": 1}, {"prefill": "p2", "decode": "d2"})
    control.register("decode-1", fingerprint="g")
    why = "it runs another model (h) than decode-1 (g)"
    assert control.register("prefill-1", fingerprint="h") == [f"reject prefill-1: {why}"]


def test_a_canary_that_fails_is_taken_away_and_nothing_else_was_touched() -> None:
    control = running({"prefill": 1, "decode": 1}, TWO)
    apply(control, {"prefill": 1, "decode": 1}, {"prefill": "p1", "decode": "d2"})
    for pause_s in (1, 2):
        assert control.failed("decode-1", "no room") == []
        assert control.tick(pause_s) == ["stop decode-1"]
        assert control.stopped("decode-1") == ["start decode-1 as d2"]
    assert control.failed("decode-1", "no room") == ["stop decode-1"]
    state = control.core.state()
    assert state.rollout is not None
    assert (state.rollout.is_back, state.rollout.stage, state.rollout.doing) == (True, "finishing", "decode-1 leaves")
    assert control.stopped("decode-1") == []
    state = control.core.state()
    assert (state.generation, state.rollout, state.is_settled) == (1, None, True)
    assert state.rolled_back is not None
    assert (state.rolled_back.generation, state.rolled_back.why) == (2, "decode-1 failed 3 times: no room")
    assert control.core.latest == 2
    assert {w.num_starts for w in state.workers} == {1}


def test_a_canary_that_is_late_is_taken_away() -> None:
    control = running({"prefill": 1, "decode": 1}, TWO)
    apply(control, {"prefill": 1, "decode": 1}, {"prefill": "p1", "decode": "d2"}, limit_s=20.0)
    control(events.StartsPending({"decode-1": "waits for a Ray node with 1 GPU"}))
    assert control.core.next_wakeup() == control.now + 20
    assert control.tick(19.9) == []
    assert control.tick(0.1) == ["stop decode-1"]
    back = control.core.state().rolled_back
    assert back is not None
    assert back.why == "decode-1 was not ready after 20 s: waits for a Ray node with 1 GPU"


def test_a_later_worker_that_fails_brings_the_replaced_ones_back() -> None:
    control = running({"prefill": 1, "decode": 2}, TWO)
    apply(control, {"prefill": 1, "decode": 2}, {"prefill": "p1", "decode": "d2"})
    control.register("decode-2")
    replace(control, "decode-0")
    control.empty("decode-1")
    control.stopped("decode-1")
    for pause_s in (1, 2):
        control.failed("decode-1", "no room")
        control.tick(pause_s)
        control.stopped("decode-1")
    assert control.failed("decode-1", "no room") == ["configure 1", "stop decode-1"]
    assert control.stopped("decode-1") == ["start decode-1 as d1"]
    assert control.phases()["decode-0"] == "ready"
    assert control.register("decode-1", 3)[0] == "accept decode-1"
    assert control.phases() == {
        "prefill-0": "ready",
        "decode-0": "draining",
        "decode-1": "ready",
        "decode-2": "ready",
        "gateway": "ready",
    }
    control.empty("decode-0", 2)
    assert control.stopped("decode-0") == ["start decode-0 as d1"]
    control.register("decode-0", 3)
    control.empty("decode-2")
    control.stopped("decode-2")
    state = control.core.state()
    assert (state.generation, state.rollout, state.is_settled) == (1, None, True)


def test_workers_that_die_meanwhile_are_started_again_and_all_becomes_new() -> None:
    control = running({"prefill": 1, "decode": 2}, TWO)
    apply(control, {"prefill": 1, "decode": 2}, {"prefill": "p1", "decode": "d2"})
    control.exited("decode-2")
    control.tick(1)
    assert control.stopped("decode-2") == ["start decode-2 as d2"]
    control.register("decode-2")
    assert control.exited("decode-1") == ["publish prefill-0 decode-0(draining) decode-2"]
    control.tick(1)
    assert control.stopped("decode-1") == ["start decode-1 as d2"], "its turn has come"
    assert replace(control, "decode-0") == ["accept decode-0", "publish prefill-0 decode-0 decode-2"]
    control.register("decode-1", 2)
    control.empty("decode-2")
    control.stopped("decode-2")
    assert control.core.state().generation == 2
    assert control.core.state().is_settled


def test_a_dying_new_worker_is_no_reason_to_go_back_until_it_has_died_three_times() -> None:
    control = running({"prefill": 1, "decode": 1}, TWO)
    apply(control, {"prefill": 1, "decode": 1}, {"prefill": "p1", "decode": "d2"})
    for count in range(1, MAX_FAILURES + 1):
        control.register("decode-1", count)
        control.exited("decode-1")
        rollout = control.core.state().rollout
        assert rollout is not None
        assert rollout.is_back == (count == MAX_FAILURES)
        if count < MAX_FAILURES:
            control.tick(4)
            control.stopped("decode-1")


def test_faults_of_a_pool_that_does_not_change_take_nothing_back() -> None:
    control = running({"prefill": 1, "decode": 1}, TWO)
    apply(control, {"prefill": 1, "decode": 1}, {"prefill": "p1", "decode": "d2"})
    control.register("decode-1")
    for count in range(2, 3 + MAX_FAILURES):
        control.exited("prefill-0")
        control.tick(30)
        control.stopped("prefill-0")
        control.register("prefill-0", count)
    rollout = control.core.state().rollout
    assert rollout is not None
    assert not rollout.is_back


def test_pools_grow_with_the_new_workers_and_shrink_after_them() -> None:
    control = running({"prefill": 2, "decode": 1}, TWO)
    apply(control, {"prefill": 1, "decode": 2}, {"prefill": "p2", "decode": "d2"})
    control.register("prefill-2")
    assert control.register("decode-1") == [
        "accept decode-1",
        "configure 2",
        "start decode-2 as d2",
        "publish prefill-0 prefill-1 decode-0 prefill-2 decode-1",
    ]
    control.register("decode-2")
    assert [n for n, phase in control.phases().items() if phase == "draining"] == ["prefill-0", "decode-0"]
    replace(control, "prefill-0")
    replace(control, "decode-0")
    leaving = [n for n, phase in control.phases().items() if phase == "draining"]
    assert leaving == ["prefill-1", "prefill-2", "decode-2"]
    for name in leaving:
        control.empty(name)
        control.stopped(name)
    assert control.core.state().is_settled
    assert control.core.sizes == {"prefill": 1, "decode": 2}


def test_sizes_alone_restart_nothing() -> None:
    control = running({"prefill": 1, "decode": 1}, TWO)
    assert apply(control, {"prefill": 1, "decode": 2}, TWO) == ["configure 2", "start decode-1 as d1"]
    assert control.core.state().rollout is None
    assert control.core.state().generation == 2


def test_another_mode_starts_its_pool_before_the_old_ones_drain() -> None:
    control = running({"prefill": 1, "decode": 1}, TWO)
    assert apply(control, {"workers": 2}, {"workers": "w1"}) == ["start workers-0 as w1"]
    assert control.register("workers-0", fingerprint="g") == [
        "accept workers-0",
        "configure 2",
        "start workers-1 as w1",
        "publish prefill-0 decode-0 workers-0",
    ]
    control.register("workers-1", fingerprint="g")
    assert [n for n, phase in control.phases().items() if phase == "draining"] == ["prefill-0", "decode-0"]
    for name in ("prefill-0", "decode-0"):
        control.empty(name)
        control.stopped(name)
    state = control.core.state()
    assert (state.generation, [pool.name for pool in state.pools], state.is_settled) == (2, ["workers"], True)


def test_a_mode_whose_workers_fail_leaves_the_old_pools_as_they_were() -> None:
    control = running({"prefill": 1, "decode": 1}, TWO)
    apply(control, {"workers": 2}, {"workers": "w1"})
    for pause_s in (1, 2):
        control.failed("workers-0")
        control.tick(pause_s)
        control.stopped("workers-0")
    assert control.failed("workers-0") == ["stop workers-0"]
    control.stopped("workers-0")
    state = control.core.state()
    assert (state.generation, [pool.name for pool in state.pools], state.is_settled) == (1, ["prefill", "decode"], True)


def test_without_room_for_another_worker_the_first_wave_is_the_canary() -> None:
    control = running({"prefill": 2, "decode": 2}, TWO)
    new: Templates = {"prefill": "p2", "decode": "d2"}
    assert apply(control, {"prefill": 2, "decode": 2}, new, surge=False) == [
        "configure 2",
        "publish prefill-0(draining) prefill-1 decode-0(draining) decode-1",
    ]
    replace(control, "prefill-0", fingerprint="g")
    replace(control, "decode-0", fingerprint="g")
    replace(control, "prefill-1", fingerprint="g")
    replace(control, "decode-1", fingerprint="g")
    assert control.core.state().generation == 2
    assert control.core.state().is_settled


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (ScaleRequest(sizes={"decode": 3}), "sizes"),
        (DrainRequest(worker_id=WorkerId("decode-0")), "worker_id"),
        (ApplyRequest(config=b"{}"), "file"),
    ],
)
def test_operators_wait_for_the_end_of_a_rollout(request_: ControlRequest, field: str) -> None:
    control = running({"prefill": 1, "decode": 2}, TWO)
    assert control.core.refusal(request_) is None
    apply(control, {"prefill": 1, "decode": 2}, {"prefill": "p1", "decode": "d2"})
    refused = control.core.refusal(request_)
    assert refused is not None
    assert refused.field == field
    assert refused.message == (
        "generation 2 of the configuration is being applied; try again after that, see `disagg status`"
    )


def test_a_worker_that_drained_before_comes_back_new() -> None:
    control = running({"prefill": 1, "decode": 2}, TWO)
    control.drain("decode-1")
    apply(control, {"prefill": 1, "decode": 2}, {"prefill": "p1", "decode": "d2"})
    control.register("decode-2")
    assert control.phases()["decode-0"] == "ready", "it waits for decode-1"
    control.empty("decode-1")
    assert control.stopped("decode-1") == ["start decode-1 as d2"]


def test_an_apply_waits_for_the_end_of_one_that_is_taken_back() -> None:
    control = running({"prefill": 1, "decode": 1}, TWO)
    apply(control, {"prefill": 1, "decode": 1}, {"prefill": "p1", "decode": "d2"}, limit_s=5.0)
    control.tick(5)
    for request in (ScaleRequest(sizes={"decode": 3}), ApplyRequest(config=b"{}")):
        refused = control.core.refusal(request)
        assert refused is not None
        assert refused.message == (
            "generation 2 of the configuration is being taken back; try again after that, see `disagg status`"
        )
    assert control.stopped("decode-1") == []
    assert control.core.refusal(ApplyRequest(config=b"{}")) is None
    assert apply(control, {"prefill": 1, "decode": 1}, {"prefill": "p1", "decode": "d3"}) == ["start decode-1 as d3"]
    control.register("decode-1", 2)
    replace(control, "decode-0")
    control.empty("decode-1", 2)
    control.stopped("decode-1")
    state = control.core.state()
    assert (state.generation, state.rolled_back, state.is_settled) == (3, None, True)


def test_a_dry_run_waits_for_no_rollout() -> None:
    control = running({"prefill": 1, "decode": 1}, TWO)
    apply(control, {"prefill": 1, "decode": 1}, {"prefill": "p1", "decode": "d2"}, limit_s=5.0)
    assert control.core.refusal(ApplyRequest(config=b"{}", dry_run=True)) is None
    control.tick(5)
    assert control.core.refusal(ApplyRequest(config=b"{}", dry_run=True)) is None


@pytest.mark.parametrize("size", [0, 1])
def test_without_surge_an_empty_pool_gets_the_new_configuration(size: int) -> None:
    control = running({"prefill": 2, "decode": 0}, TWO)
    lines = apply(control, {"prefill": 2, "decode": size}, {"prefill": "p1", "decode": "d2"}, surge=False)
    assert lines == ["configure 2", *["start decode-0 as d2"] * size]
    if size:
        control.register("decode-0")
    state = control.core.state()
    assert (state.generation, state.rollout, state.is_settled) == (2, None, True)


@pytest.mark.parametrize("num_replaced", [0, 1, 2])
def test_the_next_controller_goes_on(num_replaced: int) -> None:
    before = running({"prefill": 1, "decode": 2}, TWO)
    apply(before, {"prefill": 1, "decode": 2}, {"prefill": "p1", "decode": "d2"})
    before.register("decode-2")
    for name in ("decode-0", "decode-1")[:num_replaced]:
        replace(before, name)
    assert before.saved is not None
    names = ["prefill-0", "decode-0", "decode-1", "decode-2"]
    control = Driver({}, running=[*names, "gateway"], desired=before.saved)
    control.config_hashes = dict(before.config_hashes)
    assert control.tick() == []
    assert control.core.refusal(ApplyRequest(config=b"{}")) is not None
    for name in names[:-1]:
        control.register(name)
    assert set(control.phases().values()) <= {"ready", "lost"}, "it waits for all that runs"
    control.register("decode-2")
    control.joined()
    leaving = [n for n, phase in control.phases().items() if phase == "draining"]
    assert leaving == [["decode-0"], ["decode-1"], ["decode-2"]][num_replaced]
    for name in ("decode-0", "decode-1")[num_replaced:]:
        replace(control, name)
    control.empty("decode-2")
    control.stopped("decode-2")
    assert control.core.state().generation == 2
    assert control.core.state().is_settled


def test_the_next_controller_does_not_wait_for_ever_for_a_worker_that_is_gone() -> None:
    before = running({"prefill": 1, "decode": 1}, TWO)
    apply(before, {"prefill": 1, "decode": 1}, {"prefill": "p1", "decode": "d2"})
    control = Driver({}, running=["prefill-0", "decode-0", "gateway"], desired=before.saved)
    control.config_hashes = dict(before.config_hashes)
    assert control.tick() == []
    control.register("prefill-0")
    lines = control.tick(ADOPT_GRACE_S)
    assert "start decode-1 as d2" in lines, "the canary had not been started"
    assert control.stopped("decode-0") == ["start decode-0 as d1"]
    assert control.core.state().rollout is not None


@pytest.mark.parametrize("is_gone", [True, False])
def test_the_next_controller_starts_no_surge_worker_that_was_over(is_gone: bool) -> None:
    """The one before died while the surge worker drained, or when it was gone."""
    before = running({"prefill": 1, "decode": 1}, TWO)
    apply(before, {"prefill": 1, "decode": 1}, {"prefill": "p1", "decode": "d2"})
    before.register("decode-1")
    replace(before, "decode-0")
    assert before.phases()["decode-1"] == "draining"
    there = ["prefill-0", "decode-0", *([] if is_gone else ["decode-1"])]
    control = Driver({}, running=[*there, "gateway"], desired=before.saved)
    control.config_hashes = dict(before.config_hashes)
    assert control.tick() == []
    for name in there:
        assert not [line for line in control.register(name, 2 if name == "decode-0" else 1) if "start" in line]
    control.joined()
    if not is_gone:
        assert control.empty("decode-1")[-1] == "stop decode-1"
        assert control.stopped("decode-1") == []
    state = control.core.state()
    assert (state.generation, state.is_settled) == (2, True)


def test_the_next_controller_still_takes_back_what_fails() -> None:
    before = running({"prefill": 1, "decode": 2}, TWO)
    apply(before, {"prefill": 1, "decode": 2}, {"prefill": "p1", "decode": "d2"}, surge=False)
    replace(before, "decode-0")
    control = Driver({}, running=["prefill-0", "decode-0", "decode-1", "gateway"], desired=before.saved)
    control.config_hashes = dict(before.config_hashes)
    control.tick()
    for name in ("prefill-0", "decode-0", "decode-1"):
        control.register(name)
    control.joined()
    for count in range(2, 2 + MAX_FAILURES):
        control.exited("decode-0")
        control.tick(10)
        control.stopped("decode-0")
        control.register("decode-0", count)
    rollout = control.core.state().rollout
    assert rollout is not None
    assert rollout.is_back


def test_an_old_worker_that_comes_back_fits_the_pool_that_does_not_change() -> None:
    control = running({"prefill": 1, "decode": 1}, TWO)
    apply(control, {"prefill": 1, "decode": 1}, {"prefill": "p1", "decode": "d2"})
    control.exited("decode-0")
    control.tick(1)
    assert control.stopped("decode-0") == ["start decode-0 as d1"]
    why = "it runs another model (g) than prefill-0 (f)"
    assert control.register("decode-0", 2, fingerprint="g") == [f"reject decode-0: {why}"]
