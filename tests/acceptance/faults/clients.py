"""Rows in which clients are the trouble: too many, too slow, gone, or wrong."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import grpc
import grpc.aio

from disagg.client import AsyncClient
from disagg.client.failures import error_of
from disagg.v1 import inference_pb2 as pb
from tests.acceptance.bad_input.refusals import measure
from tests.acceptance.faults.cluster import Up, until
from tests.acceptance.faults.kills import NUM_TOKENS, RATE
from tests.acceptance.faults.load import Load, Model, send
from tests.acceptance.faults.row import Row, all_right, of_streams
from tests.support.inference_stub import service
from tests.support.process_figures import rss_bytes
from tests.support.reports import percentile

CAP_BYTES = 256 << 10
"""Memory that one unread stream may cost the gateway."""
RSS_SLACK_BYTES = 4 << 20
"""What the gateway's process may grow by for other reasons while the slow readers are there."""
SLOW_OPTIONS = (("grpc.enable_http_proxy", 0), ("grpc.http2.bdp_probe", 0))
"""With probing, gRPC would take in megabytes for a client that does not read."""
NUM_SLOW = 8
SLOW_TOKENS = 8000
"""More than the connection's own buffers take."""
SLOW_READ_S = 75.0
"""Longer than a client may leave a message unread (60 s) after these are full."""
NUM_GONE = 12
GONE_TOKENS = 400


# ---------------------------------------------------------------- slow readers


async def slow_reader(up: Up, model: Model) -> Row:
    """Clients that take one token and then none, beside others that read."""
    await up.settled()
    gateway = up.gateway_pid()
    model_name = (await up.client.models())[0].name
    lost: list[str] = []

    async def read_slowly(number: int) -> None:
        request = pb.GenerateRequest(
            model=model_name,
            token_ids=pb.TokenIds(ids=[number + 1] * 20),
            sampling=pb.SamplingParams(temperature=0.0),
            stopping=pb.StopConditions(max_tokens=SLOW_TOKENS, ignore_eos=True),
        )
        # A connection of its own: what one client does not read must not hold back another one.
        async with grpc.aio.insecure_channel(up.address, options=SLOW_OPTIONS) as channel:
            call: Any = service(channel).Generate(request)
            await call.read()
            await asyncio.sleep(SLOW_READ_S)
            while isinstance(await _read(call, lost), pb.GenerateResponse):
                pass

    async with Load(up.address, model, rate=RATE, num_tokens=NUM_TOKENS) as streams:
        await asyncio.sleep(1.0)
        before = rss_bytes(gateway)
        readers = [asyncio.create_task(read_slowly(number)) for number in range(NUM_SLOW)]
        most = 0
        for _ in range(round(SLOW_READ_S / 0.25)):
            await asyncio.sleep(0.25)
            most = max(most, rss_bytes(gateway) - before)
        await asyncio.gather(*readers)
    left_for_s, left = await up.emptied()
    seen = of_streams(streams)
    bytes_each = max(0.0, (most - RSS_SLACK_BYTES) / NUM_SLOW)
    return Row(
        name="slow_reader",
        promise="others are not held up; at most 256 KiB a stream, then stream_lost",
        met=all_right(seen) and bytes_each <= CAP_BYTES and lost == ["stream_lost"] * NUM_SLOW and not left,
        left=sum(left.values()),
        left_for_s=left_for_s,
        figures={"kib_each": bytes_each / 1024, "slow": float(NUM_SLOW), "lost": float(len(lost))},
        **seen,
    )


async def _read(call: Any, errors: list[str]) -> object:
    """The next message; None after an error, which is noted."""
    try:
        return await call.read()
    except grpc.aio.AioRpcError as error:
        errors.append(error_of(error).code)
        return None


# ---------------------------------------------------------------- clients that leave


async def disconnect(up: Up, model: Model) -> Row:
    """Clients leave in each phase: while queued, in prefill, in the transfer, in decode."""
    await up.settled()
    await up.emptied()
    figures: dict[str, float] = {}
    left_count = 0
    for phase, length in (("queued", 1500), ("prefill", 1500), ("transfer", 1500), ("decode", 40)):
        freed_s, left, reached = await _leave_in(up, model, phase, length)
        figures[f"{phase}_s"] = freed_s
        figures[f"{phase}_seen"] = float(reached)
        left_count += left
    met = not left_count and all(figures[f"{phase}_s"] <= 1.0 for phase in ("queued", "prefill", "transfer", "decode"))
    return Row(
        name="disconnect",
        promise="everything is freed within 1 s, in each phase",
        met=met and all(value for name, value in figures.items() if name.endswith("_seen")),
        left=left_count,
        left_for_s=max(value for name, value in figures.items() if name.endswith("_s")),
        figures=figures,
    )


async def _leave_in(up: Up, model: Model, phase: str, length: int) -> tuple[float, int, bool]:
    """Streams until one of them is in that phase; then all are given up at once. Seconds until nothing was held, what
    is left, and whether the phase was seen."""
    rng = random.Random(phase)

    async def ask(client: AsyncClient) -> None:
        prompt = [rng.randrange(model.vocab_size) for _ in range(length)]
        await send(client, prompt, (0,) * GONE_TOKENS)

    async def is_there() -> bool:
        found = await up.client.cluster_state()
        return any(stage.stage == phase and stage.requests for stage in found.stages)

    async with AsyncClient(up.address) as client:
        tasks = [asyncio.create_task(ask(client)) for _ in range(NUM_GONE)]
        try:
            await until(is_there, 5.0)
            reached = True
        except TimeoutError:
            reached = False
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    freed_s, left = await up.emptied()
    return freed_s, sum(left.values()), reached


# ---------------------------------------------------------------- bad input


REFUSALS = 200
"""Of each kind: with fewer, the 99th percentile is the slowest one."""


async def bad_input(up: Up, model: Model) -> Row:
    """Everything that can be seen to be wrong before tokenizing."""
    await up.settled()
    measured = await measure(up.address, REFUSALS)
    worst = max(percentile(kind.times_ms, 99) for kind in measured)
    left_for_s, left = await up.emptied()
    return Row(
        name="bad_input",
        promise="refused with the field's name within 10 ms; nothing reserved",
        met=worst <= 10.0 and not left,
        left=sum(left.values()),
        left_for_s=left_for_s,
        figures={
            "kinds": float(len(measured)),
            "p50_ms": max(percentile(kind.times_ms, 50) for kind in measured),
            "p99_ms": worst,
            "p99_of_all_ms": percentile([time_ms for kind in measured for time_ms in kind.times_ms], 99),
        },
    )
