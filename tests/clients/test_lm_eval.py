"""lm-eval against a real cluster: tasks that compare log-probabilities of choices, and tasks that generate, with the
tokenizer of the server. The tasks are made here: nobody answers for a hub of data sets."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.clients import conftest
from tests.clients.serving import Served, client_environment

CAPITALS = {"France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Japan": "Tokyo"}
NAMES = list(CAPITALS.values())
SHARED = {
    "dataset_path": "json",
    "test_split": "test",
    "num_fewshot": 0,
    "metadata": {"version": 1},
}
TASKS: dict[str, dict[str, Any]] = {
    "capitals_chosen": {
        "output_type": "multiple_choice",
        "doc_to_text": "The capital of {{country}} is",
        "doc_to_choice": NAMES,
        "doc_to_target": "{{place}}",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    },
    "capitals_written": {
        "output_type": "generate_until",
        "doc_to_text": "The capital of {{country}} is",
        "doc_to_target": " {{capital}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 8, "temperature": 0.0},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    },
}


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    """The folder of the tasks."""
    folder = tmp_path / "tasks"
    folder.mkdir()
    lines = [
        json.dumps({"country": country, "capital": capital, "place": NAMES.index(capital)})
        for country, capital in CAPITALS.items()
    ]
    data = folder / "capitals.jsonl"
    data.write_text("\n".join(lines), encoding="utf-8")
    for name, task in TASKS.items():
        whole = {"task": name, **SHARED, **task, "dataset_kwargs": {"data_files": {"test": str(data)}}}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(whole), encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("model", "path", "names", "more"),
    [
        ("local-completions", "completions", ["capitals_chosen", "capitals_written"], []),
        ("local-chat-completions", "chat/completions", ["capitals_written"], ["--apply_chat_template"]),
    ],
)
def test_tasks(served: Served, tasks: Path, model: str, path: str, names: list[str], more: list[str]) -> None:
    given: dict[str, object] = {
        "model": served.model,
        "base_url": f"{served.url}/v1/{path}",
        "num_concurrent": 2,
        "max_retries": 1,
        **({"tokenizer_backend": "remote"} if path == "completions" else {}),
    }
    output = tasks.parent / "results"
    done = subprocess.run(
        [
            conftest.program("lm-eval", "lm_eval"),
            *("--model", model, "--tasks", ",".join(names), "--include_path", str(tasks)),
            *("--model_args", ",".join(f"{key}={value}" for key, value in given.items())),
            *("--output_path", str(output), "--log_samples", *more),
        ],
        env=client_environment(HF_DATASETS_OFFLINE="1", HF_HOME=str(tasks.parent / "hub"), OPENAI_API_KEY="any"),
        cwd=tasks.parent,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    [file] = output.rglob("results_*.json")
    results = json.loads(file.read_text(encoding="utf-8"))
    assert {name: counts["effective"] for name, counts in results["n-samples"].items()} == dict.fromkeys(names, 4)
    if "capitals_chosen" in names:
        assert results["results"]["capitals_chosen"]["acc,none"] >= 0.75
    [samples] = output.rglob("samples_capitals_written*.jsonl")
    answers = [json.loads(line)["resps"][0][0] for line in samples.read_text(encoding="utf-8").splitlines()]
    assert all(answers)
    assert any(capital in answer for capital, answer in zip(NAMES, answers, strict=True))
