"""One rank's byte channels of one pair: one for each rank of the other worker that it shares a slice with.

A payload of the pair, which is of one cache group, is several slices on each rank, or none; they are sent and received
together, and one that fails ends all channels of the rank, because the others' bytes are of no use without it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

from disagg.engine.kv_transfer.transport import PairTransport, Posted, TransportError, ignore_posted
from disagg.engine.plan import Buffer
from disagg.engine.sharding.kv_routes import PairPlan, Route
from disagg.proto.handover import Side

CLOSED = "the pair is closed"

Checksums = tuple[int, ...]
PartDone = Callable[[bool, str, Checksums], None]
"""Called once with (ok, error text, one checksum for each slice that came), from any thread. Must not raise, must not
block."""


class AllOf:
    """Several operations that count as one: posted when all are, over when all are, ok if all are. Thread-safe.

    Args:
        count: how many.
        over: called with (ok, the first error, each one's checksums in order).
        posted: called when all were posted, before `over`.
        failed: called at the first that is not ok, while others may be under way.
    """

    def __init__(
        self,
        count: int,
        over: Callable[[bool, str, list[Checksums]], None],
        posted: Posted,
        failed: Callable[[], None],
    ) -> None:
        self._lock = threading.Lock()
        self._over, self._posted, self._failed = over, posted, failed
        self._num_unposted = self._num_left = count
        self._checksums: list[Checksums] = [()] * count
        self._error: str | None = None
        if not count:
            posted()
            over(True, "", [])

    def one_posted(self) -> None:
        """One more of them may be sent by the peer."""
        with self._lock:
            self._num_unposted -= 1
            all_posted = not self._num_unposted
        if all_posted:
            self._posted()

    def one_over(self, index: int, ok: bool, error: str, checksums: Checksums = ()) -> None:
        """The answer of number `index`."""
        with self._lock:
            self._num_left -= 1
            self._checksums[index] = checksums
            is_first_failure = not ok and self._error is None
            if is_first_failure:
                self._error = error
            is_last = not self._num_left
        if is_first_failure:
            self._failed()
        if is_last:
            self._over(self._error is None, self._error or "", self._checksums)


class RankChannels:
    """The channels of one rank, which send and receive its slices together. Thread-safe.

    Args:
        rank: the number of this one, of the worker on `side` of the pair.
        open_channel: forms the channel of this name with the other worker's rank; blocks; may raise what
            `Rendezvous.accept` raises.
    """

    def __init__(
        self, plan: PairPlan, side: Side, rank: int, pair_name: str, open_channel: Callable[[str], PairTransport]
    ) -> None:
        self._routes = tuple(group.routes(side, rank) for group in plan.groups)
        """Of each cache group."""
        self._peers = plan.peers(side, rank)
        self._side: Side = side
        self._rank = rank
        self._pair_name = pair_name
        self._open_channel = open_channel
        self._lock = threading.Lock()
        self._channels: dict[int, PairTransport] = {}
        self._closed = False
        self._is_breaking = False

    def open(self) -> None:
        """Form all channels; blocks until the other ranks are there. One after the other by receiver and sender, which
        is the same order everywhere, so that no two ranks wait for each other.

        Raises:
            TransportError: if a channel cannot be formed, or the pair was closed meanwhile; none is left then.
            OSError, RuntimeError: as `open_channel` does.
        """
        try:
            for peer in self._peers:
                self._add(peer, self._open_channel(channel_name(self._pair_name, self._side, self._rank, peer)))
        except BaseException:
            self.close()
            raise

    @property
    def names(self) -> list[str]:
        """Names of the channels' transports, each once."""
        with self._lock:
            return sorted({channel.name for channel in self._channels.values()})

    def _add(self, peer: int, channel: PairTransport) -> None:
        with self._lock:
            closed = self._closed
            if not closed:
                self._channels[peer] = channel
        if closed:
            channel.close()
            raise TransportError(CLOSED)

    def send(self, buffer: Buffer, group: int, element_bytes: int, done: PartDone) -> None:
        """Send this rank's slices of a payload of a cache group, `element_bytes` bytes of each element, from its part
        of a staging buffer.

        Raises:
            ValueError: if the part is too small.
        """
        routes = self._checked(buffer, group, element_bytes)
        whole = AllOf(len(routes), lambda ok, error, _: done(ok, error, ()), ignore_posted, self._break)
        for index, channel, piece in self._pieces(routes, buffer, element_bytes, whole):
            channel.send(piece, len(piece), _answer(whole, index))

    def receive(self, buffer: Buffer, group: int, element_bytes: int, done: PartDone, posted: Posted) -> None:
        """Receive this rank's slices of a payload of a cache group, `element_bytes` bytes of each element, into its
        part of a staging buffer. `posted` as in `PairTransport.recv`, when all are.

        Raises:
            ValueError: if the part is too small.
        """
        routes = self._checked(buffer, group, element_bytes)
        whole = AllOf(
            len(routes),
            lambda ok, error, checksums: done(ok, error, tuple(each for of_slice in checksums for each in of_slice)),
            posted,
            self._break,
        )
        for index, channel, piece in self._pieces(routes, buffer, element_bytes, whole):
            channel.recv(piece, len(piece), _answer(whole, index), whole.one_posted)

    def close(self) -> None:
        """End all channels; what is under way is answered not ok before this returns. A channel that is still being
        formed is closed when it stands. Idempotent; may block for a moment."""
        with self._lock:
            self._closed = True
            channels = list(self._channels.values())
        for channel in channels:
            channel.close()

    def _break(self) -> None:
        """A slice failed: end the rest, from a thread of its own, because a channel may be closing right here."""
        with self._lock:
            if self._closed or self._is_breaking:
                return
            self._is_breaking = True
        threading.Thread(target=self.close, name="kv-break", daemon=True).start()

    def _pieces(
        self, routes: tuple[Route, ...], buffer: Buffer, element_bytes: int, whole: AllOf
    ) -> Iterator[tuple[int, PairTransport, Buffer]]:
        """Number, channel and bytes of each slice; one without a channel is answered here."""
        for index, route in enumerate(routes):
            with self._lock:
                channel = None if self._closed else self._channels.get(route.peer)
            if channel is None:
                whole.one_over(index, False, CLOSED)
            else:
                first = element_bytes * route.first
                yield index, channel, buffer[first : first + element_bytes * route.num_elements]

    def _checked(self, buffer: Buffer, group: int, element_bytes: int) -> tuple[Route, ...]:
        """The slices of a group, which the part has room for."""
        routes = self._routes[group]
        needed = element_bytes * sum(route.num_elements for route in routes)
        if element_bytes < 0 or len(buffer) < needed:
            raise ValueError(f"a payload has {needed} bytes on rank {self._rank}, the part has {len(buffer)}")
        return routes


def channel_name(pair_name: str, side: Side, rank: int, peer: int) -> str:
    """Name under which two ranks meet."""
    sender, receiver = (rank, peer) if side == "sender" else (peer, rank)
    return f"{pair_name}/{sender}-{receiver}"


def _answer(whole: AllOf, index: int) -> Callable[..., None]:
    """`Done` of a send, or `Received` of a receive."""

    def answer(ok: bool, error: str, checksum: int | None = None) -> None:
        whole.one_over(index, ok, error, () if checksum is None or not ok else (checksum,))

    return answer
