"""What load commands read from text, how they start Locust, and how a sweep goes."""

from __future__ import annotations

import importlib.util
import io
from pathlib import Path

import pytest
from rich.console import Console

from disagg.cli import load_commands as commands
from disagg.cluster.system.cores import available_cores
from disagg.loadtests.campaign.shapes import numbers_of
from disagg.loadtests.campaign.sweep import sweep
from disagg.loadtests.generator.load_generator import (
    GeneratorOptions,
    check_credentials,
    locust_command,
    locust_environment,
    slo_arguments,
)
from disagg.loadtests.records import RequestRecord
from disagg.loadtests.verdict.goodput import Slo
from disagg.loadtests.verdict.recordings import Point, Recording, RunInfo
from disagg.loadtests.verdict.search import SearchConfig
from disagg.loadtests.workload.arrivals import ArrivalConfig
from disagg.loadtests.workload.workload import RandomWorkload
from disagg.proto.errors import ConfigError


def test_limits_are_in_milliseconds() -> None:
    assert commands.slos_of(["4000:12", "-:8", "100:-"]) == [
        Slo(ttft_s=4.0, tpot_s=0.012),
        Slo(tpot_s=0.008),
        Slo(ttft_s=0.1),
    ]
    assert slo_arguments(Slo(ttft_s=4.0)) == ["--slo-ttft-ms=4000", "--slo-tpot-ms=none"]


@pytest.mark.parametrize("text", ["", "4000", "a:b", "1:2:3", "0:5", "-1:5"])
def test_limits_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match="--slo"):
        commands.slos_of([text])


def test_rates() -> None:
    assert numbers_of("0.5,1", "--rates") == [0.5, 1.0]
    for text in ("", "1,", "0", "1,-2"):
        with pytest.raises(ConfigError, match="--rates"):
            numbers_of(text, "--rates")


def test_the_generator_goes_to_the_gateways_core_where_that_is_here() -> None:
    first = available_cores()[:1]
    assert commands.cores_of("auto", None) == commands.cores_of("auto", "127.0.0.1:8470") == first
    assert commands.cores_of("auto", "10.0.0.5:8470") == commands.cores_of("none", "127.0.0.1:1") == ()
    assert commands.cores_of("3,5", None) == (3, 5)
    with pytest.raises(ConfigError, match="--generator-cores"):
        commands.cores_of("x", None)


def test_the_generators_options() -> None:
    assert GeneratorOptions(cores=(0, 2), nice=3, max_in_flight=9, request_timeout_s=1.5).arguments() == [
        "--generator-nice=3",
        "--max-in-flight=9",
        "--generator-cores=0,2",
        "--request-timeout-s=1.5",
    ]


def test_locust_is_given_our_file() -> None:
    *_, option, locustfile = locust_command()
    assert option == "-f"
    assert Path(locustfile).name == "locustfile.py"
    assert Path(locustfile).exists()


def test_locust_finds_the_same_credentials_from_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name, given in (
        ("LOCUST_RUN_TIME", "1"),
        ("DISAGG_API_KEY", "key"),
        ("DISAGG_CA_CERT", "system"),
        ("DISAGG_CLIENT_CERT", "tls/client.crt"),
        ("DISAGG_CLIENT_KEY", "~/client.key"),
    ):
        monkeypatch.setenv(name, given)
    found = locust_environment()
    assert {name: found.get(name) for name in ("LOCUST_RUN_TIME", "DISAGG_API_KEY", "DISAGG_CA_CERT")} == {
        "LOCUST_RUN_TIME": None,
        "DISAGG_API_KEY": "key",
        "DISAGG_CA_CERT": "system",
    }
    assert found["DISAGG_CLIENT_CERT"] == str(tmp_path / "tls" / "client.crt")
    assert found["DISAGG_CLIENT_KEY"] == str(tmp_path / "home" / "client.key")


def test_a_key_for_another_machine_needs_tls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DISAGG_CA_CERT", raising=False)
    monkeypatch.setenv("DISAGG_API_KEY", "key")
    check_credentials("127.0.0.1:8470")
    refused = r"^api_key \(DISAGG_API_KEY\): 10\.0\.0\.5:8470 is another machine"
    with pytest.raises(ConfigError, match=refused):
        check_credentials("10.0.0.5:8470")
    monkeypatch.setattr(commands, "locust_command", lambda: pytest.fail("Locust was to be started"))
    with pytest.raises(ConfigError, match=refused):
        commands.web(commands.Common(scenario="interactive"), "10.0.0.5:8470", None, 8089, Console(file=io.StringIO()))


def test_the_scenarios_limits_hold_where_the_command_line_has_none() -> None:
    _, slo = commands.Common(scenario="interactive", tpot_ms=9.0).load()
    assert slo == Slo(ttft_s=4.0, tpot_s=0.009)
    with pytest.raises(ConfigError, match="nowhere"):
        commands.Common(scenario="nowhere").load()


def test_a_report_that_could_not_be_drawn_is_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"^plots need matplotlib; next: pip install 'disagg\[load\]'"):
        commands.Common(scenario="interactive", html=tmp_path / "run.html").load()
    commands.Common(scenario="interactive").load()


def test_a_search_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match="start_rate_per_s"):
        commands.search_of(8.0, 2.0, 0.9)


def recorded(rate: float, num_good: int) -> Recording:
    arrivals = ArrivalConfig(rate_per_s=rate, num_requests=10)
    point = Point(shape="s", shape_config={}, workload=RandomWorkload(isl=1, osl=1), arrivals=arrivals)
    records = [
        RequestRecord(
            index=index,
            due_s=0.0,
            sent_s=0.0,
            status="ok" if index < num_good else "refused",
            num_prompt_tokens=1,
            max_tokens=1,
            token_times_s=(0.1,) if index < num_good else (),
            error="" if index < num_good else f"expected after {index} s",
        )
        for index in range(10)
    ]
    return Recording(info=RunInfo(point=point, duration_s=10 / rate, num_requests=10), records=records)


def test_a_sweep_measures_what_the_search_asks_for() -> None:
    rates: list[float] = []
    lines: list[str] = []

    def measure(rate: float) -> Recording:
        rates.append(rate)
        return recorded(rate, 10 if rate <= 3 else 5)

    result = sweep(measure, SearchConfig(start_rate_per_s=1.0, tolerance=0.5), Slo(ttft_s=1.0), lines.append)
    assert rates == [1.0, 2.0, 4.0, 3.0]
    assert (result.served.served_per_s, result.served.missed_per_s, result.invalid) == (3.0, 4.0, [])
    assert lines[-2] == "4/s: 50.0% within TTFT 1000 ms; 5 refused: expected after 5 s"
