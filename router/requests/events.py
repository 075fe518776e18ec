"""What the router core is told, and what it answers. Plain frozen data: the shell makes the events and executes the
commands.

Commands of one call must be executed in order. For one request: `Emit` comes before the `Finish` or `Fail` that ends
it, and after that end nothing names the request but `CancelOn`.

They hold nothing that leads back to them, so the garbage collector need not look at them; only an error may, by its
traceback.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from disagg.proto import messages
from disagg.proto.errors import DisaggError
from disagg.proto.ids import AttemptKey, Incarnation, RequestId, WorkerId
from disagg.proto.messages import StepUpdate, WorkerInfo, WorkerReport
from disagg.router.api import Completion, RoutedRequest, TenantLimits, TokenBatch


class Submit(msgspec.Struct, frozen=True, gc=False):
    """A client wants this. Answered at once with `Fail` if it is refused; then nothing is held."""

    request: RoutedRequest
    arrival: float
    """When the gateway got it, for the trace."""


class CancelRequest(msgspec.Struct, frozen=True, gc=False):
    """The client went away, or has all it wants. Unknown and ended requests are fine."""

    request_id: RequestId
    num_answered: int | None = None
    """Tokens of a complete answer, where the gateway ended it; None where the client gave up."""


class WorkerUp(msgspec.Struct, frozen=True, gc=False):
    """A worker greeted on a session: dispatches reach it from now on."""

    info: WorkerInfo


class WorkerLost(msgspec.Struct, frozen=True, gc=False):
    """The session to that life of a worker broke."""

    worker_id: WorkerId
    incarnation: Incarnation


class WorkerSuspected(msgspec.Struct, frozen=True, gc=False):
    """That life of a worker shows that it hangs, on a session that stands."""

    worker_id: WorkerId
    incarnation: Incarnation
    why: str
    """Follows its name in a sentence, such as `was silent for 2.6 s`."""


class WorkerRecovered(msgspec.Struct, frozen=True, gc=False):
    """A suspected life of a worker speaks again."""

    worker_id: WorkerId
    incarnation: Incarnation


class DrainWorker(msgspec.Struct, frozen=True, gc=False):
    """That life of a worker gets nothing new. Answered with `WorkerIsDrained` once nothing of ours is assigned on it.
    Its loss, or a new life of it, ends the draining."""

    worker_id: WorkerId
    incarnation: Incarnation


class ResumeWorker(msgspec.Struct, frozen=True, gc=False):
    """That life of a worker is not to be drained any more. Does nothing for one that is not draining."""

    worker_id: WorkerId
    incarnation: Incarnation


class WorkerReported(msgspec.Struct, frozen=True, gc=False):
    """Load and KV events."""

    report: WorkerReport


class FromWorker(msgspec.Struct, frozen=True, gc=False):
    """One step of one worker: tokens, prefills done, hand-overs, ends, taken in this order."""

    worker_id: WorkerId
    incarnation: Incarnation
    update: StepUpdate


class LimitsChanged(msgspec.Struct, frozen=True, gc=False):
    """The file of keys was read again."""

    limits: Mapping[str, TenantLimits]
    """By tenant, of all in the file."""


class Tick(msgspec.Struct, frozen=True, gc=False):
    """Time passed; due at `RouterCore.next_wakeup()`."""


Event = (
    Submit
    | CancelRequest
    | WorkerUp
    | WorkerLost
    | WorkerSuspected
    | WorkerRecovered
    | DrainWorker
    | LimitsChanged
    | ResumeWorker
    | WorkerReported
    | FromWorker
    | Tick
)


class Dispatch(msgspec.Struct, frozen=True, gc=False):
    """Send this to the worker."""

    worker_id: WorkerId
    message: messages.Dispatch


class CancelOn(msgspec.Struct, frozen=True, gc=False):
    """Tell the worker to stop this attempt."""

    worker_id: WorkerId
    key: AttemptKey


class ConnectPair(msgspec.Struct, frozen=True, gc=False):
    """Tell the prefill worker to form its pair with a decode worker."""

    prefill_id: WorkerId
    decode_peer: messages.PeerRef


class Emit(msgspec.Struct, frozen=True, gc=False):
    """The next output tokens, in index order."""

    request_id: RequestId
    batch: TokenBatch


class Finish(msgspec.Struct, frozen=True, gc=False):
    """The answer is complete."""

    request_id: RequestId
    completion: Completion


class Fail(msgspec.Struct, frozen=True):
    """The request is over without an answer, or with a part of one."""

    request_id: RequestId
    error: DisaggError


class WatchAgain(msgspec.Struct, frozen=True, gc=False):
    """Open a new report stream to the worker: its KV events had a gap."""

    worker_id: WorkerId


class WorkerIsDrained(msgspec.Struct, frozen=True, gc=False):
    """Nothing of ours is assigned on that draining life of a worker any more. Said once."""

    worker_id: WorkerId
    incarnation: Incarnation


Command = Dispatch | CancelOn | ConnectPair | Emit | Finish | Fail | WatchAgain | WorkerIsDrained
