"""The prefill worker's end of a pair's control stream: it dials the decode worker and exchanges hand-over messages
with it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import msgspec

from disagg.engine.mailbox import Mailbox
from disagg.proto.cluster_secret import ClusterSecret
from disagg.proto.handover import PairHello, PairRefused, PairWelcome, ReceiverToSender, SenderToReceiver
from disagg.proto.messages import PeerRef, WorkerInfo, decoder, encode
from disagg.proto.services import CHANNEL_OPTIONS, TRANSFER

MAX_UNSENT_MESSAGES = 4096
"""Control messages that may wait for the network; more means that the peer reads no longer, and the pair is given
up."""


class PairError(Exception):
    """The pair cannot be formed, or its control stream broke."""


class PairStream:
    """One life of a control stream to a decode worker. Owner: the asyncio thread."""

    def __init__(self, peer: PeerRef, secret: ClusterSecret) -> None:
        self._peer = peer
        self._secret = secret
        self._outgoing: Mailbox[SenderToReceiver] = Mailbox(MAX_UNSENT_MESSAGES)
        self._channel: grpc.aio.Channel | None = None
        self._call: Any = None
        self._abandoned = False
        self._decoder = decoder(ReceiverToSender)

    async def open(self, info: WorkerInfo, timeout_s: float) -> PairWelcome:
        """Dial and shake hands.

        Raises:
            PairError: if the peer cannot be reached, is another incarnation, or refuses the pair.
        """
        self._channel = grpc.aio.insecure_channel(self._peer.address, options=CHANNEL_OPTIONS)
        self._call = self._channel.stream_stream(TRANSFER, None, None)(self._frames(), metadata=self._secret.metadata)
        self.send(PairHello(info=info, receiver_incarnation=self._peer.incarnation))
        try:
            async with asyncio.timeout(timeout_s):
                frame = await self._call.read()
        except (TimeoutError, grpc.RpcError) as error:
            raise PairError(
                f"no answer from {self._peer.worker_id} at {self._peer.address}: {_reason(error)}"
            ) from error
        if not isinstance(frame, bytes):  # the end of the stream
            raise PairError(f"{self._peer.worker_id} closed the stream")
        match self._decode(frame):
            case PairWelcome() as welcome:
                return welcome
            case PairRefused(reason=reason):
                raise PairError(f"{self._peer.worker_id} refused the pair: {reason}")
            case other:
                raise PairError(f"{self._peer.worker_id} began with {type(other).__name__} instead of a welcome")

    def send(self, message: SenderToReceiver) -> None:
        """Queue a message. A peer that reads no longer loses the stream, which `messages` then reports."""
        self._outgoing.put(message)
        if self._outgoing.closed:
            self.abandon()

    def abandon(self) -> None:
        """Break the stream off; `messages` ends."""
        self._abandoned = True
        if self._call is not None:
            self._call.cancel()

    async def messages(self) -> AsyncIterator[ReceiverToSender]:
        """What the peer says, until the stream ends; raises `PairError` when it breaks."""
        try:
            while isinstance(frame := await self._call.read(), bytes):
                yield self._decode(frame)
        except grpc.RpcError as error:
            raise PairError(f"the stream to {self._peer.worker_id} broke: {_reason(error)}") from error
        except asyncio.CancelledError:
            # gRPC raises it for a call that we cancelled, too. Let through, it would end up in the task of whoever
            # reads, and keep call and socket until the collector comes.
            if not self._abandoned:
                raise
            raise PairError(f"the stream to {self._peer.worker_id} was given up") from None

    async def ended(self) -> None:
        """Returns when the stream is over, whoever ended it. To be called once it is open."""
        await self._call.code()

    async def close(self) -> None:
        """End the stream and the channel. Idempotent."""
        self._outgoing.close()
        call, self._call = self._call, None
        channel, self._channel = self._channel, None
        if call is not None:
            call.cancel()
        if channel is not None:
            await channel.close(None)

    def _decode(self, frame: bytes) -> ReceiverToSender:
        try:
            message: ReceiverToSender = self._decoder.decode(frame)
        except msgspec.MsgspecError as error:
            raise PairError(f"{self._peer.worker_id} sent a bad frame: {error}") from error
        return message

    async def _frames(self) -> AsyncIterator[bytes]:
        async for message in self._outgoing:
            yield encode(message)


def _reason(error: BaseException) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return str(error) or type(error).__name__
