"""What the router has promised of each worker and not got back: prompt tokens to compute, sequences, KV blocks.

One entry per (worker, attempt), opened when the attempt is dispatched and closed exactly once, whatever its end.
Closing an entry that is not open is a fault of ours and raises. When nothing runs, every total is zero.

A booking, like every record that lives as long as a request, is nothing that the garbage collector walks through: it
holds no other objects, or none that lead back to it, and a router has thousands of them.

Owner: the router's fleet.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from disagg.proto.ids import AttemptKey, WorkerId


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


class Account(msgspec.Struct, gc=False):
    """All bookings of one worker and their sums."""

    tokens: int = 0
    pairs: int = 0
    blocks: int = 0
    context: int = 0
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
        return problems
