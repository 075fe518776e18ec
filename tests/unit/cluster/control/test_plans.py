"""Plans of a cluster's generations: hashes of configurations, what is saved, what is refused before it changes."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from disagg.cluster.config.cluster_config import active_pools, parse_config
from disagg.cluster.control.plan import ClusterPlan, plan_cluster
from disagg.cluster.control.plans import MAX_PLANS, Plans, SavedState, check_served, config_hash_of
from disagg.cluster.core import events
from disagg.cluster.core.adapters import Base
from disagg.cluster.core.core import ControlCore, Settings
from disagg.cluster.core.rollout import Desired, Plan, Target
from disagg.proto.control import AdapterRecord, ApplyReply, ApplyRequest, PoolName
from disagg.proto.errors import ConfigError
from tests.support.tiny_models import make_checkpoint

FAKE: dict[str, Any] = {"model": {"path": "fake"}}


def cluster_plan(raw: dict[str, Any]) -> ClusterPlan:
    return plan_cluster(parse_config({**FAKE, **raw}), (0, 1, 2, 3))


def requested(raw: dict[str, Any], **options: Any) -> ApplyRequest:
    return ApplyRequest(config=msgspec.json.encode(parse_config({**FAKE, **raw})), **options)


def planned(plans: Plans, raw: dict[str, Any], **options: Any) -> tuple[ApplyReply, Plan, ClusterPlan]:
    return plans.plan(requested(raw, **options), plans.target(1), 1)


def test_only_the_pool_that_differs_is_replaced() -> None:
    plans = Plans(cluster_plan({}))
    reply, plan, new = planned(plans, {"pools": {"decode": {"num_blocks": 64}}})
    assert (reply.pools, plan.replaced, plan.changes_all()) == (("decode",), ("decode",), False)
    assert [change.field for change in reply.changes] == ["pools.decode.num_blocks"]
    assert (plan.old.generation, plan.new.generation) == (1, 2)
    plans.add(2, new)
    old, _ = plans.worker("decode", 0, plan.old.config_hashes["decode"])
    fresh, _ = plans.worker("decode", 0, plan.new.config_hashes["decode"])
    assert (old.num_blocks, fresh.num_blocks) == (None, 64)
    assert fresh.config_hash == plan.new.config_hashes["decode"] != old.config_hash


def test_other_sizes_move_no_worker_to_other_cores() -> None:
    plans = Plans(cluster_plan({}))
    before, _ = plans.worker("decode", 0, "")
    reply, plan, new = planned(plans, {"pools": {"prefill": {"size": 3}}})
    assert (reply.pools, plan.is_needed, plan.new.sizes) == ((), False, {"prefill": 3, "decode": 1})
    assert new.worker("decode", 0).cores == before.cores == (1,)
    assert new.worker("prefill", 1).cores == (2,)


def test_more_threads_of_one_pool_move_the_cores_of_the_other() -> None:
    plans = Plans(cluster_plan({}))
    reply, _, new = planned(plans, {"pools": {"prefill": {"num_threads": 2}}})
    assert reply.pools == ("prefill", "decode")
    assert (new.worker("prefill", 0).cores, new.worker("decode", 0).cores) == ((0, 1), (2,))


def test_sizes_that_an_operator_set_stay_where_the_file_does_not_differ() -> None:
    plans = Plans(cluster_plan({"pools": {"decode": {"size": 2}}}))
    running = msgspec.structs.replace(plans.target(1), sizes={"prefill": 4, "decode": 5})
    raw: dict[str, Any] = {"pools": {"decode": {"size": 3}}}
    _, plan, _ = plans.plan(requested(raw), running, 1)
    assert plan.new.sizes == {"prefill": 4, "decode": 3}


@pytest.mark.parametrize(("enabled", "size"), [(True, 0), (False, 2)])
def test_a_pool_that_the_autoscaler_emptied_gets_the_size_of_the_file_without_it(enabled: bool, size: int) -> None:
    raw: dict[str, Any] = {
        "autoscaler": {"enabled": True},
        "pools": {"prefill": {"max_size": 4}, "decode": {"size": 2, "min_size": 0, "max_size": 4}},
    }
    plans = Plans(cluster_plan(raw))
    running = msgspec.structs.replace(plans.target(1), sizes={"prefill": 3, "decode": 0})
    pools = raw["pools"] if enabled else {"decode": {"size": 2}}
    new: dict[str, Any] = {"autoscaler": {"enabled": enabled}, "pools": pools}
    _, plan, _ = plans.plan(requested(new), running, 1)
    assert plan.new.sizes == {"prefill": 3, "decode": size}


def test_without_surge_an_empty_pool_has_no_worker_to_replace() -> None:
    raw: dict[str, Any] = {
        "autoscaler": {"enabled": True},
        "pools": {"prefill": {"max_size": 4}, "decode": {"min_size": 0, "max_size": 4}},
    }
    plans = Plans(cluster_plan(raw))
    running = msgspec.structs.replace(plans.target(1), sizes={"prefill": 1, "decode": 0})
    raw["pools"]["decode"]["num_blocks"] = 64
    reply, plan, _ = plans.plan(requested(raw, surge=False), running, 1)
    assert (reply.pools, plan.new.sizes) == (("decode",), {"prefill": 1, "decode": 0})


class ChangedMeanwhile(Plans):
    """Plans with a core whose sizes change while one is made, the first `num_changes` times."""

    def __init__(self, num_changes: int) -> None:
        super().__init__(cluster_plan({}))
        settings = Settings(drain_timeout_s=1.0, lost_grace_s=1.0)
        self.core = ControlCore({}, settings, desired=Desired(target=self.target(1)))
        self.num_changes = num_changes
        self.num_plans = 0

    def plan(self, request: ApplyRequest, running: Target, latest: int) -> tuple[ApplyReply, Plan, ClusterPlan]:
        self.num_plans += 1
        if self.num_plans <= self.num_changes:
            self.core.handle(events.Scale({"decode": 1 + self.num_plans}), 0.0)
        return super().plan(request, running, latest)


def test_sizes_that_change_while_an_apply_is_planned_are_kept() -> None:
    plans = ChangedMeanwhile(num_changes=MAX_PLANS - 1)
    _, plan, _ = asyncio.run(plans.plan_present(requested({}, restart=True), plans.core))
    assert plans.num_plans == MAX_PLANS
    assert plan.old.sizes == plan.new.sizes == {"prefill": 1, "decode": MAX_PLANS}


def test_an_apply_is_refused_where_something_changes_all_the_time() -> None:
    plans = ChangedMeanwhile(num_changes=MAX_PLANS)
    with pytest.raises(ConfigError, match=r"^file: the sizes or the generation of the cluster changed 3 times"):
        asyncio.run(plans.plan_present(requested({}, restart=True), plans.core))
    assert plans.num_plans == MAX_PLANS


def test_a_restart_replaces_workers_though_nothing_differs() -> None:
    plans = Plans(cluster_plan({}))
    reply, plan, new = planned(plans, {}, restart=True)
    assert (reply.changes, reply.pools, plan.changes_all()) == ((), ("prefill", "decode"), True)
    plans.add(2, new)
    again = plans.plan(requested({}), plan.new, 2)[0]
    assert again.pools == ()
    assert [config.restarts for config in plans.workers] == [0, 0, 1, 1]
    assert (plans.keep([2]), plans.keep([2])) == (True, False)
    assert [(config.worker_id, config.restarts) for config in plans.workers] == [("prefill-0", 1), ("decode-0", 1)]


def test_what_is_saved_gives_the_same_plans() -> None:
    plans = Plans(cluster_plan({"pools": {"prefill": {"size": 2}}}))
    raw: dict[str, Any] = {"pools": {"prefill": {"size": 3, "num_blocks": 64}}}
    _, plan, new = planned(plans, raw)
    plans.add(2, new)
    desired = Desired(target=plan.old, plan=plan, latest=2)
    saved = msgspec.json.decode(msgspec.json.encode(plans.saved(desired)), type=SavedState)
    again = Plans(cluster_plan(raw), saved)
    assert saved.desired == desired
    assert again.configured == 1
    for generation in (1, 2):
        for pool, _ in active_pools(new.config):
            assert config_hash_of(again[generation], pool) == config_hash_of(plans[generation], pool)
    plans.keep([1])
    with pytest.raises(KeyError):
        plans[2]


def test_adapters_are_saved_with_the_plans() -> None:
    raw = {"adapters": {"folder": "/adapters", "models": {"filed": "filed"}}}
    plans = Plans(cluster_plan(raw))
    assert plans.bases == {"": Base("fake", {"filed": "filed"}, "/adapters")}
    plans.adapters.follow(plans.bases)
    mine = AdapterRecord(name="mine", path="mine", model="", folder="/adapters")
    plans.adapters.ready(mine, "ab" * 32, 10)
    saved = msgspec.json.decode(msgspec.json.encode(plans.saved(Desired(target=plans.target(1)))), type=SavedState)
    again = Plans(cluster_plan(raw), saved)
    assert again.adapters.records == plans.adapters.records
    assert [each.adapter.name for each in again.adapters.served] == ["mine"]
    assert Plans(cluster_plan({})).bases == {"": Base("fake")}


@pytest.mark.parametrize(
    ("raw", "options", "message"),
    [
        ({"gateway": {"port": 7}}, {}, "gateway.port: the gateway reads it when it starts"),
        ({"pools": {"decode": {"num_blocks": 9}}}, {"surge": False}, "pools.decode.size: without a surge worker"),
        ({"model": {"path": "/nowhere/m", "name": "fake"}}, {}, "model"),
    ],
)
def test_a_refusal_names_the_field(raw: dict[str, Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        planned(Plans(cluster_plan({})), raw, **options)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"{", "the configuration: no JSON"),
        (b"[]", "the configuration: expected a mapping"),
        (json.dumps({"pools": {"decode": {"sise": 1}}}).encode(), "pools.decode.sise: unknown key"),
    ],
)
def test_a_configuration_is_checked_where_it_arrives(raw: bytes, message: str) -> None:
    plans = Plans(cluster_plan({}))
    with pytest.raises(ConfigError, match=message):
        plans.plan(ApplyRequest(config=raw), plans.target(1), 1)


def test_another_mode_has_other_pools() -> None:
    plans = Plans(cluster_plan({}))
    raw: dict[str, Any] = {"mode": "elastic"}
    reply, plan, _ = planned(plans, raw)
    pools: tuple[PoolName, ...] = ("workers", "prefill", "decode")
    assert (reply.pools, plan.changes_all(), plan.new.sizes) == (pools, True, {"workers": 2})


@pytest.mark.parametrize(
    ("file", "change", "what"),
    [
        ("tokenizer.json", {"version": "2.0"}, "tokenizer"),
        ("config.json", {"max_position_embeddings": 4096}, "context length"),
        ("generation_config.json", {"eos_token_id": 257}, "set of end tokens"),
        ("tokenizer_config.json", {"chat_template": "{{ messages }}"}, "chat template"),
    ],
)
def test_a_version_that_a_gateway_would_read_differently_is_refused(
    tmp_path: Path, file: str, change: dict[str, Any], what: str
) -> None:
    first = make_checkpoint("llama", tmp_path / "a")
    second = tmp_path / "b"
    shutil.copytree(first, second)
    check_served(str(first), str(second))
    path = second / file
    raw = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**raw, **change}))
    (second / "chat_template.jinja").unlink(missing_ok=True)
    with pytest.raises(ConfigError, match=rf"^model\.path: .* has another {what} than"):
        check_served(str(first), str(second))
