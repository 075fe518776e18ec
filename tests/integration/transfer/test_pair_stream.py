"""The prefill worker's end of a pair's control stream, before a real server: it keeps no connection that is over."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from disagg.prefill_worker.service import PairStream
from disagg.proto.frames import frame_of
from disagg.proto.handover import PairHeartbeat, PairWelcome
from disagg.proto.ids import Incarnation, WorkerId
from disagg.proto.messages import PeerRef
from disagg.proto.services import SERVER_OPTIONS, TRANSFER, service_and_method
from tests.support.control import make_info
from tests.support.secret import SECRET

INCARNATION = Incarnation("d.1")
WELCOME = PairWelcome(incarnation=INCARNATION, pair_name="pair", transport="gloo", credits=4, max_chunk_bytes=1024)
BEAT = PairHeartbeat()


class Peer:
    """A decode worker that sends a few messages, reads only the hello, and ends on order."""

    def __init__(self) -> None:
        self.leaves = asyncio.Event()

    async def pair(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        await anext(aiter(requests))
        for message in (WELCOME, BEAT, BEAT, BEAT):
            yield frame_of(message)
        await self.leaves.wait()


@asynccontextmanager
async def served(peer: Peer) -> AsyncIterator[int]:
    """The port."""
    service, method = service_and_method(TRANSFER)
    handler = grpc.method_handlers_generic_handler(service, {method: grpc.stream_stream_rpc_method_handler(peer.pair)})
    server = grpc.aio.server(options=SERVER_OPTIONS)
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield port
    finally:
        await server.stop(None)


def num_connections(port: int) -> int:
    """To this port, that stand."""
    rows = [
        line.split() for table in ("tcp", "tcp6") for line in Path(f"/proc/self/net/{table}").read_text().splitlines()
    ]
    return sum(row[3] == "01" and row[1].endswith(f":{port:04X}") for row in rows)


@pytest.mark.parametrize("peer_leaves", [True, False])
@pytest.mark.parametrize("reads", [True, False])
async def test_nothing_is_left_of_a_stream_that_was_closed(reads: bool, peer_leaves: bool) -> None:
    """Also where messages were not read and others could not be written, and without the garbage collector's help."""
    peer = Peer()
    async with served(peer) as port:
        stream = PairStream(
            PeerRef(worker_id=WorkerId("d"), incarnation=INCARNATION, address=f"127.0.0.1:{port}"), SECRET
        )
        gc.disable()
        try:
            assert await stream.open(make_info("p"), 10.0) == WELCOME
            assert num_connections(port) == 1
            if reads:
                messages = stream.messages()
                assert [await anext(messages) for _ in range(3)] == [BEAT] * 3
                await messages.aclose()
            if peer_leaves:
                peer.leaves.set()
                for _ in range(200):
                    stream.send(BEAT)
                    await asyncio.sleep(0)
                await asyncio.sleep(0.1)
            await stream.close()
            deadline = time.monotonic() + 10
            while num_connections(port):
                assert time.monotonic() < deadline, "the connection is still there"
                await asyncio.sleep(0.01)
        finally:
            gc.enable()
