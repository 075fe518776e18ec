"""The routers of all models of a gateway together, as operators see them: one cluster."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, islice

from typing_extensions import override

from disagg.proto.ids import RequestId, WorkerId
from disagg.router.api import BackgroundView, ClusterView, RequestTrace, Router, RouterViews, TenantLimits
from disagg.router.config import Decodes
from disagg.router.statistics import Rates


class AllRouters(RouterViews):
    """The views of all routers as one; there is at least one router. With a single router they are that router's own.

    Args:
        routers: by key of the model; may change.
        names: of the models by key, now.
    """

    def __init__(self, routers: Mapping[str, Router], names: Callable[[], Mapping[str, str]] = dict) -> None:
        self._by_key = routers
        self._names = names

    @property
    def _routers(self) -> list[Router]:
        return list(self._by_key.values())

    @override
    def view(self) -> ClusterView:
        return together([router.view() for router in self._routers])

    @override
    def trace(self, request_id: RequestId) -> RequestTrace | None:
        for key, router in self._by_key.items():
            if (found := router.trace(request_id)) is not None:
                return self._named(key, [found])[0]
        return None

    @override
    def recent(self, limit: int) -> list[RequestTrace]:
        traces = [self._named(key, router.recent(limit)) for key, router in self._by_key.items()]
        if len(traces) == 1:
            return traces[0]
        return list(islice(heapq.merge(*traces, key=lambda trace: -trace.arrival), limit))

    @override
    def set_decodes(self, decodes: Decodes) -> None:
        for router in self._routers:
            router.set_decodes(decodes)

    @override
    def forget(self, tenant: str) -> dict[WorkerId, bool]:
        return {worker_id: told for router in self._routers for worker_id, told in router.forget(tenant).items()}

    def set_limits(self, limits: Mapping[str, TenantLimits]) -> None:
        """Set the limits of tenants at every model's router."""
        for router in self._routers:
            router.set_limits(limits)

    def _named(self, key: str, traces: list[RequestTrace]) -> list[RequestTrace]:
        """The traces of the model with this key, with its name, or that of the adapter."""
        name = self._names().get(key, key)
        for trace in traces:
            trace.model = trace.adapter or name
        return traces


def together(views: Sequence[ClusterView]) -> ClusterView:
    """One view of all workers and requests. Sums over ended requests (`stats`) and settings of placement are not in it:
    each model has its own."""
    if len(views) == 1:
        return views[0]
    return ClusterView(
        workers=tuple(worker for view in views for worker in view.workers),
        num_queued=sum(view.num_queued for view in views),
        num_running=sum(view.num_running for view in views),
        background=BackgroundView(*map(sum, zip(*(view.background for view in views), strict=True))),
        unreachable=tuple(info for view in views for info in view.unreachable),
        stages=_added(view.stages for view in views),
        rates=Rates(
            sum(view.rates.requests_per_s for view in views), sum(view.rates.output_tokens_per_s for view in views)
        ),
        slos=_pairs(view.slos for view in views),
        exported_traces=_added(view.exported_traces for view in views),
        counters={name: metrics for view in views for name, metrics in view.counters.items()},
        restarts={name: count for view in views for name, count in view.restarts.items()},
        events=_added(view.events for view in views),
        tenants=_pairs(view.tenants for view in views),
        notes=tuple(note for view in views for note in view.notes),
    )


def _added(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Sums by name, in the order of the first occurrence; zeros stay."""
    total: Counter[str] = Counter()
    for each in counts:
        total.update(each)
    return dict(total)


def _pairs(counts: Iterable[Mapping[str, tuple[int, int]]]) -> dict[str, tuple[int, int]]:
    """Sums of pairs by name, both numbers separately."""
    found: dict[str, tuple[int, int]] = {}
    for name, (first, second) in chain.from_iterable(each.items() for each in counts):
        before = found.get(name, (0, 0))
        found[name] = (before[0] + first, before[1] + second)
    return found
