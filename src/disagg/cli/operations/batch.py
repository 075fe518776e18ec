"""`disagg batch run`: upload a file of requests, follow its batch with a progress bar, fetch the answers."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from disagg.cluster.system.children import LaunchError
from disagg.cluster.system.program import command
from disagg.proto.errors import ConfigError

_POLL_S: Final = 0.5
_TIMEOUT_S: Final = 60.0
_RETRY_FOR_S: Final = 120.0
"""Seconds for which requests are retried while no gateway answers: it may be restarting, and the batch continues after
that."""
_ENDED: Final = ("completed", "failed", "expired", "cancelled")


class _Api:
    """Client of the HTTP API at an address, with one connection for each call."""

    def __init__(self, address: str) -> None:
        self._address = address
        key = os.environ.get("DISAGG_API_KEY")
        self._headers = {"authorization": f"Bearer {key}"} if key else {}

    def call(self, method: str, path: str, body: Any = None, content_type: str = "application/json") -> Any:
        """Make a call and return its answer. Raises `ConfigError` for an error of the gateway, `OSError` without an
        answer."""
        with self.open(method, path, body, content_type) as response:
            return json.loads(response.read())

    def open(
        self, method: str, path: str, body: Any = None, content_type: str = "application/json"
    ) -> http.client.HTTPResponse:
        """Make a call and return the response for the caller to read; errors as in `call`."""
        host, _, port = self._address.rpartition(":")
        connection = http.client.HTTPConnection(host.strip("[]"), int(port), timeout=_TIMEOUT_S)
        headers = {**self._headers, **({} if body is None else {"content-type": content_type})}
        if isinstance(body, _Form):
            headers["content-length"] = str(body.num_bytes)
        elif body is not None:
            body = json.dumps(body).encode()
        connection.request(method, path, iter(body) if isinstance(body, _Form) else body, headers)
        response = connection.getresponse()
        if response.status >= http.client.BAD_REQUEST:
            raw = response.read()
            try:
                message = json.loads(raw)["error"]["message"]
            except (ValueError, KeyError, TypeError):
                message = raw[:200].decode(errors="replace")
            raise ConfigError(f"{method} {path}: {response.status}: {message}")
        return response


class _Form:
    """A file as an HTTP form, read while it is sent."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.boundary = uuid.uuid4().hex
        name = json.dumps(file.name)
        self._head = (
            f'--{self.boundary}\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
            f'--{self.boundary}\r\ncontent-disposition: form-data; name="file"; filename={name}\r\n\r\n'
        ).encode()
        self._tail = f"\r\n--{self.boundary}--\r\n".encode()
        self.num_bytes = len(self._head) + file.stat().st_size + len(self._tail)

    def __iter__(self) -> Iterator[bytes]:
        yield self._head
        with self._file.open("rb") as source:
            while part := source.read(1 << 18):
                yield part
        yield self._tail


def run_batch(address: str, file: Path, output: Path, console: Console) -> int:
    """Run a batch, and return the exit status: 0 if each line has an answer.

    Raises:
        ConfigError: for a file that cannot be read or is empty, or if the gateway refuses it.
        LaunchError: if there is no gateway at the address.
    """
    try:
        with file.open("rb") as source:
            first = source.readline(1 << 20)
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read ({error.strerror})") from None
    try:
        endpoint = json.loads(first)["url"]
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"{file}: line 1: no JSON object with a url") from None
    api, form = _Api(address), _Form(file)
    try:
        uploaded = api.call("POST", "/v1/files", form, f"multipart/form-data; boundary={form.boundary}")
        given = {"input_file_id": uploaded["id"], "endpoint": endpoint, "completion_window": "24h"}
        batch = api.call("POST", "/v1/batches", given)
    except OSError as error:
        raise LaunchError(f"no gateway answers at {address} ({error}); start one with: {command('up')}") from error
    try:
        batch = _follow(api, batch, console)
    except KeyboardInterrupt:
        api.call("POST", f"/v1/batches/{batch['id']}/cancel")
        console.print("cancelled; what is answered so far is kept", highlight=False)
        batch = _follow(api, batch, console)
    errors = output.with_name(f"{output.name}.errors")
    for file_id, path in ((batch["output_file_id"], output), (batch["error_file_id"], errors)):
        if file_id is not None:
            with api.open("GET", f"/v1/files/{file_id}/content") as response, path.open("wb") as target:
                shutil.copyfileobj(response, target)
    return _report(batch, output, errors, console)


def _follow(api: _Api, batch: dict[str, Any], console: Console) -> dict[str, Any]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    answered_at = time.monotonic()
    with Progress(*columns, console=console, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task(batch["status"], total=None)
        while batch["status"] not in _ENDED:
            time.sleep(_POLL_S)
            try:
                batch = api.call("GET", f"/v1/batches/{batch['id']}")
                answered_at = time.monotonic()
            except (OSError, http.client.HTTPException) as error:
                if time.monotonic() - answered_at > _RETRY_FOR_S:
                    raise LaunchError(f"the gateway has gone ({error}); batch {batch['id']} is kept") from error
                continue
            counts = batch["request_counts"]
            done = counts["completed"] + counts["failed"]
            progress.update(task, description=batch["status"], total=counts["total"] or None, completed=done)
    return batch


def _report(batch: dict[str, Any], output: Path, errors: Path, console: Console) -> int:
    counts = batch["request_counts"]
    text = f"{batch['id']} {batch['status']}: {counts['completed']} of {counts['total']} lines answered"
    text += f", in {output}" if batch["output_file_id"] else ""
    text += f"; {counts['failed']} errors, in {errors}" if batch["error_file_id"] else ""
    for error in (batch["errors"] or {"data": []})["data"]:
        text += f"; {error['message']}"
    console.print(text, markup=False, highlight=False, soft_wrap=True)
    return int(batch["status"] != "completed" or counts["failed"] > 0)
