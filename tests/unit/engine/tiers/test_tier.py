"""The index of one tier: prefix-closed whatever happens, tails of chains first, copies first, tenants' shares."""

from __future__ import annotations

import random

import pytest

from disagg.engine.tiers.extents import NO_PARENT, Extent
from disagg.engine.tiers.found import Found, arranged
from disagg.engine.tiers.tier import Change, Pins, Tier, Writing
from disagg.proto.ids import BlockHash


def key(name: str) -> BlockHash:
    return BlockHash(name.encode())


def chain(name: str, length: int) -> tuple[BlockHash, ...]:
    return tuple(key(f"{name}{number}") for number in range(length))


def write(tier: Tier, keys: tuple[BlockHash, ...], *, tag: bytes = b"", is_copy: bool = False) -> None:
    """Write what the tier lacks of a chain."""
    for end in range(1, len(keys) + 1):
        if keys[end - 1] not in tier:
            writing = tier.begin_write(keys[:end], tag, is_copy=is_copy)
            assert writing is not None
            tier.end_write(writing, ok=True)
    assert tier.check_integrity() == []


def test_the_tail_of_the_chain_that_was_used_longest_ago_goes_first() -> None:
    tier = Tier(4)
    old, new = chain("a", 2), chain("b", 2)
    write(tier, old)
    write(tier, new)
    tier.touch(old, is_copy=False)
    write(tier, chain("c", 1))
    assert [tier.num_held(keys) for keys in (old, new)] == [2, 1]
    write(tier, chain("d", 1))
    assert [tier.num_held(keys) for keys in (old, new)] == [2, 0]
    write(tier, chain("e", 1))
    assert [tier.num_held(keys) for keys in (old, new)] == [1, 0]
    assert tier.num_evicted == 3


def test_a_chain_that_shares_its_beginning_keeps_it() -> None:
    tier = Tier(3)
    shared = chain("a", 2)
    other = (shared[0], key("b1"))
    write(tier, shared)
    write(tier, other)
    write(tier, chain("c", 1))
    assert (tier.num_held(shared), tier.num_held(other)) == (1, 2)


def test_copies_go_first_until_somebody_computes_them() -> None:
    tier = Tier(3)
    copy, own = chain("a", 1), chain("b", 1)
    write(tier, own)
    write(tier, copy, is_copy=True)
    write(tier, chain("c", 1))
    write(tier, chain("d", 1))
    assert (tier.num_held(copy), tier.num_held(own)) == (0, 1)
    tier = Tier(2)
    write(tier, own)
    write(tier, copy, is_copy=True)
    tier.touch(copy, is_copy=False)
    write(tier, chain("c", 1))
    assert (tier.num_held(copy), tier.num_held(own)) == (1, 0)


def test_a_chain_behind_a_copy_makes_it_none() -> None:
    tier = Tier(3)
    keys = chain("a", 2)
    write(tier, keys[:1], is_copy=True)
    write(tier, keys)
    assert tier.check_integrity() == []


def test_a_tenant_with_more_than_its_share_gives_way() -> None:
    tier = Tier(4)
    write(tier, chain("few", 1), tag=b"few")
    write(tier, chain("many", 3), tag=b"many")
    write(tier, chain("new", 1), tag=b"few")
    assert (tier.num_held(chain("few", 1)), tier.num_held(chain("many", 3))) == (1, 2)


def test_forget_takes_all_of_a_tenant_and_nothing_else() -> None:
    tier = Tier(4)
    write(tier, chain("a", 2), tag=b"one")
    write(tier, chain("b", 1), tag=b"two")
    tier.forget(b"one")
    tier.go_on(2)
    assert tier.keys() == chain("b", 1)
    assert {extent.key for extent in tier.take_removed()} == set(chain("a", 2))
    assert tier.check_integrity() == []


def test_a_pinned_chain_is_not_evicted_and_one_that_cannot_be_placed_is_refused() -> None:
    tier = Tier(2)
    keys = chain("a", 2)
    write(tier, keys)
    pins = tier.pin(keys)
    assert tier.begin_write(chain("b", 1), b"", is_copy=False) is None
    tier.unpin(pins)
    assert tier.check_integrity() == []
    write(tier, chain("b", 1))
    assert tier.num_held(keys) == 1


def test_an_extent_is_never_written_before_the_one_that_it_follows() -> None:
    tier = Tier(4)
    assert tier.begin_write(chain("a", 2), b"", is_copy=False) is None
    assert len(tier) == 0


def test_what_is_being_written_cannot_be_read_and_goes_with_all_behind_it_if_that_fails() -> None:
    tier = Tier(4)
    keys = chain("a", 3)
    writings = [tier.begin_write(keys[:end], b"", is_copy=False) for end in (1, 2, 3)]
    first, second, third = [each for each in writings if each is not None]
    tier.end_write(first, ok=True)
    assert tier.num_held(keys) == 1
    tier.end_write(second, ok=False)
    tier.end_write(third, ok=True)
    assert (tier.num_held(keys), len(tier)) == (1, 1)
    assert tier.check_integrity() == []
    assert tier.drain_changes() == [Change(keys[0], True)]


def test_an_extent_that_is_dropped_while_it_is_read_frees_its_slot_with_the_last_pin() -> None:
    tier = Tier(1)
    keys = chain("a", 1)
    write(tier, keys)
    pins = tier.pin(keys)
    tier.drop(keys[0])
    assert tier.num_held(keys) == 0
    assert tier.begin_write(chain("b", 1), b"", is_copy=False) is None
    tier.unpin(pins)
    write(tier, chain("b", 1))


def chain_of(*keys: BlockHash) -> list[Extent]:
    """The extents of a chain without a tenant."""
    return [Extent(each, parent) for each, parent in zip(keys, (NO_PARENT, *keys), strict=False)]


def take_in(tier: Tier, extents: list[Extent]) -> list[Extent]:
    """What a folder has, the one that was used last at the end; what has no place."""
    tier.add_found(arranged(extents, len(extents)).extents)
    left = tier.go_on(2 * len(extents))
    assert not tier.can_go_on
    assert tier.check_integrity() == []
    return left


def test_what_a_folder_has_is_held_where_it_can_be_reached() -> None:
    tier = Tier(3)
    a, b = chain("a", 3), chain("b", 2)
    found = [Extent(a[1], a[0], b"t"), Extent(b[1], b[0]), Extent(a[0], NO_PARENT, b"t"), Extent(a[2], a[1], b"t")]
    assert arranged(found, 4) == Found((found[2], found[0], found[3]), (found[1],))
    assert take_in(tier, found) == []
    assert tier.num_held(a) == 3
    assert take_in(tier, [Extent(b[0], NO_PARENT)]) == [Extent(b[0], NO_PARENT)]
    write(tier, chain("c", 1))
    assert tier.num_held(a) == 2


def test_of_what_a_folder_has_the_chain_that_was_written_longest_ago_goes_first() -> None:
    a, b, c = chain("a", 2), chain("b", 1), chain("c", 1)
    found = [Extent(a[0], NO_PARENT), Extent(b[0], NO_PARENT), Extent(c[0], NO_PARENT), Extent(a[1], a[0])]
    tier = Tier(4)
    assert take_in(tier, found) == []
    write(tier, chain("d", 1))
    assert [tier.num_held(keys) for keys in (a, b, c)] == [2, 0, 1]
    write(tier, chain("e", 1))
    assert [tier.num_held(keys) for keys in (a, b, c)] == [2, 0, 0]


def test_of_what_a_folder_has_beyond_the_most_the_chains_that_were_written_last_are_held() -> None:
    a, b = chain("a", 3), chain("b", 1)
    found = [*chain_of(*b), *chain_of(*a)]
    assert arranged(found, 2) == Found(tuple(chain_of(*a)[:2]), (found[0], found[3]))


def test_what_is_useful_least_is_deleted_first() -> None:
    """Out of reach before the chain that was used longest ago, and of that its tail."""
    a, b, lost = chain("a", 2), chain("b", 2), chain("lost", 2)
    found = [*chain_of(*a), *chain_of(*lost)[1:], *chain_of(*b)]
    assert arranged(found, 1).left == (found[2], found[1], found[0], found[4])


def test_a_second_file_of_an_extent_is_not_held() -> None:
    """Whatever its name says of tenant and parent; only the content of a file can tell which one is right."""
    a, b = chain("a", 1), chain("b", 1)
    second = Extent(a[0], NO_PARENT, b"another")
    assert arranged([*chain_of(*a), second, *chain_of(*b)], 3).left == (second,)
    tier = Tier(2)
    take_in(tier, [*chain_of(*a), second, *chain_of(*b)])
    tier.drop(a[0])
    write(tier, chain("c", 2))
    assert tier.keys() == chain("c", 2)


def test_what_others_added_to_a_shared_folder_follows_what_was_there() -> None:
    tier = Tier(3)
    a = chain("a", 2)
    take_in(tier, chain_of(*a)[:1])
    tier.add_found(chain_of(*a)[1:])
    assert tier.go_on(2) == []
    assert tier.check_integrity() == []
    assert tier.num_held(a) == 2
    write(tier, chain("b", 2))
    assert (tier.num_held(a), tier.num_held(chain("b", 2))) == (1, 2)


def test_many_are_taken_in_and_dropped_some_at_a_time() -> None:
    """None can be read before all have slots, or what was used longest ago would go last."""
    tier, keys = Tier(10), chain("a", 6)
    tier.add_found(chain_of(*keys))
    assert tier.go_on(5) == []
    assert (len(tier), tier.drain_changes()) == (0, [])
    tier.go_on(4)
    assert tier.drain_changes() == [Change(each, True) for each in (keys[5], keys[4], keys[3])]
    assert (tier.num_held(keys), tier.check_integrity()) == (0, [])
    tier.go_on(100)
    assert tier.num_held(keys) == 6
    tier.drain_changes()
    tier.clear()
    assert (tier.is_clearing, len(tier)) == (True, 6)
    tier.go_on(2)
    assert tier.drain_changes() == [Change(each, False) for each in (keys[5], keys[4])]
    tier.go_on(100)
    assert (tier.is_clearing, tier.keys(), tier.take_removed()) == (False, (), [])
    write(tier, keys)
    assert tier.num_held(keys) == 6


def test_a_folder_that_is_lost_while_it_is_taken_in_leaves_nothing() -> None:
    tier, keys = Tier(10), chain("a", 6)
    tier.add_found(chain_of(*keys))
    tier.go_on(8)
    tier.clear()
    tier.add_found(chain_of(*chain("b", 2)))
    tier.go_on(100)
    assert (tier.keys(), tier.num_pinned) == (chain("b", 2), 0)
    assert tier.check_integrity() == []


def test_a_tenant_is_forgotten_while_it_is_taken_in() -> None:
    tier, keys = Tier(10), chain("a", 4)
    tier.add_found([extent._replace(tag=b"one") for extent in chain_of(*keys)])
    tier.add_found([extent._replace(tag=b"two") for extent in chain_of(*chain("b", 1))])
    tier.go_on(2)
    tier.forget(b"one")
    tier.go_on(100)
    assert tier.keys() == chain("b", 1)
    assert tier.check_integrity() == []


def test_a_large_tier_is_checked_in_parts() -> None:
    """A fault is found by the time that all of it was looked at."""
    tier = Tier(20)
    for number in range(10):
        write(tier, chain(str(number), 2))
    tier._held[key("70")].children.clear()
    assert [bool(tier.check_integrity(most=5)) for _ in range(5)] == [False, False, False, True, False]


@pytest.mark.parametrize("seed", range(30))
def test_it_stays_sound_whatever_is_done_with_it(seed: int) -> None:
    """Random chains with common beginnings; the model is the set of keys that were announced."""
    draw = random.Random(seed)
    tier = Tier(draw.randint(1, 12), share=draw.choice([0.0, 0.3]))
    writings: list[Writing] = []
    pinned: list[Pins] = []
    announced: set[BlockHash] = set()
    for now in range(300):
        tier.note_time(float(now))
        tenant = draw.choice("xy")
        keys = tuple(key(f"{tenant}{'-'.join(map(str, path))}") for path in _paths(draw))
        match draw.randrange(9):
            case 0 | 1 | 2:
                end = next((n + 1 for n, each in enumerate(keys) if each not in tier), 0)
                if end:
                    writing = tier.begin_write(keys[:end], tenant.encode(), is_copy=draw.random() < 0.3)
                    writings += [] if writing is None else [writing]
            case 3 | 4 if writings:
                tier.end_write(writings.pop(0), ok=draw.random() < 0.8)
            case 5:
                pinned.append(tier.pin(keys[: tier.num_held(keys)]))
            case 6 if pinned:
                tier.unpin(pinned.pop(draw.randrange(len(pinned))))
            case 7:
                tier.touch(keys, is_copy=draw.random() < 0.5)
            case 8 if draw.random() < 0.3:
                tier.drop(keys[-1])
            case 8 if draw.random() < 0.1:
                tier.forget(tenant.encode())
            case 8 if draw.random() < 0.1:
                tier.add_found([extent._replace(tag=tenant.encode()) for extent in chain_of(*keys)])
            case 8 if draw.random() < 0.05:
                tier.clear()
            case _:
                pass
        tier.go_on(draw.randrange(3))
        for change in tier.drain_changes():
            (announced.add if change.is_stored else announced.remove)(change.key)
        assert announced == set(tier.keys())
        assert tier.check_integrity() == []
        held = tier.num_held(keys)
        if not tier.can_go_on:
            assert not any(each in announced for each in keys[held:]), "what it holds of a chain is not its beginning"
    for writing in writings:
        tier.end_write(writing, ok=True)
    for pins in pinned:
        tier.unpin(pins)
    assert tier.check_integrity() == []


def _paths(draw: random.Random) -> list[tuple[int, ...]]:
    """Those of a chain in a tree of two branches at each extent."""
    path: tuple[int, ...] = ()
    paths = []
    for _ in range(draw.randint(1, 4)):
        path = (*path, draw.randrange(2))
        paths.append(path)
    return paths
