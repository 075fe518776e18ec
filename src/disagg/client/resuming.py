"""Resuming a stream when its gateway dies: which request continues it, and when. Pure.

    begin ──message──> took ──connection breaks──> broke ──pause──> request(), to any gateway ──message──> took ...
                                                     └─ nothing came for `limit_s`, or another error: given up

The request that continues is the first one, its seed and all tokens that came (`Resume`). So the gateway that takes it
needs to know nothing of the first.
"""

from __future__ import annotations

import secrets
from typing import Final

from disagg.proto.errors import NO_WORKER_YET, UNAVAILABLE_RETRY_S, DisaggError, OverloadedError, UnavailableError
from disagg.v1 import inference_pb2 as pb

RESUME_S: Final = 10.0
"""Seconds for which a client tries to resume, by default."""
START_S: Final = 120.0
"""Seconds for which a client waits for the first worker of an empty pool, by default."""
MIN_PAUSE_S: Final = 0.05
MAX_PAUSE_S: Final = 0.5
_LOST_CODES: Final = frozenset({"unreachable", "shutting_down", "gateway_stopping"})
"""Codes of an `UnavailableError` that mean that the gateway is gone or stopping."""
_FINAL_CODES: Final = frozenset({"stream_lost", "not_resumed"})
"""Codes of an `UnavailableError` after which another attempt would not help."""


class Attempts:
    """The attempts of one call. Times are seconds of any monotonic clock.

    Args:
        limit_s: how long after the connection broke it may take to come back; 0 gives up at once.
        start_s: how long a pool that was empty may take to have a worker; 0 gives up at once.
    """

    def __init__(self, limit_s: float, start_s: float = 0.0) -> None:
        self._limit_s = limit_s
        self._start_s = start_s
        self._has_begun = False
        """Whether a part of the answer was received."""
        self._refused_at: float | None = None
        self._was_taken = False
        """Whether a gateway accepted the call, at any attempt. If none did, there may be no gateway."""
        self._lost_at: float | None = None
        self._pause_s = MIN_PAUSE_S

    def progressed(self) -> None:
        """Note that a part of the answer was received."""
        self._was_taken, self._lost_at, self._pause_s = True, None, MIN_PAUSE_S
        self._has_begun = True

    def pause_s(self, error: DisaggError, was_taken: bool, now: float) -> float | None:
        """Seconds until the next attempt after the call failed; None for no further attempt.

        Args:
            error: the error of the call.
            was_taken: whether a gateway had taken it.
            now: the time.
        """
        self._was_taken = self._was_taken or was_taken
        if isinstance(error, UnavailableError) and error.code == NO_WORKER_YET and not self._has_begun:
            if self._refused_at is None:
                self._refused_at = now
            is_in_time = now + UNAVAILABLE_RETRY_S <= self._refused_at + self._start_s
            return UNAVAILABLE_RETRY_S if is_in_time else None
        wait_s = self._pause_s
        if isinstance(error, UnavailableError):
            tries = error.code not in _FINAL_CODES if self._lost_at is not None else error.code in _LOST_CODES
        else:
            tries = self._lost_at is not None and isinstance(error, OverloadedError)
        if not tries or not self._was_taken or not self._limit_s:
            return None
        if isinstance(error, OverloadedError):
            wait_s = max(wait_s, error.retry_after_s or 0.0)
        if self._lost_at is None:
            self._lost_at = now
        if now + wait_s > self._lost_at + self._limit_s:
            return None
        self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)
        return wait_s


class Resumption:
    """The state of one stream.

    Args:
        request: request of the first attempt. It gets a seed if it has none, so that it can be continued.
        limit_s: see `Attempts`; with several answers, which cannot be continued, it counts as 0.
        start_s: see `Attempts`.
    """

    def __init__(self, request: pb.GenerateRequest, limit_s: float, start_s: float = 0.0) -> None:
        can_resume = limit_s > 0 and request.n <= 1
        self._request = pb.GenerateRequest()
        self._request.CopyFrom(request)
        if can_resume and not request.sampling.HasField("seed"):
            self._request.sampling.seed = secrets.randbits(64)
        self._attempts = Attempts(limit_s if can_resume else 0.0, start_s)
        self._token_ids: list[int] = []
        self._model_version = ""
        self._had_tail = False
        """Whether the text after the last token was received."""
        self._is_continued = False
        """Whether the next part must begin behind the tokens that were received."""
        self._repeats_tail = False
        """Whether that text will be received again."""
        self._has_gap = False
        """Whether tokens are missing because a guardrail replaced them: the answer cannot be continued without them."""
        self._num_unfinished = max(1, request.n)

    @property
    def is_finished(self) -> bool:
        """Whether the ends of all answers were received: after that the state of the connection does not matter."""
        return self._num_unfinished == 0

    def request(self) -> pb.GenerateRequest:
        """Request of the next attempt."""
        if not self._token_ids:
            return self._request
        continued = pb.GenerateRequest()
        continued.CopyFrom(self._request)
        continued.resume.token_ids.extend(self._token_ids)
        continued.resume.model_version = self._model_version
        self._is_continued = True
        self._repeats_tail = self._had_tail
        return continued

    def took(self, response: pb.GenerateResponse) -> bool:
        """Handle a message, and return whether it is new. Raises `UnavailableError` if it does not continue the earlier
        ones."""
        self._attempts.progressed()
        if response.HasField("finished"):
            self._num_unfinished -= 1
            return True
        delta = response.delta
        if not delta.token_ids and self._repeats_tail:
            return False  # the same text as before the break
        self._repeats_tail = False
        self._has_gap = self._has_gap or bool(delta.token_ids and delta.first_index != len(self._token_ids))
        if self._is_continued and delta.first_index != len(self._token_ids):
            raise UnavailableError(
                f"the gateway continues at token {delta.first_index}, not {len(self._token_ids)}", "not_resumed"
            )
        self._is_continued = False  # behind its first part, tokens may be missing because a guardrail replaced them
        self._model_version = delta.model_version or self._model_version
        self._had_tail = not delta.token_ids
        self._token_ids.extend(delta.token_ids)
        return True

    def pause_s(self, error: DisaggError, was_taken: bool, now: float) -> float | None:
        """Seconds until the next attempt, or None; see `Attempts`."""
        if self._has_gap:
            return None
        return self._attempts.pause_s(error, was_taken, now)
