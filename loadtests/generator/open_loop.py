"""The open loop: every planned request is sent when it is due, independent of the others.

    run() ── sleeps until the next due time ── spawns a greenlet ── sends, reads to the end ──> RequestRecord

Latencies count from the due time. A generator that is late adds its lateness to them, and shows it. A later turn of a
conversation is due when it was planned or when the answer before it has ended, whichever is later. A request that is
due while too many are in flight is recorded as `dropped`. Every request that was due gets exactly one record.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import gevent
from gevent import monkey
from gevent.event import AsyncResult

from disagg.loadtests.generator.gateway_client import Answer, GatewayClient, Metadata, clock, request_bytes
from disagg.loadtests.records import PlannedRequest, RequestRecord

START_DELAY_S = 0.2
"""Seconds between the end of the preparations and the run's time 0."""
NATIVE_SLEEP_S = 0.002
SWITCH_INTERVAL_S = 0.0005
"""Seconds that gRPC's native threads wait for the interpreter while the greenlets have it; the usual 5 ms would affect
the results."""
TIME_DIGITS = 6
"""Digits of times: microseconds, the resolution of the clock."""

_native_sleep: Callable[[float], None] = monkey.get_original("time", "sleep")


class Conversation(NamedTuple):
    """State of a conversation that its next turn needs."""

    token_ids: tuple[int, ...]
    """Token ids of all prompts and answers so far, in order."""
    end_s: float
    """Time at which the last answer ended, in seconds since the start of the run."""


class OpenLoop:
    """Runs one plan. Owner of the in-flight count; used once, from one greenlet.

    Args:
        client: connected.
        model: the model's name.
        plan: in order of `due_s`.
        max_in_flight: a request that is due beyond this many is dropped.
        timeout_s: deadline of each request, from its sending.
        metadata: sent with each request.
        on_record: called with each record when the request has ended; must not block.
    """

    def __init__(
        self,
        client: GatewayClient,
        model: str,
        plan: Sequence[PlannedRequest],
        *,
        max_in_flight: int,
        timeout_s: float | None,
        metadata: Metadata = (),
        on_record: Callable[[RequestRecord], None],
    ) -> None:
        self._client = client
        self._model = model
        self._plan = plan
        self._max_in_flight = max_in_flight
        self._timeout_s = timeout_s
        self._metadata = metadata
        self._on_record = on_record
        self._threads = gevent.get_hub().threadpool
        self._start_s = 0.0
        self.num_in_flight = 0
        followed = {planned.after for planned in plan if planned.after is not None}
        self._conversations: Mapping[int, AsyncResult[Conversation | None]] = {
            index: AsyncResult() for index in followed
        }
        """Conversation after each request that another one follows; None when the request has failed."""

    def run(self) -> None:
        """Send all requests; returns when the last answer has ended. Ends all calls when its greenlet is killed."""
        messages = [request_bytes(planned, self._model) if planned.after is None else b"" for planned in self._plan]
        greenlets: list[gevent.Greenlet[..., None]] = []
        with _undisturbed():
            self._start_s = clock() + START_DELAY_S
            try:
                for planned, message in zip(self._plan, messages, strict=True):
                    self._sleep_until(planned.due_s)
                    if planned.after is None:
                        greenlets.append(gevent.spawn(self._exchange, planned, message, planned.due_s))
                    else:
                        greenlets.append(gevent.spawn(self._follow, planned, self._conversations[planned.after]))
                gevent.joinall(greenlets, raise_error=True)
            finally:
                gevent.killall(greenlets)

    def now_s(self) -> float:
        """Seconds since the start of the run."""
        return clock() - self._start_s

    def _sleep_until(self, due_s: float) -> None:
        """Sleep in the event loop, whose timers are up to a millisecond late, and for the rest in a native thread."""
        if (wait_s := due_s - self.now_s()) > NATIVE_SLEEP_S:
            gevent.sleep(wait_s - NATIVE_SLEEP_S)
        if (wait_s := due_s - self.now_s()) > 0:
            self._threads.apply(_native_sleep, (wait_s,))

    def _follow(self, planned: PlannedRequest, before: AsyncResult[Conversation | None]) -> None:
        """Send a later turn after the answer before it."""
        conversation = before.get()
        if conversation is None:
            now_s = self.now_s()
            self._end(planned, now_s, now_s, Answer("failed", (), (), clock(), error="the turn before it failed"))
            return
        history = conversation.token_ids
        due_s = max(planned.due_s, conversation.end_s)
        self._exchange(planned, request_bytes(planned, self._model, history), due_s, history)

    def _exchange(self, planned: PlannedRequest, message: bytes, due_s: float, history: tuple[int, ...] = ()) -> None:
        """Send one request, or drop it, and record the result."""
        sent_s = self.now_s()
        if self.num_in_flight >= self._max_in_flight:
            error = f"{self.num_in_flight} requests were in flight"
            self._end(planned, due_s, sent_s, Answer("dropped", (), (), clock(), error=error), history)
            return
        self.num_in_flight += 1
        try:
            answer = self._client.generate(
                message, max_tokens=planned.max_tokens, timeout_s=self._timeout_s, metadata=self._metadata
            )
        except gevent.GreenletExit:
            self._end(planned, due_s, sent_s, Answer("failed", (), (), clock(), error="the run was stopped"), history)
            raise
        finally:
            self.num_in_flight -= 1
        self._end(planned, due_s, sent_s, answer, history)

    def _end(
        self, planned: PlannedRequest, due_s: float, sent_s: float, answer: Answer, history: tuple[int, ...] = ()
    ) -> None:
        """Record a request, and let the next turn begin, if there is one."""
        end_s = self._relative(answer.end_s)
        self._on_record(
            RequestRecord(
                index=planned.index,
                due_s=round(due_s, TIME_DIGITS),
                sent_s=round(sent_s, TIME_DIGITS),
                status=answer.status,
                num_prompt_tokens=len(history) + len(planned.prompt_token_ids),
                max_tokens=planned.max_tokens,
                token_times_s=tuple(map(self._relative, answer.token_times_s)),
                end_s=None if answer.status == "dropped" else end_s,
                cached_tokens=answer.cached_tokens,
                output_digest=answer.digest,
                request_id=answer.request_id,
                error=answer.error,
                group=planned.group,
            )
        )
        if planned.index in self._conversations:
            whole = Conversation((*history, *planned.prompt_token_ids, *answer.token_ids), end_s)
            self._conversations[planned.index].set(whole if answer.status == "ok" else None)

    def _relative(self, time_s: float) -> float:
        return round(time_s - self._start_s, TIME_DIGITS)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Disable garbage collection, which takes tens of milliseconds with Locust and a plan in memory, and switch threads
    quickly."""
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()
        sys.setswitchinterval(interval_s)
