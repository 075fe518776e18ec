"""Probes of new workers in the controller's core, as transcripts."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from disagg.cluster.core import events
from disagg.cluster.core.core import ADOPT_GRACE_S
from disagg.cluster.core.probes import MAX_PROBES, MAX_TRIES, PARTNER_WAIT_S, RETRY_S, ROOM_WAIT_S
from disagg.cluster.core.rollout import Desired, Plan, Target
from disagg.proto.control import PoolName
from disagg.proto.ids import WorkerId
from tests.support.control import LOST_GRACE_S, Driver, succeeding

BROKEN = "decode-0: failed (checksum)"
FULL = "decode-0: refused (no room)"


def started(sizes: Mapping[PoolName, int], desired: Desired | None = None) -> Driver:
    """A cluster whose processes are being started."""
    control = Driver(sizes, desired=desired, probes=True)
    control.tick()
    return control


def serving(decode: int = 1) -> Driver:
    """One whose workers are all proven, and a gateway that follows."""
    control = started({"prefill": 1, "decode": decode})
    control.register("prefill-0")
    for index in range(decode):
        control.register(f"decode-{index}")
        control.probed()
    control.joined()
    assert control.core.state().is_settled
    return control


def test_one_request_proves_both_workers_of_the_first_pair_and_the_gateway_starts_after_it() -> None:
    control = started({"prefill": 1, "decode": 1})
    assert control.register("prefill-0") == ["accept prefill-0"]
    assert control.record("prefill-0").detail == "waits for a decode worker, to be probed with it"
    assert control.register("decode-0") == ["accept decode-0", "probe prefill-0 decode-0"]
    assert control.phases() == {"prefill-0": "starting", "decode-0": "starting"}
    assert control.record("decode-0").detail == "is probed with prefill-0"
    assert control.core.membership().members == ()
    assert control.probed() == ["gateway prefill-0 decode-0", "publish prefill-0 decode-0"]
    assert control.phases() == {"prefill-0": "ready", "decode-0": "ready", "gateway": "starting"}
    assert control.record("decode-0").detail == ""


def test_a_worker_that_joins_is_no_member_before_its_probe() -> None:
    control = serving()
    assert control.scale(decode=2) == ["start decode-1"]
    assert control.register("decode-1") == ["accept decode-1", "probe prefill-0 decode-1"]
    assert [member.info.worker_id for member in control.core.membership().members] == ["prefill-0", "decode-0"]
    assert control.probed() == ["publish prefill-0 decode-0 decode-1"]


def test_new_workers_are_probed_side_by_side_each_with_another_partner() -> None:
    control = serving(decode=2)
    assert control.scale(prefill=3) == ["start prefill-1", "start prefill-2"]
    assert control.register("prefill-1") == ["accept prefill-1", "probe prefill-1 decode-0"]
    assert control.register("prefill-2") == ["accept prefill-2", "probe prefill-2 decode-1"]
    assert control.probed(which=-2) == ["publish prefill-0 decode-0 decode-1 prefill-1"]
    assert control.probed() == ["publish prefill-0 decode-0 decode-1 prefill-1 prefill-2"]


def test_a_probe_that_fails_is_tried_with_others_and_then_its_worker_is_started_again() -> None:
    control = serving(decode=2)
    control.scale(prefill=2)
    assert control.register("prefill-1")[-1] == "probe prefill-1 decode-0"
    assert control.probed(BROKEN) == []
    assert control.record("prefill-1").detail == (f"its probe with decode-0 failed and is tried again: {BROKEN}")
    assert control.core.next_wakeup() == control.now + RETRY_S
    assert control.tick(RETRY_S) == ["probe prefill-1 decode-1"]
    assert control.probed(BROKEN) == []
    assert control.tick(RETRY_S) == ["probe prefill-1 decode-0"]
    assert control.probed("decode-1: failed (once more)") == []
    record = control.record("prefill-1")
    assert (record.phase, record.detail) == (
        "failed",
        f"{MAX_TRIES} probes of it failed; the last probe with decode-0: decode-1: failed (once more)",
    )
    due = control.core.next_wakeup()
    assert due is not None
    assert control.tick(due - control.now) == ["stop prefill-1"]
    assert control.stopped("prefill-1") == ["start prefill-1"]
    assert control.register("prefill-1", 2)[-1] == "probe prefill-1 decode-0"
    assert control.probed() == ["publish prefill-0 decode-0 decode-1 prefill-1"]


def test_a_pair_of_new_workers_that_fails_counts_against_both() -> None:
    control = started({"prefill": 1, "decode": 1})
    control.register("prefill-0")
    control.register("decode-0")
    for _ in range(MAX_TRIES - 1):
        control.probed(BROKEN)
        assert control.tick(RETRY_S) == ["probe prefill-0 decode-0"]
    control.probed(BROKEN)
    assert control.phases() == {"prefill-0": "failed", "decode-0": "failed"}


def test_want_of_room_is_no_fault_and_does_not_keep_a_worker_out_for_ever() -> None:
    control = serving()
    control.scale(decode=2)
    control.register("decode-1")
    for _ in range(int(ROOM_WAIT_S / RETRY_S)):
        assert control.probed(FULL, is_refusal=True) == []
        assert control.tick(RETRY_S) == ["probe prefill-0 decode-1"]
    assert control.probed(FULL, is_refusal=True) == ["publish prefill-0 decode-0 decode-1"]


def test_a_partner_that_dies_meanwhile_proves_nothing() -> None:
    control = serving()
    control.scale(decode=2)
    control.register("decode-1")
    control.exited("prefill-0")
    assert control.probed("prefill-0 closed the session") == []
    due = control.core.next_wakeup()
    assert due is not None
    assert control.tick(due - control.now) == ["stop prefill-0"]
    control.stopped("prefill-0")
    assert control.register("prefill-0", 2) == ["accept prefill-0", "probe prefill-0 decode-1"]
    for _ in range(MAX_TRIES - 1):  # of both; one more would be too much
        control.probed(BROKEN)
        assert control.record("decode-1").phase == "starting"
        assert control.tick(RETRY_S)
    assert control.probed() == ["publish prefill-0 decode-0 decode-1"]


def test_a_decode_worker_without_any_prefill_worker_is_probed_alone_after_a_while() -> None:
    control = started({"prefill": 1, "decode": 1})
    assert control.register("decode-0") == ["accept decode-0"]
    assert control.record("decode-0").detail == "waits for a prefill worker, to be probed with it"
    assert control.core.next_wakeup() == control.now + PARTNER_WAIT_S
    assert control.tick(PARTNER_WAIT_S) == ["probe decode-0"]
    assert control.probed(BROKEN) == []
    assert control.core.next_wakeup() == control.now + RETRY_S
    assert control.tick(RETRY_S) == ["probe decode-0"]
    assert control.probed() == ["publish decode-0"]


@pytest.mark.parametrize(
    ("sizes", "name", "lines"),
    [
        ({"prefill": 1, "decode": 0}, "prefill-0", ["accept prefill-0", "gateway prefill-0", "publish prefill-0"]),
        ({"prefill": 0, "decode": 1}, "decode-0", ["accept decode-0", "probe decode-0"]),
        ({"colocated": 1}, "colocated-0", ["accept colocated-0", "probe colocated-0"]),
        ({"workers": 1}, "workers-0", ["accept workers-0", "probe workers-0"]),
    ],
)
def test_workers_without_a_pool_of_partners(sizes: dict[PoolName, int], name: str, lines: list[str]) -> None:
    """A prefill worker alone can answer nothing, so there is nothing to probe."""
    assert started(sizes).register(name) == lines


def test_elastic_workers_are_probed_in_both_roles_and_colocated_ones_alone() -> None:
    control = started({"workers": 2})
    control.register("workers-0")
    control.probed()
    assert control.register("workers-1") == ["accept workers-1", "probe workers-0 workers-1"]
    assert control.probed() == ["probe workers-1 workers-0"]
    assert control.record("workers-1").phase == "starting"
    control.probed()
    assert control.record("workers-1").phase == "ready"
    control = started({"colocated": 2})
    control.register("colocated-0")
    assert control.register("colocated-1") == ["accept colocated-1", "probe colocated-1"]


def test_only_so_many_run_at_a_time() -> None:
    control = started({"colocated": MAX_PROBES + 1})
    for index in range(MAX_PROBES):
        assert control.register(f"colocated-{index}")[-1] == f"probe colocated-{index}"
    last = f"colocated-{MAX_PROBES}"
    assert control.register(last) == [f"accept {last}"]
    assert control.core.next_wakeup() is None
    assert control.probed(which=0)[0] == f"probe {last}"


def test_a_worker_that_ends_during_its_probe_is_started_again() -> None:
    control = serving()
    control.scale(decode=2)
    control.register("decode-1")
    control.exited("decode-1")
    assert (control.record("decode-1").phase, control.record("decode-1").detail) == ("failed", "killed by SIGKILL")
    assert control.probed() == []  # it came too late
    assert control.record("decode-1").phase == "failed"


def test_a_worker_that_goes_during_its_probe_is_not_probed_again() -> None:
    control = serving()
    control.scale(decode=2)
    control.register("decode-1")
    assert control.scale(decode=1) == ["stop decode-1"]
    assert control.stopped("decode-1") == []
    assert control.probed("decode-1 closed the session") == []
    assert control.core.next_wakeup() is None
    assert control.tick(RETRY_S) == []


def test_a_worker_that_leaves_during_its_probe_is_no_member_and_is_probed_when_it_comes_back() -> None:
    control = serving()
    control.scale(decode=2)
    control.register("decode-1")
    assert control.left("decode-1") == []
    assert control.record("decode-1").phase == "lost"
    assert control.register("decode-1") == ["accept decode-1", "probe prefill-0 decode-1"]
    assert control.left("decode-1") == []
    assert control.tick(LOST_GRACE_S) == ["stop decode-1"]
    assert control.stopped("decode-1") == ["start decode-1"]


def test_a_worker_that_was_ready_and_whose_connection_broke_is_not_probed_again() -> None:
    control = serving()
    control.left("decode-0")
    assert control.register("decode-0") == ["accept decode-0"]
    assert control.record("decode-0").phase == "ready"


def test_a_worker_whose_connection_broke_before_it_got_that_it_was_ready_gets_it_when_it_is_back() -> None:
    """Else the next controller would probe it again though it serves."""
    control = serving()
    assert control.proven == {"prefill-0.1", "decode-0.1"}
    control.proven.clear()
    control.left("decode-0")
    assert control.register("decode-0") == ["accept decode-0"]
    assert control.proven == {"decode-0.1"}


def test_a_process_that_the_launcher_started_by_itself_is_probed() -> None:
    control = serving()
    assert control.register("decode-0", 2) == ["accept decode-0", "probe prefill-0 decode-0", "publish prefill-0"]
    assert control.probed() == ["publish prefill-0 decode-0"]
    assert control.record("decode-0").num_starts == 2


def with_canary() -> Driver:
    """A rollout of decode workers whose first new one is being started."""
    sizes: dict[PoolName, int] = {"prefill": 1, "decode": 1}
    old = Target(generation=1, sizes=sizes, config_hashes={"prefill": "p1", "decode": "d1"})
    new = Target(generation=2, sizes=sizes, config_hashes={"prefill": "p1", "decode": "d2"})
    control = started(sizes, Desired(target=old))
    control.register("prefill-0")
    control.register("decode-0")
    control.probed()
    control.joined()
    assert control(events.Apply(Plan(old=old, new=new, ready_timeout_s=60.0))) == ["start decode-1 as d2"]
    return control


def with_canary_on_trial() -> Driver:
    """The same, and it is being probed."""
    control = with_canary()
    assert control.register("decode-1") == ["accept decode-1", "probe prefill-0 decode-1"]
    return control


def test_the_next_controller_probes_the_canary_that_was_being_probed_and_nobody_that_served() -> None:
    before = with_canary_on_trial()
    assert before.proven == {"prefill-0.1", "decode-0.1"}
    control = succeeding(before, ["prefill-0", "decode-0", "decode-1"])
    assert control.joined() == []
    assert control.register("prefill-0") == ["accept prefill-0"]
    assert control.register("decode-0") == ["accept decode-0"]
    assert control.register("decode-1") == ["accept decode-1", "probe prefill-0 decode-1"]
    assert control.phases() == {
        "prefill-0": "ready",
        "decode-0": "ready",
        "decode-1": "starting",
        "gateway": "ready",
    }
    assert control.probed() == ["configure 2", "publish prefill-0 decode-0(draining) decode-1"]
    assert control.proven == {"prefill-0.1", "decode-0.1", "decode-1.1"}


def test_a_canary_that_fails_its_probes_under_the_next_controller_is_taken_back() -> None:
    control = succeeding(with_canary_on_trial(), ["prefill-0", "decode-0", "decode-1"])
    control.joined()
    control.register("prefill-0")
    control.register("decode-0")
    for incarnation in range(1, 4):
        control.register("decode-1", incarnation)
        for _ in range(MAX_TRIES):
            control.probed(BROKEN)
            control.tick(RETRY_S)
        if incarnation < 3:
            assert control.record("decode-1").phase == "failed"
            while (due := control.core.next_wakeup()) is not None and control.record("decode-1").phase == "failed":
                control.tick(due - control.now)
            assert control.stopped("decode-1") == ["start decode-1 as d2"]
    rolled_back = control.core.state().rolled_back
    assert rolled_back is not None
    assert rolled_back.why.startswith("decode-1 failed 3 times: 3 probes of it failed; the last probe with prefill-0: ")
    assert [member.info.worker_id for member in control.core.membership().members] == ["prefill-0", "decode-0"]


def test_the_next_controller_gives_a_canary_on_trial_the_time_of_a_new_one() -> None:
    control = succeeding(with_canary_on_trial(), ["prefill-0", "decode-0", "decode-1"])
    control.joined()
    for name in ("prefill-0", "decode-0", "decode-1"):
        control.register(name)
    assert control.tick(ADOPT_GRACE_S) == ["publish prefill-0 decode-0"]
    assert control.core.next_wakeup() == control.now - ADOPT_GRACE_S + 60.0
    assert control.tick(60.0 - ADOPT_GRACE_S) == ["stop decode-1"]
    rolled_back = control.core.state().rolled_back
    assert rolled_back is not None
    assert rolled_back.why == "decode-1 was not ready after 60 s"


def test_without_surge_workers_the_next_controller_has_the_first_new_worker_on_trial_as_well() -> None:
    sizes: dict[PoolName, int] = {"prefill": 1, "decode": 2}
    old = Target(generation=1, sizes=sizes, config_hashes={"prefill": "p1", "decode": "d1"})
    new = Target(generation=2, sizes=sizes, config_hashes={"prefill": "p1", "decode": "d2"})
    before = started(sizes, Desired(target=old))
    before.register("prefill-0")
    for name in ("decode-0", "decode-1"):
        before.register(name)
        before.probed()
    before.joined()
    before(events.Apply(Plan(old=old, new=new, surge=False, ready_timeout_s=60.0)))
    before.empty("decode-0")
    assert before.stopped("decode-0") == ["start decode-0 as d2"]
    before.register("decode-0", 2)
    control = succeeding(before, ["prefill-0", "decode-0", "decode-1"])
    control.joined()
    control.register("prefill-0")
    control.register("decode-1")
    assert control.register("decode-0", 2) == ["accept decode-0", "probe prefill-0 decode-0"]
    control.tick(60.0)
    rolled_back = control.core.state().rolled_back
    assert rolled_back is not None
    assert rolled_back.why == "decode-0 was not ready after 60 s"


def test_a_worker_that_serves_stays_a_member_while_the_next_controller_probes_it_again() -> None:
    """The one before died after it had published the worker and before the worker heard of it."""
    before = serving()
    before.drain("decode-0")
    before.proven.clear()
    control = succeeding(before, ["prefill-0", "decode-0"])
    assert control.joined(draining=["decode-0.1"]) == []
    assert control.register("prefill-0") == ["accept prefill-0"]
    assert control.register("decode-0") == ["accept decode-0", "probe prefill-0 decode-0"]
    assert control.probed() == ["publish prefill-0 decode-0(draining)"]


def test_workers_of_different_models_are_not_probed_together() -> None:
    control = started({"prefill": 1, "decode": 1})
    control.register("prefill-0")
    lines = control.register("decode-0", fingerprint="other")
    assert lines == ["reject decode-0: it runs another model (other) than prefill-0 (f)"]


def test_a_prefill_worker_that_no_decode_worker_fits_does_not_hold_up_a_rollout() -> None:
    """Without surge workers the larger pool is the first to be replaced, and none of the other one is new."""
    sizes: dict[PoolName, int] = {"prefill": 2, "decode": 1}
    old = Target(generation=1, sizes=sizes, config_hashes={"prefill": "p1", "decode": "d1"})
    new = Target(generation=2, sizes=sizes, config_hashes={"prefill": "p2", "decode": "d2"})
    control = started(sizes, Desired(target=old))
    control.register("prefill-0")
    control.register("decode-0")
    control.probed()
    control.register("prefill-1")
    control.probed()
    control.joined()
    control(events.Apply(Plan(old=old, new=new, surge=False)))
    control.empty("prefill-0")
    assert control.stopped("prefill-0") == ["start prefill-0 as p2"]
    assert control.register("prefill-0", 2, fingerprint="g") == ["accept prefill-0"]
    assert control.record("prefill-0").detail == "waits for a decode worker, to be probed with it"
    assert control.core.next_wakeup() == control.now + ROOM_WAIT_S
    assert control.tick(ROOM_WAIT_S) == ["publish prefill-0 prefill-1(draining) decode-0(draining)"]


def test_a_canary_whose_probes_fail_is_taken_back() -> None:
    control = with_canary()
    for incarnation in range(3):
        control.register("decode-1", 1 + incarnation)
        for _ in range(MAX_TRIES):
            assert control.record("decode-1").detail == "is probed with prefill-0"
            control.probed(BROKEN)
            control.tick(RETRY_S)
        if incarnation < 2:
            while WorkerId("decode-1") in control.core.worker_ids and control.record("decode-1").phase == "failed":
                due = control.core.next_wakeup()
                assert due is not None
                control.tick(due - control.now)
            assert control.stopped("decode-1") == ["start decode-1 as d2"]
    rolled_back = control.core.state().rolled_back
    assert rolled_back is not None
    assert rolled_back.why.startswith("decode-1 failed 3 times: 3 probes of it failed; the last probe with prefill-0: ")
