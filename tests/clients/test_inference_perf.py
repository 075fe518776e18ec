"""`inference-perf` against a real cluster: every request succeeds and has the tokens that were asked for.

It needs Python >= 3.12: with an older interpreter its environment stays empty, and the test is skipped.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.clients import conftest
from tests.clients.serving import Served, client_environment

RATE = 4
DURATION_S = 5
OUTPUT_TOKENS = 12


@pytest.mark.parametrize("kind", ["completion", "chat"])
def test_a_run(served: Served, tmp_path: Path, kind: str) -> None:
    inference_perf = conftest.program("inference-perf", "inference-perf")
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(config(served, tmp_path / "reports", kind)), encoding="utf-8")
    before = num_generated(served)
    done = subprocess.run(
        [inference_perf, "--config_file", file],
        env=client_environment(HOME=str(tmp_path)),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    [report] = (tmp_path / "reports").rglob("summary_lifecycle_metrics.json")
    found = json.loads(report.read_text(encoding="utf-8"))
    assert found["load_summary"]["count"] == RATE * DURATION_S
    assert (found["successes"]["count"], found["failures"]["count"]) == (RATE * DURATION_S, 0)
    assert num_generated(served) - before == RATE * DURATION_S * OUTPUT_TOKENS


def num_generated(served: Served) -> float:
    """Output tokens up to now. What inference-perf counts is the text, tokenized again, which gives other numbers."""
    text = httpx.get(f"{served.url}/metrics", trust_env=False).text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return sum(sample.value for sample in samples if sample.name == "vllm:generation_tokens_total")


def config(served: Served, reports: Path, kind: str) -> dict[str, Any]:
    """A stream every quarter of a second."""
    exactly = {"min": OUTPUT_TOKENS, "max": OUTPUT_TOKENS, "mean": OUTPUT_TOKENS, "std_dev": 0, "total_count": 100}
    return {
        "api": {"type": kind, "streaming": True},
        "data": {
            "type": "random" if kind == "completion" else "shared_prefix",
            **({"input_distribution": {**exactly, "min": 32, "max": 32, "mean": 32}} if kind == "completion" else {}),
            **({"output_distribution": exactly} if kind == "completion" else {}),
            **({"shared_prefix": shared_prefix()} if kind == "chat" else {}),
        },
        "load": {"type": "constant", "num_workers": 1, "stages": [{"rate": RATE, "duration": DURATION_S}]},
        "server": {"type": "vllm", "model_name": served.model, "base_url": served.url, "ignore_eos": True},
        "tokenizer": {"pretrained_model_name_or_path": str(served.tokenizer)},
        "report": {"request_lifecycle": {"summary": True, "per_stage": False, "per_request": True}},
        "storage": {"local_storage": {"path": str(reports)}},
    }


def shared_prefix() -> dict[str, int]:
    """Two groups of prompts."""
    return {
        "num_groups": 2,
        "num_prompts_per_group": 5,
        "system_prompt_len": 32,
        "question_len": 16,
        "output_len": OUTPUT_TOKENS,
    }
