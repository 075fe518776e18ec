"""A placement for operators: the option that was chosen, and all that were compared.

A placement keeps the weights in one flat tuple, and the options are put together from it on demand: as many placements
are kept as traces. The garbage collector stops tracking such a tuple at its first pass, because nothing in it is
tracked. The predicted time of a link is kept only for the option that was chosen; for the others it is the present one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

import msgspec

from disagg.router.api import Decision, Option, Way
from disagg.router.placement.placement import Candidate, Choice, Demand, Policy, Weight

MAX_OPTIONS = 16
_SIDE_FIELDS = 2
"""Number of entries of one side: the weight and the candidate."""


class _Kept(NamedTuple):
    """The weight and the candidate of one side."""

    weight: Weight
    candidate: Candidate


class Placed(msgspec.Struct, frozen=True, gc=False):
    """One placement. Implements `api.Placement`."""

    policy: Policy
    demand: Demand
    choice: Choice

    @property
    def ttft_ms(self) -> float | None:
        """Predicted milliseconds from the placement to the first token; None if the policy predicts no times."""
        first = self.choice.prefill_weight or self.choice.decode_weight
        return first.wait_ms + first.prefill_ms if self.choice.decode_weight.step_ms > 0 else None

    @property
    def tpot_ms(self) -> float | None:
        """Predicted milliseconds per output token; None if the policy predicts no times."""
        step_ms = self.choice.decode_weight.step_ms
        return step_ms if step_ms > 0 else None

    @property
    def transfer_ms(self) -> float:
        """Predicted exposed time of the transfer, in milliseconds."""
        return self.choice.link_ms

    def decision(self) -> Decision:
        """The option that was chosen."""
        parts = next(parts for parts, taken in self._all() if taken)
        return Decision(policy=self.policy.name, num_options=self.choice.num_options, **parts)

    def options(self) -> list[Option]:
        """All options, the fewest missed targets first, then the least cost; at most `MAX_OPTIONS`."""
        options = [Option(**parts) for parts, _ in self._all()]
        options.sort(key=lambda option: (option.num_misses, option.cost))
        return options[:MAX_OPTIONS]

    def ways(self) -> list[Way]:
        """How the worker that computes the prompt could get what it has not cached: computing it, loads, fetches."""
        candidate = self.choice.prefill or self.choice.decode
        chosen = candidate.ways[0] if candidate.fetch is None and candidate.ways else candidate.fetch
        return [
            Way(way.kind, way.source, way.tokens, way.ms, way.prefill_ms, way.delay_ms, way is chosen)
            for way in candidate.ways
        ]

    def _all(self) -> Iterator[tuple[dict[str, Any], bool]]:
        """The fields of every option, and whether it was chosen."""
        position, flat = 0, self.choice.weighed
        taken_prefill = None if self.choice.prefill is None else self.choice.prefill.worker
        taken_decode = self.choice.decode.worker
        while position < len(flat):
            counts = flat[position : position + 3]
            prefills, decodes, colocated = _unpack(flat, position + 3, counts)
            position += 3 + sum(counts) * _SIDE_FIELDS
            for prefill, decode in product(prefills, decodes):
                if prefill.candidate.worker is decode.candidate.worker:
                    continue  # An elastic worker: alone, below.
                taken = prefill.candidate.worker is taken_prefill and decode.candidate.worker is taken_decode
                if taken:
                    link_ms, setup_ms = self.choice.link_ms, self.choice.setup_ms
                else:
                    link_ms, setup_ms = self._pair_ms(prefill, decode)
                yield _parts(prefill, decode, link_ms, setup_ms), taken
            for side in colocated:
                yield _parts(None, side, 0.0, 0.0), taken_prefill is None and side.candidate.worker is taken_decode

    def _pair_ms(self, prefill: _Kept, decode: _Kept) -> tuple[float, float]:
        """The present costs of the link and of forming the pair."""
        return self.policy.known_pair(self.demand, prefill.candidate, decode.candidate)


def _unpack(flat: Sequence[Any], position: int, counts: Sequence[int]) -> list[list[_Kept]]:
    found: list[list[_Kept]] = []
    for count in counts:
        end = position + count * _SIDE_FIELDS
        found.append([_Kept(*flat[i : i + _SIDE_FIELDS]) for i in range(position, end, _SIDE_FIELDS)])
        position = end
    return found


def _parts(prefill: _Kept | None, decode: _Kept, link_ms: float, setup_ms: float) -> dict[str, Any]:
    """The fields of an `Option`. `prefill` is None if `decode` is the weight of a colocated worker."""
    weight = decode.weight
    first = weight if prefill is None else prefill.weight
    other = Weight(0.0) if prefill is None else prefill.weight
    has_times = weight.step_ms > 0
    return {
        "prefill_worker": None if prefill is None else prefill.candidate.worker.worker_id,
        "decode_worker": decode.candidate.worker.worker_id,
        "num_misses": weight.num_misses + other.num_misses,
        "ttft_ms": first.wait_ms + first.prefill_ms if has_times else None,
        "tpot_ms": weight.step_ms if has_times else None,
        "cost": other.cost + weight.cost + link_ms + setup_ms,
        "wait_ms": first.wait_ms,
        "prefill_ms": first.prefill_ms,
        "transfer_ms": link_ms,
        "decode_ms": weight.decode_ms,
        "delay_ms": weight.delay_ms + other.delay_ms,
        "barrier_ms": weight.barrier_ms + other.barrier_ms,
        "adapter_ms": weight.adapter_ms + other.adapter_ms,
    }
