"""The options of a load test inside Locust: arguments of its command line, fields of its web page.

Locust's own `--host` is the gateway. An option that is left out is an empty string, because the web page knows nothing
else; `Settings` has the values. An API key and certificates are no options: they come from the environment, as those of
every client do (`disagg.client.credentials`), so that no command line, page or report shows them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from locust.argument_parser import LocustArgumentParser

from disagg.client.credentials import Credentials
from disagg.loadtests.scenario import Overrides, Scenario, load_scenario
from disagg.loadtests.verdict.goodput import DEFAULT_MIN_ATTAINMENT, Slo

T = TypeVar("T")

DEFAULT_HOST = "127.0.0.1:8470"
DEFAULT_SCENARIO = "interactive"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The options of one run."""

    target: str
    """host:port of the gateway."""
    credentials: Credentials
    """That can be used there."""
    scenario: Scenario
    slo: Slo
    """To be met; also sent with each request, where the router can use it."""
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
"""Options that the web page shows and may change: default and help by name. The others are the command line's alone."""


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
    """The options as values.

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
    """The niceness to run at; None for as it is. Raises `ValueError` naming the option."""
    return _integer(options, "generator_nice")


def _limit(options: argparse.Namespace, name: str, of_scenario_s: float | None) -> float | None:
    """A limit in seconds: the option's, in milliseconds, before the scenario's."""
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
