"""The dashboards and the Prometheus configuration in deploy/ use only metrics and labels that the gateway has."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from disagg.cluster.config.cluster_config import ClusterConfig
from disagg.gateway.guardrails.config import GuardrailOptions, ServiceOptions
from disagg.gateway.guardrails.shell.guardrails import Guardrails
from disagg.gateway.metrics.registry import GatewayMetrics
from disagg.gateway.usage.recorder import UsageRecorder
from disagg.proto.autoscaling import AutoscalerState, Decision, PoolDecision
from disagg.proto.messages import StartPhase
from tests.support.metrics import busy_view, read_samples

DEPLOY = Path(__file__).resolve().parents[3] / "deploy"
DASHBOARDS = sorted((DEPLOY / "grafana").glob("*.json"))
KEYWORDS = {"and", "or", "unless", "bool"}
_STRING = re.compile(r'"[^"]*"')
_SELECTOR = re.compile(r"([a-zA-Z_:][\w:]*)\s*(\{[^}]*\})")
_GROUPING = re.compile(r"\b(?:by|without)\s*\(([^)]*)\)")
_NAME = re.compile(r"[a-zA-Z_:][\w:]*(?!\s*\(|[\w:])")
_LABEL = re.compile(r"([a-zA-Z_]\w*)\s*(?:=~|!~|!=|=)")


def known_labels() -> dict[str, set[str]]:
    """Sample name -> its label names."""
    decision = Decision(pools=(PoolDecision(name="decode", size=1, wanted=2, reason="r", change="c"),))
    scaling = AutoscalerState(policy="attainment", dry_run=False, decision=decision, changes={"decode up": 1})
    metrics = GatewayMetrics(
        {"m": busy_view},
        autoscaler=lambda: scaling,
        certificates=lambda: {"gateway": 1.8e9},
        start_phases=[StartPhase("launch", 1.0)],
    )
    metrics.usage = UsageRecorder(None, lambda: 0.0)
    metrics.count_call("http", "ok")
    metrics.count_refusal("grpc", "unknown")
    asked = GuardrailOptions(name="g", service=ServiceOptions(url="http://127.0.0.1:9/"))
    metrics.guardrails = Guardrails([asked])
    metrics.guardrails.counts["g", "prompt", "stop"] += 1
    samples = read_samples(metrics.render()[0])
    return {name: {label for labels in found for label, _ in labels} for name, found in samples.items()}


def names_in(expression: str) -> set[str]:
    """The metrics that an expression reads."""
    bare = _GROUPING.sub("", re.sub(r"\{[^}]*\}|\[[^\]]*\]", "", _STRING.sub("", expression)))
    return {name for name in _NAME.findall(bare) if name not in KEYWORDS}


def labels_in(expression: str) -> set[str]:
    """The labels that an expression names."""
    bare = _STRING.sub('""', expression)
    grouped = {label.strip() for group in _GROUPING.findall(bare) for label in group.split(",")}
    selected = {label for _, selector in _SELECTOR.findall(bare) for label in _LABEL.findall(selector)}
    return grouped | selected


def expressions(node: Any) -> Iterator[str]:
    """Every `expr` below a node of a dashboard."""
    if isinstance(node, dict):
        if isinstance(node.get("expr"), str):
            yield node["expr"]
        for child in node.values():
            yield from expressions(child)
    elif isinstance(node, list):
        for child in node:
            yield from expressions(child)


def test_the_parser_of_expressions() -> None:
    text = 'histogram_quantile(0.95, sum by (le, a) (rate(x_bucket{b="y_z", c!~"d"}[5m]))) / max(f:g) > 0 or h'
    assert names_in(text) == {"x_bucket", "f:g", "h"}
    assert labels_in(text) == {"le", "a", "b", "c"}


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_a_dashboard_reads_only_what_there_is(path: Path) -> None:
    known = known_labels()
    found = list(expressions(json.loads(path.read_text(encoding="utf-8"))))
    assert len(found) >= 10
    for expression in found:
        names = names_in(expression)
        assert names, expression
        assert names <= known.keys(), expression
        assert labels_in(expression) <= set.intersection(*(known[name] for name in names)), expression


def test_there_are_two_dashboards_of_different_names_and_ids() -> None:
    dashboards = [json.loads(path.read_text(encoding="utf-8")) for path in DASHBOARDS]
    assert [path.stem for path in DASHBOARDS] == ["cluster", "prefill-decode"]
    assert len({dashboard["uid"] for dashboard in dashboards}) == len({d["title"] for d in dashboards}) == 2
    for dashboard in dashboards:
        ids = [panel["id"] for panel in dashboard["panels"]]
        assert len(ids) == len(set(ids))


def test_panels_do_not_overlap() -> None:
    for path in DASHBOARDS:
        cells: set[tuple[int, int]] = set()
        for panel in json.loads(path.read_text(encoding="utf-8"))["panels"]:
            at = panel["gridPos"]
            own = {(at["x"] + i, at["y"] + j) for i in range(at["w"]) for j in range(at["h"])}
            assert at["x"] + at["w"] <= 24
            assert not own & cells, f"{path.name}: {panel['title']}"
            cells |= own


def test_every_own_family_but_aliases_is_on_a_dashboard() -> None:
    shown = {name for path in DASHBOARDS for e in expressions(json.loads(path.read_text())) for name in names_in(e)}
    families = {family_of(name) for name in known_labels() if name.startswith("disagg_")}
    assert families - {family_of(name) for name in shown} == set()


def test_prometheus_scrapes_the_default_port() -> None:
    config = yaml.safe_load((DEPLOY / "prometheus.yml").read_text(encoding="utf-8"))
    (job,) = config["scrape_configs"]
    gateway = ClusterConfig().gateway
    assert job["static_configs"] == [{"targets": [f"{gateway.host}:{gateway.chosen_http_port}"]}]
    assert (job["metrics_path"], job["honor_labels"]) == ("/metrics", True)


def test_the_document_names_every_metric_with_its_labels() -> None:
    known = known_labels()
    text = (DEPLOY.parent / "docs" / "observability.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(disagg_\w+)` \| ([\w, ]*)\|", text, re.MULTILINE)
    own = {family_of(name): labels - {"le"} for name, labels in known.items() if name.startswith("disagg_")}
    assert {name: {label.strip() for label in labels.split(",")} - {""} for name, labels in rows} == own
    aliases = {family_of(name) for name in known if name.startswith("vllm:")}
    assert set(re.findall(r"`(vllm:\w+)`", text)) == aliases


def family_of(sample: str) -> str:
    """The name of the family, as people write it."""
    return re.sub(r"_(bucket|sum|count)$", "", sample)
