"""A guardrail as a service, with Python's own `http.server`: stops prompts about a topic, and shouts down shouting.

    python examples/guard_service.py &
    disagg up --config cluster.yaml

with, in cluster.yaml:

    gateway:
      guardrails:
        - name: example
          service: {url: "http://127.0.0.1:9100/check"}
          piece_chars: 200
"""

from __future__ import annotations

import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PORT = 9100
TOPIC = "weather"


def verdict(question: dict[str, Any]) -> dict[str, Any]:
    """What to do with the texts of a question."""
    texts = [one["text"] for one in question["texts"]]
    if question["subject"] == "prompt" and any(TOPIC in text.lower() for text in texts):
        return {"action": "stop", "reason": f"we do not talk about the {TOPIC}"}
    calm = [text.replace("!", ".") for text in texts]
    return {"action": "replace", "texts": calm, "reason": "calm"} if calm != texts else {"action": "allow"}


class Handler(BaseHTTPRequestHandler):
    """One question is one POST."""

    protocol_version = "HTTP/1.1"  # keeps connections

    def do_POST(self) -> None:
        """Answer with a verdict."""
        question = json.loads(self.rfile.read(int(self.headers["content-length"])))
        body = json.dumps(verdict(question)).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


if __name__ == "__main__":
    print(f"http://127.0.0.1:{PORT}/check", flush=True)
    ThreadingHTTPServer(("127.0.0.1", PORT), Handler).serve_forever()
