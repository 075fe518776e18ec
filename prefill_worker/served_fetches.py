"""Prefixes that other workers fetch from here: the call, what is held for it, and the offer.

    Fetch ──checked──> engine Pin ──> Pinned ──> FetchGranted, and an offer on a pair in which this worker is P
              └── FetchRefused        └── nothing is cached, or there is no time: FetchRefused

The hand-over releases what is held, at its end, whatever that is. The tokens that are held in vain where the other
worker is gone have a deadline, which is that of the fetch. Owner: the asyncio thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from disagg.engine.commands import Pin, Pinned, Release
from disagg.engine.core.fetching import is_fetch_key
from disagg.engine.kv_transfer.prefixes import MAX_SERVED, held_part
from disagg.engine.shell.role import RoleContext
from disagg.proto.block_hash import chain_hashes
from disagg.proto.handover import Fetch, FetchAnswer, FetchGranted, FetchRefused
from disagg.proto.ids import AttemptKey
from disagg.proto.messages import PeerRef, SequenceSpec

logger = logging.getLogger(__name__)


class _Served:
    """A call, and its answer once the engine has pinned the prefix."""

    def __init__(self, fetch: Fetch) -> None:
        self.fetch = fetch
        self.answer: asyncio.Future[FetchAnswer] = asyncio.get_running_loop().create_future()

    def reply(self, answer: FetchAnswer) -> None:
        if not self.answer.done():  # else the caller is gone
            self.answer.set_result(answer)


class ServedFetches:
    """Owner: the prefill role of a worker that fetches. `offer` begins the hand-over of a prefix to another worker."""

    def __init__(self, context: RoleContext, offer: Callable[[PeerRef, SequenceSpec], None]) -> None:
        self._context = context
        self._offer = offer
        self._served: dict[AttemptKey, _Served] = {}

    def __contains__(self, key: AttemptKey) -> bool:
        return key in self._served

    def __len__(self) -> int:
        return len(self._served)

    async def serve(self, fetch: Fetch) -> FetchAnswer:
        """Answer a call."""
        if reason := self._why_not(fetch):
            logger.debug("refused to send %s to %s: %s", fetch.spec.key, fetch.needy.worker_id, reason)
            return FetchRefused(reason=reason)
        served = self._served[fetch.spec.key] = _Served(fetch)
        self._context.post(Pin(fetch.spec))
        return await served.answer

    def on_pinned(self, event: Pinned) -> None:
        """The engine holds the prefix, or not."""
        served = self._served[event.key]
        fetch, num_tokens = served.fetch, event.num_tokens
        if served.answer.done():  # the caller is gone, or this worker stops
            self._end(event.key, "nobody waits for it")
        elif num_tokens <= fetch.from_token:
            self._end(event.key, event.reason or f"of {num_tokens} tokens the caller has {fetch.from_token}")
        else:
            served.reply(FetchGranted(end_token=num_tokens))
            self._offer(fetch.needy, held_part(fetch.spec, num_tokens))

    def over(self, key: AttemptKey) -> None:
        """The hand-over is over, and the prefix is released."""
        del self._served[key]

    def stop(self) -> None:
        """Refuse what is not answered yet."""
        for served in self._served.values():
            served.reply(FetchRefused(reason="the worker stops"))

    def _end(self, key: AttemptKey, reason: str) -> None:
        self._context.post(Release(key))
        self._served.pop(key).reply(FetchRefused(reason=reason))

    def _why_not(self, fetch: Fetch) -> str:
        """Reason why the call is refused; empty if it is not."""
        info, spec = self._context.info, fetch.spec
        num_tokens = spec.num_known_tokens
        if fetch.source_incarnation != info.incarnation:
            return f"{info.worker_id} is incarnation {info.incarnation}, not {fetch.source_incarnation}"
        if fetch.needy.incarnation == info.incarnation:
            return "a worker that fetches from itself"
        if fetch.fingerprint == info.fingerprint and fetch.kv_layout != info.kv_layout:
            return f"KV layouts differ: {fetch.kv_layout.unlike(info.kv_layout)}"
        if fetch.fingerprint != info.fingerprint:
            return f"model fingerprints differ: {fetch.fingerprint} and {info.fingerprint}"
        if not is_fetch_key(spec.key) or spec.key in self._served:
            return f"{spec.key} names no new fetch"
        if spec.emitted_token_ids or not 0 < num_tokens <= info.max_model_len or num_tokens % info.block_size:
            return f"a prefix of {num_tokens} tokens is none of whole blocks of {info.block_size} tokens"
        if not 0 <= fetch.from_token < num_tokens:
            return f"tokens from {fetch.from_token} on of {num_tokens}"
        if len(self._served) >= MAX_SERVED:
            return f"{MAX_SERVED} fetches are served already"
        if list(spec.block_hashes) != chain_hashes(spec.root_hash, spec.prompt_token_ids):
            return "the block hashes are not those of the tokens behind the root hash"
        return ""
