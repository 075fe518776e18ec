"""What a user of the `openai` package does with files and batches; run by that package's own environment.

python -m tests.clients.use_batches URL MODEL        in the repository's root
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import openai  # type: ignore[import-not-found]  # only in its own environment

from tests.clients.checks import expect, run

Check = Callable[[openai.OpenAI, str], None]
ENDPOINT = "/v1/chat/completions"
NUM_LINES = 12
NUM_TOKENS = 4
WAIT_S = 60.0


def _line(model: str, number: int) -> dict[str, Any]:
    body = {"model": model, "messages": [{"role": "user", "content": f"Number {number}."}], "max_tokens": NUM_TOKENS}
    body |= {"temperature": -1 if number == 0 else 0}
    return {"custom_id": f"n{number}", "method": "POST", "url": ENDPOINT, "body": body}


def _upload(client: openai.OpenAI, model: str) -> Any:
    content = "\n".join(json.dumps(_line(model, number)) for number in range(NUM_LINES)).encode()
    uploaded = client.files.create(file=("in.jsonl", content), purpose="batch")
    assert (uploaded.bytes, uploaded.filename, uploaded.purpose) == (len(content), "in.jsonl", "batch")
    assert client.files.content(uploaded.id).read() == content
    return uploaded


def batch(client: openai.OpenAI, model: str) -> None:
    """From the upload to the answers; the first line is wrong, and says so."""
    uploaded = _upload(client, model)
    created = client.batches.create(
        input_file_id=uploaded.id, endpoint=ENDPOINT, completion_window="24h", metadata={"of": "a check"}
    )
    ended = _ended(client, created.id)
    assert (ended.status, ended.metadata) == ("completed", {"of": "a check"})
    counts = ended.request_counts
    assert (counts.total, counts.completed, counts.failed) == (NUM_LINES, NUM_LINES - 1, 1)
    answers = [json.loads(line) for line in client.files.content(ended.output_file_id).text.splitlines()]
    assert sorted(answer["custom_id"] for answer in answers) == sorted(f"n{i}" for i in range(1, NUM_LINES))
    for answer in answers:
        assert answer["response"]["status_code"] == 200
        assert 1 <= answer["response"]["body"]["usage"]["completion_tokens"] <= NUM_TOKENS
    [error] = [json.loads(line) for line in client.files.content(ended.error_file_id).text.splitlines()]
    assert (error["custom_id"], error["response"]["status_code"]) == ("n0", 400)
    assert error["response"]["body"]["error"]["param"] == "temperature"
    assert created.id in [one.id for one in client.batches.list(limit=5).data]


def cancel(client: openai.OpenAI, model: str) -> None:
    created = client.batches.create(input_file_id=_upload(client, model).id, endpoint=ENDPOINT, completion_window="24h")
    assert client.batches.cancel(created.id).status in ("cancelling", "cancelled", "completed")


def files(client: openai.OpenAI, model: str) -> None:
    uploaded = _upload(client, model)
    assert client.files.retrieve(uploaded.id).id == uploaded.id
    assert uploaded.id in [one.id for one in client.files.list().data]
    assert client.files.delete(uploaded.id).deleted
    expect(openai.NotFoundError, lambda: client.files.retrieve(uploaded.id))


def responses(client: openai.OpenAI, model: str) -> None:
    """A batch of another endpoint, whose answers are what a request gets."""
    body = {"model": model, "input": "Say yes.", "max_output_tokens": NUM_TOKENS, "temperature": 0}
    content = json.dumps({"custom_id": "r", "method": "POST", "url": "/v1/responses", "body": body}).encode()
    uploaded = client.files.create(file=("in.jsonl", content), purpose="batch")
    created = client.batches.create(input_file_id=uploaded.id, endpoint="/v1/responses", completion_window="24h")
    ended = _ended(client, created.id)
    assert ended.status == "completed"
    [answer] = [json.loads(line) for line in client.files.content(ended.output_file_id).text.splitlines()]
    found = openai.types.responses.Response.model_validate(answer["response"]["body"])
    asked = client.responses.create(**body)
    assert (found.object, found.output_text, found.status) == ("response", asked.output_text, asked.status)


def _ended(client: openai.OpenAI, batch_id: str) -> Any:
    deadline = time.monotonic() + WAIT_S
    while (ended := client.batches.retrieve(batch_id)).status not in ("completed", "failed", "expired", "cancelled"):
        assert time.monotonic() < deadline, ended.status
        time.sleep(0.2)
    return ended


CHECKS: tuple[Check, ...] = (batch, cancel, files, responses)


def main(url: str, model: str) -> int:
    """Run all of them; 0 if all passed."""
    return run(CHECKS, lambda: openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0), model)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
