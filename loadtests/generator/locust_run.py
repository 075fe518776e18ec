"""One run of the load generator inside Locust: options -> plan -> dispatcher -> records -> verdict.

The run belongs to the Locust user that plays it (locust_user.py). While it goes on, each request that has ended is
also told to Locust, as three events named TTFT, TPOT and E2E, so that its tables, plots, CSV and HTML show them.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import version

from locust.env import Environment

from disagg.client.types import Targets
from disagg.client.wire import target_metadata
from disagg.loadtests.generator.locust_client import GatewayClient, Metadata
from disagg.loadtests.generator.locust_dispatcher import Dispatcher
from disagg.loadtests.generator.locust_options import Settings
from disagg.loadtests.generator.recorder import GeneratorInfo, Recorder
from disagg.loadtests.records import RequestRecord
from disagg.loadtests.verdict.goodput import Score, Slo, evaluate
from disagg.loadtests.workload.workload import plan

CONNECT_TIMEOUT_S = 10.0
REQUEST_TYPE = "generate"

EXIT_MET = 0
EXIT_MISSED = 1
EXIT_INVALID = 2
"""Also when the run was cut off or never began."""


class LoadRun:
    """One run. Owner of its records.

    Args:
        settings: the options.
        environment: Locust's, which is told about each request.
    """

    def __init__(self, settings: Settings, environment: Environment) -> None:
        self.settings = settings
        self._environment = environment
        self._recorder = Recorder(settings.record)
        self._window_s = 0.0
        self.num_planned = 0
        self.is_over = False
        """All requests have ended, or the run was stopped."""

    @property
    def records(self) -> list[RequestRecord]:
        """Of the requests that have ended so far."""
        return self._recorder.records

    def play(self) -> None:
        """Plan, send, record; returns when the last answer has ended.

        Raises:
            ConnectionError: if there is no gateway.
            ValueError: if the scenario cannot be played on its model.
        """
        settings = self.settings
        client = GatewayClient(settings.target, settings.credentials, settings.num_channels)
        started_at = datetime.now(UTC)
        model = ""
        dispatcher = None
        try:
            served = client.connect(CONNECT_TIMEOUT_S)
            model = served.name
            scenario = settings.scenario
            planned = plan(
                scenario.workload, scenario.arrivals, vocab_size=served.vocab_size, max_model_len=served.max_model_len
            )
            self._window_s, self.num_planned = planned.window_s, len(planned.requests)
            dispatcher = Dispatcher(
                client,
                model,
                planned.requests,
                max_in_flight=settings.max_in_flight,
                timeout_s=settings.request_timeout_s,
                metadata=slo_metadata(settings.slo),
                on_record=self._record,
            )
            dispatcher.run()
        finally:
            client.close()
            if dispatcher is not None:
                self._recorder.finish(self._info(model, started_at, dispatcher.now_s()))
            self.is_over = True

    def _record(self, record: RequestRecord) -> None:
        self._recorder.add(record)
        fire = self._environment.events.request.fire
        error = None if record.status == "ok" else RuntimeError(f"{record.status}: {record.error}")
        for name, value_s in (("TTFT", record.ttft_s), ("TPOT", record.tpot_s)):
            if value_s is not None:
                fire(request_type=REQUEST_TYPE, name=name, response_time=value_s * 1e3, response_length=0)
        end_s = record.sent_s if record.end_s is None else record.end_s
        fire(
            request_type=REQUEST_TYPE,
            name="E2E",
            response_time=(end_s - record.due_s) * 1e3,
            response_length=len(record.token_times_s),
            exception=error,
        )

    @property
    def is_complete(self) -> bool:
        """Whether every planned request has its record."""
        return 0 < self.num_planned == len(self.records)

    def score(self) -> Score | None:
        """The verdict on what has ended so far; None before anything has."""
        return evaluate(self.records, self.settings.slo, self._window_s) if self.records else None

    def exit_status(self) -> int:
        """For a shell: `EXIT_MET`, `EXIT_MISSED` or `EXIT_INVALID`."""
        score = self.score()
        if score is None or not self.is_complete or not score.is_valid:
            return EXIT_INVALID
        return EXIT_MET if score.attainment >= self.settings.min_attainment else EXIT_MISSED

    def _info(self, model: str, started_at: datetime, elapsed_s: float) -> GeneratorInfo:
        settings = self.settings
        return GeneratorInfo(
            target=settings.target,
            model=model,
            label=settings.label,
            window_s=self._window_s,
            num_planned=self.num_planned,
            is_complete=self.is_complete,
            started_at=started_at.isoformat(timespec="seconds"),
            elapsed_s=round(elapsed_s, 3),
            ttft_slo_s=settings.slo.ttft_s,
            tpot_slo_s=settings.slo.tpot_s,
            max_in_flight=settings.max_in_flight,
            request_timeout_s=settings.request_timeout_s,
            cores=sorted(_affinity()),
            niceness=os.getpriority(os.PRIO_PROCESS, 0),
            versions={name: version(name) for name in ("disagg", "grpcio", "locust", "gevent")}
            | {"python": platform.python_version()},
        )


def _affinity() -> set[int]:
    """The cores that this process may use; empty where the system does not say."""
    get_affinity: Callable[[int], set[int]] | None = getattr(os, "sched_getaffinity", None)
    return set() if get_affinity is None else get_affinity(0)


def slo_metadata(slo: Slo) -> Metadata:
    """The limits as the gateway takes them, in milliseconds."""
    ttft_ms, tpot_ms = (None if limit_s is None else limit_s * 1e3 for limit_s in (slo.ttft_s, slo.tpot_s))
    return target_metadata(Targets(ttft_ms=ttft_ms, tpot_ms=tpot_ms))
