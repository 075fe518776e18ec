"""Few pairs are formed when a worker comes; the others when a request needs them."""

from __future__ import annotations

import pytest

from disagg.proto.errors import ConfigError
from disagg.proto.ids import GatewayId, WorkerId
from disagg.router.config import RouterConfig
from disagg.router.requests import events
from disagg.router.requests.router_core import RouterCore
from disagg.router.workers.pairs import Pairs
from tests.support.placing import Placing, busy
from tests.support.router import in_turn, routed_request, worker_info

NUM_SIDE = 40
COLD_MS = 50.0


def ids(*names: str) -> list[WorkerId]:
    return [WorkerId(name) for name in names]


def connects(core: RouterCore, name: str) -> list[tuple[str, str]]:
    """The pairs that the router has formed because this worker came."""
    commands = core.handle(events.WorkerUp(worker_info(name)), 0.0)
    return [(c.prefill_id, c.decode_peer.worker_id) for c in commands if isinstance(c, events.ConnectPair)]


def test_what_a_worker_forms_when_it_comes_does_not_grow_with_the_number_of_its_peers() -> None:
    core = RouterCore(RouterConfig(), GatewayId("g"), in_turn)
    formed: dict[str, int] = {}
    for number in range(NUM_SIDE):
        for name in (f"p{number}", f"d{number}"):
            pairs = connects(core, name)
            assert all(name in pair for pair in pairs)
            for worker_id in [worker_id for pair in pairs for worker_id in pair]:
                formed[worker_id] = formed.get(worker_id, 0) + 1
    assert set(formed.values()) == {8}
    assert sum(formed.values()) == 8 * 2 * NUM_SIDE


def test_a_small_cluster_forms_all_pairs_at_once() -> None:
    core = RouterCore(RouterConfig(), GatewayId("g"), in_turn)
    assert connects(core, "p0") == []
    assert connects(core, "d0") == [("p0", "d0")]
    assert connects(core, "d1") == [("p0", "d1")]
    assert connects(core, "p1") == [("p1", "d0"), ("p1", "d1")]
    assert connects(core, "p1") == [("p1", "d0"), ("p1", "d1")], "it may have lost them: they are formed again"


def test_a_pair_need_not_be_formed_to_be_placed_on() -> None:
    core = RouterCore(RouterConfig(warm_pairs=0, local_prefill="never"), GatewayId("g"), in_turn)
    assert [*connects(core, "p0"), *connects(core, "d0")] == []
    (command,) = core.handle(events.Submit(routed_request("r", 64), 0.0), 0.0)
    assert isinstance(command, events.Dispatch)
    assert command.message.decode_peer is not None
    assert (command.worker_id, command.message.decode_peer.worker_id) == ("p0", "d0")


def test_the_peers_with_the_fewest_warm_pairs_come_first_and_none_has_too_many() -> None:
    pairs = Pairs(RouterConfig(warm_pairs=2))
    decodes = ids("d0", "d1", "d2")
    assert pairs.warm_up(WorkerId("p0"), decodes) == {"d0", "d1"}
    assert pairs.warm_up(WorkerId("p1"), decodes) == {"d2", "d0"}
    assert pairs.warm_up(WorkerId("p2"), decodes) == {"d1", "d2"}
    assert pairs.warm_up(WorkerId("p3"), decodes) == frozenset()
    assert [len(pairs.partners(worker_id)) for worker_id in decodes] == [2, 2, 2]
    pairs.forget(WorkerId("p1"))
    assert pairs.warm_up(WorkerId("p3"), decodes) == {"d0", "d2"}


def test_a_pair_is_formed_by_use_until_it_idles_fails_or_loses_an_end() -> None:
    pairs = Pairs(RouterConfig(warm_pairs=0, pair_setup_ms=COLD_MS, pair_idle_s=60.0))
    p, d, e = ids("p", "d", "e")
    assert pairs.setup_ms(p, d) == COLD_MS
    pairs.used(p, d, 10.0)
    pairs.used(p, e, 20.0)
    pairs.used(p, d, 30.0)
    assert (pairs.setup_ms(p, d), pairs.setup_ms(p, e), pairs.setup_ms(d, p)) == (0.0, 0.0, COLD_MS)
    pairs.expire(80.0)
    assert (pairs.setup_ms(p, d), pairs.setup_ms(p, e)) == (0.0, COLD_MS)
    pairs.expire(90.0)
    assert pairs.setup_ms(p, d) == COLD_MS
    pairs.used(p, d, 100.0)
    pairs.failed(p, d)
    assert pairs.setup_ms(p, d) == COLD_MS
    pairs.used(p, d, 100.0)
    pairs.forget(d)
    assert pairs.setup_ms(p, d) == COLD_MS


def test_a_warm_pair_does_not_expire() -> None:
    pairs = Pairs(RouterConfig(warm_pairs=1, pair_setup_ms=COLD_MS))
    p, d = ids("p", "d")
    pairs.warm_up(p, [d])
    pairs.used(p, d, 0.0)
    pairs.expire(1e6)
    assert pairs.setup_ms(p, d) == 0.0


def test_of_two_decode_workers_the_one_with_a_pair_is_taken_until_the_other_is_that_much_better() -> None:
    config = RouterConfig(warm_pairs=1, pair_setup_ms=COLD_MS, local_prefill="never", watermark=0.0)

    def taken(num_sequences: int) -> str:
        return Placing("joint", "p0", busy("d0", seqs=num_sequences), "d1", config=config).where()

    assert [taken(num_sequences) for num_sequences in (0, 1, 7)] == ["p0 d0", "p0 d0", "p0 d1"]


def test_the_partners_of_a_worker_are_in_the_order_in_which_they_came() -> None:
    """That order settles ties, and must be the same in a replay."""
    pairs = Pairs(RouterConfig(warm_pairs=NUM_SIDE))
    peers = ids(*(f"d{number * 7 % NUM_SIDE}" for number in range(NUM_SIDE)))
    pairs.warm_up(WorkerId("p0"), peers)
    assert list(pairs.partners(WorkerId("p0"))) == peers


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("warm_pairs", -1, "router.warm_pairs: must not be negative, not -1"),
        ("pair_setup_ms", -0.5, "router.pair_setup_ms: must not be negative, not -0.5"),
        ("pair_idle_s", 0, "router.pair_idle_s: must be positive, not 0"),
    ],
)
def test_values_that_cannot_work_are_refused(name: str, value: float, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RouterConfig(**{name: value})  # type: ignore[arg-type]
    assert str(caught.value) == message


def test_of_many_workers_the_formed_pairs_of_the_best_prefill_worker_are_looked_at_too() -> None:
    """By themselves the decode workers without a pair with it are as good, and come first."""
    config = RouterConfig(warm_pairs=2, pair_setup_ms=COLD_MS, local_prefill="never", watermark=0.0)
    decodes = [f"d{number}" for number in range(NUM_SIDE)]
    placing = Placing("joint", *decodes, "p0", config=config, num_tokens=512)
    placing.pairs.forget(WorkerId("p0"))
    placing.pairs.warm_up(WorkerId("p0"), ids("d37"))
    choice = placing.choose()
    assert choice is not None
    assert (placing.where(), choice.setup_ms) == ("p0 d37", 0.0)


def test_who_has_a_formed_pair_with_anyone_is_known() -> None:
    pairs = Pairs(RouterConfig(warm_pairs=1, pair_idle_s=10.0))
    p0, p1, d0, d1 = ids("p0", "p1", "d0", "d1")
    pairs.used(p0, d0, 0.0)
    pairs.used(p0, d0, 1.0)
    pairs.used(p1, d0, 2.0)
    assert (pairs.has_formed(d0), pairs.has_formed(d1)) == (True, False)
    pairs.expire(11.0)
    assert (pairs.has_formed(d0), pairs.formed_with(p0), pairs.formed_with(p1)) == (True, set(), {d0})
    pairs.failed(p1, d0)
    assert not pairs.has_formed(d0)
    pairs.used(p1, d0, 12.0)
    pairs.forget(p1)
    assert not pairs.has_formed(d0)
    pairs.warm_up(d1, [p0])
    assert pairs.has_formed(d1)
    pairs.forget(p0)
    assert not pairs.has_formed(d1)
