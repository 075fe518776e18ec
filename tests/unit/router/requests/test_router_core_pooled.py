"""Requests that end with a vector of their prompt: one worker that computes prompts runs them."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from disagg.proto.ids import RequestId, WorkerId
from disagg.proto.messages import End, Pooling, StepUpdate, WorkerInfo
from disagg.router.api import Completion, RoutedRequest
from disagg.router.config import RouterConfig
from disagg.router.requests.events import Finish, FromWorker
from tests.support.router import EMPTY, PLAIN, Scenario, end_update, routed_request, worker_info

POOLING = Pooling(kind="last", dimensions=2)
VECTOR = b"\0\0\0\0\0\0\x80?"
JOINT = RouterConfig(policy="joint")


def pooled(request_id: str, num_tokens: int = 64) -> RoutedRequest:
    request = routed_request(request_id, num_tokens, max_tokens=1)
    return msgspec.structs.replace(request, pooling=POOLING)


def computed(request_id: str, attempt: int = 0) -> StepUpdate:
    end = End(request_id=RequestId(request_id), attempt=attempt, reason="stop", cached_tokens=16, vector=VECTOR)
    return StepUpdate(ends=(end,))


def finish_of(core: Scenario, worker_id: str, request_id: str, attempt: int = 0) -> Completion:
    event = FromWorker(WorkerId(worker_id), worker_info(worker_id).incarnation, computed(request_id, attempt))
    (finish,) = core.core.handle(event, core.now)
    assert isinstance(finish, Finish)
    assert core.core.check_integrity() == []
    return finish.completion


@pytest.mark.parametrize("config", [PLAIN, JOINT, RouterConfig(policy="random"), RouterConfig(policy="elastic")])
@pytest.mark.parametrize("workers", [("p0", "d0"), ("p0",), ("c0",), ("w0", "d0")])
def test_one_worker_that_computes_prompts_runs_it(config: RouterConfig, workers: Sequence[str]) -> None:
    core = Scenario(*workers, config=config)
    core.submit(pooled("a"))
    dispatch = core.dispatched["a/0"]
    assert (dispatch.worker_id, dispatch.message.decode_peer) == (workers[0], None)
    assert dispatch.message.spec.pooling == POOLING
    assert finish_of(core, workers[0], "a") == Completion("stop", 0, 16, VECTOR)
    assert core.core.holdings() == EMPTY
    (trace,) = core.core.recent(1)
    assert (trace.outcome, trace.marks[0].path, trace.num_output_tokens) == ("stop", "pooled", 0)
    assert (trace.prefill_worker, trace.decode_worker) == (workers[0], None)
    assert (trace.prefill_cached_tokens, trace.decode_cached_tokens) == (16, 0)


def test_a_worker_that_only_decodes_never_runs_it() -> None:
    core = Scenario("d0", config=RouterConfig(no_worker_grace_s=1.0))
    assert core.submit(pooled("a")) == ["fail a UnavailableError no_prefill_capacity"]
    assert core.core.holdings() == EMPTY


def test_a_prompt_may_be_as_long_as_a_worker_allows() -> None:
    core = Scenario(worker_info("p0", max_model_len=100), "d0")
    core.submit(pooled("a", 100))
    assert core.dispatched["a/0"].worker_id == "p0"
    core.submit(pooled("b", 101))
    assert str(core.errors["b"]).endswith("the prompt is too long: 101 tokens > 100 maximum")


def test_prompts_are_spread_by_load_and_by_cached_prefixes() -> None:
    core = Scenario("p0", "p1", "d0", config=JOINT)
    for name in "abcd":
        core.submit(pooled(name))
    assert sorted(core.dispatched[f"{name}/0"].worker_id for name in "abcd") == ["p0", "p0", "p1", "p1"]


def test_one_waits_for_a_slot_and_one_whose_worker_is_lost_goes_to_another() -> None:
    core = Scenario(worker_info("p0", token_budget=32), "d0")
    assert core.submit(pooled("a")) == ["dispatch p0 a/0 alone"]
    assert core.submit(pooled("b")) == []
    assert core.update("p0", computed("a")) == ["finish a stop 0 cached=16", "dispatch p0 b/0 alone"]
    assert core.up("p1") == []
    assert core.lost("p0") == ["dispatch p1 b/1 alone"]
    assert core.update("p1", computed("b", 1)) == ["finish b stop 0 cached=16"]
    assert core.core.holdings() == EMPTY


def test_one_that_is_cancelled_is_dropped_by_its_worker() -> None:
    core = Scenario("p0", "d0")
    core.submit(pooled("a"))
    assert core.cancel("a") == ["cancel p0 a/0", "fail a RequestCancelledError"]
    assert core.core.holdings() == EMPTY


def test_it_has_no_targets_and_does_not_change_the_expected_length_of_answers() -> None:
    core = Scenario("p0", "d0", config=RouterConfig(ttft_slo_s=0.001, tpot_slo_s=0.001, admission=True))
    core.submit(pooled("a"))
    assert core.dispatched["a/0"].message.spec.targets is None
    before = core.core._attempts.answer_tokens
    core.now = 5.0
    finish_of(core, "p0", "a")
    assert core.core._attempts.answer_tokens == before
    assert core.core.view(core.now).slos == {"ttft": (0, 0), "tpot": (0, 0), "both": (0, 0)}


def test_a_failed_one_is_tried_on_another_worker() -> None:
    core = Scenario("p0", "p1", "d0")
    core.submit(pooled("a"))
    first = core.dispatched["a/0"].worker_id
    core.update(first, end_update("a", 0, "failed", detail="step: broken"))
    second = core.dispatched["a/1"].worker_id
    assert {first, second} == {"p0", "p1"}
    assert finish_of(core, second, "a", 1).vector == VECTOR
    assert core.core.holdings() == EMPTY


def test_many_tenants_share_workers_that_do_not_decode() -> None:
    infos: list[WorkerInfo] = [worker_info("p0")]
    core = Scenario(*infos)
    assert core.core._fleet.num_places() == infos[0].max_num_seqs
    assert core.core._fleet.kv_room()[0] == 1024


def test_a_flood_of_one_tenant_does_not_hold_up_another() -> None:
    """A slot at a time: the chat of another tenant is next, whatever waits; then the tenants take turns."""
    config = msgspec.structs.replace(PLAIN, fair_quantum_tokens=1)
    core = Scenario(worker_info("c0", token_budget=32), config=config)
    for number in range(50):
        core.submit(msgspec.structs.replace(pooled(f"flood-{number}"), tenant="a"))
    assert list(core.dispatched) == ["flood-0/0"]
    chat = routed_request("chat", 64, max_tokens=1)
    core.submit(msgspec.structs.replace(chat, tenant="b"))
    core.submit(msgspec.structs.replace(pooled("text"), tenant="b"))
    assert core.update("c0", computed("flood-0")) == ["finish flood-0 stop 0 cached=16", "dispatch c0 chat/0 alone"]
    core.update("c0", end_update("chat", 0, "length"))
    (last,) = [key for key in core.dispatched if key not in ("flood-0/0", "chat/0")]
    assert last in ("flood-1/0", "text/0")
    core.update("c0", computed(last.split("/")[0]))
    assert {"flood-1/0", "text/0"} <= core.dispatched.keys()
    assert len(core.dispatched) == 4


def test_of_one_tenant_a_chat_with_a_target_is_before_its_vectors() -> None:
    core = Scenario(worker_info("c0", token_budget=32))
    for number in range(50):
        core.submit(pooled(f"flood-{number}"))
    chat = msgspec.structs.replace(routed_request("chat", 64, max_tokens=1), ttft_slo_s=1.0)
    core.submit(chat)
    assert core.update("c0", computed("flood-0")) == ["finish flood-0 stop 0 cached=16", "dispatch c0 chat/0 alone"]
