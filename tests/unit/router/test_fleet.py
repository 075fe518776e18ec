import pytest

from disagg.proto.ids import AttemptKey, RequestId, WorkerId
from disagg.proto.messages import BlocksSnapshot, Load
from disagg.router.books import Booking
from disagg.router.fleet import Fleet, longest_of
from tests.support.router import routed_request, worker_info, worker_report

P, D = WorkerId("p0"), WorkerId("d0")
KEY = AttemptKey(RequestId("r0"), 0)


def fleet(*names: str) -> Fleet:
    made = Fleet()
    for name in names:
        made.up(worker_info(name))
    return made


def test_the_longest_sequence_is_that_of_the_best_pair_or_whole_worker() -> None:
    small, large = worker_info("p0", max_model_len=100), worker_info("p1", max_model_len=300)
    assert longest_of([]) == 0
    assert longest_of([small, large]) == 0
    assert longest_of([small, large, worker_info("d0", max_model_len=200)]) == 200
    assert longest_of([small, large, worker_info("d0", max_model_len=400)]) == 300
    assert longest_of([small, worker_info("d0", fingerprint="b")]) == 0
    assert longest_of([small, worker_info("d0"), worker_info("c0", max_model_len=150)]) == 150


@pytest.mark.parametrize(
    ("names", "missing"),
    [((), "decode"), (("p0",), "decode"), (("d0",), "prefill"), (("p0", "d0"), None), (("c0",), None)],
)
def test_missing_role(names: tuple[str, ...], missing: str | None) -> None:
    assert fleet(*names).missing_role() == missing


def test_candidates_join_books_index_and_reports() -> None:
    it = fleet("p0", "d0")
    request = routed_request("r0", 64)
    snapshot = BlocksSnapshot(hashes=request.block_hashes)
    assert it.report(worker_report("p0", 0, snapshot, load=Load(blocks_active=3, blocks_reserved=4)))
    it.books.open(P, KEY, Booking(tokens=10, blocks=5))
    it.books.open(D, KEY, Booking(blocks=6))
    p0, d0 = it.candidates(request.block_hashes, 64, without=())
    # All four blocks match, but the last token is always computed.
    assert (p0.worker_id, p0.cached_tokens, p0.outstanding_tokens, p0.num_sequences, p0.used_blocks) == (
        P,
        48,
        10,
        1,
        7,
    )
    assert (d0.worker_id, d0.cached_tokens, d0.outstanding_tokens, d0.num_sequences, d0.used_blocks) == (D, 0, 0, 1, 6)
    assert [c.worker_id for c in it.candidates(request.block_hashes, 64, without={P})] == [D]
    assert [c.cached_tokens for c in it.candidates(request.block_hashes, 65, without={D})] == [64]


def test_a_worker_that_greets_twice_in_one_life_keeps_what_is_known() -> None:
    it = fleet("d0")
    request = routed_request("r0", 32)
    it.report(worker_report("d0", 0, BlocksSnapshot(hashes=request.block_hashes), load=Load(num_running=2)))
    it.up(worker_info("d0", max_model_len=50))
    assert it.views()[0].load.num_running == 2
    assert it.index.match(request.block_hashes) == {D: 2}


def test_a_lost_worker_is_forgotten() -> None:
    it = fleet("p0", "d0")
    it.report(worker_report("d0", 0, BlocksSnapshot(hashes=routed_request("r0").block_hashes)))
    it.lost(D)
    assert (it.incarnation(D), it.incarnation(P)) == (None, "1")
    assert (len(it.index), it.longest_sequence) == (0, 0)
    assert [view.info.worker_id for view in it.views()] == [P]


def test_integrity_sees_bookings_on_a_stranger() -> None:
    it = fleet("p0")
    it.books.open(D, KEY, Booking())
    assert it.check_integrity() == ["bookings on d0, which is not present"]
