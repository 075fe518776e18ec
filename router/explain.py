"""A placement in words that an operator can read: the option that was taken, and what it was among.

A placement keeps what it weighed in one flat tuple, and the options are put together from that when somebody asks: as
many of them are kept as requests are remembered, and every object more would cost each run of the garbage collector.
What a link was thought to add is kept for the option that was taken only: for the others it is what the router thinks
when it is asked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

from disagg.router.api import Decision, Option
from disagg.router.placement import Candidate, Choice, Demand, Policy, Weight
from disagg.router.worker import Worker

MAX_OPTIONS = 16
_WEIGHT_FIELDS = len(Weight._fields)
_SIDE_FIELDS = 2 + _WEIGHT_FIELDS
"""The worker, what it had cached, the weight."""


class _Kept(NamedTuple):
    """One side, unpacked."""

    worker: Worker
    cached_tokens: int
    weight: Weight


class Placed:
    """Implements `api.Placement`. Made once for each placement."""

    __slots__ = (
        "_decode",
        "_demand",
        "_flat",
        "_num_options",
        "_policy",
        "_prefill",
        "tpot_ms",
        "transfer_ms",
        "ttft_ms",
    )

    def __init__(self, policy: Policy, demand: Demand, choice: Choice) -> None:
        decode = choice.decode_weight
        first = choice.prefill_weight or decode
        knows_times = decode.step_ms > 0
        self.ttft_ms = first.wait_ms + first.prefill_ms if knows_times else None
        self.tpot_ms = decode.step_ms if knows_times else None
        self.transfer_ms = choice.link_ms
        self._policy = policy
        self._demand = demand
        self._num_options = choice.num_options
        self._prefill = None if choice.prefill is None else choice.prefill.worker
        self._decode = choice.decode.worker
        flat: list[Any] = []
        for prefills, decodes, alone in choice.weighed:
            flat += (len(prefills), len(decodes), len(alone))
            for sides in (prefills, decodes, alone):
                for side in sides:
                    candidate = side[5]
                    flat += (candidate.worker, candidate.cached_tokens)
                    flat += side[4]
        self._flat = tuple(flat)

    def decision(self) -> Decision:
        """What was taken."""
        parts = next(parts for parts, taken in self._all() if taken)
        return Decision(policy=self._policy.name, num_options=self._num_options, **parts)

    def options(self) -> list[Option]:
        """What it was among: the fewest missed targets first, then the least cost; at most `MAX_OPTIONS`."""
        options = [Option(**parts) for parts, _ in self._all()]
        options.sort(key=lambda option: (option.num_misses, option.cost))
        return options[:MAX_OPTIONS]

    def _all(self) -> Iterator[tuple[dict[str, Any], bool]]:
        """The fields of every option, and whether it was taken."""
        position, flat = 0, self._flat
        while position < len(flat):
            counts = flat[position : position + 3]
            prefills, decodes, alone = _unpack(flat, position + 3, counts)
            position += 3 + sum(counts) * _SIDE_FIELDS
            for prefill, decode in product(prefills, decodes):
                taken = prefill.worker is self._prefill and decode.worker is self._decode
                link_ms = self.transfer_ms if taken else self._link_ms(prefill, decode)
                yield _parts(prefill, decode, link_ms), taken
            for side in alone:
                yield _parts(None, side, 0.0), self._prefill is None and side.worker is self._decode

    def _link_ms(self, prefill: _Kept, decode: _Kept) -> float:
        sides = (Candidate(side.worker, side.cached_tokens) for side in (prefill, decode))
        return self._policy.weigh_link(self._demand, *sides)


def _unpack(flat: Sequence[Any], position: int, counts: Sequence[int]) -> list[list[_Kept]]:
    found: list[list[_Kept]] = []
    for count in counts:
        ends = range(position, position + count * _SIDE_FIELDS, _SIDE_FIELDS)
        found.append([_Kept(flat[i], flat[i + 1], Weight(*flat[i + 2 : i + _SIDE_FIELDS])) for i in ends])
        position += count * _SIDE_FIELDS
    return found


def _parts(prefill: _Kept | None, decode: _Kept, link_ms: float) -> dict[str, Any]:
    """The fields of an `Option`. `prefill` is None where `decode` weighs all of it."""
    weight = decode.weight
    first = weight if prefill is None else prefill.weight
    other = Weight(0.0) if prefill is None else prefill.weight
    knows_times = weight.step_ms > 0
    return {
        "prefill_worker": None if prefill is None else prefill.worker.worker_id,
        "decode_worker": decode.worker.worker_id,
        "num_misses": weight.num_misses + other.num_misses,
        "ttft_ms": first.wait_ms + first.prefill_ms if knows_times else None,
        "tpot_ms": weight.step_ms if knows_times else None,
        "cost": other.cost + weight.cost + link_ms,
        "wait_ms": first.wait_ms,
        "prefill_ms": first.prefill_ms,
        "transfer_ms": link_ms,
        "decode_ms": weight.decode_ms,
        "delay_ms": weight.delay_ms + other.delay_ms,
        "barrier_ms": weight.barrier_ms + other.barrier_ms,
    }
