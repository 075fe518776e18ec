"""The controller's core as transcripts: an event, and the commands that follow."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disagg.cluster.core import events
from disagg.cluster.core.backoff import FIRST_PAUSE_S, MAX_BACKOFF_S, STABLE_S, backoff_s
from disagg.cluster.core.core import ADOPT_GRACE_S
from disagg.cluster.core.gateways import INITIAL_POOLS_TIMEOUT_S
from disagg.cluster.core.workers import Worker
from disagg.proto.control import ControlRequest, DrainRequest, ScaleRequest, StateRequest
from disagg.proto.ids import GatewayId, WorkerId
from tests.support.control import ADDRESS, DRAIN_TIMEOUT_S, GATEWAY_ID, LOST_GRACE_S, Driver, settled

# ---------------------------------------------------------------- start


def test_a_cluster_comes_up_workers_first() -> None:
    control = Driver({"prefill": 1, "decode": 2})
    assert control.tick() == ["start prefill-0", "start decode-0", "start decode-1"]
    assert control.register("decode-1") == ["accept decode-1", "publish decode-1"]
    assert control.register("prefill-0") == ["accept prefill-0", "publish prefill-0 decode-1"]
    assert control.register("decode-0") == [
        "accept decode-0",
        "gateway prefill-0 decode-0 decode-1",
        "publish prefill-0 decode-0 decode-1",
    ]
    assert not control.core.state().is_settled
    assert control.joined() == ["publish prefill-0 decode-0 decode-1"]
    assert control.core.state().is_settled
    assert control.core.next_wakeup() is None


def test_the_gateway_does_not_wait_for_ever_for_the_whole_first_set() -> None:
    control = Driver({"prefill": 1, "decode": 2})
    control.tick()
    control.register("prefill-0")
    control.register("decode-0")
    assert control.core.next_wakeup() == control.now + INITIAL_POOLS_TIMEOUT_S
    assert control.tick(INITIAL_POOLS_TIMEOUT_S) == ["gateway prefill-0 decode-0"]


def test_a_failed_start_is_told_and_tried_again() -> None:
    control = Driver({"colocated": 1})
    control.tick()
    assert control.failed("colocated-0") == []
    record = control.record("colocated-0")
    assert (record.phase, record.detail, record.num_starts) == ("failed", "no weights", 1)
    assert control.exited("colocated-0", "exit status 1") == []
    assert control.record("colocated-0").detail == "no weights"
    assert control.core.next_wakeup() == control.now + 1
    assert control.tick(1) == ["stop colocated-0"]
    assert control.stopped("colocated-0") == ["start colocated-0"]
    assert control.register("colocated-0", 2)[0] == "accept colocated-0"
    assert control.record("colocated-0").num_starts == 2


def test_what_a_start_is_busy_with_is_shown_until_it_is_over() -> None:
    control = Driver({"colocated": 1})
    control.tick()
    name, start_id = WorkerId("colocated-0"), control.core._workers[WorkerId("colocated-0")].start_id

    def says(doing: str, start_id: str) -> str:
        control.core.handle(events.WorkerStarting(name, doing, start_id), control.now)
        return control.record("colocated-0").detail

    assert says("loads the weights", start_id) == "loads the weights"
    assert says("loads others", "of an earlier start") == "loads the weights"
    assert control.core.handle(events.WorkerStarting(WorkerId("decode-7"), "loads", ""), control.now) == []
    control.register("colocated-0")
    assert control.record("colocated-0").detail == ""


def test_the_pause_grows_with_faults_in_a_row_and_a_healthy_life_ends_the_row() -> None:
    control = Driver({"colocated": 1})
    control.tick()
    for pause_s in (1, 2, 4, 8, 16, 30, 30):
        control.exited("colocated-0", "exit status 1")
        assert control.tick(pause_s - 0.01) == []
        assert control.tick(0.01) == ["stop colocated-0"]
        assert control.stopped("colocated-0") == ["start colocated-0"]
    control.register("colocated-0")
    control.now += STABLE_S
    control.exited("colocated-0")
    assert control.core.next_wakeup() == control.now + FIRST_PAUSE_S
    assert [backoff_s(n) for n in (1, 5, 6, 100)] == [1, 16, MAX_BACKOFF_S, MAX_BACKOFF_S]


def test_a_worker_that_runs_another_model_is_refused() -> None:
    control = Driver({"prefill": 1, "decode": 1})
    control.tick()
    control.register("prefill-0", fingerprint="a")
    why = "it runs another model (b) than prefill-0 (a)"
    assert control.register("decode-0", fingerprint="b") == [f"reject decode-0: {why}"]
    assert (control.record("decode-0").phase, control.record("decode-0").detail) == ("failed", why)
    assert control.exited("decode-0", "exit status 0") == []
    assert control.record("decode-0").detail == why
    control.tick(1)
    control.stopped("decode-0")
    (line,) = control.register("decode-0", fingerprint="a", num_layers=2)
    assert line.startswith("reject decode-0: its KV layout (")


def test_the_model_of_workers_that_are_gone_binds_nobody() -> None:
    control = Driver({"prefill": 1, "decode": 1})
    control.tick()
    control.register("prefill-0", fingerprint="a")
    control.exited("prefill-0")
    assert control.register("decode-0", fingerprint="b")[0] == "accept decode-0"
    control.tick(FIRST_PAUSE_S)
    control.stopped("prefill-0")
    assert control.register("prefill-0", 2, fingerprint="a")[0].startswith("reject prefill-0: it runs another model")
    assert control.register("decode-0", 2, fingerprint="c")[0] == "accept decode-0"


def test_the_failure_of_an_earlier_start_is_not_that_of_the_next() -> None:
    control = Driver({"colocated": 1})
    control.tick()
    first = control.start_ids["colocated-0"]
    control.exited("colocated-0", "exit status 1")
    control.tick(1)
    control.stopped("colocated-0")
    second = control.start_ids["colocated-0"]
    assert (first, second) == ("c1.1", "c1.2")
    control.failed("colocated-0", "late news", start_id=first)
    assert (control.record("colocated-0").phase, control.record("colocated-0").detail) == ("starting", "exit status 1")
    control.failed("colocated-0", "no weights", start_id=second)
    assert (control.record("colocated-0").phase, control.record("colocated-0").detail) == ("failed", "no weights")


def test_a_process_that_could_not_be_stopped_is_not_taken_for_the_next() -> None:
    control = Driver({"colocated": 1})
    control.tick()
    first = control.start_ids["colocated-0"]
    control.register("colocated-0", 1, start_id=first)
    control.joined()
    control.hung("colocated-0")
    control.tick(LOST_GRACE_S)
    assert control.stopped("colocated-0") == ["start colocated-0"]
    why = "it is of an earlier start, which was replaced"
    assert control.register("colocated-0", 1, start_id=first) == [f"reject colocated-0: {why}"]
    assert control.left("colocated-0", 1) == []
    assert control.record("colocated-0").phase == "starting"
    second = control.start_ids["colocated-0"]
    assert control.register("colocated-0", 2, start_id=second)[0] == "accept colocated-0"
    assert control.register("colocated-0", 1, start_id=first) == [f"reject colocated-0: {why}"]
    assert control.core.membership().members[0].info.incarnation == "colocated-0.2"


def test_a_launcher_that_restarts_by_itself_keeps_the_start() -> None:
    control = Driver({"colocated": 1})
    control.tick()
    for incarnation in (1, 2):
        assert control.register("colocated-0", incarnation, start_id="c1.1")[0] == "accept colocated-0"


def test_what_an_earlier_controller_started_is_taken_as_it_is() -> None:
    control = Driver({"decode": 1}, running={"decode-0"})
    control.tick()
    assert control.register("decode-0", start_id="c0.7")[0] == "accept decode-0"
    assert control.register("decode-0", 2, start_id="c0.6")[0].startswith("reject decode-0: it is of an earlier start")


def test_what_a_start_waits_for_is_shown_and_is_no_failure() -> None:
    control = Driver({"prefill": 1, "decode": 1})
    control.tick()
    assert control(events.StartsPending({"decode-0": "no node with disagg.role: decode"})) == []
    assert control.record("decode-0").phase == "starting"
    assert control.record("decode-0").detail == "no node with disagg.role: decode"
    control(events.StartsPending({}))
    assert control.record("decode-0").detail == ""


def test_a_start_that_waits_for_a_node_is_taken_over_by_the_next_controller() -> None:
    control = Driver({"decode": 2}, running={"decode-0", "decode-1"})
    control.register("decode-0", start_id="c0.1")
    assert control(events.StartsPending({"decode-1": "no node with disagg.role: decode"})) == []
    assert control.tick(LOST_GRACE_S - 1) == []
    assert control.phases() == {"decode-0": "ready", "decode-1": "lost"}
    assert control.register("decode-1", start_id="c0.2")[0] == "accept decode-1"


def test_strangers_are_sent_away() -> None:
    control = settled({"colocated": 1})
    assert control.register("colocated-1") == ["reject colocated-1: colocated-1 is not in the desired state"]
    assert control.register("x") == ["reject x: x is not in the desired state"]


# ---------------------------------------------------------------- scale


def test_scaling_up_starts_and_publishes() -> None:
    control = settled({"prefill": 1, "decode": 1})
    assert control.scale(decode=3, prefill=1) == ["start decode-1", "start decode-2"]
    assert not control.core.state().is_settled
    assert control.register("decode-2") == ["accept decode-2", "publish prefill-0 decode-0 decode-2"]
    assert control.register("decode-1") == ["accept decode-1", "publish prefill-0 decode-0 decode-1 decode-2"]
    assert control.core.state().is_settled
    assert control.core.sizes == {"prefill": 1, "decode": 3}


def test_scaling_down_drains_the_highest_first_and_then_stops() -> None:
    control = settled({"prefill": 1, "decode": 3})
    assert control.scale(decode=1) == ["publish prefill-0 decode-0 decode-1(draining) decode-2(draining)"]
    assert [pool.ready for pool in control.core.state().pools] == [1, 1]
    assert control.empty("decode-1") == ["publish prefill-0 decode-0 decode-2(draining)", "stop decode-1"]
    assert control.left("decode-1") == []
    assert control.stopped("decode-1") == []
    assert control.empty("decode-2") == ["publish prefill-0 decode-0", "stop decode-2"]
    assert control.phases() == {"prefill-0": "ready", "decode-0": "ready", "decode-2": "stopping", "gateway": "ready"}
    assert control.exited("decode-2", "exit status 0") == []
    assert control.stopped("decode-2") == []
    assert control.core.state().is_settled


def test_every_gateway_must_be_empty() -> None:
    control = settled({"decode": 2})
    other = GatewayId("g2")
    control(events.GatewayJoined(other, "127.0.0.1:8471", 8))
    control.scale(decode=1)
    assert control.empty("decode-1") == []
    incarnation = control.core.membership().members[1].info.incarnation
    assert control(events.WorkerEmpty(GatewayId("unknown"), WorkerId("decode-1"), incarnation)) == []
    assert control(events.WorkerEmpty(other, WorkerId("decode-1"), incarnation)) == [
        "publish decode-0",
        "stop decode-1",
    ]


def test_a_drain_that_takes_too_long_ends() -> None:
    control = settled({"decode": 2})
    control.scale(decode=1)
    assert control.core.next_wakeup() == control.now + DRAIN_TIMEOUT_S
    assert control.tick(DRAIN_TIMEOUT_S) == ["publish decode-0", "stop decode-1"]


def test_a_drain_with_a_deadline_of_its_own_ends_then() -> None:
    control = settled({"decode": 2})
    assert control(events.Drain(WorkerId("decode-0"), 2.5)) == ["publish decode-0(draining) decode-1"]
    assert control.core.next_wakeup() == control.now + 2.5
    assert control.tick(2.0) == []
    assert control.tick(0.5) == ["publish decode-1", "stop decode-0"]


def test_a_worker_that_is_wanted_again_while_it_drains_comes_back_as_a_new_incarnation() -> None:
    control = settled({"decode": 2})
    control.scale(decode=1)
    assert control.scale(decode=2) == []
    assert control.record("decode-1").phase == "draining"
    assert control.empty("decode-1") == ["publish decode-0", "stop decode-1"]
    assert control.stopped("decode-1") == ["start decode-1"]
    assert control.register("decode-1", 2) == ["accept decode-1", "publish decode-0 decode-1"]


def test_a_worker_that_is_wanted_again_while_it_stops_is_started_again() -> None:
    control = settled({"decode": 2})
    control.scale(decode=1)
    control.empty("decode-1")
    assert control.scale(decode=2) == []
    assert control.stopped("decode-1") == ["start decode-1"]


def test_a_worker_that_does_not_run_is_not_drained() -> None:
    control = settled({"decode": 1})
    control.scale(decode=3)
    control.failed("decode-2")
    assert control.scale(decode=1) == ["stop decode-2 decode-1"]
    assert control.register("decode-1") == ["reject decode-1: it is being stopped"]
    assert control.stopped("decode-2", "decode-1") == []
    assert control.phases() == {"decode-0": "ready", "gateway": "ready"}


def test_an_operator_s_drain_replaces_the_worker() -> None:
    control = settled({"decode": 2})
    assert control(events.Drain(WorkerId("decode-0"))) == ["publish decode-0(draining) decode-1"]
    assert control.empty("decode-0") == ["publish decode-1", "stop decode-0"]
    assert control.stopped("decode-0") == ["start decode-0"]


def test_a_draining_worker_that_dies_is_gone() -> None:
    control = settled({"decode": 2})
    control.scale(decode=1)
    assert control.left("decode-1") == []
    assert control.exited("decode-1") == ["publish decode-0", "stop decode-1"]
    assert control.stopped("decode-1") == []


def test_a_draining_worker_whose_line_broke_drains_on() -> None:
    control = settled({"decode": 2})
    control.scale(decode=1)
    control.left("decode-1")
    assert control.register("decode-1") == ["accept decode-1"]
    assert control.record("decode-1").phase == "draining"
    assert control.register("decode-1", 2) == [
        "reject decode-1: the process that it replaces was draining",
        "publish decode-0",
        "stop decode-1",
    ]


@pytest.mark.parametrize(
    ("request_", "field", "message"),
    [
        (ScaleRequest(sizes={"decode": 0}), "sizes.decode", "expected 1 to 1024 workers; got 0"),
        (ScaleRequest(sizes={"decode": 1025}), "sizes.decode", "expected 1 to 1024 workers; got 1025"),
        (ScaleRequest(sizes={"decode": 2, "colocated": 1}), "sizes.colocated", "this cluster has prefill, decode"),
        (ScaleRequest(sizes={}), "sizes", "name at least one pool of prefill, decode"),
        (DrainRequest(worker_id=WorkerId("x")), "worker_id", "there is no x; there is prefill-0, decode-0, decode-1"),
        (
            DrainRequest(worker_id=WorkerId("decode-1")),
            "worker_id",
            "decode-1 is lost; only a worker that is ready can be drained",
        ),
        (
            DrainRequest(worker_id=WorkerId("prefill-0")),
            "worker_id",
            "prefill-0 is the only ready worker of its pool; make the pool larger first",
        ),
        *(
            (
                DrainRequest(worker_id=WorkerId("decode-0"), deadline_s=deadline_s),
                "deadline_s",
                f"expected 0 to 86400 seconds; got {deadline_s:g}",
            )
            for deadline_s in (-1.0, float("nan"), float("inf"))
        ),
    ],
)
def test_what_cannot_be_followed_is_refused_with_the_field(request_: ControlRequest, field: str, message: str) -> None:
    control = settled({"prefill": 1, "decode": 2})
    control.exited("decode-1")
    refused = control.core.refusal(request_)
    assert refused is not None
    assert (refused.field, refused.message) == (field, message)


def test_what_can_be_followed_is_not_refused() -> None:
    control = settled({"prefill": 1, "decode": 2})
    for request in (ScaleRequest(sizes={"decode": 1}), DrainRequest(worker_id=WorkerId("decode-0")), StateRequest()):
        assert control.core.refusal(request) is None


# ---------------------------------------------------------------- losses


def test_a_worker_that_dies_leaves_the_membership_and_is_started_again() -> None:
    control = settled({"prefill": 1, "decode": 1})
    assert control.left("decode-0") == []
    assert control.exited("decode-0") == ["publish prefill-0"]
    record = control.record("decode-0")
    assert (record.phase, record.detail) == ("lost", "killed by SIGKILL")
    assert control.tick(1) == ["stop decode-0"]
    assert control.stopped("decode-0") == ["start decode-0"]
    assert control.register("decode-0", 2) == ["accept decode-0", "publish prefill-0 decode-0"]
    assert control.core.state().is_settled


def test_a_worker_whose_line_broke_stays_a_member_and_may_come_back() -> None:
    control = settled({"decode": 1})
    assert control.left("decode-0") == []
    assert control.record("decode-0").phase == "lost"
    assert control.register("decode-0") == ["accept decode-0"]
    assert control.record("decode-0").num_starts == 1
    assert control.core.next_wakeup() is None


def test_a_worker_that_does_not_come_back_is_stopped_and_started_anew() -> None:
    control = settled({"decode": 1})
    control.left("decode-0")
    assert control.tick(LOST_GRACE_S) == ["publish", "stop decode-0"]
    assert control.stopped("decode-0") == ["start decode-0"]


def test_a_life_that_the_launcher_started_replaces_the_lost_one() -> None:
    control = settled({"decode": 1})
    control.left("decode-0")
    assert control.register("decode-0", 2) == ["accept decode-0", "publish decode-0"]
    assert control.record("decode-0").num_starts == 2
    assert control.left("decode-0", 1) == []
    assert control.record("decode-0").phase == "ready"


def test_a_new_life_may_be_seen_before_the_end_of_the_old_one() -> None:
    control = settled({"decode": 1})
    assert control.register("decode-0", 2) == ["accept decode-0", "publish decode-0"]
    assert control.left("decode-0", 1) == []
    assert control.core.state().is_settled


def test_a_lost_worker_that_is_not_wanted_any_more_drains() -> None:
    """It may live, and gateways may have sequences there."""
    control = settled({"decode": 3})
    control.left("decode-1")
    control.exited("decode-2")
    assert control.scale(decode=1) == ["publish decode-0 decode-1(draining)", "stop decode-2"]


# ---------------------------------------------------------------- the gateway


def test_a_gateway_that_dies_is_started_again_where_clients_know_it() -> None:
    control = settled({"prefill": 1, "decode": 2})
    control.exited("decode-1")
    assert control(events.GatewayLeft(GATEWAY_ID)) == []
    assert control.exited("gateway", "exit status 3") == []
    assert control.phases()["gateway"] == "lost"
    assert control.core.state().gateways[0].detail == "exit status 3"
    assert control.tick(1) == ["stop gateway", "stop decode-1"]
    assert control(events.GatewayStopped()) == [f"gateway prefill-0 decode-0 at {ADDRESS}"]
    assert control.joined() == ["publish prefill-0 decode-0"]


def test_it_is_known_by_both_addresses() -> None:
    control = settled({"decode": 1})
    control(events.GatewayJoined(GATEWAY_ID, ADDRESS, 7, "127.0.0.1:8471"))
    (gateway,) = control.core.state().gateways
    assert (gateway.address, gateway.http_address) == (ADDRESS, "127.0.0.1:8471")
    control.exited("gateway")
    (gateway,) = control.core.state().gateways
    assert (gateway.address, gateway.http_address) == ("", "")
    assert control.tick(1) == ["stop gateway"]
    (started,) = control.core.handle(events.GatewayStopped(), control.now)
    assert isinstance(started, events.StartGateway)
    assert (started.address, started.http_address) == (ADDRESS, "127.0.0.1:8471")


def test_a_gateway_whose_line_broke_may_come_back() -> None:
    control = settled({"decode": 2})
    control(events.GatewayLeft(GATEWAY_ID))
    control.scale(decode=1)
    assert control.record("decode-1").phase == "draining", "it cannot be asked, and may have sequences there"
    assert control.joined() == ["publish decode-0 decode-1(draining)"]
    assert control.empty("decode-1") == ["publish decode-0", "stop decode-1"]


def test_a_gateway_that_cannot_start_is_told_and_tried_again() -> None:
    control = Driver({"colocated": 1})
    control.tick()
    control.register("colocated-0")
    control(events.GatewayStartFailed("port 1 is taken"))
    (gateway,) = control.core.state().gateways
    assert (gateway.phase, gateway.detail, gateway.address) == ("failed", "port 1 is taken", "")
    assert control.exited("gateway", "exit status 1") == []
    assert control.tick(1) == ["stop gateway"]
    assert control(events.GatewayStopped()) == ["gateway colocated-0"]


def test_without_a_gateway_nothing_needs_to_drain() -> None:
    control = Driver({"decode": 2})
    control.tick()
    control.register("decode-0")
    control.register("decode-1")
    assert control.scale(decode=1)[-1] == "stop decode-1"


# ---------------------------------------------------------------- a controller that comes back


def test_running_processes_are_adopted_and_gateways_keep_what_they_know_until_then() -> None:
    control = Driver({"prefill": 1, "decode": 2}, running={"prefill-0", "decode-0", "decode-5", "gateway"})
    assert control.tick() == ["start decode-1", "stop decode-5"]
    assert control.phases() == {
        "prefill-0": "lost",
        "decode-0": "lost",
        "decode-1": "starting",
        "decode-5": "stopping",
        "gateway": "lost",
    }
    assert control.joined() == []
    assert control.register("prefill-0") == ["accept prefill-0"]
    assert control.register("decode-0") == ["accept decode-0", "publish prefill-0 decode-0"]
    assert control.stopped("decode-5") == []
    assert control.register("decode-1") == ["accept decode-1", "publish prefill-0 decode-0 decode-1"]
    assert control.core.state().is_settled
    assert [record.num_starts for record in control.core.state().workers] == [1, 1, 1]


def test_adopting_ends_and_who_did_not_register_is_started_anew() -> None:
    control = Driver({"decode": 2}, running={"decode-0", "decode-1", "gateway"})
    control.tick()
    control.joined()
    control.register("decode-0")
    assert control.tick(ADOPT_GRACE_S) == ["publish decode-0", "stop decode-1"]
    assert control.stopped("decode-1") == ["start decode-1"]


@pytest.mark.parametrize("gateway_first", [True, False])
def test_a_drain_goes_on_under_the_next_controller(gateway_first: bool) -> None:
    control = Driver({"decode": 2}, running={"decode-0", "decode-1", "gateway"})
    control.tick()
    if gateway_first:
        assert control.joined(draining=["decode-0.1"]) == []
        control.register("decode-0")
        assert control.register("decode-1") == ["accept decode-1", "publish decode-0(draining) decode-1"]
    else:
        control.register("decode-0")
        assert control.register("decode-1") == ["accept decode-1", "publish decode-0 decode-1"]
        assert control.joined(draining=["decode-0.1"]) == ["publish decode-0(draining) decode-1"]
    refused = control.core.refusal(DrainRequest(worker_id=WorkerId("decode-1")))
    assert refused is not None
    assert refused.message == "decode-1 is the only ready worker of its pool; make the pool larger first"
    assert control.empty("decode-0") == ["publish decode-1", "stop decode-0"]
    assert control.stopped("decode-0") == ["start decode-0"]
    assert control.register("decode-0", 2) == ["accept decode-0", "publish decode-0 decode-1"]
    assert control.core.state().is_settled
    assert control.core._drains == set()


def test_a_drain_of_another_life_or_of_a_stranger_is_forgotten() -> None:
    control = Driver({"decode": 2}, running={"decode-0", "decode-1", "gateway"})
    control.tick()
    control.joined(draining=["decode-0.1", "decode-1.1", "decode-7.1"])
    assert control.register("decode-0", 2) == ["accept decode-0"]
    assert control.register("decode-1", 1) == ["accept decode-1", "publish decode-0 decode-1(draining)"]
    assert control.core._drains == set()


def test_a_gateway_whose_line_broke_says_nothing_new() -> None:
    control = settled({"decode": 2})
    control.drain("decode-0")
    assert control.joined(draining=["decode-0.1"]) == ["publish decode-0(draining) decode-1"]
    control.empty("decode-0")
    control.stopped("decode-0")
    control.register("decode-0", 2)
    assert control.joined(draining=["decode-0.1"]) == ["publish decode-0 decode-1"]


def test_an_adopted_gateway_that_does_not_follow_is_started_anew() -> None:
    control = Driver({"decode": 1}, running={"decode-0", "gateway"})
    control.tick()
    control.register("decode-0")
    assert control.tick(LOST_GRACE_S) == ["stop gateway"]
    assert control(events.GatewayStopped()) == ["gateway decode-0"]


# ---------------------------------------------------------------- always


def test_a_transition_that_is_not_in_the_table_changes_nothing() -> None:
    worker = Worker(WorkerId("w"), "decode", 0)
    with pytest.raises(ValueError, match=r"^w: starting -> draining$"):
        worker.enter("draining")
    assert worker.phase == "starting"


EVENTS = st.one_of(
    st.tuples(st.just("register"), st.integers(0, 2), st.integers(1, 3)),
    st.tuples(st.just("left"), st.integers(0, 2), st.integers(1, 3)),
    st.tuples(st.just("empty"), st.integers(0, 2), st.integers(1, 3)),
    st.tuples(st.sampled_from(["exited", "failed"]), st.integers(0, 2)),
    st.tuples(st.just("scale"), st.integers(1, 3)),
    st.tuples(st.just("tick"), st.sampled_from([0.0, 1.0, 30.0, 400.0])),
    st.tuples(st.sampled_from(["joined", "gateway left", "gateway exited", "launcher"])),
    st.tuples(st.just("joined with drains"), st.integers(0, 2), st.integers(1, 3)),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(EVENTS, max_size=40), st.sets(st.sampled_from(["decode-0", "decode-2", "gateway"])))
def test_whatever_happens_it_settles_when_things_work_again(
    happens: list[tuple[object, ...]], running: set[str]
) -> None:
    control = Driver({"decode": 2}, running)
    asked: list[str] = control.tick()

    def happen(what: object, *arguments: object) -> list[str]:
        match what:
            case "register" | "left" | "empty":
                return list(getattr(control, str(what))(f"decode-{arguments[0]}", arguments[1]))
            case "exited" | "failed":
                return list(getattr(control, str(what))(f"decode-{arguments[0]}"))
            case "scale":
                return control.scale(decode=int(str(arguments[0])))
            case "tick":
                return control.tick(float(str(arguments[0])))
            case "joined":
                return control.joined()
            case "joined with drains":
                return control.joined(draining=[f"decode-{arguments[0]}.{arguments[1]}"])
            case "gateway left":
                return control(events.GatewayLeft(GATEWAY_ID))
            case "gateway exited":
                return control.exited("gateway")
            case _:
                return launch()

    def launch() -> list[str]:
        """The launcher does what it was asked."""
        answers: list[str] = []
        for line in list(asked):
            asked.remove(line)
            if line == "stop gateway":
                answers += control(events.GatewayStopped())
            elif line.startswith("stop "):
                answers += control.stopped(*line.split()[1:])
        return answers

    for event in happens:
        asked += happen(*event)
    incarnation = 10
    for _ in range(20):
        while any(line.startswith("stop ") for line in asked):
            asked += launch()
        incarnation += 1
        for name, phase in control.phases().items():
            if phase in ("starting", "lost", "failed"):
                asked += control.joined() if name == "gateway" else control.register(name, incarnation)
            elif phase == "draining":
                asked += control.tick(DRAIN_TIMEOUT_S)
        asked += control.tick(MAX_BACKOFF_S)
    state = control.core.state()
    assert state.is_settled, control.phases()
    assert [pool.ready for pool in state.pools] == [control.core.sizes["decode"]]
    assert len(control.core.membership().members) == control.core.sizes["decode"]


# ---------------------------------------------------------------- several gateways


def joined(control: Driver, name: str, incarnation: int = 1) -> list[str]:
    gateway_id = GatewayId(f"{name}.{incarnation}")
    return control(events.GatewayJoined(gateway_id, ADDRESS, 7, "127.0.0.1:8471", name=name))


def two_gateways() -> Driver:
    control = Driver({"decode": 1}, gateways=2)
    control.tick()
    assert control.register("decode-0")[1] == "gateway decode-0"
    assert control.phases() == {"decode-0": "ready", "gateway": "starting"}
    assert joined(control, "gateway") == [f"gateway-1 decode-0 at {ADDRESS}", "publish decode-0"]
    assert not control.core.state().is_settled
    joined(control, "gateway-1")
    assert control.core.state().is_settled
    return control


def test_further_gateways_start_where_the_first_one_listens() -> None:
    control = two_gateways()
    gateways = control.core.state().gateways
    assert [(gateway.name, gateway.phase, gateway.address) for gateway in gateways] == [
        ("gateway", "ready", ADDRESS),
        ("gateway-1", "ready", ADDRESS),
    ]


@pytest.mark.parametrize(("dead", "other"), [("gateway", "gateway-1"), ("gateway-1", "gateway")])
def test_a_gateway_among_several_is_started_again_alone(dead: str, other: str) -> None:
    control = two_gateways()
    assert control(events.GatewayLeft(GatewayId(f"{dead}.1"))) == []
    assert control.exited(dead, "killed") == []
    phases = {gateway.name: gateway.phase for gateway in control.core.state().gateways}
    assert phases == {dead: "lost", other: "ready"}
    assert control.tick(1) == [f"stop {dead}"]
    assert control(events.GatewayStopped(dead)) == [f"{dead} decode-0 at {ADDRESS}"]
    joined(control, dead, 2)
    assert control.core.state().is_settled


def test_while_one_of_several_gateways_is_lost_no_worker_counts_as_empty() -> None:
    control = Driver({"decode": 2}, gateways=2)
    control.tick()
    control.register("decode-0")
    control.register("decode-1")
    joined(control, "gateway")
    joined(control, "gateway-1")
    control(events.GatewayLeft(GatewayId("gateway-1.1")))
    control.scale(decode=1)
    incarnation = control.core.membership().members[1].info.incarnation
    empty = [events.WorkerEmpty(GatewayId(f"{name}.1"), WorkerId("decode-1"), incarnation) for name in ("gateway",)]
    assert [control(event) for event in empty] == [[]]
    joined(control, "gateway-1")
    stops = control(events.WorkerEmpty(GatewayId("gateway-1.1"), WorkerId("decode-1"), incarnation))
    assert stops == ["publish decode-0", "stop decode-1"]


def test_a_controller_that_comes_back_adopts_all_gateways() -> None:
    control = Driver({"decode": 1}, running=("decode-0", "gateway", "gateway-1", "gateway-2"), gateways=2)
    assert control.tick() == ["stop gateway-2"]  # there are to be two
    control.register("decode-0")
    joined(control, "gateway-1")
    joined(control, "gateway")
    assert control.core.state().is_settled


def test_one_that_cannot_start_does_not_stop_the_others() -> None:
    control = two_gateways()
    control.exited("gateway-1")
    control.tick(1)
    control(events.GatewayStopped("gateway-1"))
    control(events.GatewayStartFailed("no memory", "gateway-1"))
    gateways = {gateway.name: (gateway.phase, gateway.detail) for gateway in control.core.state().gateways}
    assert gateways == {"gateway": ("ready", ""), "gateway-1": ("failed", "no memory")}
