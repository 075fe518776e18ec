"""What the router has promised of each worker and not got back: prompt tokens to compute, sequences, KV blocks.

One entry per (worker, attempt), opened when the attempt is dispatched and closed exactly once, whatever its end.
Closing an entry that is not open is a fault of ours and raises. When nothing runs, every total is zero.

A cached prefix costs a worker nothing only while a sequence there holds it. Blocks that are cached and held by no
sequence count as free, and are in use as soon as a sequence refers to them. So an account knows, by marks along their
chains of hashes, which prefixes its bookings hold, and a booking leaves out no more than those.

A booking, like every record that lives as long as a request, is nothing that the garbage collector walks through: it
holds no other objects, or none that lead back to it, and a router has thousands of them.

Owner: the router's fleet.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from disagg.proto.ids import AttemptKey, BlockHash, WorkerId

MARK_BLOCKS = 16
"""A chain of hashes is marked after every so many blocks: few enough marks for the rate of placements. Of a prefix that
is shared up to a block between two marks, the blocks behind the last mark count as not shared."""


class Booking(msgspec.Struct, gc=False):
    """What one attempt takes of one worker (besides a sequence slot)."""

    tokens: int = 0
    """Prompt tokens that the worker must compute and has not reported as done."""
    pairs: int = 0
    """Query-key pairs of these tokens: the sum over them of the tokens that each one attends to."""
    blocks: int = 0
    """KV blocks, in the worker's own block size."""
    context: int = 0
    """Tokens that each decode step of the sequence attends to; grows with the answer. 0 where it does not decode."""
    known_tokens: int = 0
    """Where it decodes: what `context` was at first."""
    most_output_tokens: int = 0
    """Where it decodes: output tokens that there can be."""
    marks: tuple[BlockHash, ...] = ()
    """Of the chain that the sequence holds; see `marks_of`."""
    num_matched: int = 0
    """Blocks of that chain that the worker had: where the last mark is, unless that is behind `MARK_BLOCKS` others."""
    shared_blocks: int = 0
    """KV blocks that are left out of `blocks`: other bookings held them."""


class Account(msgspec.Struct, gc=False):
    """All bookings of one worker and their sums."""

    tokens: int = 0
    pairs: int = 0
    blocks: int = 0
    context: int = 0
    held: dict[BlockHash, int] = {}
    """Mark -> bookings that have it."""
    bookings: dict[AttemptKey, Booking] = {}

    @property
    def sequences(self) -> int:
        """Attempts on the worker."""
        return len(self.bookings)


class Books:
    """Accounts of all workers; see the module docstring."""

    def __init__(self) -> None:
        self._accounts: dict[WorkerId, Account] = {}

    def account(self, worker_id: WorkerId) -> Account:
        """The account of a worker, read only; the same object until `forget`."""
        account = self._accounts.get(worker_id)
        if account is None:
            account = self._accounts[worker_id] = Account()
        return account

    def forget(self, worker_id: WorkerId) -> None:
        """Drop the account of a worker that is gone; its bookings must have been closed."""
        account = self._accounts.pop(worker_id, None)
        assert account is None or not account.bookings, f"bookings on {worker_id} are still open"

    def open(self, worker_id: WorkerId, key: AttemptKey, booking: Booking) -> None:
        """Book `booking`, which now belongs to the books. Raises `ValueError` if the attempt has one on this worker."""
        account = self.account(worker_id)
        if key in account.bookings:
            raise ValueError(f"{key} is booked on {worker_id} already")
        account.bookings[key] = booking
        account.tokens += booking.tokens
        account.pairs += booking.pairs
        account.blocks += booking.blocks
        account.context += booking.context
        held = account.held
        for mark in booking.marks:
            held[mark] = held.get(mark, 0) + 1

    def computed(self, worker_id: WorkerId, key: AttemptKey) -> int:
        """The prompt is computed: give back the booking's tokens, keep the rest. Returns how many these were; 0 the
        second time."""
        account = self._accounts[worker_id]
        booking = account.bookings[key]
        num_tokens = booking.tokens
        account.tokens -= num_tokens
        account.pairs -= booking.pairs
        booking.tokens = booking.pairs = 0
        return num_tokens

    def grow(self, worker_id: WorkerId, key: AttemptKey, num_tokens: int) -> None:
        """The answer got longer by `num_tokens`, which later steps attend to as well."""
        account = self._accounts[worker_id]
        account.bookings[key].context += num_tokens
        account.context += num_tokens

    def close(self, worker_id: WorkerId, key: AttemptKey) -> Booking:
        """Give back all of the booking; returns it. Raises `KeyError` if it is not open."""
        account = self._accounts[worker_id]
        booking = account.bookings.pop(key)
        account.tokens -= booking.tokens
        account.pairs -= booking.pairs
        account.blocks -= booking.blocks
        account.context -= booking.context
        held = account.held
        for mark in booking.marks:
            if held[mark] == 1:
                del held[mark]
            else:
                held[mark] -= 1
        return booking

    def entries(self) -> Iterator[tuple[WorkerId, AttemptKey]]:
        """All open bookings."""
        for worker_id, account in self._accounts.items():
            for key in account.bookings:
                yield worker_id, key

    def holdings(self) -> dict[str, int]:
        """The sums over all workers; all zero when nothing runs."""
        accounts = self._accounts.values()
        return {
            "tokens": sum(account.tokens for account in accounts),
            "sequences": sum(account.sequences for account in accounts),
            "blocks": sum(account.blocks for account in accounts),
        }

    def check_integrity(self) -> list[str]:
        """What does not add up; empty when all is well."""
        problems = []
        for worker_id, account in self._accounts.items():
            for name in ("tokens", "pairs", "blocks", "context"):
                total = sum(getattr(booking, name) for booking in account.bookings.values())
                if total != getattr(account, name):
                    problems.append(
                        f"books of {worker_id}: {getattr(account, name)} {name}, but its bookings say {total}"
                    )
            marks = Counter(mark for booking in account.bookings.values() for mark in booking.marks)
            if marks != account.held:
                problems.append(f"books of {worker_id}: the marks are not those of its bookings")
        return problems


def marks_of(hashes: Sequence[BlockHash], num_matched: int) -> tuple[BlockHash, ...]:
    """The marks of a chain of which a worker has `num_matched` blocks: where that prefix ends, and every
    `MARK_BLOCKS`."""
    marks = tuple(hashes[MARK_BLOCKS - 1 :: MARK_BLOCKS])
    return (*marks, hashes[num_matched - 1]) if num_matched % MARK_BLOCKS else marks


def num_left(booking: Booking, held: Mapping[BlockHash, int]) -> int:
    """Of the chain of a booking that was closed how many blocks other bookings still hold."""
    if not held:
        return 0
    marks, num_regular = booking.marks, len(booking.marks)
    left = 0
    if booking.num_matched % MARK_BLOCKS:
        num_regular -= 1
        left = booking.num_matched if marks[-1] in held else 0
    while num_regular and num_regular * MARK_BLOCKS > left and marks[num_regular - 1] not in held:
        num_regular -= 1
    return max(left, num_regular * MARK_BLOCKS)


def num_held(hashes: Sequence[BlockHash], num_matched: int, held: Mapping[BlockHash, int]) -> int:
    """How many of the first `num_matched` blocks of a chain bookings hold, as far as their marks show it."""
    if not num_matched or not held:
        return 0
    if hashes[num_matched - 1] in held:
        return num_matched
    low, high = 0, num_matched // MARK_BLOCKS
    while low < high:  # A booking that has a mark has all before it.
        middle = (low + high + 1) // 2
        if hashes[middle * MARK_BLOCKS - 1] in held:
            low = middle
        else:
            high = middle - 1
    return low * MARK_BLOCKS
