"""A chat over the OpenAI-compatible HTTP API, streamed, with nothing but Python's own library."""

import http.client
import json
import os
import sys
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

URL = os.environ.get("DISAGG_URL", "http://127.0.0.1:8471")


def connect() -> http.client.HTTPConnection:
    """A connection to the gateway."""
    parts = urlsplit(URL)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    return kind(parts.netloc, timeout=60)


def call(connection: http.client.HTTPConnection, path: str, body: dict[str, Any] | None) -> http.client.HTTPResponse:
    """Send a request; raises `SystemExit` with the server's error when it is refused."""
    headers = {"content-type": "application/json"}
    if key := os.environ.get("DISAGG_API_KEY"):
        headers["authorization"] = f"Bearer {key}"
    connection.request("GET" if body is None else "POST", path, None if body is None else json.dumps(body), headers)
    response = connection.getresponse()
    if response.status != 200:
        error = json.load(response)["error"]
        wait_ms = response.getheader("retry-after-ms")
        again = f"; try again in {wait_ms} ms" if wait_ms else ""
        raise SystemExit(f"{response.status} {error['code']}: {error['message']}{again}")
    return response


def events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """The chunks of a stream. One with an error, or an end without [DONE], is a failure."""
    for line in response:
        data = line.decode().removeprefix("data: ").strip()
        if data == "[DONE]":
            return
        if data:
            chunk = json.loads(data)
            if "error" in chunk:
                raise SystemExit(f"failed on the way: {chunk['error']['message']}")
            yield chunk
    raise SystemExit("the stream was cut")


def main() -> None:
    """Send one message."""
    question = " ".join(sys.argv[1:]) or "What is a cache?"
    connection = connect()
    model = json.load(call(connection, "/v1/models", None))["data"][0]["id"]
    body = {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": 64,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    usage: dict[str, Any] = {}
    for chunk in events(call(connection, "/v1/chat/completions", body)):
        for choice in chunk["choices"]:
            print(choice["delta"].get("content") or "", end="", flush=True)
        usage = chunk.get("usage") or usage
    print(f"\n[{usage['prompt_tokens']} + {usage['completion_tokens']} tokens from {model}]")
    connection.close()


if __name__ == "__main__":
    main()
