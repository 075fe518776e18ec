"""The decode worker's end of the control streams, which prefill workers open: one for each pair. And the calls by which
a worker fetches prefixes from others."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

import grpc
import msgspec

from disagg.connections.cluster_secret import ClusterSecret
from disagg.connections.shell.channels import open_channel
from disagg.engine.io.mailbox import Mailbox
from disagg.engine.shell.pair_link import MAX_UNSENT_MESSAGES, outgoing_frames
from disagg.proto.frames import frame_decoder, frame_of
from disagg.proto.handover import (
    Fetch,
    FetchAnswer,
    PairHello,
    PairRefused,
    PairWelcome,
    ReceiverToSender,
    SenderToReceiver,
)
from disagg.proto.ids import WorkerId
from disagg.proto.messages import PeerRef, decoder, encode
from disagg.proto.services import FETCH, TRANSFER, TRANSFER_SERVICE, service_and_method

logger = logging.getLogger(__name__)

Outgoing = Mailbox[ReceiverToSender]


class Pair(Protocol):
    """The receiving side of one pair, as the stream sees it."""

    def on_message(self, message: SenderToReceiver) -> None:
        """Handle a message after the hello."""
        ...

    def on_lost(self) -> None:
        """Handle the end of the stream. Idempotent."""
        ...


class FetchError(Exception):
    """No answer of the source of a prefix, or none that can be read. `is_late`: no fault is known but its silence."""

    def __init__(self, detail: str, *, is_late: bool = False) -> None:
        super().__init__(detail)
        self.is_late = is_late


class FetchChannel:
    """The channel to the worker that has prefixes. `used_at`: when it was used last, for its owner."""

    def __init__(self, peer: PeerRef, secret: ClusterSecret) -> None:
        self._channel = open_channel(peer.address, secret)
        self._metadata = secret.metadata
        self._call = self._channel.unary_unary(FETCH, None, None)
        self._decode = decoder(FetchAnswer).decode
        self.used_at = 0.0

    async def ask(self, fetch: Fetch, timeout_s: float | None) -> FetchAnswer:
        """Ask for a prefix.

        Raises:
            FetchError: if there is no answer in time.
        """
        try:
            frame = await self._call(encode(fetch), timeout=timeout_s, metadata=self._metadata)
            answer: FetchAnswer = self._decode(frame)
        except grpc.aio.AioRpcError as error:
            is_late = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            raise FetchError(f"{error.code().name}: {error.details()}", is_late=is_late) from error
        except msgspec.MsgspecError as error:
            raise FetchError(f"a bad answer: {error}") from error
        return answer

    async def close(self) -> None:
        """End the channel."""
        await self._channel.close(None)


class TransferService:
    """Generic handler of the pair streams. `accept` checks the hello and makes the pair, or refuses it."""

    def __init__(self, accept: Callable[[PairHello, Outgoing], tuple[PairWelcome, Pair] | PairRefused]) -> None:
        self._accept = accept
        self._decoder = frame_decoder(SenderToReceiver)

    def handler(self) -> Any:
        """The gRPC handler for the worker's server."""
        methods = {service_and_method(TRANSFER)[1]: grpc.stream_stream_rpc_method_handler(self._pair)}
        return grpc.method_handlers_generic_handler(TRANSFER_SERVICE, methods)

    async def _pair(
        self, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[bytes]:
        incoming = aiter(requests)
        hello = await self._hello(incoming, context)
        outgoing = Outgoing(MAX_UNSENT_MESSAGES)
        accepted = self._accept(hello, outgoing)
        if isinstance(accepted, PairRefused):
            yield frame_of(accepted)
            return
        welcome, pair = accepted
        peer_id = hello.info.worker_id
        reader = asyncio.create_task(self._read(incoming, pair, outgoing, peer_id), name=f"pair-{peer_id}")
        try:
            yield frame_of(welcome)
            async for frame in outgoing_frames(outgoing):
                yield frame
        finally:
            reader.cancel()
            pair.on_lost()

    async def _hello(self, incoming: AsyncIterator[bytes], context: grpc.aio.ServicerContext[Any, Any]) -> PairHello:
        try:
            messages = self._decoder.decode(await anext(incoming))
        except (StopAsyncIteration, msgspec.MsgspecError):
            messages = []
        match messages:
            case [PairHello() as hello]:
                return hello
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a pair stream begins with PairHello")
        raise AssertionError

    async def _read(self, incoming: AsyncIterator[bytes], pair: Pair, outgoing: Outgoing, peer_id: WorkerId) -> None:
        try:
            async for frame in incoming:
                for message in self._decoder.decode(frame):
                    pair.on_message(message)
        except msgspec.MsgspecError as error:
            logger.warning("pair with %s: a bad frame, closing it: %s", peer_id, error)
        except grpc.RpcError as error:
            logger.debug("pair with %s: the control stream broke: %s", peer_id, error)
        except Exception:
            # A bug here. It costs this pair: its attempts fail, and are placed again.
            logger.exception("pair with %s: internal error in worker; closing the pair, its attempts fail", peer_id)
        finally:
            outgoing.close()
            pair.on_lost()  # Now: the handler may be blocked in a write to a peer that does not read.
