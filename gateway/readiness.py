"""Whether a gateway should get new requests, and the answers that still run while it drains.

    starting ──> ready <──> without a worker that decodes
                   └────────────┴── begin_drain ──> draining: new requests are refused, running ones end

Alive is another question: a gateway is alive as long as it answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

from disagg.proto.errors import UnavailableError
from disagg.router.api import ClusterView

State = Literal["ready", "no decode worker", "draining"]

STOPPING = "gateway_stopping"
"""The code of what a gateway that stops refuses or cuts off."""


class Readiness:
    """Of one gateway. Owner of the count of running answers; used on its event loop only.

    Args:
        view: the cluster now.
        waits_for_workers: whether a gateway without a worker that decodes is not ready. False where an autoscaler may
            have emptied the pools: it starts workers for requests that came, so they must reach the gateway.
    """

    def __init__(self, view: Callable[[], ClusterView], *, waits_for_workers: bool = True) -> None:
        self._view = view
        self._waits_for_workers = waits_for_workers
        self._num_running = 0
        self._all_ended = asyncio.Event()
        self._all_ended.set()
        self.is_draining = False

    @property
    def num_decode_workers(self) -> int:
        """Workers that the router can use to decode."""
        return sum("decode" in worker.info.roles for worker in self._view().workers)

    @property
    def tiers_off(self) -> dict[str, str]:
        """Tiers of KV that workers do not use or do not write to, as `worker tier`, and why. Nothing that a request
        needs."""
        view = self._view()
        present = {worker.info.worker_id for worker in view.workers}
        return {
            f"{worker_id} {tier.name}": tier.off_reason
            for worker_id, metrics in view.counters.items()
            for tier in metrics.tiers
            if tier.off_reason and worker_id in present
        }

    @property
    def state(self) -> State:
        """As the probes show it."""
        if self.is_draining:
            return "draining"
        return "no decode worker" if self._waits_for_workers and not self.num_decode_workers else "ready"

    @contextmanager
    def answering(self) -> Iterator[None]:
        """What is inside answers a prompt; a drain waits for it. Raises `UnavailableError` once one has begun."""
        if self.is_draining:
            raise UnavailableError("the gateway stops and takes no new requests", STOPPING)
        self._num_running += 1
        self._all_ended.clear()
        try:
            yield
        finally:
            self._num_running -= 1
            if not self._num_running:
                self._all_ended.set()

    def begin_drain(self) -> int:
        """Refuse new requests from now on; the number of answers that still run. Idempotent."""
        self.is_draining = True
        return self._num_running

    async def wait_ended(self, timeout_s: float) -> int:
        """Until no answer runs, at most that long; the number of those that still do."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._all_ended.wait()
        except TimeoutError:
            pass
        return self._num_running
