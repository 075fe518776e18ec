"""The client's end of one request: the router puts tokens in, one consumer takes them in batches.

    put* ── finish ──> iteration ends, `completion` is set          put* ── fail ──> iteration raises
    put, and too much is unread ──> stream_lost: unread tokens are dropped, the request is cancelled

Unread tokens wait here, up to `MAX_UNREAD_BYTES`: workers do not wait for a client. Tokens that
came before a failure are still delivered, except after a cancel or `stream_lost`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from typing_extensions import override

from disagg.proto.errors import DisaggError, RequestCancelledError, UnavailableError
from disagg.proto.ids import RequestId
from disagg.router.api import Completion, RequestHandle, TokenBatch

MAX_UNREAD_BYTES = 256 << 10
"""Most unread bytes: about 7,000 tokens. With log probabilities, which take up to forty times as much, the limit is
`LOGPROBS_FACTOR` times this."""
LOGPROBS_FACTOR = 4
_ID_BYTES, _LOGPROBS_BYTES, _TOP_BYTES = 36, 170, 68
"""Estimated bytes of an id in a list, of a `TokenLogprobs` without alternatives, and of each alternative."""


class Handle(RequestHandle):
    """The handle of one request. Used only on the router's event loop."""

    def __init__(self, request_id: RequestId, on_cancel: Callable[[RequestId], None]) -> None:
        self.request_id = request_id
        self.completion: Completion | None = None
        self.num_answered: int | None = None
        self._on_cancel = on_cancel
        self._unread = TokenBatch([])
        self._unread_bytes = 0
        self._end: Completion | DisaggError | None = None
        self._changed = asyncio.Event()

    def put(self, batch: TokenBatch) -> None:
        """Add the next tokens to the unread ones."""
        if self._end is not None:
            return
        self._unread.token_ids.extend(batch.token_ids)
        self._unread.logprobs.extend(batch.logprobs)
        self._unread_bytes += num_bytes(batch)
        if self._unread_bytes > MAX_UNREAD_BYTES * (LOGPROBS_FACTOR if batch.logprobs else 1):
            self._lose()
        self._changed.set()

    def finish(self, completion: Completion) -> None:
        """End the iteration after the unread tokens."""
        self._end = self._end or completion
        self._changed.set()

    def fail(self, error: DisaggError) -> None:
        """End the iteration with an error. Only the first end counts."""
        if self._end is None and isinstance(error, RequestCancelledError):
            self._unread = TokenBatch([])
        self._end = self._end or error
        self._changed.set()

    @property
    def error(self) -> DisaggError | None:
        """The error of a failed request, else None."""
        return self._end if isinstance(self._end, DisaggError) else None

    @override
    def cancel(self) -> None:
        if self._end is None:
            self._on_cancel(self.request_id)

    def _lose(self) -> None:
        self._unread = TokenBatch([])
        self._end = UnavailableError("more was unread than a stream may hold", "stream_lost")
        # Not at once: the router is executing the event that brought these tokens.
        asyncio.get_running_loop().call_soon(self._on_cancel, self.request_id)

    def __aiter__(self) -> AsyncIterator[TokenBatch]:
        return self

    async def __anext__(self) -> TokenBatch:
        """The batch of all tokens since the last one; waits for at least one token."""
        while not self._unread.token_ids:
            if isinstance(self._end, DisaggError):
                raise self._end
            if self._end is not None:
                self.completion = self._end
                raise StopAsyncIteration
            self._changed.clear()
            await self._changed.wait()
        batch, self._unread = self._unread, TokenBatch([])
        self._unread_bytes = 0
        return batch


def num_bytes(batch: TokenBatch) -> int:
    """Approximate bytes of a batch in memory."""
    size = _ID_BYTES * len(batch.token_ids)
    if batch.logprobs:
        size += sum(_LOGPROBS_BYTES + _TOP_BYTES * len(one.top_ids) for one in batch.logprobs)
    return size
