"""How large a body may be, in bytes and in parts, and how slow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from disagg.router.gateway.auth.auth import CALLER
from disagg.router.gateway.event_loop.pieces import in_pieces
from disagg.router.gateway.event_loop.turns import Turns
from disagg.router.gateway.http.exchange import Exchange
from disagg.router.gateway.http.transport.sites import check_content_type
from disagg.router.gateway.http.transport.unfinished import UnfinishedBodies
from disagg.router.gateway.requests.shape import SMALL_BYTES, Pieces, count_json

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyLimits:
    """Of every body that is read."""

    max_bytes: int
    timeout_s: float
    """From the end of the head to the end of the body."""
    max_values: int
    """Of all its lists and objects together."""
    turns: Turns
    """For large bodies."""
    unfinished: UnfinishedBodies
    """Bodies of all connections that are not whole yet."""

    async def read(self, exchange: Exchange, decode: Callable[[bytes], Pieces[T]]) -> T:
        """What `decode` makes of the body of `exchange`. A large one waits for its turn, and is counted and decoded in
        pieces: so many that arrive at once are not decoded in the same turn of the event loop.

        Raises:
            ContentTypeError: if it is not announced as JSON.
            InvalidRequestError: for too many parts.
            OverloadedError: if too many bytes wait, or unfinished bodies hold too many.
            DisaggError: whatever `Exchange.read_body` and `decode` raise.
        """
        check_content_type(exchange.headers.get("content-type"))
        body = await exchange.read_body(self.max_bytes, self.timeout_s, self.unfinished)
        if len(body) <= SMALL_BYTES:
            return await in_pieces(decode(body))
        async with self.turns.of(CALLER.get().tenant, len(body)):
            await in_pieces(count_json(body, self.max_values))
            return await in_pieces(decode(body))
