"""What a placement was among, as it is told afterwards."""

from __future__ import annotations

import pytest

from disagg.proto.ids import WorkerId
from disagg.proto.messages import Load
from disagg.router.config import RouterConfig
from disagg.router.placement.placement import Demand
from disagg.router.requests.explain import MAX_OPTIONS, Placed
from tests.support.placing import Placing, busy
from tests.support.router import worker_info, worker_report

DEMAND = Demand(num_tokens=64, reserve_tokens=16, output_tokens=10.0)


def options(it: Placing) -> list[tuple[str | None, str]]:
    choice = it.choose()
    assert choice is not None
    found = Placed(it.policy, DEMAND, choice).options()
    assert [option.cost for option in found] == sorted(option.cost for option in found)
    return [(option.prefill_worker, option.decode_worker) for option in found]


def test_all_pairs_are_told_the_chosen_one_first() -> None:
    it = Placing("least_loaded", busy("p0", seqs=1, tokens=64), "p1", busy("d0", seqs=1, used=30), "d1")
    assert options(it)[0] == ("p1", "d1")
    assert sorted(options(it)) == [("p0", "d0"), ("p0", "d1"), ("p1", "d0"), ("p1", "d1")]


def test_workers_alone_are_options_too() -> None:
    it = Placing("joint", "p0", "d0", "d1", config=RouterConfig(local_prefill="auto", watermark=0.0))
    assert sorted(options(it), key=str) == [("p0", "d0"), ("p0", "d1"), (None, "d0"), (None, "d1")]


def test_each_elastic_worker_is_an_option_alone_once_and_no_pair_with_itself() -> None:
    config = RouterConfig(policy="elastic", local_prefill="auto", watermark=0.0)
    it = Placing("elastic", "w0", "w1", config=config)
    assert sorted(options(it), key=str) == [("w0", "w1"), ("w1", "w0"), (None, "w0"), (None, "w1")]
    it = Placing("elastic", "w0", "d0", config=config)
    assert sorted(options(it), key=str) == [("w0", "d0"), (None, "d0"), (None, "w0")]


def test_the_chosen_option_is_the_decision_word_for_word() -> None:
    it = Placing("joint", "p0", busy("p1", seqs=1, tokens=64), "d0", "d1")
    choice = it.choose()
    assert choice is not None
    decision = Placed(it.policy, DEMAND, choice).decision()
    it.links.observe(choice.prefill.worker.worker_id, choice.decode.worker.worker_id, 1 << 20, 900.0)  # type: ignore[union-attr]
    (taken,) = (
        option
        for option in Placed(it.policy, DEMAND, choice).options()
        if (option.prefill_worker, option.decode_worker) == (decision.prefill_worker, decision.decode_worker)
    )
    fields = taken.__struct_fields__
    assert {name: getattr(taken, name) for name in fields} == {name: getattr(decision, name) for name in fields}
    assert (decision.policy, decision.num_options) == ("joint", 4)


def test_to_look_at_a_placement_fits_nothing() -> None:
    """Else what is predicted later would depend on who looked."""
    it = Placing("joint", "p0", "d0", "d1")
    choice = it.choose()
    assert choice is not None
    placed = Placed(it.policy, DEMAND, choice)
    before = placed.options()
    for decode in ("d0", "d1"):
        it.links.observe(WorkerId("p0"), WorkerId(decode), 1 << 20, 900.0)
    assert placed.options() == before
    it.choose()
    assert placed.options() != before


@pytest.mark.parametrize("load", [Load(blocks_total=64, blocks_cached=64), Load(blocks_total=64, blocks_apart=64)])
def test_what_a_prefill_pushes_out_is_part_of_the_delay(load: Load) -> None:
    it = Placing("joint", busy(worker_info("p0", num_blocks=64)), "d0")
    it.fleet.report(worker_report("p0", 1, load=load), 0.0)
    choice = it.choose(reuse=0.5, output_tokens=1.0)
    assert choice is not None
    option = Placed(it.policy, DEMAND, choice).decision()
    assert option.delay_ms > 0
    times = option.wait_ms + option.prefill_ms + option.transfer_ms + option.decode_ms
    assert option.cost == pytest.approx(times + option.delay_ms + option.barrier_ms)


def test_at_most_so_many_are_told() -> None:
    kinds = [worker_info(f"{role}{i}", fingerprint=f"model-{i}") for i in range(40) for role in "pd"]
    it = Placing("least_loaded", *(busy(kind) for kind in kinds))
    assert len(options(it)) == MAX_OPTIONS
