"""Loads that once stopped a gateway or another tenant, on a real cluster: each load of one tenant beside another that
sends short requests one after the other.

    python -m tests.acceptance.isolation.hostile_loads [--seconds 6] [--json FILE]

    empty fields    messages of the largest size, of as many empty sub-messages as fit, three at a time (gRPC)
    empty lists     the same of lists (HTTP)
    last bytes      24 bodies of the largest size, whose last bytes come together
    64 x 2          eight calls of 64 prompts and two answers each, of 8,000 tokens
    n = 16          two calls of 16 answers of 8,000 tokens
    long prompts    twelve prompts of 1 MB at a time, all refused
    state streams   300 streams of the cluster's state

For each: the times to the first token of the other tenant without the load and beside it (the median and the longest),
the gateway's longest turn since its start, what its memory grew, and whether all processes are the same.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Final

import grpc.aio

from disagg.client import AsyncClient
from disagg.gateway.config import GatewayConfig, ModelSource
from disagg.proto.errors import DisaggError
from disagg.v1 import inference_pb2 as pb
from tests.acceptance.faults.cluster import Up
from tests.acceptance.faults.load import Model
from tests.support.process_figures import is_running, rss_bytes
from tests.support.raw_clients import COMPLETIONS, http_request
from tests.support.reports import percentile, print_table, report, write_json

KEYS: Final = {name: f"key-of-the-{name}-tenant" for name in ("neighbour", "attacker")}
MAX_MODEL_LEN: Final = 16_384
STEP_MS: Final = 10.0
PAUSE_S: Final = 0.02
"""Of the neighbour, between two requests."""
EMPTY_TIMEOUT_S: Final = 120.0
TIMEOUT_S: Final = 60.0
SERVICE: Final = "/disagg.v1.InferenceService"
_ANY_SIZE: Final = (("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1))

Row = dict[str, Any]
Codes = Counter[str]


class Attacker:
    """Sends what the loads are made of. A call that is given up with its load is not counted."""

    def __init__(self, up: Up, model: Model) -> None:
        self._up, self._model = up, model.name
        self._metadata = (("authorization", f"Bearer {KEYS['attacker']}"),)
        self.codes: Codes = Counter()
        config = GatewayConfig(models=(ModelSource(name="x", path="fake", prefix_root=""),))
        self._room = config.max_message_bytes(MAX_MODEL_LEN) - 1024

    async def _grpc(self, path: str, body: bytes) -> None:
        async with grpc.aio.insecure_channel(self._up.address, options=_ANY_SIZE) as channel:
            call = channel.unary_stream(path, None, None)
            try:
                async for _ in call(body, metadata=self._metadata, timeout=TIMEOUT_S):
                    pass
                self.codes["OK"] += 1
            except grpc.aio.AioRpcError as error:
                self.codes[error.code().name] += 1

    async def _http(self, parts: Sequence[bytes], wait: asyncio.Event | None = None) -> None:
        """One request; its last part is sent once `wait` is set."""
        host, _, port = self._up.http_address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            for part in parts[:-1]:
                writer.write(part)
                await writer.drain()
            if wait is not None:
                await wait.wait()
            writer.write(parts[-1])
            words = (await reader.readline()).split()
            self.codes[words[1].decode() if len(words) > 1 else "closed"] += 1
            await reader.read()
        except OSError:
            self.codes["closed"] += 1
        finally:
            writer.close()

    def _post(self, body: bytes) -> list[bytes]:
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {KEYS['attacker']}\r\n"
        rest = f"connection: close\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        return [(head + rest).encode() + body[:-16], body[-16:]]

    async def empty_fields(self) -> None:
        """Three at a time."""
        message = empty_turns(self._model, self._room)
        await asyncio.gather(*(self._grpc(f"{SERVICE}/Generate", message) for _ in range(3)))

    async def empty_lists(self) -> None:
        """Three bytes each."""
        body = b'{"model":"%b","prompt":[%b]}' % (self._model.encode(), b",".join([b"[]"] * ((self._room - 64) // 3)))
        await self._http(self._post(body))

    async def last_bytes(self) -> None:
        """All bodies but for their ends, and then these."""
        body = b'{"model":"%b","prompt":"%b"}' % (self._model.encode(), b"a" * (self._room - 64))
        event = asyncio.Event()
        async with asyncio.TaskGroup() as calls:
            for _ in range(24):
                calls.create_task(self._http(self._post(body), event))
            await asyncio.sleep(1.0)
            event.set()

    async def many_prompts(self) -> None:
        """1,024 answers that are asked for by calls of 1.2 KB."""
        body = {"model": self._model, "prompt": [[1, 2, 3, 4]] * 64, "n": 2, "max_tokens": 8000, "ignore_eos": True}
        await asyncio.gather(*(self._http([http_request(COMPLETIONS, body, _bearer())]) for _ in range(8)))

    async def many_answers(self) -> None:
        """32 answers, which take each decode place for 80 s."""
        body = {"model": self._model, "prompt": [1, 2, 3, 4], "n": 16, "max_tokens": 8000, "ignore_eos": True}
        await asyncio.gather(*(self._http([http_request(COMPLETIONS, body, _bearer())]) for _ in range(2)))

    async def long_prompts(self) -> None:
        """Longer than the context."""
        body = {"model": self._model, "prompt": "x y " * (self._room // 4 - 64), "max_tokens": 4}
        await asyncio.gather(*(self._http([http_request(COMPLETIONS, body, _bearer())]) for _ in range(12)))

    async def state_streams(self) -> None:
        """Held; those beyond what a tenant may have are refused."""
        async with grpc.aio.insecure_channel(self._up.address, options=_ANY_SIZE) as channel:

            async def watch() -> None:
                call = channel.unary_stream("/disagg.v1.AdminService/WatchClusterState", None, None)
                try:
                    async for _ in call(b"", metadata=self._metadata, timeout=TIMEOUT_S):
                        self.codes["states"] += 1
                except grpc.aio.AioRpcError as error:
                    self.codes[error.code().name] += 1

            await asyncio.gather(*(watch() for _ in range(300)))


LOADS: Final[dict[str, Callable[[Attacker], Awaitable[None]]]] = {
    "empty fields": Attacker.empty_fields,
    "empty lists": Attacker.empty_lists,
    "last bytes": Attacker.last_bytes,
    "64 x 2": Attacker.many_prompts,
    "n = 16": Attacker.many_answers,
    "long prompts": Attacker.long_prompts,
    "state streams": Attacker.state_streams,
}
"""One round of each."""


def _bearer() -> list[tuple[str, str]]:
    return [("authorization", f"Bearer {KEYS['attacker']}"), ("connection", "close")]


def empty_turns(model: str, num_bytes: int) -> bytes:
    """A request for the answer to a conversation: as many turns without a field as fit, of two bytes each."""
    turns = b"\x0a\x00" * (num_bytes // 2)
    number = pb.GenerateRequest.DESCRIPTOR.fields_by_name["chat"].number
    return pb.GenerateRequest(model=model).SerializeToString() + bytes([number << 3 | 2]) + _varint(len(turns)) + turns


def _varint(value: int) -> bytes:
    data = bytearray()
    while value > 0x7F:
        data.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*data, value])


async def neighbour(client: AsyncClient, until: Callable[[], bool]) -> list[float]:
    """Seconds to each answer of one token, until the load is over; `inf` for one that failed."""
    taken: list[float] = []
    while not taken or not until():
        began = time.monotonic()
        try:
            await client.generate([1, 2, 3], max_tokens=1, timeout_s=TIMEOUT_S)
            taken.append(time.monotonic() - began)
        except DisaggError:
            taken.append(float("inf"))
        await asyncio.sleep(PAUSE_S)
    return taken


async def row_of(name: str, up: Up, model: Model, seconds: float) -> Row:
    """One load, again and again for so long; then it is given up."""
    gateway, workers = up.gateway_pid(), [worker.pid for worker in (await up.state()).values()]
    attacker, client = Attacker(up, model), AsyncClient(up.address, KEYS["neighbour"])
    rss = rss_bytes(gateway)

    async def attack() -> None:
        while True:
            await LOADS[name](attacker)

    try:
        end = time.monotonic() + seconds / 2
        alone = await neighbour(client, lambda: time.monotonic() > end)
        task = asyncio.create_task(attack())
        end = time.monotonic() + seconds
        beside = await neighbour(client, lambda: time.monotonic() > end)
        growth = rss_bytes(gateway) - rss
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    finally:
        await client.close()
    _, left = await up.emptied(EMPTY_TIMEOUT_S)
    same = gateway == up.gateway_pid() and all(is_running(pid) for pid in (gateway, *workers))
    row = {
        "load": name,
        "alone_p50_ms": round(1000 * percentile(alone, 50), 1),
        "alone_longest_ms": round(1000 * max(alone), 1),
        "p50_ms": round(1000 * percentile(beside, 50), 1),
        "longest_ms": round(1000 * max(beside), 1),
        "requests": len(beside),
        "answers": " ".join(f"{code}:{count}" for code, count in sorted(attacker.codes.items())),
        "loop_longest_ms": round(1000 * await up.metric("disagg_gateway_loop_longest_seconds", window="start"), 1),
        "growth_mib": round(growth / (1 << 20), 1),
        "same_processes": int(same),
        "left": sum(left.values()),
    }
    print(row, file=sys.stderr, flush=True)
    return row


async def measure(names: Sequence[str], seconds: float) -> list[Row]:
    """A row for each load, on one cluster."""
    model = Model()
    pool = {"num_blocks": 16_384, "max_num_seqs": 16}
    config = {
        "model": {"path": model.path, "dtype": model.dtype, "max_model_len": MAX_MODEL_LEN},
        "pools": {"prefill": {**pool, "size": 1, "max_num_seqs": 64}, "decode": {**pool, "size": 1}},
    }
    async with Up(config, step_ms=STEP_MS, keys=KEYS) as up:
        await up.settled()
        return [await row_of(name, up, model, seconds) for name in names]


def summary(rows: Sequence[Row]) -> dict[str, float]:
    """Over all loads."""
    return {
        "longest_ms": max(row["longest_ms"] for row in rows),
        "longest_delay_ms": max(row["longest_ms"] - row["alone_longest_ms"] for row in rows),
        "loop_longest_ms": max(row["loop_longest_ms"] for row in rows),
        "growth_mib": max(row["growth_mib"] for row in rows),
        "same_processes": min(row["same_processes"] for row in rows),
        "left": max(row["left"] for row in rows),
    }


def main() -> None:
    """Measure, print, and write the report."""
    names = list(LOADS)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=6.0, help="of each load")
    parser.add_argument("--loads", default=",".join(names), help=f"of {', '.join(names)}")
    parser.add_argument("--json", type=Path, help="write the report to this file")
    options = parser.parse_args()
    loads = options.loads.split(",")
    if unknown := sorted(set(loads) - set(names)):
        parser.error(f"--loads: there is no {', '.join(unknown)}; there is {', '.join(names)}")
    rows = asyncio.run(measure(loads, options.seconds))
    columns = list(rows[0])
    cells = [[str(row[name]) for name in columns] for row in rows]
    print_table("Hostile loads", [name.replace("_", " ") for name in columns], cells)
    print(summary(rows))
    if options.json is not None:
        write_json(options.json, report(rows, summary(rows)))


if __name__ == "__main__":
    main()
