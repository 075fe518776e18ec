"""The gateway's own counts, and the metrics of the whole cluster for Prometheus.

    calls answered, per protocol and outcome ──┐
    the router's view: sums over requests,     ├──> families, made on demand ──render──> `/metrics`
      loads and counters of the workers      ──┘

Nothing is counted twice: the router keeps plain numbers, and both the names of our own (`cluster.py`) and those
of vLLM (`vllm.py`) are views of them.
"""

from __future__ import annotations

import asyncio
import time
import typing
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Literal

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from disagg.gateway.event_loop.loop_times import LIMITS_S, LoopTimes
from disagg.gateway.event_loop.shell.offload import Offload
from disagg.gateway.guardrails.shell.guardrails import Guardrails
from disagg.gateway.metrics.cluster import cluster_families
from disagg.gateway.metrics.family_constructors import counter, gauge, of_models
from disagg.gateway.metrics.vllm import vllm_families
from disagg.proto.autoscaling import AutoscalerState
from disagg.proto.errors import DisaggError, InternalError, RequestCancelledError
from disagg.proto.messages import StartPhase
from disagg.router.api import ClusterView

Protocol = Literal["grpc", "http"]


class UsageState(typing.Protocol):
    """The counts of the usage recorder that are shown as metrics."""

    @property
    def num_unwritten(self) -> int:
        """Number of calls that are counted but not in the file yet."""
        ...

    @property
    def writes(self) -> Mapping[str, int]:
        """Number of transactions by outcome, `ok` or `failed`."""
        ...


class GatewayMetrics(Collector):
    """One registry, owned by one gateway; nothing is registered globally.

    Args:
        views: of each served model, by name: its part of the cluster now. The name is the label `model_name` of the
            `vllm:*` aliases; where there are several, it is the label `model` of what is of one model, too. Models
            may come and go.
        vllm_aliases: whether the names of vLLM are there too.
        loop_times: of the gateway's event loop; `None` shows zeros.
        autoscaler: what the controller's decided last; `None` where there is none.
        certificates: when those in use expire, in seconds since the epoch, by name.
        name: of the gateway.
        shows_workers: whether what all gateways know is shown, see `GatewayConfig`.
        start_phases: of the gateway's process; the list may still grow.
    """

    def __init__(
        self,
        views: Mapping[str, Callable[[], ClusterView]],
        *,
        vllm_aliases: bool = True,
        loop_times: LoopTimes | None = None,
        autoscaler: Callable[[], AutoscalerState | None] = lambda: None,
        certificates: Callable[[], Mapping[str, float]] = dict,
        name: str = "gateway",
        shows_workers: bool = True,
        start_phases: Sequence[StartPhase] = (),
    ) -> None:
        self._certificates = certificates
        self._name = name
        self._shows_workers = shows_workers
        self._autoscaler = autoscaler
        self._start_phases = start_phases
        self._loop_times = loop_times or LoopTimes()
        self.offload: Offload | None = None
        """The threads for tokenizing; set when the gateway starts."""
        self.usage: UsageState | None = None
        """The recorder of usage; set by the gateway if it records usage."""
        self.guardrails: Guardrails | None = None
        """The guardrails; set when the gateway starts, None if there are none."""
        self._views = views
        self._vllm_aliases = vllm_aliases
        self._calls: Counter[tuple[Protocol, str]] = Counter()
        self._refusals: Counter[tuple[str, str]] = Counter()
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def count_call(self, protocol: Protocol, outcome: str) -> None:
        """Count a call for an answer that ended with `ok` or the code of an error."""
        self._calls[protocol, outcome] += 1

    def count_refusal(self, protocol: str, reason: str) -> None:
        """Count a call without a known key."""
        self._refusals[protocol, reason] += 1

    @contextmanager
    def counted(self, protocol: Protocol) -> Iterator[None]:
        """Count the work inside as one call, by its outcome."""
        outcome = InternalError.code
        try:
            yield
            outcome = "ok"
        except DisaggError as error:
            outcome = error.code
            raise
        except asyncio.CancelledError:
            outcome = RequestCancelledError.code
            raise
        finally:
            self.count_call(protocol, outcome)

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """The exposition and its content type, as the header `Accept` requests it; plain text if the header is
        invalid."""
        try:
            encode, content_type = choose_encoder(accept)
        except TypeError:  # the library compares a version that is no number with numbers
            encode, content_type = choose_encoder("")
        return encode(self._registry), content_type

    def collect(self) -> Iterator[Metric]:
        """Yield all metric families as of now; called by the registry."""
        yield counter(
            "disagg_calls",
            "Calls for answers, by protocol and outcome (ok, or the code of an error).",
            ("protocol", "outcome"),
            sorted(self._calls.items()),
        )
        yield counter(
            "disagg_refused_authentications",
            "Calls that came without a valid key, by protocol and reason.",
            ("protocol", "reason"),
            sorted(self._refusals.items()),
        )
        yield gauge(
            "disagg_certificate_expires_timestamp_seconds",
            "When a certificate in use expires: that of the gateway for clients, or given for the cluster's processes.",
            ("certificate",),
            [((name,), expires_at) for name, expires_at in sorted(self._certificates().items())],
        )
        yield gauge("disagg_gateway_info", "Which gateway shows these metrics.", ("gateway",), [((self._name,), 1)])
        yield gauge(
            "disagg_gateway_start_seconds",
            "How long each phase of the start of this gateway's process took.",
            ("phase",),
            [((phase.name,), phase.seconds) for phase in self._start_phases],
        )
        yield from loop_families(self._loop_times, self.offload)
        if self.usage is not None:
            yield from usage_families(self.usage)
        if self.guardrails is not None:
            yield from guardrail_families(self.guardrails)
        views = {name: self._shown(view()) for name, view in self._views.items()}
        yield from of_models(
            {name: cluster_families(view, shows_workers=self._shows_workers) for name, view in views.items()}
        )
        if self._shows_workers and (scaling := self._autoscaler()) is not None:
            yield from autoscaler_families(scaling)
        if self._vllm_aliases:
            yield from of_models({name: vllm_families(view, name) for name, view in views.items()}, label="")

    def _shown(self, view: ClusterView) -> ClusterView:
        return view if self._shows_workers else replace(view, counters={})


def guardrail_families(guardrails: Guardrails) -> Iterator[Metric]:
    """Metric families of the decisions of guardrails."""
    yield counter(
        "disagg_guardrail_decisions",
        "Verdicts of guardrails, by what became of it: allow, replace, stop, or failed where there was no verdict.",
        ("guardrail", "subject", "action"),
        sorted(guardrails.counts.items()),
    )
    yield counter(
        "disagg_guardrail_asked_seconds",
        "How long verdicts of services and functions took, in all.",
        ("guardrail",),
        [((name,), seconds) for name, seconds in sorted(guardrails.seconds.items())],
    )
    yield gauge(
        "disagg_guardrail_suspended",
        "Whether a guardrail failed so often that it is not asked for a while.",
        ("guardrail",),
        [((name,), int(is_open)) for name, is_open in sorted(guardrails.open_circuits.items())],
    )


def autoscaler_families(state: AutoscalerState) -> Iterator[Metric]:
    """Metric families of the autoscaler's last decision."""
    decision = state.decision
    yield gauge(
        "disagg_autoscaler_wanted_workers",
        "Workers that the autoscaler wants of each pool.",
        ("pool",),
        [] if decision is None else [((pool.name,), pool.wanted) for pool in decision.pools],
    )
    yield gauge(
        "disagg_autoscaler_demand_tokens_per_second",
        "Tokens per second that arriving requests ask for: of prompts, without cached ones, and of answers.",
        ("phase",),
        []
        if decision is None
        else [(("prefill",), decision.prompt_tokens_per_s), (("decode",), decision.output_tokens_per_s)],
    )
    yield counter(
        "disagg_autoscaler_changes",
        "How often a pool was resized, or would have been in a dry run.",
        ("pool", "direction"),
        [(tuple(name.rsplit(" ", 1)), count) for name, count in sorted(state.changes.items())],
    )


def usage_families(state: UsageState) -> Iterator[Metric]:
    """Metric families of the recorder of usage."""
    yield gauge(
        "disagg_usage_unwritten_calls",
        "Calls that are counted and not yet in the file of usage: more than a few mean that it cannot be written.",
        (),
        [((), state.num_unwritten)],
    )
    yield counter(
        "disagg_usage_writes",
        "Transactions of the file of usage, by outcome: ok, failed.",
        ("outcome",),
        [((outcome,), count) for outcome, count in sorted(state.writes.items())],
    )


def loop_families(times: LoopTimes, offload: Offload | None) -> Iterator[Metric]:
    """Metric families of the gateway's event loop and of its threads for tokenizing."""
    yield gauge(
        "disagg_gateway_loop_longest_seconds",
        "Longest turn of the gateway's event loop above 5 ms: of the last minute or two, and since the start.",
        ("window",),
        [(("minute",), times.recent_longest_s(time.monotonic())), (("start",), times.longest_s)],
    )
    yield counter(
        "disagg_gateway_loop_long_turns",
        "Turns of the gateway's event loop that took longer than so many seconds.",
        ("longer_than",),
        [((f"{limit_s:g}",), count) for limit_s, count in zip(LIMITS_S, times.num_long, strict=True)],
    )
    yield gauge(
        "disagg_gateway_offloaded_bytes",
        "Size of the prompts that are tokenized on threads, or wait for that.",
        (),
        [((), 0 if offload is None else offload.num_bytes)],
    )
    yield gauge(
        "disagg_gateway_offloaded_waiting",
        "Prompts that wait for a thread to tokenize them.",
        (),
        [((), 0 if offload is None else offload.num_waiting)],
    )
