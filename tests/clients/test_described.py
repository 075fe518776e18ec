"""The operations that need an id of something that exists: what Schemathesis cannot make up, by hand."""

from __future__ import annotations

import json
import time
from typing import Any

import httpx

from tests.clients.serving import Served
from tests.support.openapi import Described

TIMEOUT_S = 60.0


def test_a_batch_and_a_request_are_as_the_document_says(served: Served) -> None:
    with httpx.Client(base_url=served.url, trust_env=False, timeout=TIMEOUT_S) as client:
        described = Described(client.get("/openapi.json").json())

        def call(method: str, path: str, **more: Any) -> httpx.Response:
            answer = client.request(method, path, **more)
            assert answer.status_code == 200, answer.text
            described.check(method, path, 200, answer.headers["content-type"], answer.content)
            return answer

        body = {"model": served.model, "prompt": "One, two,", "max_tokens": 4}
        line = {"custom_id": "one", "method": "POST", "url": "/v1/completions", "body": body}
        form = {"files": {"file": ("in.jsonl", json.dumps(line).encode())}, "data": {"purpose": "batch"}}
        file_id = call("POST", "/v1/files", **form).json()["id"]
        asked = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}
        batch = call("POST", "/v1/batches", json={**asked, "metadata": {"by": "hand"}}).json()
        path = f"/v1/batches/{batch['id']}"
        deadline = time.monotonic() + TIMEOUT_S
        while batch["status"] != "completed":
            assert time.monotonic() < deadline, batch
            time.sleep(0.1)
            batch = call("GET", path).json()
        assert call("POST", f"{path}/cancel").json()["status"] == "completed"
        assert batch["id"] in [each["id"] for each in call("GET", "/v1/batches").json()["data"]]
        call("GET", f"/v1/files/{batch['output_file_id']}")
        assert json.loads(call("GET", f"/v1/files/{batch['output_file_id']}/content").content)["custom_id"] == "one"
        for one in (file_id, batch["output_file_id"]):
            assert call("DELETE", f"/v1/files/{one}").json()["deleted"]
        answer = call("POST", "/v1/completions", json=body)
        shown = call("GET", f"/ui/requests/{answer.headers['x-disagg-request-id']}").json()
        assert shown["outcome"] == "length"
        call("GET", "/ui/state")
        call("GET", "/v1/usage")
