"""The prefill worker's end of a pair's control stream, which it opens to the decode worker. And the service from which
other workers fetch prefixes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import grpc
import msgspec

from disagg.connections.cluster_secret import ClusterSecret
from disagg.connections.shell.channels import open_channel
from disagg.engine.io.mailbox import Mailbox
from disagg.engine.shell.pair_link import MAX_UNSENT_MESSAGES, outgoing_frames
from disagg.proto.frames import frame_decoder
from disagg.proto.handover import (
    Fetch,
    FetchAnswer,
    PairHello,
    PairRefused,
    PairWelcome,
    ReceiverToSender,
    SenderToReceiver,
)
from disagg.proto.messages import PeerRef, WorkerInfo, decoder, encode
from disagg.proto.services import FETCH, FETCH_SERVICE, TRANSFER, service_and_method

END_TIMEOUT_S = 1.0
"""Seconds to wait for the end of a call that is over, which normally comes at once."""


class PairError(Exception):
    """The pair cannot be formed, or its control stream broke."""


class FetchService:
    """Generic handler of the calls for prefixes; `serve` answers one."""

    def __init__(self, serve: Callable[[Fetch], Awaitable[FetchAnswer]]) -> None:
        self._serve = serve
        self._decode = decoder(Fetch).decode

    def handler(self) -> Any:
        """The gRPC handler for the worker's server."""
        methods = {service_and_method(FETCH)[1]: grpc.unary_unary_rpc_method_handler(self._fetch)}
        return grpc.method_handlers_generic_handler(FETCH_SERVICE, methods)

    async def _fetch(self, frame: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
        try:
            fetch = self._decode(frame)
        except msgspec.MsgspecError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"not a Fetch: {error}")
            raise
        return encode(await self._serve(fetch))


class PairStream:
    """One control stream to a decode worker, opened once. Owner: the asyncio thread."""

    def __init__(self, peer: PeerRef, secret: ClusterSecret) -> None:
        self._peer = peer
        self._secret = secret
        self._outgoing: Mailbox[SenderToReceiver] = Mailbox(MAX_UNSENT_MESSAGES)
        self._channel: grpc.aio.Channel | None = None
        self._call: Any = None
        self._incoming: AsyncGenerator[Any, None] | None = None
        self._abandoned = False
        self._decoder = frame_decoder(ReceiverToSender)

    async def open(self, info: WorkerInfo, timeout_s: float, *, digests: bool = False) -> PairWelcome:
        """Connect, and exchange `PairHello` and `PairWelcome`; `digests` as there.

        Raises:
            PairError: if the peer cannot be reached, is another incarnation, or refuses the pair.
        """
        self._channel = open_channel(self._peer.address, self._secret)
        self._call = self._channel.stream_stream(TRANSFER, None, None)(
            outgoing_frames(self._outgoing), metadata=self._secret.metadata
        )
        # Not `read()`, which reads nothing after a write has failed; see `_read_out`.
        self._incoming = aiter(self._call)
        self.send(PairHello(info=info, receiver_incarnation=self._peer.incarnation, digests=digests))
        try:
            async with asyncio.timeout(timeout_s):
                frame = await anext(self._incoming)
        except (TimeoutError, grpc.RpcError) as error:
            raise PairError(
                f"no answer from {self._peer.worker_id} at {self._peer.address}: {_reason(error)}"
            ) from error
        except StopAsyncIteration:
            raise PairError(f"{self._peer.worker_id} closed the stream") from None
        match self._decode(frame):
            case [PairWelcome() as welcome]:
                return welcome
            case [PairRefused(reason=reason)]:
                raise PairError(f"{self._peer.worker_id} refused the pair: {reason}")
            case others:
                names = ", ".join(type(other).__name__ for other in others)
                raise PairError(f"{self._peer.worker_id} began with {names} instead of PairWelcome")

    def send(self, message: SenderToReceiver) -> None:
        """Queue a message. If the peer has stopped reading, the stream is cancelled, which `messages` then reports."""
        self._outgoing.put(message)
        if self._outgoing.closed:
            self.abandon()

    def abandon(self) -> None:
        """Cancel the stream; `messages` ends."""
        self._abandoned = True
        if self._call is not None:
            self._call.cancel()

    async def messages(self) -> AsyncGenerator[ReceiverToSender, None]:
        """Yields the peer's messages until the stream ends; raises `PairError` when it breaks."""
        assert self._incoming is not None
        try:
            async for frame in self._incoming:
                for message in self._decode(frame):
                    yield message
        except grpc.RpcError as error:
            raise PairError(f"the stream to {self._peer.worker_id} broke: {_reason(error)}") from error
        except asyncio.CancelledError:
            # gRPC raises it also for a call that was cancelled here. Let through, it would cancel the reading task, and
            # keep call and socket until garbage collection.
            if not self._abandoned:
                raise
            raise PairError(f"the stream to {self._peer.worker_id} was given up") from None

    async def ended(self) -> None:
        """Wait until the stream has ended, whichever side ended it. To be called once it is open."""
        await self._call.code()

    async def close(self) -> None:
        """End the stream and the channel. Idempotent."""
        self._outgoing.close()
        call, self._call = self._call, None
        incoming, self._incoming = self._incoming, None
        channel, self._channel = self._channel, None
        if call is not None:
            call.cancel()
        if incoming is not None:
            await _read_out(incoming)
        if channel is not None:
            await channel.close(None)

    def _decode(self, frame: bytes) -> list[ReceiverToSender]:
        try:
            return self._decoder.decode(frame)
        except msgspec.MsgspecError as error:
            raise PairError(f"{self._peer.worker_id} sent a bad frame: {error}") from error


async def _read_out(incoming: AsyncGenerator[Any, None]) -> None:
    """Read a call that is over to its end. gRPC keeps a call with unread messages, and its connection with it; where a
    write has failed, not even a cancel ends it."""
    with contextlib.suppress(grpc.RpcError, asyncio.CancelledError, TimeoutError):  # gRPC's, of its own cancel
        async with asyncio.timeout(END_TIMEOUT_S):
            async for _ in incoming:
                pass
    await incoming.aclose()


def _reason(error: BaseException) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return str(error) or type(error).__name__
