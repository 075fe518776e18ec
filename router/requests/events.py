"""The events of the router core and its commands. Plain frozen data: the server makes the events and executes the
commands.

Commands of one call must be executed in order. For one request: `Emit` comes before the `Finish` or `Fail` that ends
it, and after that end no command but `CancelOn` has the request's id.

They are in no reference cycle, so the garbage collector does not track them; only an error may be, by its traceback.
Events are tagged, so that a recording can hold them (`router/recording/`).
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from disagg.proto import messages
from disagg.proto.errors import DisaggError
from disagg.proto.ids import AttemptKey, Incarnation, RequestId, WorkerId
from disagg.proto.messages import Adapter, StepUpdate, WorkerInfo, WorkerReport
from disagg.router.api import Completion, RoutedRequest, TenantLimits, TokenBatch
from disagg.router.config import Decodes, RouterConfig


class Submit(msgspec.Struct, frozen=True, gc=False, tag=True):
    """A new request. Answered at once with `Fail` if it is refused; then nothing is held."""

    request: RoutedRequest
    arrival: float
    """When it arrived at the gateway, for the trace."""


class CancelRequest(msgspec.Struct, frozen=True, gc=False, tag=True):
    """The client disconnected, or needs no more tokens. Unknown and ended requests are ignored."""

    request_id: RequestId
    num_answered: int | None = None
    """Number of tokens of an answer that the gateway ended as complete; None if the client gave up."""


class WorkerUp(msgspec.Struct, frozen=True, gc=False, tag=True):
    """The session to a worker is established: dispatches reach it from now on."""

    info: WorkerInfo


class WorkerLost(msgspec.Struct, frozen=True, gc=False, tag=True):
    """The session to that incarnation of a worker broke."""

    worker_id: WorkerId
    incarnation: Incarnation


class WorkerSuspected(msgspec.Struct, frozen=True, gc=False, tag=True):
    """That incarnation of a worker seems to hang, while its session is established."""

    worker_id: WorkerId
    incarnation: Incarnation
    why: str
    """The reason, as the rest of a sentence that begins with the worker's id, such as `was unresponsive for 2.6 s`."""
    is_stuck: bool = False
    """Whether the worker responds but does not end its step."""


class WorkerRecovered(msgspec.Struct, frozen=True, gc=False, tag=True):
    """A suspected incarnation of a worker is responsive again."""

    worker_id: WorkerId
    incarnation: Incarnation


class DrainWorker(msgspec.Struct, frozen=True, gc=False, tag=True):
    """That incarnation of a worker gets nothing new. Answered with `WorkerIsDrained` once this router has assigned
    nothing to it. Its loss, or a new incarnation, ends the draining."""

    worker_id: WorkerId
    incarnation: Incarnation


class ResumeWorker(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Draining of that incarnation of a worker is revoked. Does nothing for one that is not draining."""

    worker_id: WorkerId
    incarnation: Incarnation


class WorkerReported(msgspec.Struct, frozen=True, gc=False, tag=True):
    """A worker reported its load and KV events."""

    report: WorkerReport


class FromWorker(msgspec.Struct, frozen=True, gc=False, tag=True):
    """The updates of one step of one worker: tokens, prefills done, hand-overs, ends, handled in this order."""

    worker_id: WorkerId
    incarnation: Incarnation
    update: StepUpdate


class LimitsChanged(msgspec.Struct, frozen=True, gc=False, tag=True):
    """The key file was read again."""

    limits: Mapping[str, TenantLimits]
    """The limits of each tenant in the file, by name."""


class WorkersExpected(msgspec.Struct, frozen=True, gc=False, tag=True):
    """The controller expects these workers, and no others, to come."""

    in_s: dict[WorkerId, float]
    """Seconds from now until each is expected to be ready."""


class SetDecodes(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Answers are placed by this setting from now on (policy `elastic`; others ignore it). Running sequences stay where
    they are."""

    decodes: Decodes


class ConfigChanged(msgspec.Struct, frozen=True, gc=False, tag=True):
    """The router follows this configuration from now on, as far as `RouterCore.configure` says. No running or waiting
    request is lost by it."""

    config: RouterConfig


class AdapterRemoved(msgspec.Struct, frozen=True, gc=False, tag=True):
    """The name of an adapter is not served any more. Requests that named it and wait for their first worker fail;
    others continue."""

    adapter: Adapter


class StoodStill(msgspec.Struct, frozen=True, gc=False, tag=True):
    """The gateway's process stood still for a time that its clock does not count. Deadlines, which are the clients'
    own, come earlier by that time."""

    seconds: float


class Tick(msgspec.Struct, frozen=True, gc=False, tag=True):
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
    | WorkersExpected
    | SetDecodes
    | ConfigChanged
    | AdapterRemoved
    | WorkerReported
    | FromWorker
    | StoodStill
    | Tick
)


class Dispatch(msgspec.Struct, frozen=True, gc=False):
    """Send the dispatch to the worker."""

    worker_id: WorkerId
    message: messages.Dispatch


class CancelOn(msgspec.Struct, frozen=True, gc=False):
    """Send the worker a cancel of this attempt."""

    worker_id: WorkerId
    key: AttemptKey


class ConnectPair(msgspec.Struct, frozen=True, gc=False):
    """Have the prefill worker form its pair with a decode worker."""

    prefill_id: WorkerId
    decode_peer: messages.PeerRef


class Migrate(msgspec.Struct, frozen=True, gc=False):
    """Tell the worker to move an attempt to another one."""

    worker_id: WorkerId
    message: messages.Migrate


class CancelMigration(msgspec.Struct, frozen=True, gc=False):
    """Tell the worker to keep an attempt that it was to move."""

    worker_id: WorkerId
    key: AttemptKey


class Emit(msgspec.Struct, frozen=True, gc=False):
    """The next output tokens, in index order."""

    request_id: RequestId
    batch: TokenBatch


class Finish(msgspec.Struct, frozen=True, gc=False):
    """The answer is complete."""

    request_id: RequestId
    completion: Completion


class Fail(msgspec.Struct, frozen=True):
    """The request has ended without an answer, or with a part of one."""

    request_id: RequestId
    error: DisaggError


class WatchAgain(msgspec.Struct, frozen=True, gc=False):
    """Open a new report stream to the worker: its KV events had a gap."""

    worker_id: WorkerId


class WorkerIsDrained(msgspec.Struct, frozen=True, gc=False):
    """This router has nothing assigned to that draining incarnation of a worker any more. Sent once."""

    worker_id: WorkerId
    incarnation: Incarnation


Command = (
    Dispatch | CancelOn | ConnectPair | Migrate | CancelMigration | Emit | Finish | Fail | WatchAgain | WorkerIsDrained
)
