"""What the router core is told, and what it answers. Plain frozen data: the shell makes the events and executes the
commands.

Commands of one call must be executed in order. For one request: `Emit` comes before the `Finish` or `Fail` that ends
it, and after that end nothing names the request but `CancelOn`.
"""

from __future__ import annotations

from dataclasses import dataclass

from disagg.proto import messages
from disagg.proto.errors import DisaggError
from disagg.proto.ids import AttemptKey, Incarnation, RequestId, WorkerId
from disagg.proto.messages import StepUpdate, WorkerInfo, WorkerReport
from disagg.router.api import Completion, RoutedRequest, TokenBatch


@dataclass(frozen=True, slots=True)
class Submit:
    """A client wants this. Answered at once with `Fail` if it is refused; then nothing is held."""

    request: RoutedRequest
    arrival: float
    """When the gateway got it, for the trace."""


@dataclass(frozen=True, slots=True)
class CancelRequest:
    """The client went away, or has all it wants. Unknown and ended requests are fine."""

    request_id: RequestId
    num_answered: int | None = None
    """Tokens of a complete answer, where the gateway ended it; None where the client gave up."""


@dataclass(frozen=True, slots=True)
class WorkerUp:
    """A worker greeted on a session: dispatches reach it from now on."""

    info: WorkerInfo


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """The session to that life of a worker broke."""

    worker_id: WorkerId
    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class WorkerSuspected:
    """That life of a worker shows that it hangs, on a session that stands."""

    worker_id: WorkerId
    incarnation: Incarnation
    why: str
    """Follows its name in a sentence, such as `was silent for 2.6 s`."""


@dataclass(frozen=True, slots=True)
class WorkerHeard:
    """A suspected life of a worker speaks again."""

    worker_id: WorkerId
    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class DrainWorker:
    """That life of a worker gets nothing new. Answered with `WorkerIsDrained` once nothing of ours is booked on it.
    Its loss, or a new life of it, ends the draining."""

    worker_id: WorkerId
    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class WorkerReported:
    """Load and KV events."""

    report: WorkerReport


@dataclass(frozen=True, slots=True)
class FromWorker:
    """One step of one worker: tokens, prefills done, hand-overs, ends, taken in this order."""

    worker_id: WorkerId
    incarnation: Incarnation
    update: StepUpdate


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed; due at `RouterCore.next_wakeup()`."""


Event = (
    Submit
    | CancelRequest
    | WorkerUp
    | WorkerLost
    | WorkerSuspected
    | WorkerHeard
    | DrainWorker
    | WorkerReported
    | FromWorker
    | Tick
)


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Send this to the worker."""

    worker_id: WorkerId
    message: messages.Dispatch


@dataclass(frozen=True, slots=True)
class CancelOn:
    """Tell the worker to stop this attempt."""

    worker_id: WorkerId
    key: AttemptKey


@dataclass(frozen=True, slots=True)
class ConnectPair:
    """Tell the prefill worker to form its pair with a decode worker."""

    prefill_id: WorkerId
    decode_peer: messages.PeerRef


@dataclass(frozen=True, slots=True)
class Emit:
    """The next output tokens, in index order."""

    request_id: RequestId
    batch: TokenBatch


@dataclass(frozen=True, slots=True)
class Finish:
    """The answer is complete."""

    request_id: RequestId
    completion: Completion


@dataclass(frozen=True, slots=True)
class Fail:
    """The request is over without an answer, or with a part of one."""

    request_id: RequestId
    error: DisaggError


@dataclass(frozen=True, slots=True)
class WatchAgain:
    """Open a new report stream to the worker: its KV events had a gap."""

    worker_id: WorkerId


@dataclass(frozen=True, slots=True)
class WorkerIsDrained:
    """Nothing of ours is booked on that draining life of a worker any more. Said once."""

    worker_id: WorkerId
    incarnation: Incarnation


Command = Dispatch | CancelOn | ConnectPair | Emit | Finish | Fail | WatchAgain | WorkerIsDrained
