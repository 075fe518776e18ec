"""What a worker is made of, as plain functions, so that something else can take the place of one at the start of the
worker: the faults of `engine/faults/`, or what a test plays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from disagg.connections.cluster_secret import ClusterSecret
from disagg.engine.config import TransportName
from disagg.engine.io.mailbox import Mailbox
from disagg.engine.kv_transfer.transport import Connector, Rendezvous
from disagg.engine.kv_transfer.transports.factory import make_connector, make_rendezvous
from disagg.engine.plan import ModelRunner
from disagg.engine.shell.extent_files import ExtentFiles
from disagg.proto.messages import StepUpdate

T = TypeVar("T")
Deliver = Callable[[Any], None]
"""Takes a control message of a pair, on the event loop's thread."""


def as_it_is(part: T) -> T:
    """Nothing is put around a part."""
    return part


def _new_mailbox(max_items: int) -> Mailbox[StepUpdate]:
    return Mailbox(max_items)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerParts:
    """The defaults are those of every worker that serves."""

    make_rendezvous: Callable[[TransportName, str, ClusterSecret], Rendezvous] = make_rendezvous
    """(transport, host, secret) -> what accepts the pairs' byte channels on D."""
    make_connector: Callable[[str, str, ClusterSecret], Connector] = make_connector
    """(transport, worker id, secret) -> what opens the pairs' byte channels on P."""
    control_out: Callable[[Deliver], Deliver] = as_it_is
    """Wraps what sends the control messages of one pair."""
    control_in: Callable[[Deliver], Deliver] = as_it_is
    """Wraps what takes the peer's control messages of one pair."""
    wrap_runner: Callable[[ModelRunner], ModelRunner] = as_it_is
    wrap_files: Callable[[ExtentFiles], ExtentFiles] = as_it_is
    """Wraps the files of the disk tier."""
    new_mailbox: Callable[[int], Mailbox[StepUpdate]] = _new_mailbox
    """Makes the queue of updates for one gateway, of at most that many items."""


DEFAULT_PARTS = WorkerParts()
