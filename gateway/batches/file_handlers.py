"""`/v1/files`: inputs of batches, and their outputs."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence
from typing import Any, BinaryIO, Final

from disagg.gateway.auth.auth import CALLER
from disagg.gateway.batches.schema import MAX_FILES, PURPOSE, page_of
from disagg.gateway.batches.service import UPLOAD_TIMEOUT_S, BatchService
from disagg.gateway.batches.store import File
from disagg.gateway.batches.upload import FormWriter, receive_file
from disagg.gateway.http.errors import SlowBodyError
from disagg.gateway.http.query import read_query
from disagg.gateway.http.shell.exchange import Exchange
from disagg.proto.errors import DisaggError, InvalidRequestError

_SLICE_BYTES: Final = 256 << 10
_MAX_LENGTH_CHARS: Final = 18
_DAY_S: Final = 86_400.0


class NotFoundError(DisaggError):
    """The caller's tenant has no such file or batch; another one may."""

    http_status = 404
    grpc_code = "NOT_FOUND"
    code = "not_found"


class Files:
    """Handlers. A tenant sees its own files only.

    Args:
        batches: where they are kept.
        read_timeout_s: how long an upload may be silent.
    """

    def __init__(self, batches: BatchService, read_timeout_s: float) -> None:
        self._batches = batches
        self._read_timeout_s = read_timeout_s

    async def upload(self, exchange: Exchange, request_id: str) -> None:
        """`POST /v1/files`: a form with `file` and `purpose`, which must be `batch`."""
        tenant, most = CALLER.get().tenant, self._batches.options.max_file_bytes
        form = FormWriter(exchange.headers.get("content-type"), most)
        async with self._batches.uploading(tenant, request_id, _num_coming(exchange, most)) as path:
            try:
                async with asyncio.timeout(UPLOAD_TIMEOUT_S):
                    name = await receive_file(form, exchange.body_parts(self._read_timeout_s), path)
            except TimeoutError:
                raise SlowBodyError(f"the file did not arrive within {UPLOAD_TIMEOUT_S:g} s") from None
            if form.fields.get("purpose") != PURPOSE.encode():
                raise InvalidRequestError("purpose", f"must be {PURPOSE}")
            file = File(f"file-{uuid.uuid4().hex}", tenant, name, PURPOSE, form.num_bytes, time.time())
            await self._batches.call(lambda store: store.add_file(file, path))
        await exchange.respond_json(self._shown(file))

    async def list(self, exchange: Exchange, request_id: str) -> None:
        """`GET /v1/files`, the latest first: `limit`, `after`, `purpose`."""
        tenant = CALLER.get().tenant
        found: Sequence[File] = await self._batches.call(lambda store: store.files(tenant))
        await exchange.respond_json(
            page_of(read_query(exchange.scope), [self._shown(file) for file in found], MAX_FILES, MAX_FILES)
        )

    async def one(self, exchange: Exchange, request_id: str) -> None:
        """Handle `GET /v1/files/{file}`: show one file of the caller's tenant."""
        await exchange.respond_json(self._shown(await self._find(exchange)))

    async def content(self, exchange: Exchange, request_id: str) -> None:
        """`GET /v1/files/{file}/content`, read from the disk as the client reads it."""
        file = await self._find(exchange)
        source: BinaryIO = await self._batches.call(lambda store: store.path(file.id).open("rb"))
        try:
            async with exchange.until_disconnect():
                await exchange.start_download(file.num_bytes, b"application/octet-stream")
                while part := await asyncio.to_thread(source.read, _SLICE_BYTES):
                    await exchange.write(part)
                await exchange.end(b"")
        finally:
            source.close()

    async def delete(self, exchange: Exchange, request_id: str) -> None:
        """Handle `DELETE /v1/files/{file}`. A file that an open batch reads is refused."""
        tenant, file_id = CALLER.get().tenant, exchange.path_params["file"]
        if not await self._batches.call(lambda store: store.delete_file(tenant, file_id)):
            raise NotFoundError("there is no such file")
        await exchange.respond_json({"id": file_id, "object": "file", "deleted": True})

    async def _find(self, exchange: Exchange) -> File:
        tenant, file_id = CALLER.get().tenant, exchange.path_params["file"]
        file = await self._batches.call(lambda store: store.file(tenant, file_id))
        if file is None:
            raise NotFoundError("there is no such file")
        return file

    def _shown(self, file: File) -> dict[str, Any]:
        return {
            "id": file.id,
            "object": "file",
            "bytes": file.num_bytes,
            "created_at": int(file.created),
            "expires_at": int(file.created + _DAY_S * self._batches.options.file_days),
            "filename": file.name,
            "purpose": file.purpose,
            "status": "processed",
        }


def _num_coming(exchange: Exchange, most: int) -> int:
    """The most bytes that the file can have: the length of its form if the client sent one, else the limit."""
    length = exchange.headers.get("content-length", "")
    return min(int(length), most) if length.isdecimal() and len(length) <= _MAX_LENGTH_CHARS else most
