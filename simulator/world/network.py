"""The links that KV travels over: each worker has one out and one in, and the transfers on a link share it evenly.

A transfer's rate is the smaller of its two shares, so a worker that sends to two others sends to each at half its
rate, and what one of them cannot take is not given to the other (max-min fairness would). The last byte arrives a
latency after it was sent.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from disagg.simulator.world.clock import EventLoop
from disagg.step_times.interface import LinkTimes


@dataclass(slots=True, eq=False)
class _Transfer:
    source: Hashable
    target: Hashable
    bytes_left: float
    done: Callable[[], None]
    rate: float = 0.0
    as_of: float = 0.0
    """When `bytes_left` was computed."""
    version: int = 0
    """Version of the planned end; a plan with an older one is void."""


class Network:
    """All transfers under way. Owner: the simulated cluster."""

    def __init__(self, loop: EventLoop, link: LinkTimes) -> None:
        if not (link.bandwidth_bytes_per_s > 0 and link.latency_s >= 0):
            raise ValueError(f"link: expected a bandwidth above 0 and a latency of at least 0; got {link}")
        self._loop = loop
        self._link = link
        self._out: defaultdict[Hashable, dict[_Transfer, None]] = defaultdict(dict)
        self._in: defaultdict[Hashable, dict[_Transfer, None]] = defaultdict(dict)
        self._factors: dict[Hashable, float] = {}
        """The slowdown of a worker's transfers, where there is one."""
        self.bytes_sent = 0
        self.num_transfers = 0

    def send(self, source: Hashable, target: Hashable, num_bytes: int, done: Callable[[], None]) -> None:
        """Begin a transfer; `done` is called when its last byte has arrived."""
        self.bytes_sent += num_bytes
        self.num_transfers += 1
        transfer = _Transfer(source, target, float(num_bytes), done, as_of=self._loop.now)
        self._out[source][transfer] = None
        self._in[target][transfer] = None
        self._share(source, target)

    def slow_down(self, worker: Hashable, factor: float) -> None:
        """Transfers from a worker and to it take `factor` times as long from now on."""
        self._factors[worker] = factor
        for transfer in [*self._out[worker], *self._in[worker]]:
            self._share(transfer.source, transfer.target)

    def drop(self, worker: Hashable) -> None:
        """End all transfers from and to a worker that is gone. Their callbacks are not called."""
        for transfer in [*self._out.pop(worker, {}), *self._in.pop(worker, {})]:
            transfer.version += 1
            self._out[transfer.source].pop(transfer, None)
            self._in[transfer.target].pop(transfer, None)
            self._share(transfer.source, transfer.target)

    @property
    def num_under_way(self) -> int:
        """Number of transfers that have bytes to send."""
        return sum(map(len, self._out.values()))

    def _share(self, source: Hashable, target: Hashable) -> None:
        """Compute the rates of the transfers on these two links again, after their number or slowdown has changed."""
        now, bandwidth = self._loop.now, self._link.bandwidth_bytes_per_s
        for transfer in {**self._out[source], **self._in[target]}:
            rate = bandwidth / max(len(self._out[transfer.source]), len(self._in[transfer.target]))
            rate /= self._factor(transfer)
            if rate == transfer.rate:
                continue
            transfer.bytes_left -= transfer.rate * (now - transfer.as_of)
            transfer.rate, transfer.as_of = rate, now
            transfer.version += 1
            self._loop.after(max(0.0, transfer.bytes_left / rate), self._sent, transfer, transfer.version)

    def _sent(self, transfer: _Transfer, version: int) -> None:
        if version != transfer.version:
            return
        del self._out[transfer.source][transfer]
        del self._in[transfer.target][transfer]
        self._loop.after(self._link.latency_s * self._factor(transfer), transfer.done)
        self._share(transfer.source, transfer.target)

    def _factor(self, transfer: _Transfer) -> float:
        return max(self._factors.get(transfer.source, 1.0), self._factors.get(transfer.target, 1.0))
