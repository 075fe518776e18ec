"""What a real prefill worker holds for its peers does not grow with their number."""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path

from disagg.engine.config import TransferLimits, WorkerConfig
from disagg.engine.fake_runner import fake_generate
from disagg.proto.messages import RoleName, WorkerInfo
from tests.support.workers import GatewayStub, running_workers, wait_until_workers_idle

WAIT_S = 60.0
NUM_DECODES = 5
MAX_PAIRS = 2
PROMPT = [1, 2, 3, 4, 5, 6, 7, 8]


def config(worker_id: str, role: RoleName) -> WorkerConfig:
    return WorkerConfig(
        worker_id=worker_id,
        roles=(role,),
        model_path="fake",
        num_blocks=64,
        max_model_len=256,
        transfer=TransferLimits(max_pairs=MAX_PAIRS),
        transport="gloo",
    )


def num_sockets(pid: int) -> int:
    number = 0
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            number += str(link.readlink()).startswith("socket:")
    return number


def num_threads(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/task").iterdir()))


async def until_at_most(worker: WorkerInfo, most: tuple[int, int]) -> None:
    """Until the worker has at most so many sockets and threads."""
    deadline = time.monotonic() + WAIT_S
    while True:
        found = num_sockets(worker.pid), num_threads(worker.pid)
        if found[0] <= most[0] and found[1] <= most[1]:
            return
        assert time.monotonic() < deadline, f"{found} sockets and threads, at most {most}"
        await asyncio.sleep(0.05)


async def test_sockets_and_threads_do_not_grow_with_the_number_of_peers() -> None:
    names = [f"decode-{number}" for number in range(NUM_DECODES)]
    workers = running_workers(config("prefill-0", "prefill"), *(config(name, "decode") for name in names))
    with workers as (prefill, *decodes):
        gateway = GatewayStub()
        try:
            for info in (prefill, *decodes):
                await gateway.connect(info)

            async def answer(name: str) -> None:
                _, answer = gateway.submit(PROMPT, worker="prefill-0", to=name, max_tokens=4)
                async with asyncio.timeout(WAIT_S):
                    await answer.ended.wait()
                assert answer.token_ids == fake_generate(PROMPT, 4)

            for name in names[:MAX_PAIRS]:
                await answer(name)
            # gRPC starts a thread where those it has are late: one for each further peer would be one more than this.
            most = num_sockets(prefill.pid), num_threads(prefill.pid) + NUM_DECODES - MAX_PAIRS - 1
            for name in [*names[MAX_PAIRS:], *names]:
                await answer(name)
            await until_at_most(prefill, most)
            await wait_until_workers_idle((prefill, *decodes))
        finally:
            await gateway.close()
