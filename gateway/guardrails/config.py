"""`gateway.guardrails`: the user's configuration, and what is wrong with it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal
from urllib.parse import urlsplit

import msgspec

from disagg.gateway.guardrails.pattern_syntax import PatternError
from disagg.gateway.guardrails.scanner import check_pattern
from disagg.proto.config import Count, Name, NonNegativeInt, Seconds, check_bounds
from disagg.proto.errors import ConfigError

MAX_GUARDRAILS: Final = 16
MAX_RULES: Final = 64
"""Maximum number of rules of one guardrail."""
_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_OBJECT: Final = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*|[A-Za-z0-9_.-]+")
AppliesTo = Literal["both", "prompts", "answers"]


class RuleOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One of `rules`: a pattern, secrets, or a length."""

    name: str = ""
    """Name of the rule in metrics and `disagg explain`; by default its position."""
    pattern: str | None = None
    """A regular expression of RE2 that has a longest match: no `*`, `+`, anchors. Found anywhere in a text."""
    ignore_case: bool = False
    """Whether the pattern ignores case."""
    secrets: bool = False
    """Find API keys, tokens and private keys of common forms."""
    max_chars: Count | None = None
    """The most characters of a prompt's texts together, or of an answer."""
    action: Literal["stop", "replace"] = "stop"
    """Refuse the prompt, or end the answer before the text; or replace the text."""
    replacement: str = "[removed]"
    """Text that replaces a match, with `action: replace`."""
    reason: str = ""
    """Reason that clients are told."""
    applies_to: AppliesTo = "both"


class ServiceOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A service that is asked over HTTP."""

    url: Name
    """`http://` or `https://`; each question is a POST there."""


class PythonOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A function in Python, which runs on threads of the gateway."""

    object: Name
    """`module:function`, or the name of an entry point in the group `disagg.guardrails`. A class is called with
    `options`, for the function."""
    options: dict[str, Any] = {}
    """Keyword arguments of a class."""


class GuardrailOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One of `gateway.guardrails`: `rules`, a `service`, or `python`. They are asked in their order."""

    name: Name
    """Name in metrics, logs, errors and `disagg explain`."""
    rules: tuple[RuleOptions, ...] = ()
    """Built-in rules, which are checked in the gateway itself."""
    service: ServiceOptions | None = None
    """`{url}`: asked over HTTP."""
    python: PythonOptions | None = None
    """`{object, options}`: asked on a thread."""
    applies_to: AppliesTo = "both"
    """Texts that the `service` or `python` object checks; each rule has its own."""
    piece_chars: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)] | Literal["whole"] = "whole"
    """Characters of an answer that are asked about at a time; a stream is held back by as many. `whole` holds all of it
    back."""
    context_chars: Annotated[int, msgspec.Meta(ge=0, le=1 << 16)] = 0
    """Characters of the answer before a piece that are sent with it."""
    timeout_s: Seconds = 1.0
    """Seconds after which a question counts as failed; before it is asked, it waits for its place as long at most."""
    max_running: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 16
    """Questions at a time: connections of a service, threads of Python. Where there are several tenants, a quarter of
    them is never one tenant's, nor of those that wait."""
    max_waiting: NonNegativeInt = 256
    """Further questions, that wait; beyond that requests are refused."""
    on_failure: Literal["stop", "allow"] = "stop"
    """What becomes of requests while the guardrail is down: they fail with code `guardrail_unavailable`, or go on. It
    is down once questions of all tenants fail; before that a request without a verdict fails, whatever is set here."""


def check_guardrails(guardrails: Sequence[GuardrailOptions], path: str) -> None:
    """Raises `ConfigError` naming the first field that cannot work."""
    if len(guardrails) > MAX_GUARDRAILS:
        raise ConfigError(f"{path}: at most {MAX_GUARDRAILS}, not {len(guardrails)}")
    names: set[str] = set()
    for i, each in enumerate(guardrails):
        here = f"{path}[{i}]"
        check_bounds(each, here)
        if not _NAME.fullmatch(each.name):
            raise ConfigError(f"{here}.name: must be of letters, digits, dots, dashes and underscores, at most 64")
        if each.name in names:
            raise ConfigError(f"{here}.name: {each.name!r} is the name of another one")
        names.add(each.name)
        if sum((bool(each.rules), each.service is not None, each.python is not None)) != 1:
            raise ConfigError(f"{here}: exactly one of rules, service and python must be set")
        if each.service is not None:
            _check_url(each.service.url, f"{here}.service.url")
        if each.python is not None and not _OBJECT.fullmatch(each.python.object):
            raise ConfigError(f"{here}.python.object: must be module:function or the name of an entry point")
        if isinstance(each.piece_chars, str) and each.context_chars:
            raise ConfigError(f"{here}.context_chars: needs piece_chars; whole answers have no text before them")
        _check_rules(each.rules, f"{here}.rules")


def _check_rules(rules: Sequence[RuleOptions], path: str) -> None:
    if len(rules) > MAX_RULES:
        raise ConfigError(f"{path}: at most {MAX_RULES}, not {len(rules)}")
    for i, rule in enumerate(rules):
        here = f"{path}[{i}]"
        check_bounds(rule, here)
        if sum((rule.pattern is not None, rule.secrets, rule.max_chars is not None)) != 1:
            raise ConfigError(f"{here}: exactly one of pattern, secrets and max_chars must be set")
        if rule.name and not _NAME.fullmatch(rule.name):
            raise ConfigError(f"{here}.name: must be of letters, digits, dots, dashes and underscores, at most 64")
        if rule.max_chars is not None and rule.action == "replace":
            raise ConfigError(f"{here}.action: max_chars can only stop")
        if len(rule.replacement) > 1024 or len(rule.reason) > 200:
            raise ConfigError(f"{here}: at most 1024 characters of replacement and 200 of reason")
        if rule.pattern is not None:
            try:
                check_pattern(rule.pattern)
            except PatternError as error:
                raise ConfigError(f"{here}.pattern: {error}") from None


def _check_url(url: str, path: str) -> None:
    try:
        parts = urlsplit(url)
        is_good = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        is_good = False
    if not is_good or not url.isascii() or not url.isprintable() or " " in url:
        raise ConfigError(f"{path}: must be http://host:port/path or https://host/path; got {url!r}")
    if parts.username or parts.password or parts.fragment:
        raise ConfigError(f"{path}: must have no user, password or fragment")
