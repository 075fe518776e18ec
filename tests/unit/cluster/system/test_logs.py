"""Logs as text and as JSON."""

from __future__ import annotations

import json
import logging
import sys

import pytest

from disagg.cluster.config.cluster_config import parse_config
from disagg.cluster.system.logs import JsonFormatter, log_environment, setup_logging
from disagg.proto.errors import ConfigError


def record(message: str, *args: object, **more: object) -> logging.LogRecord:
    made = logging.LogRecord("disagg.x", logging.WARNING, "x.py", 1, message, args, None)
    made.created, made.msecs = 1_700_000_000.25, 250.0
    vars(made).update(more)
    return made


def test_a_json_line_is_one_object() -> None:
    line = JsonFormatter().format(record("two\nlines and %s", '"quotes"', request_id="r1", trace_id=""))
    assert "\n" not in line
    assert json.loads(line) == {
        "ts": "2023-11-14T22:13:20.250Z",
        "level": "warning",
        "logger": "disagg.x",
        "message": 'two\nlines and "quotes"',
        "request_id": "r1",
    }


def test_a_json_line_has_the_traceback() -> None:
    try:
        raise ValueError("broken")
    except ValueError:
        failed = record("no luck", trace_id="ab")
        failed.exc_info = sys.exc_info()
    line = json.loads(JsonFormatter().format(failed))
    assert line["trace_id"] == "ab"
    assert line["error"].startswith("Traceback")
    assert line["error"].endswith("ValueError: broken")


@pytest.mark.parametrize(
    ("environ", "levels", "is_json"),
    [
        ({}, (logging.INFO, logging.WARNING), False),
        ({"DISAGG_LOG": "debug"}, (logging.DEBUG, logging.DEBUG), False),
        ({"DISAGG_LOG": "error"}, (logging.ERROR, logging.ERROR), False),
        ({"DISAGG_LOG": "loud", "DISAGG_LOG_FORMAT": "json"}, (logging.INFO, logging.WARNING), True),
    ],
)
def test_the_environment_says_how_to_log(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], levels: tuple[int, int], is_json: bool
) -> None:
    root, ours = logging.getLogger(), logging.getLogger("disagg")
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(root, "level", root.level)
    monkeypatch.setattr(ours, "level", ours.level)
    setup_logging(environ)
    (handler,) = root.handlers
    assert ((ours.level, root.level), isinstance(handler.formatter, JsonFormatter)) == (levels, is_json)


def test_what_the_user_set_by_hand_goes_before_the_file() -> None:
    assert log_environment("info", "json", {}) == {"DISAGG_LOG": "info", "DISAGG_LOG_FORMAT": "json"}
    assert log_environment("info", "text", {"DISAGG_LOG": "debug"}) == {
        "DISAGG_LOG": "debug",
        "DISAGG_LOG_FORMAT": "text",
    }


def test_the_section_of_the_configuration() -> None:
    config = parse_config({"logging": {"format": "json", "level": "debug"}, "metrics": {"vllm_aliases": False}})
    assert (config.logging.format, config.logging.level, config.metrics.vllm_aliases) == ("json", "debug", False)
    with pytest.raises(ConfigError, match=r"logging\.format"):
        parse_config({"logging": {"format": "xml"}})
