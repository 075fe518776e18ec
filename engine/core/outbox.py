"""Messages from a worker to its gateways: one per gateway and step, never one per token (`Outbox`), and for short steps
one for several of them (`TokenPacing`). Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from disagg.engine.commands import Event, TokenSampled
from disagg.proto.ids import AttemptKey, GatewayId
from disagg.proto.messages import (
    End,
    EndReason,
    Fetched,
    HandedOver,
    MigrationFailed,
    PrefillDone,
    StepUpdate,
    TokenLogprobs,
    TokenOut,
)


@dataclass(slots=True)
class _Pending:
    tokens: dict[AttemptKey, tuple[int, list[int], list[TokenLogprobs]]] = field(default_factory=dict)
    prefilled: list[PrefillDone] = field(default_factory=list)
    handed_over: list[HandedOver] = field(default_factory=list)
    ends: list[End] = field(default_factory=list)
    migrations_failed: list[MigrationFailed] = field(default_factory=list)
    fetched: list[Fetched] = field(default_factory=list)

    def to_update(self) -> StepUpdate:
        tokens = tuple(
            TokenOut(key.request_id, key.attempt, first_index, tuple(token_ids), tuple(logprobs))
            for key, (first_index, token_ids, logprobs) in self.tokens.items()
        )
        return StepUpdate(
            tokens=tokens,
            prefilled=tuple(self.prefilled),
            handed_over=tuple(self.handed_over),
            ends=tuple(self.ends),
            migrations_failed=tuple(self.migrations_failed),
            fetched=tuple(self.fetched),
        )


class Outbox:
    """What one turn of a worker has for each gateway. Owner: the asyncio side of one worker."""

    def __init__(self) -> None:
        self._pending: dict[GatewayId, _Pending] = {}

    def token(
        self, gateway_id: GatewayId, key: AttemptKey, index: int, token_id: int, logprobs: TokenLogprobs | None = None
    ) -> None:
        """Output token `index` of an attempt; the indices of one attempt come in order. All of its tokens have
        `logprobs`, or none."""
        tokens = self._for(gateway_id).tokens
        of_attempt = tokens.get(key)
        if of_attempt is None:
            of_attempt = tokens[key] = (index, [], [])
        of_attempt[1].append(token_id)
        if logprobs is not None:
            of_attempt[2].append(logprobs)

    def prefill_done(
        self,
        gateway_id: GatewayId,
        key: AttemptKey,
        cached_tokens: int,
        *,
        alloc_wait_s: float = 0.0,
        queue_s: float = 0.0,
    ) -> None:
        """The prompt is computed."""
        message = PrefillDone(
            request_id=key.request_id,
            attempt=key.attempt,
            cached_tokens=cached_tokens,
            alloc_wait_s=alloc_wait_s,
            queue_s=queue_s,
        )
        self._for(gateway_id).prefilled.append(message)

    def fetched(self, gateway_id: GatewayId, message: Fetched) -> None:
        """The fetch of a prefix is over for a sequence."""
        self._for(gateway_id).fetched.append(message)

    def handed_over(self, gateway_id: GatewayId, message: HandedOver) -> None:
        """The sequence is on the decode worker now."""
        self._for(gateway_id).handed_over.append(message)

    def end(
        self,
        gateway_id: GatewayId,
        key: AttemptKey,
        reason: EndReason,
        detail: str = "",
        cached_tokens: int = 0,
        queue_s: float = 0.0,
        *,
        drafted_tokens: int = 0,
        accepted_tokens: int = 0,
        in_transfer: bool = False,
        vector: bytes = b"",
    ) -> None:
        """The attempt is over on this worker."""
        message = End(
            request_id=key.request_id,
            attempt=key.attempt,
            reason=reason,
            detail=detail,
            cached_tokens=cached_tokens,
            queue_s=queue_s,
            drafted_tokens=drafted_tokens,
            accepted_tokens=accepted_tokens,
            in_transfer=in_transfer,
            vector=vector,
        )
        self._for(gateway_id).ends.append(message)

    def migration_failed(self, gateway_id: GatewayId, key: AttemptKey, detail: str, *, refused: bool) -> None:
        """The attempt stays on this worker."""
        message = MigrationFailed(request_id=key.request_id, attempt=key.attempt, refused=refused, detail=detail)
        self._for(gateway_id).migrations_failed.append(message)

    def flush(self) -> dict[GatewayId, StepUpdate]:
        """One update for each gateway with something to send; the outbox is empty afterwards."""
        if not self._pending:
            return {}
        pending, self._pending = self._pending, {}
        return {gateway_id: box.to_update() for gateway_id, box in pending.items()}

    def _for(self, gateway_id: GatewayId) -> _Pending:
        pending = self._pending.get(gateway_id)
        if pending is None:
            pending = self._pending[gateway_id] = _Pending()
        return pending


class TokenPacing:
    """Decides whether the events of a step may wait for the next step. Owner: the engine thread.

    First tokens, ends and hand-overs are sent at once, with all that waits; further tokens of an interval together. A
    message costs the worker, the gateway and the client far more than the token in it, on cores that they share with
    the model, and a step of a small model takes a few milliseconds. Steps longer than half the interval are sent one by
    one.

    Args:
        interval_s: tokens of steps that end within this time are sent together; 0 sends each step's at once.
    """

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._flushed_at = -math.inf

    def flushed(self, now: float) -> None:
        """Everything up to now was sent."""
        self._flushed_at = now

    def may_wait(self, events: Sequence[Event], step_s: float, now: float) -> bool:
        """Whether `events` may be sent after the next step, if that takes `step_s` like the one before: it would end
        within the interval, and none of them is urgent."""
        if now + step_s > self._flushed_at + self._interval_s:
            return False
        return all(isinstance(event, TokenSampled) and event.index > 0 for event in events)
