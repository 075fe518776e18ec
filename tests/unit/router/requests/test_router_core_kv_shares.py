"""KV blocks and several tenants: what one of them has waiting and running keeps no other one waiting."""

from __future__ import annotations

import msgspec
import pytest

from disagg.proto.messages import Load
from disagg.router.api import RoutedRequest, TenantLimits
from tests.support.router import (
    PLAIN,
    Scenario,
    end_update,
    handed_over_update,
    prefilled_update,
    routed_request,
    worker_info,
    worker_report,
)

BYPASS_S = 0.5
CONFIG = msgspec.structs.replace(PLAIN, bypass_s=BYPASS_S, decode_reserve_tokens=0)
SHARED = TenantLimits(is_sole=False)


def of(tenant: str, name: str, num_blocks: int, limits: TenantLimits = SHARED) -> RoutedRequest:
    """A request that needs so many blocks."""
    return msgspec.structs.replace(routed_request(name, 16 * num_blocks - 4), tenant=tenant, limits=limits)


def workers(*num_blocks: int) -> Scenario:
    """A prefill worker with all in plenty, and decode workers with so many blocks."""
    p0 = worker_info("p0", num_blocks=4096, max_num_seqs=512, token_budget=65536, max_model_len=16384)
    decodes = [
        worker_info(f"d{number}", num_blocks=count, max_num_seqs=64, max_model_len=4096)
        for number, count in enumerate(num_blocks)
    ]
    return Scenario(p0, *decodes, config=CONFIG)


def flood(it: Scenario, num_blocks: int, count: int, tenant: str = "a") -> int:
    """So many requests of one tenant; the number that was placed."""
    return sum(bool(it.submit(of(tenant, f"{tenant}{number}", num_blocks))) for number in range(count))


@pytest.mark.parametrize("num_decodes", [1, 2, 4])
def test_a_worker_is_held_against_tenants_whose_turn_is_behind_only(num_decodes: int) -> None:
    it = workers(*[100] * num_decodes)
    flood(it, 24, 6 * num_decodes)
    it.at(BYPASS_S)  # From now on a worker is held for a request of a, which stays so: nothing ends.
    it.at(2 * BYPASS_S)
    for number in range(3):
        it.at(it.now + 1.0)
        assert it.submit(of("b", f"b{number}", 1))[0].startswith(f"dispatch p0 b{number}/0")


@pytest.mark.parametrize("num_decodes", [1, 2, 4])
@pytest.mark.parametrize("num_blocks", [1, 3, 9, 24, 60])
def test_one_of_several_tenants_leaves_room_for_a_small_request(num_decodes: int, num_blocks: int) -> None:
    it = workers(*[100] * num_decodes)
    assert flood(it, num_blocks, 101 * num_decodes)
    assert it.submit(of("b", "b0", 5))[0].startswith("dispatch")
    assert it.core.check_integrity() == []


def test_a_sole_tenant_may_have_all_blocks() -> None:
    it = workers(101)
    sole = TenantLimits(running=100)
    assert [len(it.submit(of("a", f"a{number}", 20, sole))) for number in range(6)] == [1, 1, 1, 1, 1, 0]


def test_a_tenant_of_which_nothing_runs_may_have_one_request_of_any_size() -> None:
    it = workers(100)
    assert it.submit(of("a", "a0", 95)) == ["dispatch p0 a0/0 -> d0"]


def test_two_tenants_that_want_all_get_half_of_the_blocks_each() -> None:
    """A has nine tenths when b comes: b gets what a gives back, up to its half."""
    it = workers(101)
    assert flood(it, 10, 40) == 9
    assert flood(it, 10, 20, "b") == 1
    placed: list[str] = []
    for number in range(9):
        it.update("p0", prefilled_update(f"a{number}", 0))
        lines = it.update("d0", handed_over_update(f"a{number}", 0), end_update(f"a{number}", 0, "stop"))
        placed += [line.split()[2][0] for line in lines if line.startswith("dispatch")]
    assert placed[:4] == ["b"] * 4
    running = it.core.view(it.now).tenants
    assert (running["a"][1], running["b"][1]) == (5, 5)


def test_a_prompt_that_answers_share_counts_once() -> None:
    """Sixteen answers to one prompt of 40 blocks, of one block more each."""
    it = workers(100)
    prompt = list(range(40 * 16))
    requests = [
        msgspec.structs.replace(routed_request(f"a{number}", prompt, max_tokens=16), tenant="a", limits=SHARED)
        for number in range(16)
    ]
    it.holds("d0", requests[0], 40)
    assert [len(it.submit(request)) for request in requests] == [1] * 16


def test_a_tenant_over_its_share_hides_nobody_behind_it() -> None:
    """B has used more, so that it stands behind what a has waiting."""
    it = workers(100)
    assert it.submit(of("b", "b0", 3))
    assert flood(it, 9, 100) == 9
    for number in range(1, 5):
        it.submit(of("b", f"b{number}", 1))
    assert it.core.view(it.now).tenants["b"][1] >= 4


def test_what_a_tenant_needed_lately_is_kept_free_for_it() -> None:
    """B had 30 of 100 blocks at a time: they are its for 30 to 60 s."""
    it = workers(101)
    assert flood(it, 10, 3, "b") == 3
    for number in range(3):
        it.cancel(f"b{number}")
    assert flood(it, 10, 20) == 7
    assert [len(it.submit(of("b", f"b{number}", 10))) for number in range(3, 7)] == [1, 1, 1, 0]
    for number in range(3, 7):
        it.cancel(f"b{number}")
    for now in (31.0, 62.0):
        it.at(now)
        it.report(worker_report("d0", int(now > 60), load=Load(blocks_active=70)))
    assert it.core.view(it.now).tenants["a"][1] == 9
