"""KV blocks and several tenants: what one of them has waiting and running keeps no other one waiting."""

from __future__ import annotations

import msgspec
import pytest

from disagg.router.api import RoutedRequest, TenantLimits
from tests.support.router import PLAIN, Scenario, routed_request, worker_info

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
