import pytest

from disagg.proto.ids import AttemptKey, RequestId, WorkerId
from disagg.proto.messages import BlocksSnapshot, Load
from disagg.router.placement.fleet import Fleet
from disagg.router.placement.model_groups import longest_of
from disagg.router.placement.placement import Demand
from disagg.router.workers.assignments import Assignment
from tests.support.placing import Placing, busy, samples
from tests.support.router import routed_request, worker_info, worker_report

P, D = WorkerId("p0"), WorkerId("d0")
K0, K1 = AttemptKey(RequestId("r0"), 0), AttemptKey(RequestId("r1"), 0)


def fleet(*names: str) -> Fleet:
    return Placing("least_loaded", *names).fleet


def test_the_longest_sequence_is_that_of_the_best_pair_or_whole_worker() -> None:
    small, large = worker_info("p0", max_model_len=100), worker_info("p1", max_model_len=300)
    assert longest_of([], False) == 0
    assert longest_of([small, large], True) == 0
    assert longest_of([small, large, worker_info("d0", max_model_len=200)], False) == 200
    assert longest_of([small, large, worker_info("d0", max_model_len=400)], False) == 300
    assert longest_of([small, large, worker_info("d0", max_model_len=400)], True) == 400
    assert longest_of([small, worker_info("d0", fingerprint="b")], False) == 0
    assert longest_of([small, worker_info("d0"), worker_info("c0", max_model_len=150)], False) == 150


@pytest.mark.parametrize(
    ("names", "missing"),
    [((), "decode"), (("p0",), "decode"), (("d0",), "prefill"), (("p0", "d0"), None), (("c0",), None)],
)
def test_missing_role(names: tuple[str, ...], missing: str | None) -> None:
    assert fleet(*names).missing_role() == missing


def test_candidates_join_assignments_index_and_reports() -> None:
    it = fleet("p0", "d0")
    request = routed_request("r0", 64)
    snapshot = BlocksSnapshot(hashes=request.block_hashes)
    assert it.report(worker_report("p0", 0, snapshot, load=Load(blocks_active=3, blocks_reserved=4)), 0.0)
    it.open(it.worker(P), K0, Assignment(tokens=10, blocks=5), 0)
    it.open(it.worker(D), K0, Assignment(blocks=6), 0)
    ((p0,), (d0,), colocated, local, _, _) = it.shortlists(Demand(num_tokens=64), request.block_hashes, (), 0.0)[0]
    assert (colocated, local) == ([], False)
    # All four blocks match, but the last token is always computed.
    assert (p0.worker.worker_id, p0.cached_tokens, p0.worker.outstanding_tokens, p0.worker.used_blocks) == (
        P,
        48,
        10,
        12,  # Seven that were held before it was assigned there, and its five.
    )
    assert (d0.worker.worker_id, d0.cached_tokens, d0.worker.outstanding_tokens, d0.worker.used_blocks) == (D, 0, 0, 6)
    assert it.shortlists(Demand(num_tokens=65), request.block_hashes, {D}, 0.0)[0].decodes == []
    assert it.shortlists(Demand(num_tokens=65), request.block_hashes, (), 0.0)[0].prefills[0].cached_tokens == 64


def test_a_worker_that_greets_twice_in_one_life_keeps_what_is_known() -> None:
    it = fleet("d0")
    request = routed_request("r0", 32)
    it.report(worker_report("d0", 0, BlocksSnapshot(hashes=request.block_hashes), load=Load(num_running=2)), 0.0)
    it.open(it.worker(D), K0, Assignment(blocks=3), 0)
    it.up(worker_info("d0", max_model_len=50), 0.0)
    assert it.views(0.0)[0].load.num_running == 2
    assert it.index.match(request.block_hashes) == {D: 2}
    assert (it.worker(D).used_blocks, it.worker(D).info.max_model_len) == (3, 50)
    assert it.check_integrity() == []


def test_a_lost_worker_is_forgotten_and_the_others_stay() -> None:
    it = fleet("p0", "d0", "d1")
    hashes = routed_request("r0").block_hashes
    it.report(worker_report("d0", 0, BlocksSnapshot(hashes=hashes)), 0.0)
    it.report(worker_report("d1", 0, BlocksSnapshot(hashes=hashes[:2])), 0.0)
    it.lost(D)
    assert (it.incarnation(D), it.incarnation(P)) == (None, "1")
    assert it.index.match(hashes) == {"d1": 2}
    assert [view.info.worker_id for view in it.views(0.0)] == ["d1", "p0"]
    it.lost(WorkerId("d1"))
    assert (len(it.index), it.longest_sequence) == (0, 0)


def test_integrity_sees_assignments_of_an_unknown_worker() -> None:
    it = fleet("p0")
    it.assignments.open(D, K0, Assignment())
    assert it.check_integrity() == ["assignments of d0, which is not present"]


# ---------------------------------------------------------------- progress within a prompt


def test_a_report_tells_how_far_a_prompt_is() -> None:
    it = fleet("p0", "d0")
    worker = it.worker(P)
    it.open(worker, K0, Assignment(tokens=100, pairs=5050), 0)
    assert worker.outstanding_tokens == 100
    # The worker may not have heard of it when it wrote this.
    it.report(worker_report("p0", 1, load=Load(uncomputed_prompt_tokens=0)), 0.0)
    assert worker.outstanding_tokens == 100
    it.report(worker_report("p0", 2, load=Load(uncomputed_prompt_tokens=40)), 0.0)
    assert worker.outstanding_tokens == 40
    # 40 * 5050 / 100 query-key pairs are left
    assert worker.backlog_ms == pytest.approx(
        40 * worker.prefill_token_ms + 2020 * worker.attended_ms + 40 / worker.prompt_room * worker.around_ms
    )
    it.open(worker, K1, Assignment(tokens=50, pairs=1275), 1)
    assert worker.outstanding_tokens == 90
    it.report(worker_report("p0", 3, load=Load(uncomputed_prompt_tokens=20)), 0.0)
    assert worker.outstanding_tokens == 70
    it.computed(P, K0, 0.0)
    assert (worker.outstanding_tokens, it.assignments.of_worker(P).tokens) == (50, 50)
    it.close(P, K1)
    it.close(P, K0)
    assert worker.outstanding_tokens == 0


def test_a_report_with_a_new_prompt_takes_nothing_back_of_the_progress_before_it() -> None:
    """The router cannot see whether a report includes what was assigned since the one before."""
    it = fleet("p0", "d0")
    worker = it.worker(P)
    it.open(worker, K0, Assignment(tokens=100, pairs=5050), 0)
    it.report(worker_report("p0", 1, load=Load(uncomputed_prompt_tokens=100)), 0.0)
    it.report(worker_report("p0", 2, load=Load(uncomputed_prompt_tokens=30)), 0.0)
    assert worker.outstanding_tokens == 30
    it.open(worker, K1, Assignment(tokens=50, pairs=1275), 1)
    it.report(worker_report("p0", 3, load=Load(uncomputed_prompt_tokens=70)), 0.0)
    assert worker.outstanding_tokens == 80
    it.report(worker_report("p0", 4, load=Load(uncomputed_prompt_tokens=70)), 0.0)
    assert worker.outstanding_tokens == 70
    # A worker that begins a prompt anew has more to compute than before.
    it.report(worker_report("p0", 5, load=Load(uncomputed_prompt_tokens=150)), 0.0)
    assert worker.outstanding_tokens == 150


def test_openings_are_counted_when_a_slot_frees() -> None:
    it = fleet("p0", "d0")
    worker = it.worker(P)
    before = it.num_openings
    it.open(worker, K0, Assignment(tokens=300), 0)
    assert (it.has_opening, it.num_openings) == (False, before)
    it.report(worker_report("p0", 1, load=Load(uncomputed_prompt_tokens=300)), 0.0)
    it.report(worker_report("p0", 2, load=Load(uncomputed_prompt_tokens=256)), 0.0)
    assert (it.has_opening, it.num_openings) == (False, before)
    it.report(worker_report("p0", 3, load=Load(uncomputed_prompt_tokens=255)), 0.0)
    assert (it.has_opening, it.num_openings) == (True, before + 1)
    assert it.check_integrity() == []


def test_the_backlog_of_those_that_compute_prompts() -> None:
    exact = samples(base_ms=0.0, prefill_token_ms=1.0, decode_ms=1.0)
    it = Placing("joint", busy(worker_info("p0", calibration=exact)), busy(worker_info("p1", calibration=exact)), "d0")
    assert it.fleet.backlog() == (0.0, 2)
    it.fleet.open(it.fleet.worker(P), K0, Assignment(tokens=100), 0)
    backlog_ms, num_workers = it.fleet.backlog()
    assert (round(backlog_ms), num_workers) == (100, 2)
    fastest = it.fleet.fastest()
    assert fastest is not None
    assert fastest.worker_id == "p1"
    it.fleet.computed(P, K0, 0.0)
    assert it.fleet.backlog()[0] == pytest.approx(0.0)
