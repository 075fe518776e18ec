"""Runs the load generator: Locust, headless, as a child process with our locustfile.

On a machine with few cores the generator has to share one. It goes to the machine's first core, where core_layout.py
puts the gateway and the first worker, whatever the shape of the cluster: the same disturbance for all shapes that are
compared, and none for the decode worker. There it may run before the others (`nice`): it uses a few per cent of the
core, and if it had to wait for the worker's long steps it would measure itself. Its lateness is recorded, and too much
of it makes a run invalid.

It inherits the environment, and takes API key and certificates from there as every client does; see
`disagg.client.credentials`.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import msgspec

from disagg.client.credentials import SYSTEM_ROOTS, Credentials
from disagg.cluster.system.children import LaunchError, last_lines
from disagg.cluster.system.cores import available_cores
from disagg.loadtests.generator.recorder import GeneratorInfo, info_path, read_info
from disagg.loadtests.scenario import Scenario, to_raw
from disagg.loadtests.verdict.goodput import Slo
from disagg.loadtests.workload.workload import TraceWorkload
from disagg.proto.errors import ConfigError

LOG_TAIL_LINES = 15
STOP_TIMEOUT_S = 10.0
GENERATOR_NICE = -10
"""Niceness of the generator, which is ignored, with a line in the log, where the system does not allow it."""
_CREDENTIAL_FILES = ("DISAGG_CA_CERT", "DISAGG_CLIENT_CERT", "DISAGG_CLIENT_KEY")


@dataclass(frozen=True, kw_only=True)
class GeneratorOptions:
    """Options of the generator that do not depend on what it sends."""

    cores: tuple[int, ...] = ()
    """Cores of the generator; empty for all."""
    nice: int = GENERATOR_NICE
    max_in_flight: int = 4096
    request_timeout_s: float | None = None

    def arguments(self) -> list[str]:
        """Arguments of Locust's command line."""
        found = [f"--generator-nice={self.nice}", f"--max-in-flight={self.max_in_flight}"]
        if self.cores:
            found.append(f"--generator-cores={','.join(map(str, self.cores))}")
        if self.request_timeout_s is not None:
            found.append(f"--request-timeout-s={self.request_timeout_s:g}")
        return found


def gateway_cores() -> tuple[int, ...]:
    """The core of the gateway of a cluster on this machine."""
    return available_cores()[:1]


def play(
    scenario: Scenario, target: str, record: Path, options: GeneratorOptions, *, slo: Slo | None = None, label: str = ""
) -> GeneratorInfo:
    """Play a scenario against a gateway and record it; blocks until the last answer has ended.

    Args:
        scenario: the requests to send.
        target: host:port.
        record: the .jsonl file.
        options: options of the generator.
        slo: targets that are sent with every request; None sends none.
        label: label for the record.

    Raises:
        LaunchError: if the run did not come to its end; with the end of Locust's log.
        ConfigError: if Locust is not installed, or the environment's credentials cannot be used at `target`.
    """
    check_credentials(target)
    record = record.resolve()
    info_path(record).unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix="disagg-load-") as folder:
        file = Path(folder) / "scenario.yaml"
        file.write_bytes(msgspec.yaml.encode(to_raw(_with_whole_path(scenario))))
        arguments = [f"--scenario={file}", f"--record={record}", f"--label={label}", *slo_arguments(slo or Slo())]
        command = [*locust_command(), "--headless", "--only-summary", f"--host={target}"]
        log = Path(folder) / "locust.log"
        status = _run([*command, *arguments, *options.arguments()], Path(folder), log)
        if not info_path(record).exists():
            raise LaunchError(
                f"the load generator ended with status {status}; its log:\n{last_lines(log, LOG_TAIL_LINES)}"
            )
    info = read_info(record)
    if not info.is_complete:
        raise LaunchError(f"the load generator was stopped before the end; see {record}")
    return info


def _with_whole_path(scenario: Scenario) -> Scenario:
    """Make the path of a trace absolute, because Locust runs in another folder."""
    workload = scenario.workload
    if not isinstance(workload, TraceWorkload):
        return scenario
    whole = msgspec.structs.replace(workload, path=str(Path(workload.path).resolve()))
    return msgspec.structs.replace(scenario, workload=whole)


def slo_arguments(slo: Slo) -> list[str]:
    """Locust's arguments for these limits."""
    limits = (("ttft", slo.ttft_s), ("tpot", slo.tpot_s))
    return [f"--slo-{name}-ms={'none' if limit is None else f'{limit * 1e3:g}'}" for name, limit in limits]


def locust_command() -> list[str]:
    """Command that starts Locust with our file; raises `ConfigError` if Locust is not installed."""
    if importlib.util.find_spec("locust") is None:
        raise ConfigError("load tests need Locust; next: pip install 'disagg[load]'")
    locustfile = Path(__file__).with_name("locustfile.py")
    return [sys.executable, "-m", "locust", "-f", str(locustfile)]


def check_credentials(target: str) -> None:
    """Raises `ConfigError` if the environment's credentials cannot be used at host:port; Locust would fail later."""
    Credentials().channel(target)


def locust_environment() -> dict[str, str]:
    """This process's environment without variables that Locust would take options from. File names are made absolute,
    because Locust runs in another folder."""
    found = {name: value for name, value in os.environ.items() if not name.startswith("LOCUST_")}
    for name in _CREDENTIAL_FILES:
        path = found.get(name)
        if path and path != SYSTEM_ROOTS:
            found[name] = str(Path(path).expanduser().resolve())
    return found


def _run(command: list[str], folder: Path, log: Path) -> int:
    """Run a command to its end, in a folder without files that Locust would read; a Ctrl-C reaches Locust too."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=locust_environment(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            return process.wait()
        finally:
            end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    """End Locust, if it still runs: SIGTERM, then SIGKILL after `STOP_TIMEOUT_S`."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
