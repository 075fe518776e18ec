"""`guidellm run` against a real cluster: every request succeeds and has the tokens that were asked for."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.clients import conftest
from tests.clients.serving import Served, client_environment

NUM_REQUESTS = 16
OUTPUT_TOKENS = 12


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions"])
def test_a_run(served: Served, tmp_path: Path, route: str) -> None:
    guidellm = conftest.program("guidellm", "guidellm")
    file = tmp_path / "report.json"
    command = [str(guidellm), "run", "--disable-console-interactive"]
    command += ["--backend", f"kind=openai_http,target={served.url},model={served.model},request_format={route}"]
    command += ["--profile", "kind=concurrent,streams=4", "--constraint", f"kind=max_requests,count={NUM_REQUESTS}"]
    command += ["--tokenizer", f"kind=huggingface_auto,model={served.tokenizer}"]
    command += ["--data", f"kind=synthetic_text,prompt_tokens=48,output_tokens={OUTPUT_TOKENS}"]
    command += ["--output", f"kind=json,path={file}"]
    done = subprocess.run(
        command,
        env=client_environment(HOME=str(tmp_path)),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    [benchmark] = json.loads(file.read_text(encoding="utf-8"))["benchmarks"]
    requests = benchmark["requests"]
    assert (len(requests["errored"]), len(requests["successful"])) == (0, NUM_REQUESTS)
    assert {request["output_metrics"]["text_tokens"] for request in requests["successful"]} == {OUTPUT_TOKENS}
