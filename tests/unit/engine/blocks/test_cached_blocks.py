"""Whose cached block goes first: with one tenant the oldest, with several that of the one over its share."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from disagg.engine.blocks.cached_blocks import CachedBlocks
from disagg.engine.commands import Add
from disagg.engine.core.engine_core import EngineCore
from disagg.proto.block_hash import chain_hashes, max_cached_tokens, root_hash, tenant_tag
from disagg.proto.messages import SequenceSpec
from disagg.proto.token_ids import pack_token_ids
from tests.support.engine import BLOCK, handle_all, make_core, make_prompt, make_spec, run_until_idle

A, B, C = b"a", b"b", b"c"


def filled(*runs: tuple[bytes, int], **options: Any) -> CachedBlocks:
    """Blocks 0, 1, ... given back in this order."""
    cached = CachedBlocks(100, **options)
    for tag, count in runs:
        for _ in range(count):
            cached.add(len(cached), tag)
    assert cached.check_integrity() == []
    return cached


def evicted(cached: CachedBlocks, count: int) -> list[int]:
    found = []
    for _ in range(count):
        assert cached.next in cached
        found.append(cached.evict())
        assert cached.check_integrity() == []
    return found


def test_with_one_tenant_the_oldest_goes_first() -> None:
    cached = filled((A, 5))
    cached.hold(1)
    cached.add(1, A)
    assert evicted(cached, 5) == [0, 2, 3, 4, 1]
    assert len(cached) == 0


def test_in_the_pool_of_a_window_copies_go_before_the_blocks_of_all_tenants() -> None:
    """B has fewer blocks than A, and used them later."""
    cached = filled((A, 4), (B, 1), copies_first=True)
    cached.add(5, B, is_copy=True)
    cached.demote(2)
    assert evicted(cached, 3) == [5, 2, 0]


def test_copies_go_first_within_a_tenant_and_where_no_tenant_is_chosen() -> None:
    cached = filled((A, 2), (B, 2))
    for block, tag in (4, B), (5, A), (6, B):
        cached.add(block, tag, is_copy=True)
    assert cached.num_copies == 3
    cached.hold(5)
    cached.add(5, A, is_copy=True)
    assert evicted(cached, 4) == [4, 6, 5, 0]  # B has more than half at first
    assert (cached.num_copies, len(cached)) == (0, 3)
    cached.hold(1)
    cached.add(1, A)
    assert evicted(cached, 3) == [2, 3, 1]


def test_a_tenant_with_more_than_an_equal_part_is_evicted_from_first() -> None:
    """Until all have as much; then the oldest of all."""
    cached = filled((B, 2), (A, 6))
    assert evicted(cached, 4) == [2, 3, 4, 5]
    assert evicted(cached, 4) == [0, 6, 1, 7]


def test_of_two_that_have_too_much_both_give() -> None:
    cached = filled((A, 5), (B, 5), (C, 1))
    assert sorted(evicted(cached, 8)) == [0, 1, 2, 3, 5, 6, 7, 8]
    assert (cached.count(A), cached.count(B), cached.count(C)) == (1, 1, 1)
    assert evicted(cached, 3) == [4, 9, 10]


def test_a_share_of_all_blocks_is_kept_from_others() -> None:
    """Up to it the oldest block of all is evicted; beyond it the largest tenant's."""
    assert evicted(filled((B, 2), (A, 10), share=0.1), 2) == [0, 1]
    assert evicted(filled((B, 2), (A, 12), share=0.1), 3) == [2, 3, 0]


def test_a_tenant_that_is_idle_keeps_nothing() -> None:
    cached = filled((B, 3), (C, 2), (A, 3), keep_s=60.0)
    cached.now = 50.0
    cached.hold(4)
    cached.add(4, C)
    cached.hold(5)
    cached.add(5, A)
    cached.now = 60.0
    assert cached.next == 0  # all have as many, or are the oldest
    cached.now = 60.1
    assert evicted(cached, 3) == [0, 1, 2]
    cached.now = 110.1
    assert evicted(cached, 3) == [3, 4, 6]


def test_a_hit_is_use() -> None:
    cached = filled((B, 2), (A, 4), keep_s=60.0)
    cached.now = 60.0
    cached.hold(1)
    cached.now = 61.0
    assert cached.next == 2  # A is idle, B is not


@pytest.mark.parametrize("share", [0.0, 0.05])
def test_random_lives_are_sound_and_one_tenant_is_never_treated_otherwise(share: float) -> None:
    rng = random.Random(share)
    cached, alone, held = CachedBlocks(60, share, 40.0), CachedBlocks(60, share, 40.0), list(range(60))
    order: list[int] = []
    for _ in range(3000):
        cached.now = alone.now = cached.now + rng.choice((0.0, 1.0, 5.0))
        kind = rng.random()
        if held and kind < 0.5:
            block = held.pop(rng.randrange(len(held)))
            cached.add(block, rng.choice((A, A, A, B, C)))
            alone.add(block, A)
            order.append(block)
        elif order and kind < 0.7:
            block = order.pop(rng.randrange(len(order)))
            cached.hold(block)
            alone.hold(block)
            held.append(block)
        elif order:
            assert alone.next == order[0]
            tags = {tag: cached.count(tag) for tag in (A, B, C)}
            block = cached.evict()
            smaller = {tag: cached.count(tag) for tag in tags}
            (loser,) = [tag for tag in tags if tags[tag] != smaller[tag]]
            assert tags[loser] > share * 60 or share or tags[loser] * 3 >= sum(tags.values()) or cached.now > 40
            alone.hold(block)
            order.remove(block)
            held.append(block)
        assert cached.check_integrity() == []
        assert len(cached) == len(alone) == len(order)


# ---------------------------------------------------------------- a worker


def spec_of(tenant: str, name: str, seed: int, num_tokens: int = 65) -> SequenceSpec:
    """A request of a tenant, hashed as its gateway would."""
    prompt = pack_token_ids(make_prompt(num_tokens, seed))
    root = root_hash("fake", tenant.encode())
    return msgspec.structs.replace(
        make_spec(name, make_prompt(num_tokens, seed), max_tokens=1),
        root_hash=root,
        block_hashes=tuple(chain_hashes(root, prompt)),
        tenant_tag=tenant_tag(tenant),
    )


def serve(core: EngineCore, spec: SequenceSpec, now: float = 0.0) -> int:
    """Run a request; how many of its tokens were cached."""
    events = handle_all(core, Add(spec), now=now) + run_until_idle(core, now)
    return int(next(event.cached_tokens for event in events if hasattr(event, "cached_tokens")))


@pytest.mark.parametrize("num_floods", [14, 60])
def test_one_tenant_that_floods_a_worker_leaves_anothers_prefixes_up_to_its_share(num_floods: int) -> None:
    """And whatever the salts that it chooses: the tag is its own, not the chain's root."""
    core = make_core(50, token_budget=256)
    serve(core, spec_of("b", "b0", 1))
    for number in range(num_floods):
        flood = spec_of("a", f"a{number}", 100 + number)
        root = root_hash("fake", f"salt {number}".encode())
        hashes = chain_hashes(root, flood.prompt_token_ids)
        assert serve(core, msgspec.structs.replace(flood, root_hash=root, block_hashes=tuple(hashes))) == 0
    assert serve(core, spec_of("b", "b1", 1)) == max_cached_tokens(65) == 64


def test_without_tenants_the_same_load_pushes_it_out() -> None:
    core = make_core(50, token_budget=256)
    serve(core, spec_of("", "b0", 1))
    for number in range(14):
        serve(core, spec_of("", f"a{number}", 100 + number))
    assert serve(core, spec_of("", "b1", 1)) == 0


def test_what_a_tenant_does_not_use_for_long_is_not_kept() -> None:
    core = make_core(50, token_budget=256)
    serve(core, spec_of("b", "b0", 1))
    for number in range(14):
        serve(core, spec_of("a", f"a{number}", 100 + number), now=601.0)
    assert serve(core, spec_of("b", "b1", 1), now=602.0) == 0


def test_a_tenant_may_use_what_no_other_one_does() -> None:
    """Alone it has the whole cache, and gives it up block by block."""
    core = make_core(50, token_budget=256)
    for number in range(10):
        serve(core, spec_of("a", f"a{number}", 100 + number))
    before = core.load().blocks_cached
    assert before >= 36
    serve(core, spec_of("b", "b0", 1))
    assert core.load().blocks_cached >= before
    assert serve(core, spec_of("a", "a9 again", 109)) == 64


def test_blocks_of_one_chain_belong_to_one_tenant() -> None:
    """Else a block could go while one behind it stays, which could not be found."""
    core = make_core(50, token_budget=256)
    serve(core, spec_of("a", "short", 1, 4 * BLOCK + 1))
    longer = spec_of("a", "longer", 1, 8 * BLOCK + 1)
    serve(core, msgspec.structs.replace(longer, tenant_tag=tenant_tag("b")))
    assert core._cached.count(tenant_tag("a")) == 8
    assert core._cached.count(tenant_tag("b")) == 0


def test_tags_are_the_tenants() -> None:
    assert tenant_tag("") == b""
    assert len(tenant_tag("a")) == 8
    assert len({tenant_tag(name) for name in ("a", "b", "é" * 40)}) == 3
