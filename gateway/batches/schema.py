"""The body of a new batch, and lists of files and batches page by page. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final

import msgspec

from disagg.gateway.http.query import read_count
from disagg.proto.errors import InvalidRequestError

PURPOSE: Final = "batch"
"""The only purpose of a file."""
WINDOW: Final = "24h"
DEFAULT_BATCHES: Final = 20
"""Number of batches of a page, where a client does not say."""
MAX_BATCHES: Final = 100
MAX_FILES: Final = 10_000
_MAX_NOTES: Final = 16


class BatchBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The JSON body of `POST /v1/batches`."""

    input_file_id: Annotated[str, msgspec.Meta(max_length=256)]
    endpoint: Annotated[str, msgspec.Meta(max_length=256)]
    completion_window: Annotated[str, msgspec.Meta(max_length=256)]
    """Must be `24h`: lines without an answer by then get none."""
    metadata: (
        Annotated[
            dict[
                Annotated[str, msgspec.Meta(max_length=64)],
                Annotated[str, msgspec.Meta(max_length=512)],
            ],
            msgspec.Meta(max_length=_MAX_NOTES),
        ]
        | None
    ) = None
    """The client's own notes."""


def page_of(query: Mapping[str, str], shown: Sequence[dict[str, Any]], default: int, most: int) -> dict[str, Any]:
    """The part of `shown` that `?limit` and `?after` ask for. Raises `InvalidRequestError`."""
    limit = read_count(query, "limit", default, most)
    begin = 0
    if "after" in query:
        ids = [one["id"] for one in shown]
        if query["after"] not in ids:
            raise InvalidRequestError("after", "there is no such id in the list")
        begin = ids.index(query["after"]) + 1
    page = shown[begin : begin + limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": begin + len(page) < len(shown),
    }
