"""What the router has promised of each worker and not got back: prompt tokens to compute, sequences, KV blocks.

One entry per (worker, attempt), opened when the attempt is dispatched and closed exactly once, whatever its end.
Closing an entry that is not open is a fault of ours and raises. When nothing runs, every total is zero.

Owner: the router core.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from disagg.proto.ids import AttemptKey, WorkerId


@dataclass(frozen=True, slots=True)
class Booking:
    """What one attempt takes of one worker (besides a sequence slot)."""

    tokens: int = 0
    """Prompt tokens that the worker must compute and has not reported as done."""
    blocks: int = 0
    """KV blocks, in the worker's own block size."""


@dataclass(slots=True)
class Account:
    """All bookings of one worker and their sums."""

    tokens: int = 0
    blocks: int = 0
    bookings: dict[AttemptKey, Booking] = field(default_factory=dict)

    @property
    def sequences(self) -> int:
        """Attempts on the worker."""
        return len(self.bookings)


class Books:
    """Accounts of all workers; see the module docstring."""

    def __init__(self) -> None:
        self.num_changes = 0
        """Counts every change, so that a caller can tell whether room may have been made."""
        self._accounts: dict[WorkerId, Account] = {}

    def account(self, worker_id: WorkerId) -> Account:
        """The account of a worker; read only. A worker without bookings has an empty one."""
        return self._accounts.get(worker_id) or Account()

    def open(self, worker_id: WorkerId, key: AttemptKey, booking: Booking) -> None:
        """Book `booking` for the attempt. Raises `ValueError` if it has one on this worker."""
        account = self._accounts.setdefault(worker_id, Account())
        if key in account.bookings:
            raise ValueError(f"{key} is booked on {worker_id} already")
        self.num_changes += 1
        account.bookings[key] = booking
        account.tokens += booking.tokens
        account.blocks += booking.blocks

    def computed(self, worker_id: WorkerId, key: AttemptKey) -> None:
        """The prompt is computed: give back the booking's tokens, keep the rest. Does nothing the second time."""
        account = self._accounts[worker_id]
        booking = account.bookings[key]
        self.num_changes += booking.tokens > 0
        account.tokens -= booking.tokens
        account.bookings[key] = Booking(blocks=booking.blocks)

    def close(self, worker_id: WorkerId, key: AttemptKey) -> None:
        """Give back all of the booking. Raises `KeyError` if it is not open."""
        account = self._accounts[worker_id]
        booking = account.bookings.pop(key)
        self.num_changes += 1
        account.tokens -= booking.tokens
        account.blocks -= booking.blocks
        if not account.bookings:
            del self._accounts[worker_id]

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
            tokens = sum(booking.tokens for booking in account.bookings.values())
            blocks = sum(booking.blocks for booking in account.bookings.values())
            if (tokens, blocks) != (account.tokens, account.blocks):
                sums = f"{account.tokens} tokens, {account.blocks} blocks"
                problems.append(f"books of {worker_id}: {sums}, but its bookings say {tokens}, {blocks}")
            if not account.bookings:
                problems.append(f"books of {worker_id}: an empty account was kept")
        return problems
