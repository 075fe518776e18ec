"""How large a body may be, and how slow."""

from __future__ import annotations

from dataclasses import dataclass

from disagg.router.gateway.http.exchange import Exchange


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyLimits:
    """Of every body that is read."""

    max_bytes: int
    timeout_s: float
    """From the end of the head to the end of the body."""

    async def read(self, exchange: Exchange) -> bytes:
        """The body of `exchange`; for what is raised, see `Exchange.read_body`."""
        return await exchange.read_body(self.max_bytes, self.timeout_s)
