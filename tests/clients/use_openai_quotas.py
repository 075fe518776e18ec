"""What a user of the `openai` package does with a key that has limits; a program of its own environment.

    use_openai_quotas.py URL MODEL KEY         the key may have 60 answers and 100,000 tokens a minute

Writes what it saw as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import openai  # type: ignore[import-not-found]  # only in its own environment

NUM_ANSWERS = 16
"""Of one call; the most that one may ask for."""


def main() -> None:
    url, model, key = sys.argv[1:]
    attempts: list[dict[str, Any]] = []

    def note(response: Any) -> None:
        headers = response.headers
        attempts.append(
            {
                "status": response.status_code,
                "retry": response.request.headers.get("x-stainless-retry-count"),
                "at": time.monotonic(),
                **{name: value for name, value in headers.items() if name.startswith(("x-ratelimit", "retry-after"))},
            }
        )

    http = openai.DefaultHttpxClient(event_hooks={"response": [note]})
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=key, http_client=http, max_retries=0)
    create = client.completions.create
    given: dict[str, Any] = {
        "model": model,
        "prompt": [75, 76, 77],
        "max_tokens": 4,
        "extra_body": {"ignore_eos": True},
    }

    first = client.completions.with_raw_response.create(**given)
    first.parse()
    seen: dict[str, Any] = {"first": attempts[-1]}
    for _ in range(3):
        create(**given, n=NUM_ANSWERS)
    create(**given, n=9)
    seen["used_up"] = attempts[-1]
    try:
        create(**given, n=8)
    except openai.RateLimitError as error:
        seen["refused"] = {**attempts[-1], "code": error.code, "message": error.message}
    attempts.clear()
    began = time.monotonic()
    client.with_options(max_retries=3).completions.create(**given, n=8)
    seen["waited_s"] = time.monotonic() - began
    seen["attempts"] = [{"status": each["status"], "retry": each["retry"]} for each in attempts]
    seen["gap_s"] = attempts[-1]["at"] - attempts[0]["at"]
    seen["retry_after_ms"] = int(attempts[0].get("retry-after-ms", 0))
    attempts.clear()
    try:
        client.with_options(max_retries=3).completions.create(**{**given, "prompt": [[75]] * 20}, n=4)
    except openai.RateLimitError as error:
        seen["never"] = {"attempts": len(attempts), "code": error.code, **attempts[-1]}
    seen["usage"] = client.get("/usage", cast_to=object)["data"]
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
