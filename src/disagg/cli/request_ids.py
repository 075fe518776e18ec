"""Request ids as people read and type them: shortened to what tells them apart, and found by how they begin. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from disagg.proto.errors import ConfigError

MIN_SHORT = 8
"""Smallest length of a shortened id."""
ANSWER_PREFIXES = ("chatcmpl-", "cmpl-", "resp_", "msg_")
"""What the ids of answers of the HTTP APIs have before the request's id."""


def request_id_of(text: str) -> str:
    """The id of a request, or its beginning, as typed or copied from an answer over HTTP."""
    prefix = next((each for each in ANSWER_PREFIXES if text.startswith(each)), "")
    return text.removeprefix(prefix)


def shortened(ids: Sequence[str]) -> list[str]:
    """The beginnings of ids, all of the least length at which different ids differ; shorter ids stay whole."""
    different = set(ids)
    length = MIN_SHORT
    while len({each[:length] for each in different}) < len(different):
        length += 1
    return [each[:length] for each in ids]


def find(text: str, ids: Iterable[str]) -> str | None:
    """The id that `text` is, or the only one that begins with it; None without one. Raises `ConfigError` if several
    begin with it."""
    found = dict.fromkeys(each for each in ids if each.startswith(text))
    if text in found:
        return text
    if len(found) > 1:
        raise ConfigError(f"request: {len(found)} ids begin with {text}: {', '.join(list(found)[:3])}; type more of it")
    return next(iter(found), None)
