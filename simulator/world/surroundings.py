"""The interface between a simulated worker and the other parts of the cluster."""

from __future__ import annotations

from typing import Protocol

from disagg.proto.ids import GatewayId, RequestId
from disagg.proto.messages import PeerRef
from disagg.router.requests import events
from disagg.simulator.durations.overheads import Overheads
from disagg.simulator.durations.tier_times import TierTimes
from disagg.simulator.world.clock import EventLoop
from disagg.simulator.world.machine import Machine
from disagg.simulator.world.network import Network
from disagg.simulator.world.prompts import STOP_TOKEN

GATEWAY = GatewayId("gateway")


class Answers:
    """The answers that the model would give: for each request one token, repeated as often as the workload says.
    Neither router nor scheduler sees a token before it is sampled."""

    def __init__(self) -> None:
        self._answers: dict[RequestId, tuple[int, int]] = {}
        self._no_answer = (2, 1 << 60)
        self._followed: set[RequestId] = set()
        self._times: dict[RequestId, tuple[int, list[float]]] = {}
        """The index of a token, and when the client has it and each one after it, where workers send several tokens
        together."""

    def add(self, request_id: RequestId, token_id: int, num_tokens: int, *, is_followed: bool) -> None:
        """Set the answer to a request. `is_followed`: whether a later prompt may repeat it."""
        self._answers[request_id] = (token_id, num_tokens)
        if is_followed:
            self._followed.add(request_id)

    def discard(self, request_id: RequestId) -> None:
        """Forget a request that has ended."""
        self._answers.pop(request_id, None)
        self._followed.discard(request_id)
        self._times.pop(request_id, None)

    def is_followed(self, request_id: RequestId) -> bool:
        """Whether a later prompt may repeat the answer."""
        return request_id in self._followed

    def note_times(self, request_id: RequestId, first_index: int, times: list[float]) -> None:
        """Note when the client has each output token from `first_index` on."""
        if request_id not in self._answers:
            return
        first, noted = self._times.get(request_id, (first_index, []))
        if 0 <= first_index - first <= len(noted):
            noted[first_index - first :] = times
            self._times[request_id] = first, noted
        else:
            self._times[request_id] = first_index, times

    def came_at(self, request_id: RequestId, first_index: int, num_tokens: int) -> list[float] | None:
        """When each of `num_tokens` tokens came, where they were sent later than they were made; None where they came
        just now."""
        first, noted = self._times.get(request_id, (0, []))
        start = max(0, first_index - first)
        times = noted[start : start + num_tokens]
        return times if len(times) == num_tokens and first_index >= first else None

    def token(self, request_id: RequestId, index: int) -> int:
        """Output token `index`; the last one is `STOP_TOKEN`, which ends the answer unless its length is forced."""
        token_id, num_tokens = self._answers.get(request_id, self._no_answer)
        return STOP_TOKEN if index + 1 == num_tokens else token_id

    def tokens(self, request_id: RequestId, first: int, num_tokens: int) -> tuple[int, ...]:
        """The `num_tokens` output tokens (at least one) from index `first` on. Only the last of them may end the
        answer."""
        ids = (self._answers.get(request_id, self._no_answer)[0],) * (num_tokens - 1)
        return (*ids, self.token(request_id, first + num_tokens - 1))

    def num_tokens(self, request_id: RequestId) -> int:
        """Number of tokens of the answer, including its last one."""
        return self._answers.get(request_id, self._no_answer)[1]


class Surroundings(Protocol):
    """The parts of a simulated cluster that its workers use. Owner: the simulated cluster."""

    loop: EventLoop
    network: Network
    overheads: Overheads
    tier_times: TierTimes
    answers: Answers
    machine: Machine | None
    """The machine that all workers share; None if each has its own."""

    def to_gateway(self, event: events.Event) -> None:
        """Send an event to the gateway; it arrives `Overheads.message_s` later."""
        ...

    def gateway_now(self, event: events.Event) -> None:
        """Deliver an event to the gateway that was sent early enough to have arrived by now."""
        ...

    def find_worker(self, peer: PeerRef) -> object | None:
        """That incarnation of a worker, if it is present."""
        ...
