"""The twin as a child of the controller: started, started again with a pause when it ended, and ended.

    tick(now, gateway's address) ──> spawn(`python -m disagg.cli.twin.process`), which reads the gateway's load and sets
                                     where answers decode (docs/twin.md)

The module is named and not imported: a cluster needs neither the simulator nor the client, and serves on without it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from disagg.cluster.config.cluster_config import ClusterConfig
from disagg.cluster.core.backoff import next_start
from disagg.cluster.system.children import (
    LOG_TAIL_LINES,
    Process,
    describe_exit,
    end,
    last_lines,
    open_log,
    spawn,
    with_log,
)
from disagg.cluster.system.process_tools import thread_environment
from disagg.connections.addresses import is_loopback

logger = logging.getLogger(__name__)

MODULE: Final = "disagg.cli.twin.process"
LOG_NAME: Final = "twin.log"
KEY_VARIABLE: Final = "DISAGG_API_KEY"
CA_VARIABLE: Final = "DISAGG_CA_CERT"
_ANY: Final = ("0.0.0.0", "::")
"""Hosts of a gateway that can also be reached through loopback."""
LEAST_CORES: Final = 2
"""Least number of cores for `controller.twin: auto`."""
STOP_S = 0.5
"""Seconds from SIGTERM to SIGKILL: it has nothing to save, and does not check for signals while it compares."""


class TwinSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Message to the child on standard input."""

    address: str
    """Address of the gateway, host:port."""
    api_key: str = ""
    """API key of an admin; empty where the gateway has no keys."""
    cores: tuple[int, ...] = ()
    """Cores that it may run on; empty for those of its parent."""

    def __repr__(self) -> str:
        return f"TwinSettings(address={self.address!r}, api_key={'...' if self.api_key else None})"


class TwinProcess:
    """Owner of one child process. Its methods block shortly, and are called by one thread at a time.

    Args:
        api_key, cores: see `TwinSettings`.
        log: a file to write to; without one, it writes where this process does.
    """

    def __init__(self, api_key: str = "", cores: Sequence[int] = (), log: Path | None = None) -> None:
        self._settings = TwinSettings(address="", api_key=api_key, cores=tuple(cores))
        self._log = log
        self._process: Process | None = None
        self._started_s = 0.0
        self._due_s = -float("inf")
        self._num_faults = 0

    @property
    def pid(self) -> int | None:
        """Process id of the running child, or None."""
        process = self._process
        return None if process is None else process.pid

    def tick(self, now: float, address: str) -> None:
        """Start the child if that is due; to be called periodically.

        Args:
            now: time of a monotonic clock.
            address: host:port of the gateway; empty while there is none. A running child is kept in that case, and
                replaced if the gateway has another address.
        """
        if self._process is not None and (status := self._process.poll()) is not None:
            self._ended(describe_exit(status), now)
        if address and address != self._settings.address:
            self.stop()
            self._settings = msgspec.structs.replace(self._settings, address=address)
        if self._process is None and address and now >= self._due_s:
            self._start(now)

    def stop(self) -> None:
        """End the child. Idempotent."""
        process, self._process = self._process, None
        if process is not None:
            end([process], STOP_S)

    def _start(self, now: float) -> None:
        self._started_s = now
        try:
            if self._log is None:
                self._process = spawn(MODULE, self._settings, thread_environment(1))
            else:
                with open_log(self._log) as output:
                    self._process = spawn(MODULE, self._settings, thread_environment(1), output)
        except OSError as error:
            self._ended(f"it cannot be run: {error}", now)

    def _ended(self, how: str, now: float) -> None:
        self.stop()
        self._num_faults, pause_s = next_start(self._num_faults, now - self._started_s)
        self._due_s = now + pause_s
        text = with_log(
            f"the twin ended ({how}) and starts again in {pause_s:g} s; until then the present setting of "
            "placement.decodes stays",
            last_lines(self._log, LOG_TAIL_LINES) if self._log is not None else "",
        )
        logger.warning("%s", text)


def twin_of(
    config: ClusterConfig, api_key: str, environ: Mapping[str, str], cores: Sequence[int], log_dir: Path | None = None
) -> TwinProcess | None:
    """Make the twin of a cluster, not started; None if none is wanted, or there is an `obstacle`."""
    if not is_wanted(config) or obstacle(config, api_key, environ, len(cores)):
        return None
    return TwinProcess(api_key, cores, None if log_dir is None else log_dir / LOG_NAME)


def is_wanted(config: ClusterConfig) -> bool:
    """Whether the configuration wants a twin to choose where answers decode."""
    return config.placement.decodes == "auto"


def key_for(config: ClusterConfig, environ: Mapping[str, str]) -> str:
    """The key that a twin of this cluster needs, if the environment has it."""
    return environ.get(KEY_VARIABLE, "") if is_wanted(config) and config.gateway.api_keys is not None else ""


def obstacle(config: ClusterConfig, api_key: str, environ: Mapping[str, str], num_cores: int) -> str:
    """Reason why the controller starts no twin although one is wanted; else empty. `num_cores`: cores of its
    machine."""
    if not is_wanted(config):
        return ""
    if config.controller.twin == "off":
        why = "controller.twin is off"
    elif config.controller.twin == "auto" and num_cores < LEAST_CORES:
        why = "this machine has one core; controller.twin: on starts it all the same"
    else:
        why = _missing_access(config, api_key, environ)
    if not why:
        return ""
    return (
        f"placement.decodes: auto, and the controller starts no twin: {why}. Until a `disagg twin` runs, answers "
        "decode with spread"
    )


def _missing_access(config: ClusterConfig, api_key: str, environ: Mapping[str, str]) -> str:
    """Reason why the gateway would refuse the twin; empty if it would not."""
    gateway = config.gateway
    if gateway.api_keys is not None and not api_key:
        return f"it needs the key of an admin ({KEY_VARIABLE} of disagg up; a Ray that others use does not get it)"
    if gateway.api_keys is None and gateway.tls is None and not (is_loopback(gateway.host) or gateway.host in _ANY):
        return "a gateway without keys takes changes from its own machine only; set gateway.api_keys"
    if gateway.tls is not None:
        if gateway.api_keys is None and gateway.tls.client_ca is not None:
            return "it needs the key of an admin, and there is no gateway.api_keys"
        if not environ.get(CA_VARIABLE):
            return f"it needs the CA of the gateway's certificate in {CA_VARIABLE}"
    return ""
