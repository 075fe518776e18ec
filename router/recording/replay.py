"""Gives a recording to a new router core, and compares what comes out."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from disagg.proto.errors import LimitError
from disagg.proto.ids import BlockHash
from disagg.proto.token_ids import PackedTokenIds
from disagg.router.recording.entries import (
    Admitted,
    ChargedElsewhere,
    Ended,
    Entry,
    Handled,
    Header,
    Refunded,
    digest,
    digest_of_error,
)
from disagg.router.requests.events import Command
from disagg.router.requests.router_core import RouterCore


class Replayed(NamedTuple):
    """The outcome of one entry."""

    commands: Sequence[Command] = ()
    error: Exception | None = None
    """The exception of the core, or the refusal of a call."""
    is_same: bool = True
    """Whether the recorded core did the same. If not, later entries show nothing: the two cores' states differ."""


class Replay:
    """A router core like the recorded one. `core` may be looked at between the entries: its queries have no effect."""

    def __init__(self, header: Header) -> None:
        self.core = RouterCore(header.config, header.gateway_id, hash_blocks=self._next_hashes)
        self._hashed: deque[tuple[BlockHash, ...]] = deque()
        self._lacks_hashes = False

    def apply(self, entry: Entry) -> Replayed:
        """Apply the next entry."""
        match entry:
            case Handled():
                return self._handle(entry)
            case Admitted(now=now, call=call):
                refused: LimitError | None = self.core.admit(call, now)
                return Replayed((), refused, digest_of_error(refused) == entry.digest)
            case Refunded(now=now, tenant=tenant, num_tokens=num_tokens, num_answers=num_answers):
                self.core.refund(tenant, num_tokens, num_answers, now)
            case ChargedElsewhere(now=now, charges=charges):
                self.core.charged_elsewhere(charges, now)
            case Ended():
                pass
        return Replayed()

    def _handle(self, entry: Handled) -> Replayed:
        self._hashed.extend(entry.hashed)
        commands: Sequence[Command] = ()
        raised: Exception | None = None
        try:
            commands = self.core.handle(entry.event, entry.now)
        except Exception as error:  # as the recorded core may have, by the same bug
            raised = error
        made = digest(commands) if raised is None else digest_of_error(raised)
        is_same = made == entry.digest and len(commands) == entry.num_commands
        return Replayed(commands, raised, is_same and not self._hashed and not self._lacks_hashes)

    def _next_hashes(self, parent: BlockHash, token_ids: PackedTokenIds) -> list[BlockHash]:
        """The hashes that the recorded core computed here; none if it computed none."""
        if not self._hashed:
            self._lacks_hashes = True
            return []
        return list(self._hashed.popleft())
