"""The options of the load commands as `Common`, whichever command they were given to."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from disagg.cli import load_commands
from disagg.cli.load import load_app
from disagg.cli.load_commands import Common
from disagg.loadtests.generator.load_generator import GeneratorOptions
from disagg.loadtests.scenario import Overrides

SHARED = (
    *("--scenario", "shared-prefix", "--seed", "7", "--slo-ttft-ms", "300", "--slo-tpot-ms", "20"),
    *("--min-attainment", "0.5", "--html", "a.html", "--json", "a.json"),
    *("--generator-cores", "3", "--generator-nice", "4"),
)
COMMANDS = {
    "run": ("--rate", "2", "--duration", "5", "--request-timeout-s", "9"),
    "sweep": ("--out", "x"),
    "compare": ("1p1d", "--rates", "1", "--out", "x"),
}


def given(monkeypatch: pytest.MonkeyPatch, name: str, *arguments: str) -> Common:
    """What the command would have begun with."""
    seen: list[Common] = []

    def take(options: Common, *_: Any, **_named: Any) -> int:
        seen.append(options)
        return 0

    monkeypatch.setattr(load_commands, name, take)
    done = CliRunner().invoke(load_app, [name, *COMMANDS[name], *arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    (options,) = seen
    return options


@pytest.mark.parametrize(
    ("name", "overrides", "timeout_s"),
    [
        ("run", Overrides(rate_per_s=2.0, duration_s=5.0, num_requests=11, seed=7), 9.0),
        ("sweep", Overrides(num_requests=11, seed=7), None),
        ("compare", Overrides(num_requests=11, seed=7), None),
    ],
)
def test_every_option_arrives(
    monkeypatch: pytest.MonkeyPatch, name: str, overrides: Overrides, timeout_s: float | None
) -> None:
    assert given(monkeypatch, name, *SHARED, "--requests", "11") == Common(
        scenario="shared-prefix",
        overrides=overrides,
        ttft_ms=300.0,
        tpot_ms=20.0,
        min_attainment=0.5,
        generator=GeneratorOptions(cores=(3,), nice=4, request_timeout_s=timeout_s),
        html=Path("a.html"),
        json=Path("a.json"),
    )


@pytest.mark.parametrize(("name", "requests"), [("run", None), ("sweep", 300), ("compare", 300)])
def test_what_is_left_out(monkeypatch: pytest.MonkeyPatch, name: str, requests: int | None) -> None:
    options = given(monkeypatch, name, "--generator-cores", "none")
    assert (options.scenario, options.overrides.num_requests, options.min_attainment) == ("interactive", requests, 0.9)
    assert options.generator.nice == -10


def test_the_generator_shares_no_core_with_a_gateway_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    assert given(monkeypatch, "run", "--address", "10.0.0.5:8470").generator.cores == ()
    assert given(monkeypatch, "sweep", "--address", "10.0.0.5:8470").generator.cores == ()
    assert given(monkeypatch, "sweep", "--address", "10.0.0.5:8470", "--shape", "1p1d").generator.cores != ()


def test_a_sigterm_leaves_by_way_of_the_clean_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The generator and the clusters that were started must end too."""
    ended: list[str] = []

    def take(*_: Any, **_named: Any) -> int:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            return 0
        finally:
            os.kill(os.getpid(), signal.SIGTERM)  # once more: it does not disturb
            ended.append("all")

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(load_commands, "compare", take)
    done = CliRunner().invoke(load_app, ["compare", *COMMANDS["compare"]])
    assert (done.exit_code, ended) == (143, ["all"])
    assert signal.getsignal(signal.SIGTERM) is before
