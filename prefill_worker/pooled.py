"""The role of pooled requests: takes prompts without an answer, and gives their vectors to the gateway.

    dispatch -> engine Add -> steps -> Ended with the vector -> End with it to the gateway

No decode worker takes part, and nothing is handed over. Each worker that computes prompts has this role.
"""

from __future__ import annotations

import logging

from disagg.engine.commands import Add, Ended, Event, FetchOrdered, Release
from disagg.engine.shell.role import RoleContext
from disagg.proto.ids import AttemptKey, GatewayId
from disagg.proto.messages import Dispatch, Migrate, PeerRef, RoleName, TransferCount

logger = logging.getLogger(__name__)


class PooledRole:
    """Owner of the pooled attempts of a worker. Asyncio thread only."""

    name: RoleName = "prefill"

    def __init__(self, context: RoleContext) -> None:
        self._context = context
        self._gateway_of: dict[AttemptKey, GatewayId] = {}
        """Gateway of each attempt, from its dispatch to its end."""

    async def start(self) -> None:
        """Nothing to do."""

    async def stop(self) -> None:
        """Nothing to do: the engine ends with its sequences."""

    def handlers(self) -> list[object]:
        """No handlers: this role serves gateways only."""
        return []

    def takes(self, dispatch: Dispatch) -> bool:
        """Whether the dispatch is a pooled request, and this worker computes prompts."""
        return dispatch.spec.pooling is not None and "prefill" in self._context.config.roles

    def dispatch(self, dispatch: Dispatch) -> None:
        """Compute an attempt."""
        spec = dispatch.spec
        if spec.key in self._gateway_of:
            logger.warning("dropped a second dispatch of %s by gateway %s", spec.key, spec.gateway_id)
            return
        self._gateway_of[spec.key] = spec.gateway_id
        self._context.post(Add(spec))

    def connect(self, peer: PeerRef) -> None:
        """Nothing to do: nothing is handed over."""

    def fetch(self, order: FetchOrdered) -> None:
        """Nothing to do: the decode role receives."""

    @property
    def num_served_fetches(self) -> int:
        """None: the prefill role sends."""
        return 0

    def migrate(self, message: Migrate, gateway_id: GatewayId) -> None:
        """Nothing to do: only sequences that decode move."""

    def cancel_migration(self, key: AttemptKey, gateway_id: GatewayId) -> None:
        """Nothing to do: only sequences that decode move."""

    def cancel(self, key: AttemptKey) -> None:
        """Drop an attempt. Unknown ones have ended already, because a cancel cannot overtake its dispatch."""
        if self._gateway_of.pop(key, None) is not None:
            self._context.post(Release(key))

    def owns(self, key: AttemptKey) -> bool:
        """Whether the attempt is here."""
        return key in self._gateway_of

    def on_event(self, event: Event) -> None:
        """Pass the end of an attempt to its gateway, with its vector."""
        if isinstance(event, Ended) and (gateway_id := self._gateway_of.pop(event.key, None)) is not None:
            self._context.outbox.end(
                gateway_id,
                event.key,
                event.reason,
                event.detail,
                event.cached_tokens,
                event.queue_s,
                vector=event.vector,
            )

    def transfers(self) -> list[TransferCount]:
        """Nothing is transferred."""
        return []

    def tick(self, now: float) -> None:
        """Nothing to do."""

    def keys_of_gateway(self, gateway_id: str) -> list[AttemptKey]:
        """Keys of the live attempts of one gateway."""
        return [key for key, owner in self._gateway_of.items() if owner == gateway_id]

    def holdings(self) -> dict[str, int]:
        """Number of attempts."""
        return {"pooled_attempts": len(self._gateway_of)}
