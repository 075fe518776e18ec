"""Several models in one cluster: the configuration, what each process gets of it, and what the controller decides."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import msgspec
import pytest

from disagg.cluster.config.cluster_config import (
    MAX_MODELS,
    active_pools,
    models_of,
    override,
    parse_config,
    unused_pools,
)
from disagg.cluster.control.autoscalers import Autoscalers, of_model, together
from disagg.cluster.control.changes import compare
from disagg.cluster.control.plan import ClusterPlan, gateway_config, plan_cluster, router_configs
from disagg.cluster.control.plans import Plans, check_served
from disagg.cluster.core import events
from disagg.cluster.core.gateways import is_gateway
from disagg.cluster.core.rollout import Plan, Target
from disagg.cluster.core.workers import split_worker_id
from disagg.gateway.config import ModelSource
from disagg.proto.autoscaling import AutoscalerState, Decision, LoadReport, PoolDecision, WorkerSample
from disagg.proto.control import (
    ApplyRequest,
    ControlRequest,
    ControlState,
    DrainRequest,
    PoolState,
    ScaleRequest,
    WorkerRecord,
)
from disagg.proto.errors import ConfigError
from disagg.proto.ids import GatewayId, Incarnation, WorkerId
from disagg.proto.messages import KvLayout
from tests.support.control import ADDRESS, GATEWAY_ID, Driver, make_info, succeeding

FAKE = {"path": "fake"}
LAYOUT = KvLayout.dense(num_layers=1, num_kv_heads=1, head_dim=1, dtype="fake", bytes_per_token=4)
TWO: dict[str, Any] = {
    "models": {
        "a": {"model": {**FAKE, "name": "org/a.1"}, "pools": {"decode": {"size": 2}}, "slo": {"ttft_ms": 100}},
        "b": {"model": FAKE, "mode": "colocated", "placement": {"policy": "random"}},
    },
    "slo": {"tpot_ms": 50},
}
SIZES = {"a/prefill": 1, "a/decode": 1, "b/prefill": 1, "b/decode": 1}


def plan_of(raw: dict[str, Any]) -> ClusterPlan:
    return plan_cluster(parse_config(raw), (0, 1, 2, 3))


def changed(**entries: dict[str, Any]) -> dict[str, Any]:
    """`TWO` with other entries of its models."""
    return {**TWO, "models": {**TWO["models"], **entries}}


# ---------------------------------------------------------------- the configuration


def test_pools_are_named_after_their_model() -> None:
    config = parse_config(TWO)
    assert [(name, pool.size) for name, pool in active_pools(config)] == [
        ("a/prefill", 1),
        ("a/decode", 2),
        ("b/colocated", 1),
    ]
    assert parse_config(msgspec.json.decode(msgspec.json.encode(config))) == config
    assert [name for name, _ in active_pools(parse_config({}))] == ["prefill", "decode"]


def test_each_model_is_a_configuration_of_its_own() -> None:
    alone = models_of(parse_config(TWO))
    assert [(key, one.model.served_name, one.mode) for key, one in alone.items()] == [
        ("a", "org/a.1", "disaggregated"),
        ("b", "b", "colocated"),
    ]
    assert [(one.slo.ttft_ms, one.slo.tpot_ms, one.placement.policy) for one in alone.values()] == [
        (100, None, "auto"),
        (None, 50, "random"),
    ]
    one = parse_config({"model": FAKE})
    assert models_of(one) == {"": one}


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({**TWO, "model": {"dtype": "float32"}}, "model: is not used beside models; set models.<key>.model of each"),
        ({**TWO, "mode": "elastic"}, "mode: is not used beside models"),
        ({**TWO, "pools": {"decode": {"size": 2}}}, "pools: is not used beside models"),
        (
            {"models": {f"m{i}": {"model": FAKE} for i in range(17)}},
            f"models: at most {MAX_MODELS} in one cluster; got 17",
        ),
        ({"models": {"a/b": {}}}, "models: a key has letters, digits, _ and -"),
        ({"models": {"a.b": {}}}, "models: a key has letters, digits, _ and -"),
        ({"models": {"a" * 33: {}}}, "models: a key has letters, digits, _ and -, at most 32"),
        ({"models": {1: {}}}, "models: a key has letters"),
        ({"models": ["a"]}, "models: expected a mapping of names to sections; got \\['a'\\]"),
        (
            changed(b={"model": {**FAKE, "name": "org/a.1"}}),
            "models.b.model.name: org/a.1 is the name of models.a already",
        ),
        (changed(b={"model": FAKE, "pool": {}}), "models.b.pool: unknown key, did you mean 'pools'"),
        (changed(b={"model": FAKE, "pools": {"decode": {"size": 0}}}), "models.b.pools.decode.size: "),
        (
            changed(b={"model": FAKE, "pools": {"decode": {"device": "tpu"}}}),
            "models.b.pools.decode.device: expected cpu",
        ),
        (
            changed(b={"model": FAKE, "pools": {"decode": {"scheduling": "static"}}}),
            "models.b.pools.decode.scheduling: static is for mode colocated",
        ),
        (
            changed(b={"model": FAKE, "mode": "elastic", "placement": {"decodes": "auto"}}),
            "models.b.placement.decodes: auto is for a cluster of one model",
        ),
        ({**TWO, "autoscaler": {"enabled": True}}, "models.a.pools.prefill.max_size: autoscaler.enabled needs"),
    ],
)
def test_mistakes_name_the_path_of_their_key(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        parse_config(raw)


def test_values_are_overridden_by_their_path() -> None:
    config = override(parse_config(TWO), {"models.a.pools.decode.size": 3})
    assert dict(active_pools(config))["a/decode"].size == 3


def test_pools_that_a_model_does_not_use_are_noted() -> None:
    config = parse_config(changed(b={"model": FAKE, "mode": "colocated", "pools": {"decode": {"size": 2}}}))
    assert unused_pools(config) == (
        "models.b.pools.decode: not used in mode colocated, which has models.b.pools.colocated",
    )


# ---------------------------------------------------------------- what each process gets


def test_workers_get_their_model_and_cores_of_their_own() -> None:
    workers = plan_of(TWO).workers
    assert [(worker.worker_id, worker.roles, worker.cores) for worker in workers] == [
        ("a/prefill-0", ("prefill",), (0,)),
        ("a/decode-0", ("decode",), (1,)),
        ("a/decode-1", ("decode",), (2,)),
        ("b/colocated-0", ("prefill", "decode"), (3,)),
    ]


def test_the_gateway_gets_all_models_and_a_router_for_each() -> None:
    config = parse_config(TWO)
    infos = [make_info("a/prefill-0"), make_info("a/decode-0")]
    gateway = gateway_config(config, {"a": "/a", "b": "/b"}, infos)
    assert gateway.models == (
        ModelSource(key="a", name="org/a.1", path="/a", prefix_root="org/a.1", max_model_len=100),
        ModelSource(key="b", name="b", path="/b", prefix_root="b", max_model_len=None),
    )
    assert {key: (router.policy, router.ttft_slo_s) for key, router in router_configs(config).items()} == {
        "a": ("joint", 0.1),
        "b": ("random", None),
    }


def test_a_gateway_gets_no_workers_of_a_model_that_is_being_added() -> None:
    """It would take them for connected, and its router of that model, which comes later, would not have them."""
    infos = [make_info(name) for name in ("a/prefill-0", "b/colocated-0", "c/prefill-0")]
    assert plan_of(TWO).gateway(infos).workers == tuple(infos[:2])
    one = plan_of({"model": FAKE}).gateway([make_info("prefill-0")])
    assert one.workers == (make_info("prefill-0"),)


def test_a_layout_keeps_the_cores_of_other_workers() -> None:
    plans = Plans(plan_of(TWO))
    grown = plans.worker("a/decode", 4, "")[0]
    assert (grown.worker_id, len(grown.cores)) == ("a/decode-4", 1)
    assert [worker.worker_id for worker in plans.workers] == ["a/prefill-0", "a/decode-0", "b/colocated-0"]


@pytest.mark.parametrize(
    ("name", "pool"), [("a/decode-3", ("a/decode", 3)), ("decode-3", ("decode", 3)), ("a/other-3", (None, 0))]
)
def test_names_of_workers_have_the_model(name: str, pool: tuple[str | None, int]) -> None:
    assert split_worker_id(WorkerId(name)) == pool


def test_a_model_called_gateway_has_workers_and_no_gateways() -> None:
    assert [is_gateway(name) for name in ("gateway", "gateway-1", "gateway-x/decode-1", "gateway/decode-1")] == [
        True,
        True,
        False,
        False,
    ]


# ---------------------------------------------------------------- the controller


def test_workers_of_different_models_need_not_fit() -> None:
    control = settled_of_two()
    control.exited("b/decode-0")
    control.tick(60.0)
    control.stopped("b/decode-0")
    assert control.register("b/decode-0", 2, fingerprint="of a")[0] == (
        "reject b/decode-0: it runs another model (of a) than b/prefill-0 (of b)"
    )


def settled_of_two() -> Driver:
    control = Driver(SIZES)
    control.tick()
    for name in SIZES:
        assert control.register(f"{name}-0", fingerprint=f"of {name[0]}")[0] == f"accept {name}-0"
    control.joined()
    assert control.core.state().is_settled
    return control


def test_the_first_gateway_waits_for_every_model_and_a_later_one_for_some_model() -> None:
    control = Driver(SIZES)
    control.tick()
    for name in ("a/prefill-0", "a/decode-0", "b/prefill-0"):
        assert control.register(name, fingerprint=name[0])[-1].startswith("publish")
    assert "gateway a/prefill-0 a/decode-0 b/prefill-0 b/decode-0" in control.register("b/decode-0", fingerprint="b")
    control.joined()
    control.exited("b/decode-0")
    control.exited("gateway")
    control.tick(1.0)
    again = f"gateway a/prefill-0 a/decode-0 b/prefill-0 at {ADDRESS}"
    assert again in control(events.GatewayStopped())


def test_a_pool_of_a_model_is_resized_by_its_name() -> None:
    control = settled_of_two()
    assert control(events.Scale({"b/decode": 2})) == ["start b/decode-1"]
    assert {pool.name: pool.desired for pool in control.core.state().pools} == {**SIZES, "b/decode": 2}


# ---------------------------------------------------------------- another configuration


def changing_b() -> Driver:
    """A rollout of one pool of b, whose first new worker starts."""
    control = settled_of_two()
    old = control.core.target
    new = msgspec.structs.replace(old, generation=2, config_hashes={**old.config_hashes, "b/decode": "d2"})
    assert control(events.Apply(Plan(old=old, new=new, ready_timeout_s=60.0))) == ["start b/decode-1 as d2"]
    return control


def finish_b(control: Driver) -> None:
    control.register("b/decode-1", fingerprint="of b")
    assert control.empty("b/decode-0")[-1] == "stop b/decode-0"
    assert control.stopped("b/decode-0") == ["start b/decode-0 as d2"]
    control.register("b/decode-0", 2, fingerprint="of b")
    assert control.empty("b/decode-1")[-1] == "stop b/decode-1"
    control.stopped("b/decode-1")


def test_a_rollout_of_one_model_lets_the_other_be_resized_and_drained() -> None:
    control = changing_b()
    for request in (ScaleRequest(sizes={"a/decode": 2}), DrainRequest(worker_id=WorkerId("a/decode-0"))):
        refused = control.core.refusal(request)
        assert refused is None or "is the only ready worker of its pool" in refused.message
    assert control(events.Scale({"a/decode": 2})) == ["start a/decode-1"]
    assert control.saved is not None
    assert control.saved.plan is not None
    assert [target.sizes["a/decode"] for target in (control.saved.plan.old, control.saved.plan.new)] == [2, 2]
    control.register("a/decode-1", fingerprint="of a")
    assert control.core.refusal(DrainRequest(worker_id=WorkerId("a/decode-0"))) is None
    assert control.drain("a/decode-0")[0].startswith("publish a/prefill-0 a/decode-0(draining)")
    finish_b(control)
    state = control.core.state()
    assert (state.generation, state.rollout) == (2, None), "it does not wait for what drains of the other model"
    assert {pool.name: pool.desired for pool in state.pools} == {**SIZES, "a/decode": 2}
    assert control.empty("a/decode-0")[-1] == "stop a/decode-0"
    assert control.stopped("a/decode-0") == ["start a/decode-0"]


def test_a_rollout_that_is_taken_back_keeps_the_sizes_of_the_other_model() -> None:
    control = changing_b()
    control(events.Scale({"a/decode": 2}))
    control.register("a/decode-1", fingerprint="of a")
    assert control.tick(60.0) == ["stop b/decode-1"]
    control(events.Scale({"a/prefill": 2}))
    control.register("a/prefill-1", fingerprint="of a")
    assert control.stopped("b/decode-1") == []
    state = control.core.state()
    assert (state.generation, state.rollout, state.is_settled) == (1, None, True)
    assert control.core.target.sizes == {**SIZES, "a/decode": 2, "a/prefill": 2}


def test_the_next_controller_has_the_sizes_that_were_set_during_a_rollout() -> None:
    before = changing_b()
    before(events.Scale({"a/decode": 2}))
    control = succeeding(before, ["a/prefill-0", "a/decode-0", "b/prefill-0", "b/decode-0", "b/decode-1"])
    assert {pool.name: pool.desired for pool in control.core.state().pools} == {**SIZES, "a/decode": 2, "b/decode": 2}
    assert (control.core.is_changing("a/decode"), control.core.is_changing("b/prefill")) == (False, True)


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (ScaleRequest(sizes={"b/prefill": 2}), "sizes"),
        (ScaleRequest(sizes={"a/decode": 2, "b/decode": 2}), "sizes"),
        (DrainRequest(worker_id=WorkerId("b/prefill-0")), "worker_id"),
        (ApplyRequest(config=b"{}"), "file"),
    ],
)
def test_a_rollout_holds_up_what_concerns_its_own_model_and_any_other_rollout(
    request_: ControlRequest, field: str
) -> None:
    refused = changing_b().core.refusal(request_)
    assert refused is not None
    assert (refused.field, refused.message) == (
        field,
        "generation 2 of the configuration is being applied (b); try again after that, see `disagg status`",
    )


def test_a_rollout_is_of_the_models_of_which_anything_differs() -> None:
    old = Target(generation=1, sizes={"a/decode": 1, "b/decode": 1}, config_hashes={"a/decode": "", "b/decode": ""})
    replaced = msgspec.structs.replace(old, config_hashes={"a/decode": "", "b/decode": "d2"})
    resized = msgspec.structs.replace(replaced, sizes={"a/decode": 2, "b/decode": 1})
    other_mode = Target(
        generation=2, sizes={"a/workers": 1, "b/decode": 1}, config_hashes={"a/workers": "", "b/decode": ""}
    )
    found = [Plan(old=old, new=new).models for new in (old, replaced, resized, other_mode)]
    assert found == [frozenset(), {"b"}, {"a", "b"}, {"a"}]


def applied(after: dict[str, Any]) -> Any:
    plans = Plans(plan_of(TWO))
    request = ApplyRequest(config=msgspec.json.encode(parse_config(after)))
    return plans.plan(request, plans.target(1), 1)


def test_what_differs_of_one_model_replaces_its_workers_only() -> None:
    reply, plan, _ = applied(changed(b={**TWO["models"]["b"], "pools": {"colocated": {"num_blocks": 9}}}))
    (change,) = reply.changes
    assert (change.field, change.how, change.detail) == (
        "models.b.pools.colocated.num_blocks",
        "replaces workers",
        "b/colocated",
    )
    assert (plan.replaced, plan.changes_all("b"), plan.changes_all("a")) == (("b/colocated",), True, False)


def test_settings_of_one_model_are_changed_in_place() -> None:
    reply, plan, _ = applied(changed(a={**TWO["models"]["a"], "slo": None, "placement": {"migrations": 0}}))
    assert [(change.how, plan.is_needed) for change in reply.changes] == [("in place", False)] * len(reply.changes)


def test_a_model_comes_with_its_pools_and_another_one_goes_with_its_own() -> None:
    reply, plan, new = applied({**TWO, "models": {"a": TWO["models"]["a"], "c": {"model": {**FAKE, "name": "org/c"}}}})
    assert [(change.field, change.before, change.after, change.how) for change in reply.changes] == [
        ("models.b", '"b"', "null", "in place"),
        ("models.c", "null", '"org/c"', "in place"),
    ]
    assert (plan.added, plan.removed, plan.replaced) == (("c/prefill", "c/decode"), ("b/colocated",), ())
    assert (plan.models, plan.exchanges_models) == ({"b", "c"}, True)
    assert list(new.model_paths) == ["a", "c"]


def test_pinned_models_behind_one_that_goes_move_up() -> None:
    reply, plan, _ = applied({**TWO, "models": {"b": TWO["models"]["b"]}})
    assert (plan.removed, plan.replaced) == (("a/prefill", "a/decode"), ("b/colocated",))
    assert reply.pools == ("b/colocated", "a/prefill", "a/decode")


def test_a_model_that_no_gateway_could_read_does_not_come(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "vocab_size": 8, "max_position_embeddings": 8}')
    with pytest.raises(ConfigError, match=r"^models\.c\.model\.path: .*tokenizer\.json: cannot be read"):
        check_served(None, str(tmp_path), "models.c.model.path")


def test_a_file_of_one_model_and_one_of_several_are_different_clusters() -> None:
    with pytest.raises(ConfigError, match=r"^model"):
        applied({"model": FAKE})
    found = compare(parse_config(TWO), parse_config({"model": FAKE}))
    assert {change.field: change.how for change in found if change.field.startswith("models.")} == {
        "models.a": "refused",
        "models.b": "refused",
    }


def test_a_model_that_comes_is_served_before_the_rollout_is_over() -> None:
    control = settled_of_two()
    old = control.core.target
    sizes, hashes = {**SIZES, "c/prefill": 1, "c/decode": 2}, {**old.config_hashes, "c/prefill": "p", "c/decode": "d"}
    new = Target(generation=2, sizes=sizes, config_hashes=hashes)
    assert control(events.Apply(Plan(old=old, new=new))) == ["start c/prefill-0 as p", "start c/decode-0 as d"]
    assert (rollout := control.core.state().rollout) is not None
    assert rollout.next == "", "no worker stands in where none is replaced"
    assert control.register("c/prefill-0", fingerprint="of c")[0] == "accept c/prefill-0"
    lines = control.register("c/decode-0", fingerprint="of c")
    assert lines[:3] == ["accept c/decode-0", "configure 2", "start c/decode-1 as d"]
    control.register("c/decode-1", fingerprint="of c")
    rollout = control.core.state().rollout
    assert rollout is not None
    assert (rollout.stage, rollout.doing) == ("finishing", "waits for the gateways to serve other models")
    control(events.SettingsFollowed(GATEWAY_ID, 1))
    assert control.core.state().rollout is not None
    control(events.SettingsFollowed(GATEWAY_ID, 2))
    state = control.core.state()
    assert (state.generation, state.rollout, state.is_settled) == (2, None, True)


def test_a_model_that_goes_is_refused_before_its_workers_drain() -> None:
    control = settled_of_two()
    old = control.core.target
    left = {name: size for name, size in SIZES.items() if name.startswith("a/")}
    new = Target(generation=2, sizes=left, config_hashes=dict.fromkeys(left, ""))
    assert control(events.Apply(Plan(old=old, new=new))) == [
        "configure 2",
        "publish a/prefill-0 a/decode-0 b/prefill-0(draining) b/decode-0(draining)",
    ]
    assert (rollout := control.core.state().rollout) is not None
    assert rollout.doing == "b/prefill-0, b/decode-0 leave"
    control(events.SettingsFollowed(GATEWAY_ID, 2))
    assert control.empty("b/prefill-0")[-1] == "stop b/prefill-0"
    assert control.empty("b/decode-0")[-1] == "stop b/decode-0"
    control.stopped("b/prefill-0", "b/decode-0")
    state = control.core.state()
    assert (state.generation, state.rollout, state.is_settled) == (2, None, True)
    assert {pool.name for pool in state.pools} == set(left)


def test_a_model_whose_first_workers_fail_does_not_come() -> None:
    control = settled_of_two()
    control(events.SettingsFollowed(GATEWAY_ID, 1))
    old = control.core.target
    new = Target(
        generation=2, sizes={**SIZES, "c/colocated": 1}, config_hashes={**old.config_hashes, "c/colocated": "w"}
    )
    assert control(events.Apply(Plan(old=old, new=new, ready_timeout_s=5.0))) == ["start c/colocated-0 as w"]
    assert control.tick(5.0) == ["stop c/colocated-0"]
    control.stopped("c/colocated-0")
    state = control.core.state()
    assert (state.generation, state.rollout, state.is_settled) == (1, None, True)


# ---------------------------------------------------------------- the autoscalers


def test_batches_leave_room_for_the_strictest_targets_of_the_models() -> None:
    plan = plan_of(TWO)
    gateway = gateway_config(plan.config, plan.model_paths, [])
    assert (gateway.ttft_target_s, gateway.tpot_target_s) == (0.1, 0.05)


def test_an_autoscaler_sees_one_model() -> None:
    state = ControlState(
        pools=tuple(PoolState(name=name, desired=1, ready=1) for name in SIZES),
        workers=(
            WorkerRecord(worker_id=WorkerId("a/decode-0"), pool="a/decode", phase="ready"),
            WorkerRecord(worker_id=WorkerId("b/decode-0"), pool="b/decode", phase="ready"),
        ),
        gateways=(),
    )
    seen = of_model(state, "b")
    assert [pool.name for pool in seen.pools] == ["prefill", "decode"]
    assert [(worker.worker_id, worker.pool) for worker in seen.workers] == [("b/decode-0", "decode")]
    assert of_model(state, "") is state


def test_an_autoscaler_sizes_pools_by_the_workers_of_its_model(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    # A decode pool is as full as its workers, whose names have the key.
    pools = {kind: {"max_size": 4} for kind in ("prefill", "decode")}
    models = {key: {"model": {**FAKE, "name": key}, "pools": pools} for key in ("a", "b")}
    config = parse_config({"models": models, "autoscaler": {"enabled": True, "policy": "threshold"}})
    state = ControlState(
        pools=tuple(PoolState(name=name, desired=1, ready=1) for name in SIZES), workers=(), gateways=()
    )

    async def decide() -> list[dict[str, int]]:
        resized: list[dict[str, int]] = []
        decided: asyncio.Queue[AutoscalerState] = asyncio.Queue()

        async def resize(sizes: dict[str, int]) -> None:
            resized.append(sizes)

        scalers = Autoscalers(config, lambda: state, resize, decided.put_nowait, lambda: 1000.0)
        for key, used in (("a", 700), ("b", 1000)):
            sample = WorkerSample(
                WorkerId(f"{key}/decode-0"), Incarnation("i"), 1000, 16, 64, 512, LAYOUT, blocks_used=used
            )
            other = msgspec.structs.replace(sample, worker_id=WorkerId(f"{key}/prefill-0"), blocks_used=700)
            report = LoadReport(model=key, num_arrived=0, num_queued=0, num_running=0, workers=(sample, other))
            scalers.report(GatewayId("g"), report)
        looks = asyncio.create_task(scalers.run())
        shown = None
        while shown is None or len(shown.pools) < len(SIZES):
            shown = (await decided.get()).decision
        looks.cancel()
        await asyncio.gather(looks, return_exceptions=True)
        return resized

    monkeypatch.setattr(
        "disagg.cluster.control.autoscaler_runner.asyncio.sleep", lambda delay_s, sleep=asyncio.sleep: sleep(0)
    )
    assert {tuple(sizes.items()) for sizes in asyncio.run(decide())} == {(("b/decode", 2),)}
    assert caplog.messages[0].startswith("pool b/decode is resized from 1 to 2: KV use 100%")


def test_decisions_about_all_models_are_shown_together() -> None:
    def decided(wanted: int) -> AutoscalerState:
        pool = PoolDecision(name="decode", size=1, wanted=wanted, reason="r", change="c")
        decision = Decision(pools=(pool,), requests_per_s=2.0)
        return AutoscalerState(
            policy="p", dry_run=False, decision=decision, age_s=wanted, changes={"decode up": wanted}
        )

    all_of_them = together({"a": decided(2), "b": decided(3)})
    assert all_of_them.decision is not None
    assert (all_of_them.decision.sizes, all_of_them.decision.requests_per_s) == ({"a/decode": 2, "b/decode": 3}, 4.0)
    assert (all_of_them.age_s, all_of_them.changes) == (3, {"a/decode up": 2, "b/decode up": 3})
    assert together({"": decided(2)}) == decided(2)
