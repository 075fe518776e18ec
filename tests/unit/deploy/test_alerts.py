"""The alerts of deploy/prometheus-alerts.yml read metrics, labels and label values that the gateway exports, and fire
when they should."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from disagg.gateway.metrics.cluster import ROLES, STATES
from tests.unit.deploy.test_dashboards import DEPLOY, known_labels, labels_in, names_in

ALERTS = DEPLOY / "prometheus-alerts.yml"
OF_PROMETHEUS = {"up": {"job", "instance"}}
"""What a server makes of a scrape by itself."""
OF_A_TARGET = {"job", "model"}
"""Labels that a server adds to each sample, and that of the model, which a gateway adds where it serves several."""
VALUES = {
    "role": set(ROLES),
    "state": {*STATES, "active", "reserved", "cached", "free"},
    "slo": {"both", "ttft", "tpot"},
    "met": {"true", "false"},
    "stage": {"queued", "prefill", "transfer", "decode"},
    "job": {"disagg"},
    "outcome": {"ok", "failed"},
}
PROMTOOL = shutil.which("promtool")


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def bare(expression: str) -> str:
    """Without words of the language that look like metrics to the parser."""
    return re.sub(r"\btime\(\)", "0", " ".join(expression.split()))


def test_what_there_is_an_alert_for() -> None:
    assert {rule["alert"] for rule in rules()} == {
        "DisaggGatewayDown",
        "DisaggNoDecodeWorker",
        "DisaggAttainmentLow",
        "DisaggQueueGrowing",
        "DisaggUsageNotWritten",
        "DisaggWorkerUnreachable",
        "DisaggWorkerRestarts",
        "DisaggKvNearlyFull",
        "DisaggTransfersFailing",
        "DisaggCertificateExpiresSoon",
        "DisaggCertificateExpires",
    }
    assert len(rules()) == 11


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule["alert"])
def test_an_alert_reads_only_what_there_is(rule: dict[str, Any]) -> None:
    expression, known = bare(rule["expr"]), known_labels() | OF_PROMETHEUS
    names = names_in(expression)
    assert names
    assert names <= known.keys()
    own = labels_in(expression) - OF_A_TARGET
    assert own <= set.intersection(*(known[name] for name in names))
    for label, values in re.findall(r'(\w+)=~?"([^"]*)"', expression):
        assert set(values.split("|")) <= VALUES[label], f"{label}={values}"


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule["alert"])
def test_an_alert_says_what_is_wrong_and_what_to_do(rule: dict[str, Any]) -> None:
    assert rule["labels"]["severity"] in ("critical", "warning")
    assert set(rule["annotations"]) == {"summary", "description"}
    assert all(rule["annotations"].values())
    used = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
    expression = bare(rule["expr"])
    if grouped := re.search(r"by \(([^)]*)\)", expression):
        assert used <= {label.strip() for label in grouped[1].split(",")}
    else:
        (name,) = names_in(expression)
        assert used <= (known_labels() | OF_PROMETHEUS)[name]


@pytest.mark.parametrize("alert", ["DisaggNoDecodeWorker", "DisaggAttainmentLow"])
def test_a_model_that_is_served_hides_no_other_one(alert: str) -> None:
    (expression,) = [bare(rule["expr"]) for rule in rules() if rule["alert"] == alert]
    assert set(re.findall(r"by \(([^)]*)\)", expression)) == {"job, model"}


def test_prometheus_loads_the_alerts() -> None:
    config = yaml.safe_load((DEPLOY / "prometheus.yml").read_text(encoding="utf-8"))
    assert config["rule_files"] == [ALERTS.name]
    assert config["scrape_configs"][0]["job_name"] in VALUES["job"]


def case(alert: str, summary: str, series: dict[str, str], at: str, **labels: str) -> dict[str, Any]:
    """A test of `promtool`: the alert, and no other one, fires at a time, with this summary and these labels."""
    rule = next(rule for rule in rules() if rule["alert"] == alert)
    annotations = rule["annotations"] | {"summary": summary}
    expected = {"exp_labels": labels | rule["labels"], "exp_annotations": annotations}
    return {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "alert_rule_test": [
            {
                "alertname": each["alert"],
                "eval_time": at,
                "exp_alerts": [expected] if each["alert"] == alert else [],
            }
            for each in rules()
        ],
    }


CASES = [
    case(
        "DisaggGatewayDown",
        "The gateway at a:1 does not answer",
        {'up{job="disagg", instance="a:1"}': "0x5"},
        "2m",
        job="disagg",
        instance="a:1",
    ),
    case(
        "DisaggNoDecodeWorker",
        "No worker can decode, so that every request is refused",
        {
            f'disagg_instances{{job="disagg", role="{role}", state="ready"}}': f"{count}x5"
            for role, count in (("prefill", 2), ("decode", 0), ("colocated", 0))
        },
        "2m",
        job="disagg",
    ),
    case(
        "DisaggNoDecodeWorker",
        "No worker of b can decode, so that every request is refused",
        {
            f'disagg_instances{{job="disagg", model="{model}", role="decode", state="ready"}}': f"{count}x5"
            for model, count in (("a", 1), ("b", 0))
        },
        "2m",
        job="disagg",
        model="b",
    ),
    case(
        "DisaggAttainmentLow",
        "80% of the requests meet their targets",
        {
            'disagg_slo_requests_total{job="disagg", slo="both", met="true"}': "0+80x30",
            'disagg_slo_requests_total{job="disagg", slo="both", met="false"}': "0+20x30",
        },
        "30m",
        job="disagg",
    ),
    case(
        "DisaggQueueGrowing",
        "200 requests wait for a worker, and they become more",
        {'disagg_requests_in_flight{job="disagg", stage="queued"}': "0+10x30"},
        "20m",
        job="disagg",
        stage="queued",
    ),
    case(
        "DisaggUsageNotWritten",
        "What keys use cannot be written: 300 tries failed in five minutes",
        {'disagg_usage_writes_total{job="disagg", outcome="failed"}': "0+60x20"},
        "12m",
        job="disagg",
    ),
    case(
        "DisaggWorkerUnreachable",
        "1 workers of role prefill belong to the cluster and cannot be reached",
        {'disagg_instances{job="disagg", role="prefill", state="unreachable"}': "1x10"},
        "6m",
        job="disagg",
        role="prefill",
    ),
    case(
        "DisaggWorkerRestarts",
        "d0 was started again 4 times in 15 minutes",
        {'disagg_instance_restarts_total{job="disagg", instance="d0"}': "0 0 1 2 3 4 4 4 4"},
        "8m",
        job="disagg",
        instance="d0",
    ),
    case(
        "DisaggKvNearlyFull",
        "98% of the KV blocks of d0 are held or promised",
        {
            f'disagg_kv_blocks{{job="disagg", instance="d0", state="{state}"}}': f"{count}x10"
            for state, count in (("active", 90), ("reserved", 8), ("cached", 1), ("free", 1))
        },
        "6m",
        job="disagg",
        instance="d0",
    ),
    case(
        "DisaggTransfersFailing",
        "10% of the hand-overs of KV fail",
        {
            'disagg_kv_transfers_total{job="disagg", src="p0", dst="d0", transport="shm"}': "0+90x20",
            'disagg_kv_transfer_failures_total{job="disagg", src="p0", dst="d0", reason="stuck"}': "0+10x20",
        },
        "12m",
        job="disagg",
    ),
    case(
        "DisaggCertificateExpiresSoon",
        "The certificate `gateway` expires in 9d 23h 58m 0s",
        {'disagg_certificate_expires_timestamp_seconds{job="disagg", certificate="gateway"}': "864000x5"},
        "2m",
        job="disagg",
        certificate="gateway",
    ),
]


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed")
def test_promtool_takes_the_alerts_and_they_fire(tmp_path: Path) -> None:
    assert PROMTOOL is not None
    checked = subprocess.run([PROMTOOL, "check", "rules", str(ALERTS)], capture_output=True, text=True, check=False)
    assert (checked.returncode, "11 rules found" in checked.stdout) == (0, True), checked.stderr + checked.stdout
    file = tmp_path / "test.yml"
    file.write_text(yaml.safe_dump({"rule_files": [str(ALERTS)], "evaluation_interval": "1m", "tests": CASES}))
    fired = subprocess.run([PROMTOOL, "test", "rules", str(file)], capture_output=True, text=True, check=False)
    assert fired.returncode == 0, fired.stdout + fired.stderr


def test_there_is_a_case_for_each_alert() -> None:
    fires = {test["alertname"] for each in CASES for test in each["alert_rule_test"] if test["exp_alerts"]}
    assert fires == {rule["alert"] for rule in rules()} - {"DisaggCertificateExpires"}  # as ...Soon, a day before
