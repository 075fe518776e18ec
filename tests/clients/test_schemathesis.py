"""Schemathesis over all operations of `/openapi.json`, against a real cluster: no answer is 5xx, and none is another
than the document says."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import httpx

from tests.clients import conftest
from tests.clients.serving import Served, client_environment
from tests.support.architecture import REPOSITORY

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "response_headers_conformance",
    "unsupported_method",
)
NOT_GENERATED = {
    "POST /v1/embeddings",
    "POST /v1/rerank",
    "POST /rerank",
    "POST /v1/score",
    "POST /score",
    "POST /v1/batches",
    "GET /v1/batches/{batch}",
    "POST /v1/batches/{batch}/cancel",
    "GET /ui/requests/{request_id}",
}
"""Operations that may have no success: the model of these tests gives no vectors, the others need the id of something
that exists, and `test_described` has them. Every other operation was answered with what the document says of
success."""
NUM_EXAMPLES = 10
"""Generated requests of an operation, beside those for each value at an edge of the document."""


def test_answers_are_what_the_document_says(served: Served, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    done = subprocess.run(
        [
            conftest.program("schemathesis", "schemathesis"),
            "run",
            f"{served.url}/openapi.json",
            f"--checks={','.join(CHECKS)}",
            f"--max-examples={NUM_EXAMPLES}",
            "--seed=1",
            "--request-timeout=60",
            "--no-color",
            "--continue-on-failure",
            "--generation-database=none",
            f"--report-json-path={report}",
        ],
        env=client_environment(
            SCHEMATHESIS_HOOKS="tests.clients.schemathesis_hooks", SERVED_MODEL=served.model, PYTHONPATH=str(REPOSITORY)
        ),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(report.read_text(encoding="utf-8"))
    operations = found["operations"]
    paths = httpx.get(f"{served.url}/openapi.json", trust_env=False).json()["paths"]
    del paths["/openapi.json"]  # Schemathesis leaves out what it has read
    assert operations["total"] == operations["tested"] == sum(map(len, paths.values()))
    answered = {
        name for name, phases in found["valid_rates"].items() if any(each["accepted"] for each in phases.values())
    }
    assert found["valid_rates"].keys() - answered <= NOT_GENERATED
