"""A router core whose events are recorded. It replaces `RouterCore` if recording is on, so that one without it has no
branch for that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec
from typing_extensions import override

from disagg.proto.block_hash import chain_hashes
from disagg.proto.errors import LimitError
from disagg.proto.ids import BlockHash, GatewayId
from disagg.proto.token_ids import PackedTokenIds
from disagg.router.api import CallDemand, RateCharge
from disagg.router.config import RouterConfig
from disagg.router.recording.entries import (
    Admitted,
    ChargedElsewhere,
    Entry,
    Handled,
    Refunded,
    TokenHider,
    digest,
    digest_of_error,
    encode,
)
from disagg.router.requests.events import Command, Event
from disagg.router.requests.router_core import RouterCore


class Sink(Protocol):
    """The destination of the entries. Must not block."""

    @property
    def is_open(self) -> bool:
        """Whether entries are still recorded. Once false, it stays false."""
        ...

    def put(self, entry: bytes) -> None:
        """Take the next entry."""
        ...

    def fail(self, error: Exception) -> None:
        """End the recording here, because the next entry could not be made."""
        ...


class RecordedCore(RouterCore):
    """Gives `sink` an entry for each call that changes the state of the core; see `RouterCore` for the rest."""

    def __init__(self, config: RouterConfig, gateway_id: GatewayId, sink: Sink) -> None:
        # As a replay reads it: an integer where a float is meant would come back as a float.
        config = msgspec.convert(msgspec.to_builtins(config), RouterConfig)
        super().__init__(config, gateway_id, hash_blocks=self._note_hashes)
        self._sink = sink
        self._hider = TokenHider()
        self._hashed: list[tuple[BlockHash, ...]] = []

    @override
    def handle(self, event: Event, now: float) -> list[Command]:
        if not self._sink.is_open:
            return super().handle(event, now)
        self._hashed.clear()
        try:
            commands = super().handle(event, now)
        except Exception as error:
            self._record_event(event, now, [], error)
            raise
        self._record_event(event, now, commands, None)
        return commands

    @override
    def admit(self, call: CallDemand, now: float) -> LimitError | None:
        error = super().admit(call, now)
        if self._sink.is_open:
            self._record(Admitted(now, call, digest_of_error(error)))
        return error

    @override
    def refund(self, tenant: str, num_tokens: int, num_answers: int, now: float) -> None:
        super().refund(tenant, num_tokens, num_answers, now)
        if self._sink.is_open:
            self._record(Refunded(now, tenant, num_tokens, num_answers))

    @override
    def charged_elsewhere(self, charges: Sequence[RateCharge], now: float) -> None:
        super().charged_elsewhere(charges, now)
        if self._sink.is_open:
            self._record(ChargedElsewhere(now, tuple(charges)))

    def _note_hashes(self, parent: BlockHash, token_ids: PackedTokenIds) -> list[BlockHash]:
        hashes = chain_hashes(parent, token_ids)
        if self._sink.is_open:
            self._hashed.append(tuple(hashes))
        return hashes

    def _record_event(self, event: Event, now: float, commands: list[Command], error: Exception | None) -> None:
        try:
            entry = Handled(
                now,
                self._hider.hide(event),
                len(commands),
                digest(commands) if error is None else digest_of_error(error),
                tuple(self._hashed),
            )
            if error is None:
                self._hider.follow(event, commands)
        except Exception as bug:
            self._sink.fail(bug)
        else:
            self._record(entry)

    def _record(self, entry: Entry) -> None:
        """Give `sink` an entry. A fault here must not fail the request."""
        try:
            encoded = encode(entry)
        except Exception as bug:
            self._sink.fail(bug)
        else:
            self._sink.put(encoded)
