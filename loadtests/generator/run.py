"""One run of the load generator inside Locust: options -> plan -> open loop -> records -> verdict.

The options are arguments of Locust's command line and fields of its web page. Locust's own `--host` is the gateway. An
option that is left out is an empty string, because the web page has nothing else; `Settings` has the values. An API key
and certificates are no options: they come from the environment, as those of every client do
(`disagg.client.credentials`), so that no command line, page or report shows them.

The run belongs to the Locust user that plays it (locustfile.py). Each request that has ended is also reported to
Locust, as three events named TTFT, TPOT and E2E, so that its tables, plots, CSV and HTML show them.
"""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TypeVar

from locust.argument_parser import LocustArgumentParser
from locust.env import Environment

from disagg.client.credentials import Credentials
from disagg.client.types import Targets
from disagg.client.wire import target_metadata
from disagg.loadtests.generator.gateway_client import GatewayClient, Metadata
from disagg.loadtests.generator.open_loop import OpenLoop
from disagg.loadtests.generator.recorder import GeneratorInfo, Recorder
from disagg.loadtests.records import RequestRecord
from disagg.loadtests.scenario import Overrides, Scenario, load_scenario
from disagg.loadtests.verdict.goodput import DEFAULT_MIN_ATTAINMENT, Score, Slo, evaluate
from disagg.loadtests.workload.workload import plan

T = TypeVar("T")

DEFAULT_HOST = "127.0.0.1:8470"
DEFAULT_SCENARIO = "interactive"

CONNECT_TIMEOUT_S = 10.0
REQUEST_TYPE = "generate"

EXIT_MET = 0
EXIT_MISSED = 1
EXIT_INVALID = 2
"""Exit status of an invalid run, and of one that was cut off or never began."""


# ---------------------------------------------------------------- options


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The options of one run."""

    target: str
    """host:port of the gateway."""
    credentials: Credentials
    """Credentials that can be used at the target."""
    scenario: Scenario
    slo: Slo
    """Limits to meet; also sent with each request, where the router can use them."""
    min_attainment: float
    max_in_flight: int
    request_timeout_s: float | None
    num_channels: int
    record: Path | None
    label: str


PAGE_OPTIONS = {
    "scenario": (DEFAULT_SCENARIO, "File or name of a scenario: workload, arrivals, limits."),
    "rate": ("", "Requests per second (the scenario's own, if unset)."),
    "duration": ("", "Seconds of arrivals (the scenario's own, if unset)."),
    "requests": ("", "Number of requests (the scenario's own, if unset)."),
    "seed": ("", "Seed of prompts and arrivals (the scenario's own, if unset)."),
    "slo_ttft_ms": ("", "Limit of the time to first token, in milliseconds; 'none' for none."),
    "slo_tpot_ms": ("", "Limit of the mean time per further token, in milliseconds; 'none' for none."),
    "min_attainment": (str(DEFAULT_MIN_ATTAINMENT), "Share of requests that must meet both limits."),
    "max_in_flight": ("4096", "Requests that are due beyond this many are dropped."),
    "request_timeout_s": ("", "Deadline of each request, in seconds (none, if unset)."),
}
"""Options that the web page shows and may change: default and help by name. The others exist on the command line
only."""


def add_arguments(parser: LocustArgumentParser) -> None:
    """Declare the options; all but the last few are also on the web page."""
    for name, (default, help_text) in PAGE_OPTIONS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", default=default, help=help_text)
    _add_hidden(parser)


def _add_hidden(parser: LocustArgumentParser) -> None:
    for name, default, help_text in (
        ("--record", "", "Write the records to this .jsonl file."),
        ("--label", "", "What is measured, for the report."),
        ("--channels", "1", "Connections to the gateway."),
        ("--generator-cores", "", "Run the generator on these cores only, such as 0,1."),
        ("--generator-nice", "", "Niceness of the generator; below 0 it runs before others, if that is allowed."),
    ):
        parser.add_argument(name, default=default, help=help_text, include_in_web_ui=False)


def settings_of(options: argparse.Namespace) -> Settings:
    """Convert the options to values.

    Raises:
        ValueError: naming the option, or the variable of the environment.
    """
    target = options.host or DEFAULT_HOST
    credentials = Credentials()
    credentials.channel(target)  # refuses what it cannot be used for
    overrides = Overrides(
        rate_per_s=_number(options, "rate"),
        duration_s=_number(options, "duration"),
        num_requests=_integer(options, "requests"),
        seed=_integer(options, "seed"),
    )
    scenario = load_scenario(options.scenario, overrides)
    min_attainment = _number(options, "min_attainment")
    max_in_flight, num_channels = _integer(options, "max_in_flight"), _integer(options, "channels")
    if min_attainment is None or not 0 < min_attainment <= 1:
        raise ValueError(f"--min-attainment: expected a share in (0, 1]; got {options.min_attainment!r}")
    if max_in_flight is None or max_in_flight < 1:
        raise ValueError(f"--max-in-flight: expected at least 1; got {options.max_in_flight!r}")
    if num_channels is None or num_channels < 1:
        raise ValueError(f"--channels: expected at least 1; got {options.channels!r}")
    return Settings(
        target=target,
        credentials=credentials,
        scenario=scenario,
        slo=Slo(
            ttft_s=_limit(options, "slo_ttft_ms", scenario.slo.ttft_s),
            tpot_s=_limit(options, "slo_tpot_ms", scenario.slo.tpot_s),
        ),
        min_attainment=min_attainment,
        max_in_flight=max_in_flight,
        request_timeout_s=_number(options, "request_timeout_s"),
        num_channels=num_channels,
        record=Path(options.record) if options.record else None,
        label=options.label,
    )


def cores_of(options: argparse.Namespace) -> set[int] | None:
    """The cores to run on; None for all. Raises `ValueError` naming the option."""
    if not options.generator_cores:
        return None
    try:
        return {int(core) for core in options.generator_cores.split(",")}
    except ValueError:
        raise ValueError(f"--generator-cores: expected numbers such as 0,1; got {options.generator_cores!r}") from None


def niceness_of(options: argparse.Namespace) -> int | None:
    """The niceness to run at; None for the present one. Raises `ValueError` naming the option."""
    return _integer(options, "generator_nice")


def _limit(options: argparse.Namespace, name: str, of_scenario_s: float | None) -> float | None:
    """Limit in seconds: the option's, in milliseconds, if given, else the scenario's."""
    if getattr(options, name) == "none":
        return None
    limit_ms = _number(options, name)
    return of_scenario_s if limit_ms is None else limit_ms / 1000


def _number(options: argparse.Namespace, name: str) -> float | None:
    return _parsed(options, name, float)


def _integer(options: argparse.Namespace, name: str) -> int | None:
    return _parsed(options, name, int)


def _parsed(options: argparse.Namespace, name: str, kind: Callable[[str], T]) -> T | None:
    text = str(getattr(options, name)).strip()
    try:
        return kind(text) if text else None
    except ValueError:
        raise ValueError(f"--{name.replace('_', '-')}: expected a number; got {text!r}") from None


# ---------------------------------------------------------------- the run


class LoadRun:
    """One run. Owner of its records.

    Args:
        settings: the options of the run.
        environment: Locust's, to which each request is reported.
    """

    def __init__(self, settings: Settings, environment: Environment) -> None:
        self.settings = settings
        self._environment = environment
        self._recorder = Recorder(settings.record)
        self._window_s = 0.0
        self.num_planned = 0
        self.is_over = False
        """Whether all requests have ended, or the run was stopped."""

    @property
    def records(self) -> list[RequestRecord]:
        """Records of the requests that have ended so far."""
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
        loop = None
        try:
            served = client.connect(CONNECT_TIMEOUT_S)
            model = served.name
            scenario = settings.scenario
            planned = plan(
                scenario.workload, scenario.arrivals, vocab_size=served.vocab_size, max_model_len=served.max_model_len
            )
            self._window_s, self.num_planned = planned.window_s, len(planned.requests)
            loop = OpenLoop(
                client,
                model,
                planned.requests,
                max_in_flight=settings.max_in_flight,
                timeout_s=settings.request_timeout_s,
                metadata=slo_metadata(settings.slo),
                on_record=self._record,
            )
            loop.run()
        finally:
            client.close()
            if loop is not None:
                self._recorder.finish(self._info(model, started_at, loop.now_s()))
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
        """Score of the requests that have ended so far; None before the first has."""
        return evaluate(self.records, self.settings.slo, self._window_s) if self.records else None

    def exit_status(self) -> int:
        """Exit status for a shell: `EXIT_MET`, `EXIT_MISSED` or `EXIT_INVALID`."""
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
    """The cores that this process may use; empty on systems that have no such call."""
    get_affinity: Callable[[int], set[int]] | None = getattr(os, "sched_getaffinity", None)
    return set() if get_affinity is None else get_affinity(0)


def slo_metadata(slo: Slo) -> Metadata:
    """Metadata with the limits as the gateway takes them, in milliseconds."""
    ttft_ms, tpot_ms = (None if limit_s is None else limit_s * 1e3 for limit_s in (slo.ttft_s, slo.tpot_s))
    return target_metadata(Targets(ttft_ms=ttft_ms, tpot_ms=tpot_ms))
