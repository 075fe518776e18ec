"""What the links of prefill and decode workers have in common.

    PairLink        one pair with its transport; whether it is idle
    LinkTable       which attempt belongs to which link
    surplus_links   which pairs to close where there are too many

Owner of all of it: the asyncio thread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Collection, Mapping
from typing import Any, Generic, TypeVar

from disagg.engine.commands import Command
from disagg.engine.io.blocking import call_on_thread
from disagg.engine.io.mailbox import Mailbox
from disagg.engine.kv_transfer.pair_shell import PairShell
from disagg.engine.kv_transfer.transport import PairTransport
from disagg.engine.plan import Buffer
from disagg.engine.shell.role import RoleContext
from disagg.proto.frames import frames
from disagg.proto.ids import AttemptKey, WorkerId

MAX_UNSENT_MESSAGES = 4096
"""Control messages of a pair that may wait for the network; with more the peer has stopped reading, and the pair is
given up."""


async def outgoing_frames(messages: Mailbox[Any]) -> AsyncIterator[bytes]:
    """What is queued, packed into frames, until the mailbox is closed."""
    async for batch in messages.batches():
        for frame in frames(batch):
            yield frame


class PairLink:
    """One end of a pair: the `PairIo` of its `PairShell`.

    Args:
        context: the worker.
        peer_id: the other worker.
    """

    def __init__(self, context: RoleContext, peer_id: WorkerId) -> None:
        self._context = context
        self._peer_id = peer_id
        self._shell: PairShell[Any, Any] | None = None
        self._transport: PairTransport | None = None
        self.used_at = context.now()
        """When the last attempt was offered, or the link was made."""

    @property
    def is_idle(self) -> bool:
        """Whether no attempt uses the pair."""
        return (self._shell is None or not self._shell.num_copies) and not any(self.holdings().values())

    @property
    def transport_name(self) -> str:
        """What moves the bytes; the configured name until that is known."""
        return self._context.config.transport if self._transport is None else self._transport.name

    def holdings(self) -> dict[str, int]:
        """Counts of what the pair holds; zero when idle."""
        return {} if self._shell is None else self._shell.half.holdings()

    def is_copying(self, key: AttemptKey) -> bool:
        """Whether the engine still copies a chunk of this attempt."""
        return self._shell is not None and self._shell.is_copying(key)

    def post(self, command: Command) -> None:
        """Queue a command for the engine."""
        self._context.post(command)

    def new_staging(self, nbytes: int) -> Buffer:
        """Memory for a staging slot."""
        return self._context.new_staging(nbytes)

    async def _close_transport(self) -> None:
        if self._transport is not None:
            await call_on_thread(f"close-{self._peer_id}", self._transport.close)
        # Now, because the garbage collector does not see their size. A copy under way has its own reference.
        if self._shell is not None:
            self._shell.free_buffers()


L = TypeVar("L", bound=PairLink)


class LinkTable(Generic[L]):
    """The link of each attempt, from its offer until its hand-over is decided and the engine has ended its copies."""

    def __init__(self) -> None:
        self._links: dict[AttemptKey, L] = {}
        self._undecided: set[AttemptKey] = set()

    def __contains__(self, key: AttemptKey) -> bool:
        return key in self._links

    def add(self, key: AttemptKey, link: L) -> None:
        """An attempt is offered."""
        self._links[key] = link
        self._undecided.add(key)

    def get(self, key: AttemptKey) -> L | None:
        """The link of an attempt, if it has one."""
        return self._links.get(key)

    def decided(self, key: AttemptKey) -> None:
        """The hand-over of an attempt succeeded or failed."""
        self._undecided.discard(key)
        self.copied(key)

    def copied(self, key: AttemptKey) -> None:
        """The engine ended a copy for an attempt."""
        link = self._links.get(key)
        if link is not None and key not in self._undecided and not link.is_copying(key):
            del self._links[key]


def surplus_links(links: Collection[L], most: int) -> list[L]:
    """Those to close so that with one more there are at most `most`: idle ones, not used for longest first. Fewer where
    the others are in use."""
    surplus = len(links) - most + 1
    if surplus <= 0:
        return []
    return sorted((link for link in links if link.is_idle), key=lambda link: link.used_at)[:surplus]


def total_holdings(own: Mapping[str, int], links: Collection[PairLink]) -> dict[str, int]:
    """What a role holds itself, and what its links hold."""
    total = Counter(own)
    for link in links:
        total.update(link.holdings())
    return dict(total)
