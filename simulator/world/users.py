"""The users that send the requests of an outline, and a record of each request, as in a load test.

A request is sent when it is due, independent of the others. A later turn of a conversation is due at its time or
when the answer before it has ended, if that is later; where the turn before it failed, so does it. A user may leave: he
cancels what has no first token before its timeout (`patience_s`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from disagg.loadtests.records import RequestRecord, Status
from disagg.loadtests.verdict.goodput import Slo
from disagg.loadtests.workload.workload import OutlinedRequest
from disagg.proto.block_hash import root_hash
from disagg.proto.errors import DeadlineError, DisaggError, OverloadedError
from disagg.proto.ids import RequestId
from disagg.proto.messages import Sampling
from disagg.router.api import Completion, RoutedRequest
from disagg.simulator.durations.overheads import Overheads
from disagg.simulator.world.clock import EventLoop
from disagg.simulator.world.gateway import Gateway
from disagg.simulator.world.prompts import EMPTY, STOP_TOKEN, PromptText, answer_token, answered, extend
from disagg.simulator.world.surroundings import Answers

ROOT = root_hash("simulated")
NO_TARGETS = Slo()


class Habits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How users send requests and wait for answers."""

    max_tokens: int | None = None
    """Output tokens that requests allow (or their own length, if that is more). Answers end before, with a stop token,
    so that router and workers learn lengths only from answers. None forces lengths, as a load test does: then each
    request has its own `max_tokens`."""
    patience_s: float | None = None
    """Seconds without a first token after which a user cancels. None for never."""

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"max_tokens: expected at least 1; got {self.max_tokens}")
        if self.patience_s is not None and not self.patience_s > 0:
            raise ValueError(f"patience_s: expected a time above 0; got {self.patience_s}")


LOAD_TEST = Habits()
"""The habits of the load generator."""


@dataclass(frozen=True, slots=True)
class UserRequest:
    """One request with its targets."""

    outlined: OutlinedRequest
    targets: Slo = NO_TARGETS
    max_tokens: int | None = None
    """Output tokens that the request allows, instead of `Habits.max_tokens`."""


class Users:
    """The simulated clients. Owner of the records. `requests` are in the order of their due times and numbered by it;
    for `run` see `prompts.extend`."""

    def __init__(
        self,
        loop: EventLoop,
        gateway: Gateway,
        answers: Answers,
        overheads: Overheads,
        requests: Sequence[UserRequest],
        habits: Habits = LOAD_TEST,
        *,
        run: int = 1,
        take: Callable[[RequestRecord], None] | None = None,
    ) -> None:
        self.records: list[RequestRecord] = []
        """The records, in the order in which requests ended; empty if `take` takes them instead."""
        self._take = take or self.records.append
        self._num_ended = 0
        self.prompt_tokens = self.cached_tokens = 0
        """Prompt tokens of answered requests, and how many of them were cached."""
        self._loop = loop
        self._gateway = gateway
        self._answers = answers
        self._overheads = overheads
        self._requests = requests
        self._habits = habits
        self._run = run
        self._followers: dict[int, list[int]] = {}
        """For each turn: the turns that wait for it."""
        for number, request in enumerate(requests):
            if (after := request.outlined.after) is not None:
                self._followers.setdefault(after, []).append(number)
        self._said: dict[int, PromptText | None] = {}
        """For each ended turn with a later one: the conversation so far; None if it failed."""
        self._ended_at: dict[int, float] = {}
        self._due_and_waiting: set[int] = set()
        self._next = 0
        if requests:
            loop.at(requests[0].outlined.due_s, self._on_due)

    @property
    def is_done(self) -> bool:
        """Whether every request has its record."""
        return self._num_ended == len(self._requests)

    # ------------------------------------------------------------ when

    def _on_due(self) -> None:
        """Send the request that is due. Only one at a time is planned."""
        number = self._next
        self._next += 1
        if self._next < len(self._requests):
            self._loop.at(self._requests[self._next].outlined.due_s, self._on_due)
        after = self._requests[number].outlined.after
        if after is None:
            self._ask(number, self._loop.now, EMPTY)
        elif after in self._said:
            self._follow(number, after)
        else:
            self._due_and_waiting.add(number)

    def _follow(self, number: int, after: int) -> None:
        said, outlined = self._said[after], self._requests[number].outlined
        if said is None:
            now = self._loop.now
            record = self._new_record(number, now, outlined.num_prompt_tokens, "failed", end_s=now)
            self._record(number, msgspec.structs.replace(record, error="the turn before it failed"), None)
        else:
            self._ask(number, max(outlined.due_s, self._ended_at[after]), said)

    # ------------------------------------------------------------ what

    def _ask(self, number: int, due_s: float, said: PromptText) -> None:
        text = extend(said, self._requests[number].outlined.parts, ROOT, self._run)
        overheads = self._overheads
        delay_s = overheads.request_s + overheads.request_token_s * text.num_tokens
        self._loop.after(delay_s, self._submit, number, due_s, text)

    def _submit(self, number: int, due_s: float, text: PromptText) -> None:
        request = self._requests[number]
        outlined, targets, habits = request.outlined, request.targets, self._habits
        request_id = RequestId(f"r{number}")
        is_followed = number in self._followers
        self._answers.add(request_id, answer_token(number), outlined.max_tokens, is_followed=is_followed)
        sampling = Sampling(temperature=0.0, max_tokens=outlined.max_tokens)
        allowed = habits.max_tokens if request.max_tokens is None else request.max_tokens
        if allowed is not None:
            most = max(allowed, outlined.max_tokens)
            sampling = Sampling(temperature=0.0, max_tokens=most, stop_token_ids=(STOP_TOKEN,))
        routed = RoutedRequest(
            request_id=request_id,
            prompt_token_ids=text.token_ids,
            block_hashes=text.hashes,
            root_hash=ROOT,
            sampling=sampling,
            ttft_slo_s=targets.ttft_s,
            tpot_slo_s=targets.tpot_s,
            prepaid_tokens=text.num_tokens + sampling.max_tokens,
        )
        user = _User(self, number, due_s, request_id, text)
        self._gateway.submit(routed, due_s, user)
        if habits.patience_s is not None and not user.is_over:
            self._loop.at(due_s + habits.patience_s, self._lose_patience, user)

    def _lose_patience(self, user: _User) -> None:
        if not user.is_over and not user.times:
            self._gateway.cancel(user.request_id)
            user.end("failed", self._loop.now, f"the client left after {self._habits.patience_s:g} s")

    # ------------------------------------------------------------ what came of it

    def _new_record(
        self, number: int, due_s: float, num_prompt_tokens: int, status: Status, end_s: float
    ) -> RequestRecord:
        outlined = self._requests[number].outlined
        return RequestRecord(
            index=outlined.index,
            due_s=due_s,
            sent_s=due_s,
            status=status,
            num_prompt_tokens=num_prompt_tokens,
            max_tokens=outlined.max_tokens,
            end_s=end_s,
            group=outlined.group,
        )

    def came_at(self, request_id: RequestId, first: int, num_tokens: int) -> list[float] | None:
        """When each of `num_tokens` tokens of a request came; None for just now."""
        return self._answers.came_at(request_id, first, num_tokens)

    def ended(self, user: _User, status: Status, end_s: float, error: str, cached_tokens: int) -> None:
        """Record a request that has ended."""
        self._answers.discard(user.request_id)
        if status == "ok":
            self.prompt_tokens += user.text.num_tokens
            self.cached_tokens += cached_tokens
        record = msgspec.structs.replace(
            self._new_record(user.number, user.due_s, user.text.num_tokens, status, end_s),
            token_times_s=tuple(user.times),
            cached_tokens=cached_tokens,
            request_id=user.request_id,
            error=error,
        )
        self._record(user.number, record, user.text if status == "ok" else None)

    def _record(self, number: int, record: RequestRecord, text: PromptText | None) -> None:
        self._take(record)
        self._num_ended += 1
        if self.is_done:
            self._loop.stop()
        followers = self._followers.pop(number, None)
        if followers is None:
            return
        said = None if text is None else answered(text, self._answer_ids(number), ROOT)
        self._said[number], self._ended_at[number] = said, record.end_s or self._loop.now
        for follower in followers:
            if follower in self._due_and_waiting:
                self._due_and_waiting.discard(follower)
                self._loop.at(self._ended_at[number], self._follow, follower, number)

    def _answer_ids(self, number: int) -> list[int]:
        return [*[answer_token(number)] * (self._requests[number].outlined.max_tokens - 1), STOP_TOKEN]


class _User:
    """The client of one request. Implements `Client`."""

    __slots__ = ("due_s", "is_over", "number", "request_id", "text", "times", "users")

    def __init__(self, users: Users, number: int, due_s: float, request_id: RequestId, text: PromptText) -> None:
        self.users = users
        self.number = number
        self.due_s = due_s
        self.request_id = request_id
        self.text = text
        self.times: list[float] = []
        self.is_over = False

    def on_tokens(self, num_tokens: int, now: float) -> None:
        times = self.users.came_at(self.request_id, len(self.times), num_tokens)
        self.times += [now] * num_tokens if times is None else times

    def on_finish(self, completion: Completion, now: float) -> None:
        self.end("ok", now, "", completion.cached_tokens)

    def on_error(self, error: DisaggError, now: float) -> None:
        self.end(status_of(error), now, error.code)

    def end(self, status: Status, now: float, error: str, cached_tokens: int = 0) -> None:
        """Note that the request has ended, and record it."""
        self.is_over = True
        self.users.ended(self, status, now, error, cached_tokens)


def status_of(error: DisaggError) -> Status:
    """The status of an error, as a load test's client records it."""
    if isinstance(error, OverloadedError):
        return "refused"
    return "deadline" if isinstance(error, DeadlineError) else "failed"
