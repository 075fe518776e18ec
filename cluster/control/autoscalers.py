"""The autoscalers of a cluster: one for each model, which sees only the state of its model, as if it were alone.

LoadReport(model) ──> the runner of that model resize {"decode": 3} ──> {"qwen/decode": 3} ControlState ──> its pools
and workers, by kind AutoscalerState of each ──> one of all
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import msgspec

from disagg.cluster.config.cluster_config import ClusterConfig, models_of
from disagg.cluster.control.autoscaler_runner import AutoscalerRunner, Resize
from disagg.proto.autoscaling import AutoscalerState, Decision, LoadReport
from disagg.proto.control import ControlState
from disagg.proto.ids import GatewayId, WorkerId, join_name, kind_of, model_of


class Autoscalers:
    """Owner of the runners. Arguments as for `AutoscalerRunner`, for the whole cluster."""

    def __init__(
        self,
        config: ClusterConfig,
        state: Callable[[], ControlState],
        resize: Resize,
        decided: Callable[[AutoscalerState], None],
        clock: Callable[[], float],
    ) -> None:
        self._decided = decided
        self._runners = {
            key: AutoscalerRunner(
                alone,
                lambda key=key: of_model(state(), key),  # type: ignore[misc]  # a default binds the key of this turn
                _resizing(resize, key),
                self._on_decision,
                clock,
                key,
            )
            for key, alone in models_of(config).items()
        }

    def report(self, gateway_id: GatewayId, report: LoadReport) -> None:
        """Take a gateway's report about one model, which replaces its earlier one."""
        if (runner := self._runners.get(report.model)) is not None:
            runner.report(gateway_id, of_kinds(report))

    def forget(self, gateway_id: GatewayId) -> None:
        """Drop the reports of a gateway that has left."""
        for runner in self._runners.values():
            runner.forget(gateway_id)

    def observe(self, state: ControlState) -> None:
        """Pass the new state to the runner of each model; called after each change of the controller's state."""
        for key, runner in self._runners.items():
            runner.observe(of_model(state, key))

    def snapshot(self) -> AutoscalerState:
        """The states of all models' autoscalers in one, for operators."""
        return together({key: runner.snapshot() for key, runner in self._runners.items()})

    async def run(self) -> None:
        """Decide periodically, until it is cancelled."""
        await asyncio.gather(*(runner.run() for runner in self._runners.values()))

    def _on_decision(self, state: AutoscalerState) -> None:
        self._decided(self.snapshot())


def _resizing(resize: Resize, key: str) -> Resize:
    async def resize_model(sizes: dict[str, int]) -> None:
        await resize({join_name(key, kind): size for kind, size in sizes.items()})

    return resize_model


def of_model(state: ControlState, key: str) -> ControlState:
    """The state as if there were only that model: pools by their kind."""
    if not key:
        return state
    return msgspec.structs.replace(
        state,
        pools=tuple(
            msgspec.structs.replace(pool, name=kind_of(pool.name)) for pool in state.pools if model_of(pool.name) == key
        ),
        workers=tuple(
            msgspec.structs.replace(worker, pool=kind_of(worker.pool))
            for worker in state.workers
            if model_of(worker.pool) == key
        ),
    )


def of_kinds(report: LoadReport) -> LoadReport:
    """The report as if there were only its model: workers by kind and index, because policies take their pool from
    that."""
    if not report.model:
        return report
    workers = (
        msgspec.structs.replace(sample, worker_id=WorkerId(kind_of(sample.worker_id))) for sample in report.workers
    )
    return msgspec.structs.replace(report, workers=tuple(workers))


def together(states: Mapping[str, AutoscalerState]) -> AutoscalerState:
    """Combine the states of all models, by key, in one: demands are added, pools have their names in the cluster."""
    decisions = {key: state.decision for key, state in states.items() if state.decision is not None}
    first = next(iter(states.values()))
    if list(states) == [""]:
        return first
    total = Decision(
        pools=tuple(
            msgspec.structs.replace(pool, name=join_name(key, pool.name))
            for key, decision in decisions.items()
            for pool in decision.pools
        ),
        prompt_tokens_per_s=sum(decision.prompt_tokens_per_s for decision in decisions.values()),
        output_tokens_per_s=sum(decision.output_tokens_per_s for decision in decisions.values()),
        requests_per_s=sum(decision.requests_per_s for decision in decisions.values()),
        forecast_per_s=sum(decision.forecast_per_s for decision in decisions.values()),
    )
    return AutoscalerState(
        policy=first.policy,
        dry_run=first.dry_run,
        decision=total if decisions else None,
        age_s=max(state.age_s for state in states.values()),
        changes={join_name(key, name): count for key, state in states.items() for name, count in state.changes.items()},
    )
