"""`aiperf profile` against a real cluster: every request succeeds and has the tokens that were asked for."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.clients import conftest
from tests.clients.serving import Served, client_environment

NUM_REQUESTS = 24
INPUT_TOKENS = 64
OUTPUT_TOKENS = 16


@pytest.mark.parametrize(("endpoint", "streaming"), [("chat", True), ("chat", False), ("completions", True)])
def test_a_profile(served: Served, tmp_path: Path, endpoint: str, streaming: bool) -> None:
    aiperf = conftest.program("aiperf", "aiperf")
    command = [str(aiperf), "profile", "--model", served.model, "--url", served.url, "--endpoint-type", endpoint]
    command += ["--tokenizer", str(served.tokenizer), "--output-artifact-dir", str(tmp_path / "artifacts")]
    command += ["--concurrency", "4", "--request-count", str(NUM_REQUESTS), "--random-seed", "1", "--ui", "none"]
    command += ["--synthetic-input-tokens-mean", str(INPUT_TOKENS), "--synthetic-input-tokens-stddev", "0"]
    command += ["--output-tokens-mean", str(OUTPUT_TOKENS), "--output-tokens-stddev", "0"]
    command += ["--extra-inputs", "ignore_eos:true", "--use-server-token-count"]
    command += ["--streaming"] if streaming else []
    done = subprocess.run(
        command,
        env=client_environment(HOME=str(tmp_path)),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    found = report(tmp_path / "artifacts")
    assert found["request_count"]["avg"] == NUM_REQUESTS
    assert found.get("error_request_count", {"avg": 0})["avg"] == 0
    assert found["error_summary"] == []
    lengths = found["output_sequence_length"]
    assert (lengths["min"], lengths["max"]) == (OUTPUT_TOKENS, OUTPUT_TOKENS)
    if streaming:
        assert found["time_to_first_token"]["min"] > 0


def report(folder: Path) -> dict[str, Any]:
    """What it wrote."""
    [path] = folder.rglob("profile_export_aiperf.json")
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content
