"""A guardrail service in a process of its own: `python -m tests.support.guard_service WORD` prints its port.

What it does depends on the words of the texts; `slow-<path>` and `broken-<path>` count for the path that they name.
An answer in which `WORD` is, in a piece or where it meets the one before, is stopped.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

STUCK_S = 3600.0


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        question = json.loads(self.rfile.read(int(self.headers["content-length"])))
        texts = [one["text"] for one in question["texts"]]
        said, name = " ".join(texts), self.path.strip("/")
        if question["subject"] == "answer" and self.server.word in question["before"] + texts[0]:  # type: ignore[attr-defined]
            return self._answer(b'{"action": "stop", "reason": "a word"}')
        if f"slow-{name}" in said:
            time.sleep(STUCK_S)
        if f"broken-{name}" in said:
            return self._answer(b'{"action": "perhaps"}')
        if f"busy-{name}" in said:
            return self._answer(b"{}", 503)
        if f"forbidden-{name}" in said:
            return self._answer(b'{"action": "stop", "reason": "by the service"}')
        if f"old-{name}" in said:
            swapped = [text.replace(f"old-{name}", "new") for text in texts]
            return self._answer(json.dumps({"action": "replace", "texts": swapped}).encode())
        return self._answer(b'{"action": "allow"}')

    def _answer(self, body: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing to standard error."""


@contextmanager
def guard_service(word: str) -> Iterator[int]:
    """The port of a service that runs until the end; it stops answers with this word."""
    command = [sys.executable, "-m", "tests.support.guard_service", word]
    root = Path(__file__).resolve().parents[2]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root) as process:
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.kill()


def main() -> None:
    """Serve until killed."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    server.word = sys.argv[1]  # type: ignore[attr-defined]
    print(server.server_address[1], flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
