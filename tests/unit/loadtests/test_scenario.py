"""Scenario files: the ones that come with the package, options on top, and errors by file and field."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from disagg.loadtests.scenario import (
    Overrides,
    Scenario,
    built_in_names,
    load_scenario,
    make_scenario,
    scenario_path,
    to_raw,
)
from disagg.loadtests.verdict.goodput import Slo
from disagg.loadtests.workload.arrivals import ArrivalConfig
from disagg.loadtests.workload.workload import RandomWorkload, TraceWorkload, plan

RAW: dict[str, Any] = {
    "workload": {"kind": "random", "isl": [1, 5], "osl": 3},
    "arrivals": {"rate_per_s": 1, "num_requests": 3},
}
SCENARIO = Scenario(
    workload=RandomWorkload(isl=(1, 5), osl=3), arrivals=ArrivalConfig(rate_per_s=1.0, num_requests=3), slo=Slo()
)


def test_the_package_has_scenarios() -> None:
    assert built_in_names() == ["burst", "conversations", "interactive", "mooncake", "shared-prefix"]


@pytest.mark.parametrize("name", built_in_names())
def test_every_scenario_of_the_package_can_be_planned_for_a_small_model(name: str) -> None:
    scenario = load_scenario(name)
    assert scenario.description
    if not isinstance(scenario.workload, TraceWorkload):
        assert plan(scenario.workload, scenario.arrivals, vocab_size=49_152, max_model_len=2048).requests


def test_a_file_is_read_and_written_back(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("workload: {kind: random, isl: [1, 5], osl: 3}\narrivals: {rate_per_s: 1, num_requests: 3}\n")
    assert load_scenario(str(file)) == SCENARIO
    assert make_scenario(to_raw(SCENARIO)) == SCENARIO


def test_options_replace_values_and_the_end_of_the_plan() -> None:
    def arrivals(**values: Any) -> ArrivalConfig:
        return make_scenario(RAW, Overrides(**values)).arrivals

    assert arrivals() == SCENARIO.arrivals
    assert arrivals(rate_per_s=2.5) == ArrivalConfig(rate_per_s=2.5, num_requests=3)
    assert arrivals(duration_s=9.0) == ArrivalConfig(rate_per_s=1.0, duration_s=9.0)
    assert arrivals(duration_s=9.0, num_requests=4) == ArrivalConfig(rate_per_s=1.0, duration_s=9.0, num_requests=4)
    seeded = make_scenario(RAW, Overrides(seed=8))
    assert (seeded.arrivals.seed, seeded.workload.seed) == (8, 8)
    assert RAW["arrivals"] == {"rate_per_s": 1, "num_requests": 3}


def test_a_name_without_folder_or_suffix_is_one_of_the_package() -> None:
    assert scenario_path("interactive").parent.name == "scenarios"
    assert scenario_path("interactive.yaml") == Path("interactive.yaml")
    with pytest.raises(ValueError, match=r"^scenario: there is no .*nonsense\.yaml; give a file or one of burst, "):
        load_scenario("nonsense")


BAD: list[tuple[str, object, str]] = [
    ("workload.isl", [7, 5], "workload.isl: expected a number of at least 1, or [least, most]; got [7, 5]"),
    ("workload.isl", "x", "workload.isl: Expected `int | array`, got `str`"),
    ("workload.kind", "x", "workload.kind: Invalid value 'x'"),
    ("workload.turns", 3, "workload: Object contains unknown field `turns`"),
    ("arrivals.rate_per_s", -1, "arrivals.rate_per_s: Expected `float` > 0.0"),
    ("arrivals.cv", 2, "arrivals.cv: only arrivals of kind gamma have one, not poisson"),
    ("slo", {"ttft_s": 0}, "slo.ttft_s: Expected `float` > 0.0"),
    ("arrivals", None, "arrivals: Expected `object`, got `null`"),
    ("rate", 3, "Object contains unknown field `rate`"),
]


@pytest.mark.parametrize(("place", "value", "message"), BAD)
def test_a_value_that_cannot_be_is_named_by_its_place(place: str, value: object, message: str) -> None:
    raw = to_raw(SCENARIO)
    *sections, key = place.split(".")
    target = raw
    for section in sections:
        target = target[section]
    target[key] = value
    with pytest.raises(ValueError) as caught:  # noqa: PT011  the text is compared below
        make_scenario(raw)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1", ": cannot be read ("),
        ("7", ": expected the keys workload and arrivals"),
        ("arrivals: {rate_per_s: 1, num_requests: 1}", ": Object missing required field `workload`"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    with pytest.raises(ValueError) as caught:  # noqa: PT011  the text is compared below
        load_scenario(str(file))
    assert str(caught.value).startswith(f"{file}{message}")
