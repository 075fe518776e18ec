"""What a simulated worker needs of the world around it."""

from __future__ import annotations

from typing import Protocol

from disagg.proto.ids import GatewayId, RequestId
from disagg.proto.messages import PeerRef
from disagg.router.requests import events
from disagg.simulator.durations.overheads import Overheads
from disagg.simulator.world.clock import EventLoop
from disagg.simulator.world.machine import Machine
from disagg.simulator.world.network import Network
from disagg.simulator.world.prompts import STOP_TOKEN

GATEWAY = GatewayId("gateway")


class Answers:
    """What the model would say: of each request one token again and again, for as long as the workload says. Neither
    router nor scheduler sees it before it is sampled."""

    def __init__(self) -> None:
        self._answers: dict[RequestId, tuple[int, int]] = {}
        self._no_answer = (2, 1 << 60)
        self._followed: set[RequestId] = set()
        self._times: dict[RequestId, tuple[int, list[float]]] = {}
        """The index of a token, and when the client has it and those after it, where workers send several together."""

    def add(self, request_id: RequestId, token_id: int, num_tokens: int, *, is_followed: bool) -> None:
        """The answer to a request; a later prompt may repeat it."""
        self._answers[request_id] = (token_id, num_tokens)
        if is_followed:
            self._followed.add(request_id)

    def discard(self, request_id: RequestId) -> None:
        """The request is over."""
        self._answers.pop(request_id, None)
        self._followed.discard(request_id)
        self._times.pop(request_id, None)

    def is_followed(self, request_id: RequestId) -> bool:
        """Whether a later prompt may repeat the answer."""
        return request_id in self._followed

    def note_times(self, request_id: RequestId, first_index: int, times: list[float]) -> None:
        """When the client has the output tokens from `first_index` on."""
        if request_id not in self._answers:
            return
        first, noted = self._times.get(request_id, (first_index, []))
        if 0 <= first_index - first <= len(noted):
            noted[first_index - first :] = times
            self._times[request_id] = first, noted
        else:
            self._times[request_id] = first_index, times

    def came_at(self, request_id: RequestId, first_index: int, num_tokens: int) -> list[float] | None:
        """When so many tokens came, where they were sent later than they were made; None where they came just now."""
        first, noted = self._times.get(request_id, (0, []))
        start = max(0, first_index - first)
        times = noted[start : start + num_tokens]
        return times if len(times) == num_tokens and first_index >= first else None

    def token(self, request_id: RequestId, index: int) -> int:
        """Output token `index`; the last one is `STOP_TOKEN`, which ends the answer unless its length is forced."""
        token_id, num_tokens = self._answers.get(request_id, self._no_answer)
        return STOP_TOKEN if index + 1 == num_tokens else token_id

    def tokens(self, request_id: RequestId, first: int, num_tokens: int) -> tuple[int, ...]:
        """So many of them, at least one, from index `first` on; none but the last of them ends the answer."""
        ids = (self._answers.get(request_id, self._no_answer)[0],) * (num_tokens - 1)
        return (*ids, self.token(request_id, first + num_tokens - 1))

    def num_tokens(self, request_id: RequestId) -> int:
        """Of the answer, its last token included."""
        return self._answers.get(request_id, self._no_answer)[1]


class Surroundings(Protocol):
    """Owner: the simulated cluster."""

    loop: EventLoop
    network: Network
    overheads: Overheads
    answers: Answers
    machine: Machine | None
    """Where workers share one."""

    def to_gateway(self, event: events.Event) -> None:
        """Send something to the gateway; it arrives a message's time later."""
        ...

    def gateway_now(self, event: events.Event) -> None:
        """Something that was on its way to the gateway has arrived there by now."""
        ...

    def find_worker(self, peer: PeerRef) -> object | None:
        """That life of a worker, if it is there."""
        ...
