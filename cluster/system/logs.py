"""Logs of a cluster's processes: on standard error, as text or as one JSON object a line.

The launcher sets its children's environment (`log_environment`), so that all processes log alike; `DISAGG_LOG`, set by
hand, goes before the configured level.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Mapping
from typing import Literal

import msgspec
from typing_extensions import override

LEVEL_VARIABLE = "DISAGG_LOG"
FORMAT_VARIABLE = "DISAGG_LOG_FORMAT"
TEXT_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_IDS = ("request_id", "trace_id")
"""Attributes that a log record may have besides its message."""


class LoggingConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The section `logging`: logs of workers, gateway and controller, on standard error. Prompts and answers are never
    logged."""

    format: Literal["text", "json"] = "text"
    """Format of the lines; `json` is one object a line."""
    level: Literal["debug", "info", "warning", "error"] = "info"
    """Level of the logs. The environment variable `DISAGG_LOG` takes precedence. `debug` has a line for each request;
    `info` starts, stops and changes; `warning` what is degraded or refused; `error` what was lost or stopped working.
    """


DEFAULT_LEVEL = LoggingConfig().level


class JsonFormatter(logging.Formatter):
    """Formats a record as one object a line: ts (UTC), level, logger, message; request_id and trace_id if the record
    has them; error with the traceback if there is one."""

    @override
    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "ts": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {name: value for name in _IDS if (value := getattr(record, name, ""))}
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


def setup_logging(environ: Mapping[str, str]) -> None:
    """Log to standard error as the environment sets it: `info` and up, as text, by default. Other packages log warnings
    and up, and below `info` everything. Does nothing where logging is set up already."""
    handler = logging.StreamHandler(sys.stderr)
    as_json = environ.get(FORMAT_VARIABLE) == "json"
    handler.setFormatter(JsonFormatter() if as_json else logging.Formatter(TEXT_FORMAT))
    if logging.getLogger().handlers:
        return
    levels = logging.getLevelNamesMapping()
    level = levels.get(environ.get(LEVEL_VARIABLE, "").upper(), levels[DEFAULT_LEVEL.upper()])
    logging.basicConfig(handlers=[handler], level=level if level < logging.INFO else max(level, logging.WARNING))
    logging.getLogger("disagg").setLevel(level)


def log_environment(level: str, log_format: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Environment with which children log like this. A level in `environ` takes precedence over `level`."""
    return {LEVEL_VARIABLE: environ.get(LEVEL_VARIABLE, level), FORMAT_VARIABLE: log_format}
