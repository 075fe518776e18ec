"""The file that Locust runs: one user that is the whole open loop, and a shape that ends the test when the loop has
ended.

    locust -f loadtests/generator/locustfile.py --headless --host 127.0.0.1:8470 --scenario interactive --rate 2

Locust's own model, many users that each wait for their answer, is a closed loop: it sends less when the server is slow.
So there is exactly one user here, which takes its requests from a plan (open_loop.py); numbers of users and spawn rates
mean nothing. Headless, the exit status is 0 when enough requests met their limits, 1 when not, 2 when the run is not
valid or did not come to its end.

Locust has patched the standard library for gevent before it reads this file. `init_grpc` must run before the first
channel is made, hence before the other imports.
"""

from __future__ import annotations

from disagg.loadtests.generator.grpc_gevent import init_grpc

init_grpc()

# ruff: noqa: E402
import logging
import os
import sys
from typing import Any

from locust import LoadTestShape, User, events
from locust.env import Environment
from locust.exception import StopUser

from disagg.loadtests.generator.run import (
    DEFAULT_HOST,
    EXIT_INVALID,
    PAGE_OPTIONS,
    LoadRun,
    add_arguments,
    cores_of,
    niceness_of,
    settings_of,
)
from disagg.loadtests.generator.web_page import View, add_goodput_tab, guard_page

logger = logging.getLogger(__name__)

ONE_USER = (1, 1.0)


class _Current:
    """The last run of this process. Locust has one environment per process and one run at a time."""

    run: LoadRun | None = None
    error: str = ""
    """Reason why the last run could not begin; empty if it did."""


current = _Current()


def _play(user: User) -> None:
    """The only task of a user: the whole test."""
    try:
        options = user.environment.parsed_options
        current.run = LoadRun(settings_of(options), user.environment)
        current.run.play()
    except (ValueError, ConnectionError) as error:
        current.error = str(error)
        logger.error("%s", error)
    raise StopUser


class OpenLoopUser(User):  # type: ignore[misc]
    """Plays one run and stops."""

    fixed_count = 1
    tasks = (_play,)


class UntilTheEnd(LoadTestShape):  # type: ignore[misc]
    """One user until its run is over. (With a shape Locust's page has no fields for numbers of users.)"""

    use_common_options = False

    def reset_time(self) -> None:
        """End the last run. Locust calls this when a test begins."""
        super().reset_time()
        current.run, current.error = None, ""

    def tick(self) -> tuple[int, float] | None:
        """Number of users and spawn rate; None ends the test. Locust calls this once a second."""
        is_over = current.error or (current.run is not None and current.run.is_over)
        return None if is_over else ONE_USER


def _add_arguments(parser: Any, **_: object) -> None:
    add_arguments(parser)


def _begin(environment: Environment, **_: object) -> None:
    """Set cores and priority, and refuse invalid options, before anything is sent."""
    options = environment.parsed_options
    assert options is not None
    try:
        _settle(cores_of(options), niceness_of(options))
        settings_of(options)
    except ValueError as error:
        logger.error("%s", error)
        sys.exit(EXIT_INVALID)
    if environment.web_ui is not None:
        options.host = environment.host = options.host or DEFAULT_HOST
        guard_page(environment.web_ui, options, PAGE_OPTIONS)
        add_goodput_tab(environment.web_ui, _seen)


def _seen() -> View | None:
    """Data of the goodput tab."""
    return None if current.run is None else (current.run.records, current.run.settings.slo)


def _settle(cores: set[int] | None, niceness: int | None) -> None:
    """Set cores and priority, which later threads inherit. Raises `ValueError` for cores that do not exist."""
    if cores is not None:
        try:
            os.sched_setaffinity(0, cores)
        except OSError as error:
            raise ValueError(f"--generator-cores: {sorted(cores)}: {error.strerror}") from None
    if niceness is not None:
        try:
            os.setpriority(os.PRIO_PROCESS, 0, niceness)
        except PermissionError:
            logger.warning("--generator-nice: %d is not allowed here; going on without", niceness)


def _set_exit_status(environment: Environment, **_: object) -> None:
    run = current.run
    environment.process_exit_code = EXIT_INVALID if run is None else run.exit_status()
    if run is not None and (score := run.score()) is not None:
        logger.info("attainment %.4f, goodput %.4f requests/s", score.attainment, score.goodput_per_s)
        for reason in score.invalid_reasons:
            logger.error("not valid: %s", reason)


events.init_command_line_parser.add_listener(_add_arguments)
events.init.add_listener(_begin)
events.quitting.add_listener(_set_exit_status)
