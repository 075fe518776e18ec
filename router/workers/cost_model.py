"""The exposed part of KV transfers, predicted: fitted online, as step times are (`step_times/step_model.py`).

A link that was slow for a while is avoided, so no transfer would show that it has recovered. So a link that has become
much slower, and that no request used for `STALE_S`, is predicted at its best for the next request: its trial. If the
trial is much faster than the fit, all earlier observations count at its pace.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from disagg.proto.ids import WorkerId
from disagg.step_times.least_squares import Moments, solve_two, total
from disagg.step_times.step_model import LEAST_MS, NUM_LEARNED, Outliers, next_fit, ridge

_LINK_UNKNOWNS = 2
_MEGABYTE = 1e6
_LATENCY_MS, _MEGABYTE_MS = 1.0, 0.5
"""Default milliseconds of a transfer: its latency, and the time of each megabyte."""
_LINK_FLOOR_MS = 1.0
"""Least milliseconds by which errors are divided: smaller errors do not matter, however large they are relatively."""
_FLEET_WINDOW, _PAIR_WINDOW = 1024.0, 64.0
STALE_S = 6.0
"""Seconds without a request after which a slow link is tried again."""
STALE_PLACEMENTS = 8
"""Number of placements, on any link or without one, that must also have passed. So few of few requests are trials."""
_SLOW, _SLOW_MS = 2.0, 5.0
"""A link is slow if a transfer of a megabyte takes more than `_SLOW` times as long as at its best, and more than
`_SLOW_MS` milliseconds longer."""
_LEAST_SEEN = 4
"""Number of transfers from which on a fit may be the link's best."""
_PAIR_PRIOR = 4.0
"""Number of transfers that the assumption that a pair is typical counts for."""


class _Link(msgspec.Struct, gc=False):
    """The fit of one pair, or of the whole fleet."""

    recent: Moments
    multiples: tuple[float, ...]
    outliers: Outliers
    num_observed: int = 0
    refit_at: int = 1
    latency_ms: float = 0.0
    byte_ms: float = 0.0
    """Milliseconds of each byte by the latest fit; `latency_ms` is that of a transfer of no bytes."""
    best: tuple[float, float] = (math.inf, math.inf)
    """The least latency and milliseconds of each byte, by the fit with the shortest time of a megabyte."""
    is_slow: bool = False
    """Whether the latest fit is slow, compared with `best`."""
    used_at: float = -math.inf
    """When a request was last placed on the link, or a transfer was observed."""
    used_turn: int = 0
    """Number of placements at that time."""
    is_tried: bool = False
    """Whether a request is a trial of the link."""

    def __post_init__(self) -> None:
        self._take(self.multiples)

    def predict(self, byte_factor: float) -> float:
        """Predicted milliseconds by the latest fit."""
        latency, per_megabyte = self.multiples
        return max(_LINK_FLOOR_MS, _LATENCY_MS * latency + byte_factor * per_megabyte)

    def observe(self, byte_factor: float, exposed_ms: float, size: float) -> None:
        """Observe one transfer; the observation is divided by `size`."""
        predicted = self.predict(byte_factor)
        weight = self.outliers.weight(abs(exposed_ms - predicted) / predicted)
        self.recent.add_two(_LATENCY_MS / size, byte_factor / size, exposed_ms / size, weight)
        self.num_observed += 1

    def fit(self, prior: Moments) -> None:
        """Compute the coefficients again, if that is due."""
        if self.num_observed >= self.refit_at:
            system = total(_LINK_UNKNOWNS, (prior, self.recent))
            self.fitted(solve_two(system.gram, system.moment) or tuple(system.solve()))

    def fitted(self, multiples: tuple[float, ...]) -> None:
        """Set the coefficients until more transfers are observed."""
        self._take(multiples)
        self.refit_at = next_fit(self.num_observed)

    def _take(self, multiples: tuple[float, ...]) -> None:
        self.multiples = multiples
        latency, per_megabyte = multiples
        self.latency_ms, self.byte_ms = latency * _LATENCY_MS, per_megabyte * _MEGABYTE_MS / _MEGABYTE
        if self.num_observed >= _LEAST_SEEN:
            ms, best_ms = self.latency_ms + _MEGABYTE * self.byte_ms, self.best[0] + _MEGABYTE * self.best[1]
            if ms < best_ms:
                self.best, best_ms = (self.latency_ms, self.byte_ms), ms
            self.is_slow = ms > max(_SLOW * best_ms, best_ms + _SLOW_MS)

    def is_stale(self, now: float, turn: int) -> bool:
        """Whether the link is slow by old observations only."""
        return self.is_slow and now >= self.used_at + STALE_S and turn >= self.used_turn + STALE_PLACEMENTS

    def end_trial(self, byte_factor: float, exposed_ms: float) -> None:
        """End the trial with its transfer. If it was much faster than predicted, the earlier ones count as faster by
        the same factor."""
        self.is_tried = False
        factor = max(_LINK_FLOOR_MS, exposed_ms) / self.predict(byte_factor)
        if factor < 1.0 / _SLOW:
            self.recent.stretch(factor)
            first, second = self.multiples
            self.fitted((first * factor, second * factor))


def _new_link(window: float, multiples: tuple[float, ...]) -> _Link:
    return _Link(recent=Moments(_LINK_UNKNOWNS, window), multiples=multiples, outliers=Outliers(usual=1.0))


_NO_LINKS: Mapping[WorkerId, _Link] = {}


class LinkModel:
    """Exposed time of KV transfers, by pair: from `PrefillDone` to `HandedOver`, as the router receives them.

    A latency and a time per byte for each pair of workers. A pair that is new, or rarely used, has those of the whole
    fleet. Holds one small fit for each pair that was used, until `forget`; these may be a hundred thousand, and the
    garbage collector tracks none of them.
    """

    def __init__(self) -> None:
        self._prior = ridge(_LINK_UNKNOWNS, 1.0)
        self._fleet = _new_link(_FLEET_WINDOW, (1.0,) * _LINK_UNKNOWNS)
        self._pairs: dict[WorkerId, dict[WorkerId, _Link]] = {}
        self._num_placed = 0

    def placed(self, prefill_id: WorkerId | None, decode_id: WorkerId, now: float) -> bool:
        """Note that a request was placed on a pair, or without one. Returns whether that is a trial of its link."""
        self._num_placed += 1
        if prefill_id is None:
            return False
        fleet = self._fleet
        link = self._pairs.get(prefill_id, _NO_LINKS).get(decode_id, fleet)
        if not (link.is_slow or fleet.is_slow):
            return False
        is_trial = link.is_stale(now, self._num_placed)
        for each in (fleet, link):
            each.is_tried = each.is_tried or each.is_stale(now, self._num_placed)
        for each in (fleet, link):
            each.used_at, each.used_turn = now, self._num_placed
        return is_trial

    def observe(
        self, prefill_id: WorkerId, decode_id: WorkerId, kv_bytes: int, exposed_ms: float, now: float = 0.0
    ) -> None:
        """Observe one hand-over; one with an impossible time is ignored."""
        if not 0.0 <= exposed_ms < math.inf:
            return
        byte_factor = _byte_factor(kv_bytes)
        links = self._pairs.setdefault(prefill_id, {})
        link = links.get(decode_id)
        if link is None:
            link = links[decode_id] = _new_link(_PAIR_WINDOW, self._fleet.multiples)
        fleet = self._fleet
        fleet.fit(self._prior)
        for each in (fleet, link):
            if each.is_tried:
                each.end_trial(byte_factor, exposed_ms)
            each.used_at, each.used_turn = max(each.used_at, now), self._num_placed
        size = fleet.predict(byte_factor)
        if fleet.num_observed < NUM_LEARNED:
            size = max(size, exposed_ms)
        for fit in (fleet, link):
            fit.observe(byte_factor, exposed_ms, size)

    def exposed_ms(self, prefill_id: WorkerId, decode_id: WorkerId, kv_bytes: int, now: float = -math.inf) -> float:
        """The predicted milliseconds for `kv_bytes` that D does not hold; positive, and more for more bytes. `now`: the
        time of a request that may be a trial of the link."""
        fleet, links = self._fleet, self._pairs.get(prefill_id)
        link = fleet if links is None else links.get(decode_id, fleet)
        if link.num_observed >= link.refit_at:
            if link is fleet:
                link.fit(self._prior)
            else:
                self._fit_pair(link)
        if link.is_slow and link.is_stale(now, self._num_placed + 1):
            latency_ms, byte_ms = link.best
            return max(LEAST_MS, latency_ms + kv_bytes * byte_ms)
        exposed_ms = link.latency_ms + kv_bytes * link.byte_ms
        return exposed_ms if exposed_ms > LEAST_MS else LEAST_MS

    def known_ms(self, prefill_id: WorkerId, decode_id: WorkerId, kv_bytes: int) -> float:
        """Like `exposed_ms`, by the fit of the latest placement. For views: a fit that they made would change later
        ones."""
        link = self._pairs.get(prefill_id, {}).get(decode_id, self._fleet)
        latency, per_megabyte = link.multiples
        return max(LEAST_MS, _LATENCY_MS * latency + _byte_factor(kv_bytes) * per_megabyte)

    def typical(self) -> tuple[float, float]:
        """The latency in seconds, and the seconds of each byte, of all pairs together, by the latest fit."""
        latency, per_megabyte = self._fleet.multiples
        return max(0.0, latency * _LATENCY_MS / 1e3), max(0.0, per_megabyte * _MEGABYTE_MS / _MEGABYTE / 1e3)

    def forget(self, worker_id: WorkerId) -> None:
        """Drop a worker that is lost, with its pairs."""
        self._pairs.pop(worker_id, None)
        for links in self._pairs.values():
            links.pop(worker_id, None)

    def _fit_pair(self, link: _Link) -> None:
        """Fit a pair with the fleet's typical times as its prior. The sums are written out, in the order of `Moments`:
        with a hundred workers there is a pair to fit at every placement."""
        fleet, recent = self._fleet.recent, link.recent
        a, b, c = self._prior.gram
        seen = fleet.weight * fleet.scale
        if seen > 0.0:
            x, y, z = fleet.gram
            factor = _PAIR_PRIOR / max(seen, _PAIR_PRIOR) * fleet.scale
            a, b, c = a + factor * x, b + factor * y, c + factor * z
        latency, per_megabyte = self._fleet.multiples
        p, q = a * latency + b * per_megabyte, b * latency + c * per_megabyte
        (x, y, z), (u, v), scale = recent.gram, recent.moment, recent.scale
        gram, moment = (a + scale * x, b + scale * y, c + scale * z), (p + scale * u, q + scale * v)
        solution = solve_two(gram, moment)
        if solution is None:
            link.fit(self._typical())
        else:
            link.fitted(solution)

    def _typical(self) -> Moments:
        """A prior of the weight of `_PAIR_PRIOR` transfers of the fleet, with the times of the fleet's fit."""
        fleet = self._fleet
        typical = total(_LINK_UNKNOWNS, (self._prior,))
        seen = fleet.recent.weight * fleet.recent.scale
        if seen > 0.0:
            typical.include(fleet.recent, _PAIR_PRIOR / max(seen, _PAIR_PRIOR))
        typical.expect(fleet.multiples)
        return typical


def _byte_factor(kv_bytes: int) -> float:
    """The factor of the multiple of `_MEGABYTE_MS`. That of the multiple of `_LATENCY_MS` is `_LATENCY_MS` itself."""
    return max(0, kv_bytes) / _MEGABYTE * _MEGABYTE_MS
