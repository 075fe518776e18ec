"""The cached blocks without a holder, by tenant, and the order in which they are evicted. Pure.

With one tenant the order is LRU: the block that was released first is evicted first. With several, a tenant that fills
the cache must not evict what the others use:

    1. a tenant that used none of its blocks for `keep_s` is evicted from first, the longest idle one before others
    2. then the tenant with the most blocks, while it has more than its share
    3. where no tenant has more, the block that was released first

Within a tenant, and where no tenant is chosen, copies go first (see `prefix_cache.py`), and the order is LRU among
copies and among the others. In the pool of a window copies are of no use to any tenant, and go before all others. A
share is an equal part of what is cached, or `share` of all blocks of the worker. Every call takes O(1).
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import KeysView

TenantTag = bytes
"""Names a tenant; empty where there are none."""


class _Tenant:
    __slots__ = ("blocks", "copies", "used_at")

    def __init__(self) -> None:
        self.blocks: OrderedDict[int, None] = OrderedDict()
        """Blocks in the order of release."""
        self.copies: OrderedDict[int, None] = OrderedDict()
        """Blocks that are copies."""
        self.used_at = -math.inf
        """When one of its blocks was last released, or held again."""


class CachedBlocks:
    """Cached blocks in the order of their eviction. Owner: the prefix cache.

    Args:
        num_blocks: all blocks of the worker.
        share: part of them that each tenant keeps from the others; 0 for an equal part of what is cached.
        keep_s: how long a tenant keeps it without using it.
        copies_first: whether copies go before the blocks of all tenants.
    """

    def __init__(
        self, num_blocks: int = 0, share: float = 0.0, keep_s: float = math.inf, *, copies_first: bool = False
    ) -> None:
        self.now = 0.0
        """Time of the last command or step, on any clock."""
        self._quota = share * num_blocks
        self._keep_s = keep_s
        self._copies_first = copies_first
        self._tag_of: OrderedDict[int, TenantTag] = OrderedDict()
        """Tenant tag of every cached block, in the order of release."""
        self._copies: OrderedDict[int, None] = OrderedDict()
        """Cached blocks that are copies."""
        self._tenants: dict[TenantTag, _Tenant] = {}
        """Tenants that have blocks."""
        self._by_use: OrderedDict[TenantTag, None] = OrderedDict()
        """The tenant first that was idle for longest."""
        self._by_size: dict[int, OrderedDict[TenantTag, None]] = {}
        """Tenants by their number of blocks."""
        self._largest = 0

    def __len__(self) -> int:
        return len(self._tag_of)

    def __contains__(self, block: int) -> bool:
        return block in self._tag_of

    @property
    def blocks(self) -> KeysView[int]:
        """All of them, in the order of release."""
        return self._tag_of.keys()

    @property
    def num_copies(self) -> int:
        """How many of them are copies."""
        return len(self._copies)

    def count(self, tag: TenantTag) -> int:
        """Blocks of one tenant."""
        tenant = self._tenants.get(tag)
        return 0 if tenant is None else len(tenant.blocks)

    def of(self, tag: TenantTag) -> list[int]:
        """Blocks of one tenant, in the order of release."""
        tenant = self._tenants.get(tag)
        return [] if tenant is None else list(tenant.blocks)

    def add(self, block: int, tag: TenantTag, *, is_copy: bool = False) -> None:
        """Its tenant released it. A copy goes before all others of the tenant."""
        tenant = self._tenants.get(tag)
        if tenant is None:
            tenant = self._tenants[tag] = _Tenant()
        self._tag_of[block] = tag
        tenant.blocks[block] = None
        if is_copy:
            self._copies[block] = tenant.copies[block] = None
        self._resized(tag, len(tenant.blocks) - 1, len(tenant.blocks))
        self._used(tag, tenant)

    def demote(self, block: int) -> None:
        """A block, if it is one of them, goes like a copy from now on, after those that are copies already."""
        tag = self._tag_of.get(block)
        if tag is not None and block not in self._copies:
            self._copies[block] = self._tenants[tag].copies[block] = None

    def hold(self, block: int) -> None:
        """Its tenant uses it again."""
        tag = self._take(block)
        if (tenant := self._tenants.get(tag)) is not None:
            self._used(tag, tenant)

    @property
    def next(self) -> int:
        """The block to evict next; there is one."""
        if self._copies_first and self._copies:
            return next(iter(self._copies))
        if len(self._tenants) > 1 and (tag := self._next_tenant()) is not None:
            tenant = self._tenants[tag]
            return next(iter(tenant.copies or tenant.blocks))
        return next(iter(self._copies or self._tag_of))

    def evict(self) -> int:
        """Remove the block `next` and return it."""
        block = self.next
        self._take(block)
        return block

    def check_integrity(self) -> list[str]:
        """Findings; empty when sound."""
        blocks = {block: tag for tag, tenant in self._tenants.items() for block in tenant.blocks}
        sizes = {tag: len(tenant.blocks) for tag, tenant in self._tenants.items()}
        by_size = {tag: size for size, tags in self._by_size.items() for tag in tags}
        problems = []
        if blocks != dict(self._tag_of):
            problems.append("cached blocks: the tenants' and all of them differ")
        copies = {block for tenant in self._tenants.values() for block in tenant.copies if block in tenant.blocks}
        if copies != self._copies.keys() or len(copies) != sum(len(tenant.copies) for tenant in self._tenants.values()):
            problems.append("cached blocks: the tenants' copies and all of them differ")
        if sizes != by_size or self._largest != max(sizes.values(), default=0) or 0 in sizes.values():
            problems.append("cached blocks: the sizes of the tenants are not what they have")
        if self._by_use.keys() != self._tenants.keys():
            problems.append("cached blocks: the tenants by use are others than those with blocks")
        return problems

    # ------------------------------------------------------------ inside

    def _next_tenant(self) -> TenantTag | None:
        """The tenant whose oldest block is evicted next; None for the oldest of all."""
        idle = next(iter(self._by_use))
        if self.now - self._tenants[idle].used_at > self._keep_s:
            return idle
        quota = self._quota or len(self._tag_of) / len(self._tenants)
        return next(iter(self._by_size[self._largest])) if self._largest > quota else None

    def _take(self, block: int) -> TenantTag:
        tag = self._tag_of.pop(block)
        tenant = self._tenants[tag]
        del tenant.blocks[block]
        if block in self._copies:
            del self._copies[block], tenant.copies[block]
        self._resized(tag, len(tenant.blocks) + 1, len(tenant.blocks))
        if not tenant.blocks:
            del self._tenants[tag], self._by_use[tag]
        return tag

    def _used(self, tag: TenantTag, tenant: _Tenant) -> None:
        tenant.used_at = self.now
        self._by_use[tag] = None
        self._by_use.move_to_end(tag)

    def _resized(self, tag: TenantTag, before: int, after: int) -> None:
        """Record that the number of a tenant's blocks changed by one."""
        if before:
            same = self._by_size[before]
            del same[tag]
            if not same:
                del self._by_size[before]
        if after:
            self._by_size.setdefault(after, OrderedDict())[tag] = None
        if after > self._largest or (before == self._largest and before not in self._by_size):
            self._largest = after
