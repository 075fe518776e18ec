"""Bytes that D reads out of P's memory, by NIXL: shared memory within a host, RDMA between hosts, also from GPU to GPU.

    P    Filled(address, size) of a staging buffer that is registered ──> D
    D    reads it into its own buffer; when all of it is there ──> Taken

Nothing but the receiver's own agent ever writes to the receiver's memory, and that agent can be ended at any moment:
`close` answers when it is gone. What a late or restarted peer does cannot reach a slot.

The words travel over a TCP connection of the pair: with it a peer that dies is noticed at once, whoever waits sleeps,
and only processes of the cluster are spoken with. The two meet at D's `RendezvousServer` as in `gloo.py`; there the
receiver leaves an address for this one connection. A pair stands when D has read a few bytes of P and found them right.

Each end has an agent of its own (`nixl_agent.py`) and two threads: one reads the connection, one makes the reads. UCX
may need P's help to wire a connection up, or to send what D cannot read by itself, so P looks after its agent while
something of its is not taken.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import secrets
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import numpy as np
from typing_extensions import override

from disagg.connections.cluster_secret import ClusterSecret
from disagg.connections.shell.connection import Connection, ConnectionFailedError, connect
from disagg.connections.shell.handshake import NONCE_BYTES, AuthenticatedListener, answer, closed_after
from disagg.engine.io.rendezvous import MemberStore, member_store
from disagg.engine.kv_transfer.transport import (
    CLOSED,
    PEER_ENDED,
    RANK_OF,
    Checksum,
    Done,
    PairTransport,
    Posted,
    Received,
    TransportError,
    ignore_posted,
    no_checksum,
)
from disagg.engine.kv_transfer.transports.digest import checksum_of
from disagg.engine.kv_transfer.transports.nixl_agent import MemoryKind, NixlAgent, NixlError, Region, load, region_of
from disagg.engine.kv_transfer.transports.process_end import end_process, return_or_exit
from disagg.engine.kv_transfer.transports.settings import ServerConnector, ServerRendezvous, TransportSettings
from disagg.engine.plan import Buffer, is_fatal
from disagg.proto.handover import Side
from disagg.proto.messages import Message, decoder

logger = logging.getLogger(__name__)

_READ_POLL_S = 50e-6
"""Seconds between two polls of a read that is under way."""
_HELP_POLL_S = 500e-6
"""Seconds between two times that the sender lets UCX help the receiver."""
_LINK_KEY = "link"
_MAX_FRAME_BYTES = 1 << 20
_PROBE_BYTES = 64
_MAX_FILLED = 4096
"""Payloads of a peer that may wait for a receive: far more than it has staging slots."""


# ---------------------------------------------------------------- messages


class Agent(Message, frozen=True, kw_only=True, tag=True):
    """The first message of each side: how NIXL reaches it."""

    metadata: bytes
    probe: bytes = b""
    """Bytes of the sender that the receiver reads first, and compares."""


class Filled(Message, frozen=True, kw_only=True, tag=True):
    """A payload can be read."""

    address: int
    nbytes: int
    kind: MemoryKind
    device: int
    metadata: bytes = b""
    """Metadata of the sender's memory, if the receiver does not know it yet."""


class Taken(Message, frozen=True, kw_only=True, tag=True):
    """The oldest payload that was not taken is read."""


class Proven(Message, frozen=True, kw_only=True, tag=True):
    """The receiver has read the probe."""


Word = Filled | Taken | Proven


# ---------------------------------------------------------------- set-up


class NixlRendezvous(ServerRendezvous["NixlTransport"]):
    """D's end of the set-up: the two ends of a pair find each other at its server.

    Raises:
        NixlError: NIXL is not installed.
        OSError: if it cannot listen on the host.
    """

    def __init__(self, settings: TransportSettings) -> None:
        load()
        super().__init__(settings, form)


class NixlConnector(ServerConnector["NixlTransport"]):
    """P's way to any D, or that of a rank of D to the ranks of P.

    Raises:
        NixlError: NIXL is not installed.
    """

    def __init__(self, settings: TransportSettings, side: Side = "sender") -> None:
        load()
        super().__init__(settings, form, side)


def form(settings: TransportSettings, pair_name: str, address: str, side: Side) -> NixlTransport:
    """One end of a pair, whose ends meet at the rendezvous server at `address`.

    Raises:
        TransportError: the other side does not come in time, or the receiver cannot read the sender's memory.
    """
    host, secret, timeout_s = settings.host, settings.secret, settings.set_up_timeout_s
    try:
        with contextlib.ExitStack() as ours:
            with member_store(pair_name, address, secret, RANK_OF[side], 2, timeout_s) as store:
                meet = _await_link if side == "receiver" else _open_link
                link = meet(store, pair_name, secret, host, timeout_s)
            ours.callback(link.close)
            agent = NixlAgent(f"{pair_name}/{side}", host)
            ours.callback(agent.close)
            transport = _formed(agent, link, side, settings.checksum, timeout_s)
            ours.pop_all()
            return transport
    except (OSError, RuntimeError, ValueError) as error:
        raise TransportError(f"could not form the pair {pair_name!r} at {address!r}: {error}") from error


def _await_link(store: MemberStore, pair_name: str, secret: ClusterSecret, host: str, timeout_s: float) -> Connection:
    arrived: queue.SimpleQueue[Connection] = queue.SimpleQueue()
    expected = {(pair_name, RANK_OF["sender"])}

    def is_expected(name: str, rank: int) -> bool:
        with contextlib.suppress(KeyError):
            expected.remove((name, rank))
            return True
        return False

    listener = AuthenticatedListener(host, secret, "kv link", is_expected, lambda _, __, link: arrived.put(link))
    try:
        store.set(_LINK_KEY, listener.address)
        return arrived.get(timeout=timeout_s)
    except queue.Empty:
        raise TransportError(f"no sender came in {timeout_s:g} s") from None
    finally:
        listener.close()
        listener.join()


def _open_link(store: MemberStore, pair_name: str, secret: ClusterSecret, _: str, timeout_s: float) -> Connection:
    link = connect(store.get(_LINK_KEY).decode(), timeout_s)
    try:
        answer(link, secret, "kv link", pair_name, RANK_OF["sender"], secrets.token_bytes(NONCE_BYTES))
    except BaseException:
        link.close()
        raise
    return link


def _formed(agent: NixlAgent, link: Connection, side: Side, checksum: Checksum, timeout_s: float) -> NixlTransport:
    """The transport, once D has read bytes of P over it."""
    probe = secrets.token_bytes(_PROBE_BYTES) if side == "sender" else b""
    with closed_after(link, timeout_s):
        link.send(Agent(metadata=agent.metadata, probe=probe))
        frame = link.receive(_MAX_FRAME_BYTES)
    if frame is None:
        raise TransportError(PEER_ENDED)
    try:
        peer = decoder(Agent).decode(frame)
    except msgspec.MsgspecError as error:
        raise TransportError(f"the peer does not know this transport: {error}") from error
    agent.add_peer(peer.metadata)
    transport = NixlTransport(agent, link, checksum)
    try:
        if side == "sender":
            transport.wait_proven(probe, timeout_s)
        else:
            transport.prove(peer.probe, timeout_s)
    except BaseException:
        transport.close()
        raise
    return transport


# ---------------------------------------------------------------- transport


@dataclass(frozen=True, slots=True)
class _Receive:
    buffer: Buffer
    nbytes: int
    done: Received


class NixlTransport(PairTransport):
    """Either end of a pair; it may send and receive. Takes over `agent`, which has its peer, and `link`."""

    name = "nixl"

    def __init__(self, agent: NixlAgent, link: Connection, checksum: Checksum) -> None:
        self._agent = agent
        self._link = link
        self._checksum_of: Callable[[Buffer], int] = lambda payload: checksum_of(payload, checksum)
        self._changed = threading.Condition()
        self._ended = ""
        """Why nothing more is moved."""
        self._is_proven = False
        self._send_lock = threading.Lock()
        """Payloads are announced in the order of `_untaken`."""
        self._untaken: deque[Done] = deque()
        """Callbacks of payloads that the peer has not read."""
        self._filled: deque[Filled] = deque()
        """Payloads of the peer without a receive."""
        self._receives: deque[_Receive] = deque()
        """Receives without a payload."""
        self._reads: deque[tuple[int, _Receive]] = deque()
        """Reads under way. Owner: the thread that makes them."""
        self._threads = (
            threading.Thread(target=self._listen, name="kv-nixl-link", daemon=True),
            threading.Thread(target=self._work, name="kv-nixl", daemon=True),
        )
        for thread in self._threads:
            thread.start()

    # ------------------------------------------------------------ operations

    @override
    def send(self, buffer: Buffer, nbytes: int, done: Done) -> None:
        with self._send_lock:
            with self._changed:
                ended = self._ended
                if not ended:
                    self._untaken.append(done)
                    self._changed.notify()
            if not ended:
                self._announce(buffer, nbytes)
        if ended:
            done(False, ended)

    @override
    def recv(self, buffer: Buffer, nbytes: int, done: Received, posted: Posted = ignore_posted) -> None:
        """The peer only says that its payload is there, so it may do that at once."""
        if not self._ended:
            posted()
        with self._changed:
            ended = self._ended
            if not ended:
                self._receives.append(_Receive(buffer, nbytes, done))
                self._changed.notify()
        if ended:
            done(False, ended, 0)

    @override
    def skip_checksums(self) -> None:
        self._checksum_of = no_checksum

    @override
    def close(self) -> None:
        self._end(CLOSED)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def prove(self, expected: bytes, timeout_s: float) -> None:
        """The receiver's part of the set-up: read the probe.

        Raises:
            TransportError: if other bytes came, or none in time.
        """
        target = np.zeros(len(expected), np.uint8)
        answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.recv(target, len(expected), lambda _, error, __: answers.put(error))
        try:
            error = answers.get(timeout=timeout_s)
        except queue.Empty:
            error = f"none in {timeout_s:g} s"
        if error:
            raise TransportError(f"the sender's memory cannot be read: {error}")
        if target.tobytes() != expected:
            raise TransportError("the sender's memory was read wrongly")
        self._link.send(Proven())

    def wait_proven(self, probe: bytes, timeout_s: float) -> None:
        """The sender's part of the set-up.

        Raises:
            TransportError: if the receiver does not read the probe in time.
        """
        errors: list[str] = []
        self.send(np.frombuffer(bytearray(probe), np.uint8), len(probe), lambda _, error: errors.append(error))
        with self._changed:
            self._changed.wait_for(lambda: self._is_proven or self._ended, timeout_s)
            if not self._is_proven:
                raise TransportError(f"the receiver cannot read memory of this process: {self._ended or errors}")

    def _announce(self, buffer: Buffer, nbytes: int) -> None:
        try:
            metadata = self._agent.register(buffer)
            region = region_of(buffer)
            self._link.send(
                Filled(address=region.address, nbytes=nbytes, kind=region.kind, device=region.device, metadata=metadata)
            )
        except (NixlError, ConnectionFailedError) as error:
            self._end(str(error))

    def _end(self, reason: str) -> None:
        """Nothing more is moved, on both sides; does not wait. Idempotent."""
        with self._changed:
            self._ended = self._ended or reason
            self._changed.notify_all()
        self._link.close()

    # ------------------------------------------------------------ the connection

    def _listen(self) -> None:
        """What the peer says, until the end."""
        words = decoder(Word)
        try:
            while (frame := self._link.receive(_MAX_FRAME_BYTES)) is not None:
                self._on_word(words.decode(frame))
        except ConnectionFailedError as error:
            self._end(f"{PEER_ENDED}: {error}")
        except msgspec.MsgspecError as error:
            self._end(f"the peer broke the protocol: {error}")
        else:
            self._end(PEER_ENDED)

    def _on_word(self, word: Word) -> None:
        done: Done | None = None
        with self._changed:
            match word:
                case Filled() if len(self._filled) < _MAX_FILLED:
                    self._filled.append(word)
                case Filled():
                    raise ConnectionFailedError(f"{_MAX_FILLED} payloads wait for a receive")
                case Proven():
                    self._is_proven = True
                case Taken() if self._untaken:
                    done = self._untaken.popleft()
                case Taken():
                    raise ConnectionFailedError("it has taken what was not sent")
            self._changed.notify_all()
        if done is not None:
            done(True, "")

    # ------------------------------------------------------------ the reads

    def _work(self) -> None:
        """Make the reads, until the end; then answer what is left."""
        try:
            while self._go_on():
                self._begin_reads()
                self._finish_reads()
                self._agent.progress()
        except (NixlError, ConnectionFailedError) as error:
            self._end(str(error))
        except Exception as error:
            if is_fatal(error):
                end_process("transport nixl", error)
            logger.exception("transport nixl: internal error; ending the pair")
            self._end(f"internal error: {error}")
        try:
            return_or_exit(self._agent.close, "the end of a NIXL agent")
        except BaseException as error:
            end_process("transport nixl", error)
        with self._changed:
            untaken, self._untaken = self._untaken, deque()
            receives = [*(receive for _, receive in self._reads), *self._receives]
            self._reads.clear()
            self._receives.clear()
        for done in untaken:
            done(False, self._ended)
        for receive in receives:
            receive.done(False, self._ended, 0)

    def _go_on(self) -> bool:
        """Wait until there is something to do; false at the end."""
        with self._changed:
            while not self._ended and not self._can_begin:
                if self._reads or self._untaken:
                    self._changed.wait(_READ_POLL_S if self._reads else _HELP_POLL_S)
                    break
                self._changed.wait()
            return not self._ended

    @property
    def _can_begin(self) -> bool:
        return bool(self._filled and self._receives)

    def _begin_reads(self) -> None:
        while True:
            with self._changed:
                if not self._can_begin:
                    return
                filled, receive = self._filled.popleft(), self._receives.popleft()
                self._receives.appendleft(receive)  # until it is a read, so that the end answers it
            if filled.metadata:
                self._agent.add_peer(filled.metadata)
            if filled.nbytes != receive.nbytes:
                raise NixlError(f"{filled.nbytes} bytes were sent where {receive.nbytes} were expected")
            self._agent.register(receive.buffer)
            remote = Region(filled.address, filled.nbytes, filled.kind, filled.device)
            number = self._agent.read(receive.buffer, receive.nbytes, remote)
            with self._changed:
                self._reads.append((number, self._receives.popleft()))

    def _finish_reads(self) -> None:
        while self._reads and self._agent.is_done(self._reads[0][0]):
            self._link.send(Taken())
            receive = self._reads[0][1]
            checksum = self._checksum_of(receive.buffer[: receive.nbytes])
            self._reads.popleft()
            receive.done(True, "", checksum)
