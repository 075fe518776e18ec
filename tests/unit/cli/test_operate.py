from __future__ import annotations

import io
from collections.abc import Iterator

import pytest
from rich.console import Console

from disagg.cli.operations import operate
from disagg.cli.operations.operate import parse_seconds
from disagg.client import ClusterState
from disagg.cluster.system.children import LaunchError
from disagg.proto.errors import ConfigError
from disagg.v1 import inference_pb2 as pb


def make_state(desired: int, **workers: str) -> ClusterState:
    """Workers of one pool: id -> phase."""
    found = [
        pb.WorkerState(worker_id=name.replace("_", "-"), phase=phase, incarnation=f"{name}.1")
        for name, phase in workers.items()
    ]
    ready = sum(phase == "ready" for phase in workers.values())
    return pb.GetClusterStateResponse(workers=found, pools=[pb.PoolState(name="decode", desired=desired, ready=ready)])


def test_sizes_of_a_command_line() -> None:
    assert operate.parse_sizes(["prefill=3", "decode=0"]) == {"prefill": 3, "decode": 0}


@pytest.mark.parametrize("texts", [["decode"], ["decode=x"], ["decode=-1"], ["=2"], ["decode=1", "decode=2"]])
def test_what_is_no_size_is_a_mistake(texts: list[str]) -> None:
    with pytest.raises(ConfigError, match=f"^{texts[-1]}: "):
        operate.parse_sizes(texts)


def test_an_address_without_a_port_is_a_mistake() -> None:
    with pytest.raises(ConfigError, match=r"^--address: expected host:port; got 'x'$"):
        operate.open_client("x")


def test_waiting_tells_each_change_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operate, "POLL_INTERVAL_S", 0)
    before = make_state(1, decode_0="ready", decode_1="lost")
    failed = make_state(2, decode_0="ready", decode_1="failed")
    failed.workers[1].detail = "no [weights]"
    again = make_state(2, decode_0="ready", decode_1="ready")
    again.workers[0].incarnation = "another"
    states: Iterator[ClusterState] = iter([failed, failed, make_state(2, decode_0="ready", decode_1="starting"), again])
    out = io.StringIO()
    operate.wait_settled(lambda: next(states), before, Console(file=out, width=80), wait_s=100)
    assert out.getvalue() == (
        "  failed    decode-1 (no [weights])\n  starting  decode-1\n  ready     decode-0\n  ready     decode-1\n"
    )


def test_who_left_is_told() -> None:
    out = io.StringIO()
    before, after = make_state(1, decode_0="ready", decode_1="stopping"), make_state(1, decode_0="ready")
    operate.wait_settled(lambda: after, before, Console(file=out), wait_s=0)
    assert out.getvalue() == "  gone      decode-1\n"


def test_waiting_ends() -> None:
    state = make_state(2, decode_0="ready", decode_1="starting")
    with pytest.raises(LaunchError, match=r"^not done after 0 s: decode-1 is starting; it goes on$"):
        operate.wait_settled(lambda: state, state, Console(file=io.StringIO()), wait_s=0)


def test_what_becomes_of_other_models_is_not_waited_for() -> None:
    names = ("a/decode", "b/decode")
    workers = [pb.WorkerState(worker_id=f"{name}-0", phase="ready", incarnation="1") for name in names]
    pools = [pb.PoolState(name=name, ready=1, desired=1) for name in names]
    state = pb.GetClusterStateResponse(pools=pools, workers=workers, rollout=pb.RolloutState(generation=2))
    state.workers[1].phase, state.pools[1].ready = "draining", 0
    assert [operate.is_settled(state, {key}) for key in ("a", "b")] == [True, False]
    assert not operate.is_settled(state)
    assert operate.workers_in(state, {"a"}) == {"a/decode-0": ("ready", "1")}
    assert list(operate.workers_in(state)) == ["a/decode-0", "b/decode-0"]


def test_one_model_is_not_settled_while_its_configuration_changes() -> None:
    state = make_state(1, decode_0="ready")
    assert operate.is_settled(state, {""})
    state.rollout.generation = 2
    assert not operate.is_settled(state, {""})


def test_a_cluster_whose_controller_is_away_is_not_settled() -> None:
    assert not operate.is_settled(pb.GetClusterStateResponse(workers=[pb.WorkerState(worker_id="decode-0")]))


def test_the_tables() -> None:
    state = make_state(2, decode_0="ready", decode_1="starting")
    state.workers[1].detail = "no node with [disagg.role]"
    state.queued_requests, state.running_requests = 1, 2
    out = io.StringIO()
    operate.show_state(state, Console(file=out, width=100))
    lines = [line.split() for line in out.getvalue().splitlines()]
    assert ["decode", "1", "2"] in lines
    assert ["decode-1", "starting", "0"] in lines
    assert "decode-1: no node with [disagg.role]" in out.getvalue()
    assert out.getvalue().endswith("2 requests run, 1 wait\n")


def test_what_a_ready_worker_is_left_out_of_is_shown_and_why_it_was_lost_once_is_not() -> None:
    state = make_state(2, prefill_0="ready", prefill_1="ready")
    state.workers[0].detail, state.workers[1].detail = "quarantined: prefill has been failing for 3 s", "it was lost"
    out = io.StringIO()
    operate.show_state(state, Console(file=out, width=120))
    assert "prefill-0: quarantined: prefill has been failing for 3 s\n" in out.getvalue()
    assert "it was lost" not in out.getvalue()


@pytest.mark.parametrize(
    ("text", "seconds"), [("30s", 30.0), ("2.5", 2.5), ("2min", 120.0), ("1 h", 3600.0), ("0", 0.0)]
)
def test_times_of_the_command_line(text: str, seconds: float) -> None:
    assert parse_seconds("--deadline", text) == seconds


@pytest.mark.parametrize("text", ["", "s", "-1s", "1e9", "30 sec", "nan", "1s2"])
def test_what_is_no_time_is_refused_by_the_name_of_its_option(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^--deadline: expected a time such as 30s or 2min; got "):
        parse_seconds("--deadline", text)


def test_notes_on_the_configuration_are_shown() -> None:
    state = make_state(1, decode_0="ready")
    state.notes.append("slo.tpot_ms is 30, and a decode step takes [60] ms")
    out = io.StringIO()
    operate.show_state(state, Console(file=out, width=120))
    assert "note slo.tpot_ms is 30, and a decode step takes [60] ms\n" in out.getvalue()


def test_load_that_is_left_out_is_not_shown_as_none() -> None:
    out = io.StringIO()
    state = pb.GetClusterStateResponse(
        workers=[pb.WorkerState(worker_id="decode-0", phase="ready", kv_blocks_total=100)],
        gateways=[pb.GatewayState(name="gateway", phase="ready")],
        autoscaler=pb.AutoscalerState(policy="threshold"),
        load_left_out=True,
    )
    operate.show_state(state, Console(file=out, width=120))
    assert ["decode-0", "ready", "100"] in [line.split() for line in out.getvalue().splitlines()]
    assert out.getvalue().endswith("\nload is shown to keys with the scope metrics or admin\n")
    assert "it has not decided" not in out.getvalue()
    assert "the controller does not answer" not in out.getvalue()


@pytest.mark.parametrize(
    ("tp", "pp", "ep", "text"),
    [
        (0, 0, False, ""),
        (1, 1, False, ""),
        (2, 1, False, "tp 2"),
        (1, 4, False, "pp 4"),
        (2, 4, False, "tp 2, pp 4"),
        (4, 2, True, "tp 4, pp 2, ep"),
    ],
)
def test_the_ranks_of_a_worker_are_named(tp: int, pp: int, ep: bool, text: str) -> None:
    assert operate.ranks_text(pb.WorkerState(tp=tp, pp=pp, ep=ep)) == text


def test_ranks_are_a_column_where_a_worker_has_several() -> None:
    state = make_state(1, decode_0="ready", prefill_0="ready")

    def shown() -> str:
        out = io.StringIO()
        operate.show_state(state, Console(file=out, width=120))
        return out.getvalue()

    assert "ranks" not in shown()
    state.workers[0].tp, state.workers[0].pp = 2, 4
    (header,) = [line.split() for line in shown().splitlines() if "ranks" in line]
    assert header[:4] == ["worker", "phase", "ranks", "pid"]
    (row,) = [line.split() for line in shown().splitlines() if line.startswith("decode-0")]
    assert row[:6] == ["decode-0", "ready", "tp", "2,", "pp", "4"]


class Forgetting:
    """A client whose workers are all told but one."""

    def __enter__(self) -> Forgetting:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def forget(self, tenant: str) -> tuple[list[str], list[str]]:
        return ["prefill-0", "prefill-1"], ["decode-0"] if tenant == "a" else []


def test_forget_names_workers_that_are_told_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operate, "open_client", lambda address: Forgetting())
    out = io.StringIO()
    operate.run_forget("x:1", "b", Console(file=out))
    operate.run_forget("x:1", "a", Console(file=out))
    assert out.getvalue().splitlines() == [
        "2 workers drop what they keep of it",
        "2 workers drop what they keep of it; told when they register: decode-0",
    ]
