"""`disagg calibrate` with the model without weights and a clock that is set."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from disagg.cli.planning import calibrate
from disagg.cli.planning.calibrate import (
    machine_name,
    measure,
    read_recording,
    run_calibrate,
    run_recorded,
    worker_config,
)
from disagg.engine.config import WorkerConfig
from disagg.engine.parallel.factories import make_runner
from disagg.engine.plan import ModelRunner, StepPlan
from disagg.proto.errors import ConfigError
from disagg.router.recording.recorded_core import RecordedCore
from disagg.simulator.durations.fitted import fit
from disagg.simulator.world import gateway as simulated_gateway
from disagg.simulator.world.surroundings import GATEWAY
from disagg.step_times.interface import StepWork
from tests.support.recordings import ListSink, file_of, header_of
from tests.support.simulation import NO_LOCAL, LinearTimes, asked, cluster_spec, simulated


def fake_config(token_budget: int = 64) -> WorkerConfig:
    return worker_config(
        "fake",
        dtype="bfloat16",
        quantization="none",
        device="cpu",
        threads=1,
        kv_cache="1MiB",
        token_budget=token_budget,
    )


class Timed:
    """A runner whose steps take 1 s a token on its own clock, and every seventh run twice that."""

    def __init__(self, config: WorkerConfig) -> None:
        self.now = 0.0
        self.runs = 0
        self.runner: ModelRunner = make_runner(config)
        run = self.runner.run

        def timed(plan: StepPlan) -> object:
            self.runs += 1
            self.now += plan.num_tokens * (2.0 if self.runs % 7 == 0 else 1.0)
            return run(plan)

        self.runner.run = timed  # type: ignore[method-assign, assignment]

    def clock(self) -> float:
        return self.now


def measured(limit_s: float, say: Callable[[str], None] = lambda line: None) -> dict[int, set[float]]:
    """Times by rows of a step."""
    config = fake_config()
    timed = Timed(config)
    found: dict[int, set[float]] = {}
    for sample in measure(timed.runner, config, timed.clock, limit_s, say):
        found.setdefault(sample.prefill_tokens + sample.num_decodes, set()).add(sample.ms)
    return found


def test_disturbed_runs_do_not_count() -> None:
    lines: list[str] = []
    found = measured(1e6, lines.append)
    assert found == {rows: {1000.0 * rows} for rows in found}
    assert max(found) == 64
    assert lines[-1].endswith(f"{50 * int(lines[-1].split()[0])} runs")


def test_what_takes_too_long_is_left_out() -> None:
    lines: list[str] = []
    found = measured(1500.0, lines.append)
    assert 8 in found
    assert 64 not in found
    assert lines[0].endswith("--limit-s is too short for them")


def test_too_little_time_is_an_error_with_the_flag() -> None:
    with pytest.raises(
        ConfigError, match=r"^--limit-s: 3 s are too short: one round measured \d of \d+ steps, and 8 are"
    ):
        measured(3.0)


def test_the_file_says_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = fake_config()
    timed = Timed(config)
    monkeypatch.setattr(calibrate, "make_runner", lambda config: timed.runner)
    out, screen = tmp_path / "steps.json", io.StringIO()
    run_calibrate(config, "fake", out, 1e6, Console(file=screen, width=200), timed.clock)
    recording = read_recording(out)
    assert (recording.model, recording.dtype, recording.device, recording.tp) == ("fake", "bfloat16", "cpu", 1)
    assert recording.fingerprint == timed.runner.fingerprint
    assert recording.machine == machine_name() != ""
    assert recording.kv_bytes_per_token == timed.runner.layout.bytes_per_token
    assert "piecewise" in screen.getvalue()
    assert f"written to {out}" in screen.getvalue()


def test_a_folder_that_is_not_there_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^--out: there is no folder "):
        run_calibrate(fake_config(), "fake", tmp_path / "no" / "steps.json", 1.0, Console(file=io.StringIO()))


def test_bad_options_are_named() -> None:
    with pytest.raises(ConfigError, match=r"^--kv-cache: 'much' is not a size"):
        worker_config(
            "fake", dtype="bfloat16", quantization="none", device="cpu", threads=1, kv_cache="much", token_budget=64
        )
    with pytest.raises(ConfigError, match=r"^calibrate: Invalid enum value 'bf16' - at `\$.dtype`"):
        worker_config(
            "fake", dtype="bf16", quantization="none", device="cpu", threads=1, kv_cache="1MiB", token_budget=64
        )


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^--step-times: \S+ cannot be read: No such file or directory$"):
        read_recording(tmp_path / "steps.json")
    (tmp_path / "steps.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"^--step-times: \S+steps.json: not recorded step times: "):
        read_recording(tmp_path / "steps.json")


# ---------------------------------------------------------------- from recordings of a cluster that served


def recorded_run(monkeypatch: pytest.MonkeyPatch) -> bytes:
    """The recording of a simulated cluster's gateway, as a file."""
    sink = ListSink()
    monkeypatch.setattr(simulated_gateway, "RouterCore", lambda config, gateway_id: RecordedCore(config, GATEWAY, sink))
    spec = cluster_spec(prefill=1, decode=1, router=NO_LOCAL, times=LinearTimes(base_s=0.004, token_s=0.0005))
    simulated(spec, asked(*[(0.2 * i, 20 + 41 * i % 300, 10 + i % 40) for i in range(100)]))
    return file_of(header_of(spec.router, GATEWAY), sink.entries)


def test_step_times_come_from_a_recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, out = tmp_path / "run.events", tmp_path / "steps.json"
    file.write_bytes(recorded_run(monkeypatch))
    shown = io.StringIO()
    run_recorded([file], "small", out, Console(file=shown, width=200))
    recording = read_recording(out)
    assert (recording.model, recording.fingerprint, recording.kv_bytes_per_token) == ("small", "simulated", 1000)
    assert recording.sharing is None  # each simulated worker has a host of its own
    step = fit(recording.samples)
    assert step.step_s(StepWork(200, 20_100, 0, 0)) == pytest.approx(0.104, rel=0.02)
    assert step.step_s(StepWork(0, 0, 3, 600)) == pytest.approx(0.010, rel=0.02)
    assert f"written to {out}; next: disagg simulate ... --times {out}" in shown.getvalue()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"no recording", "not a recording of a router's events"),
        (None, "cannot be read: No such file or directory"),
    ],
)
def test_what_is_no_recording_is_refused(tmp_path: Path, content: bytes | None, message: str) -> None:
    file = tmp_path / "run.events"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError) as refused:
        run_recorded([file], None, tmp_path / "steps.json", Console(file=io.StringIO()))
    assert str(refused.value).startswith(f"--recording: {file}")
    assert str(refused.value).endswith(message)


def test_a_recording_without_workers_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "run.events"
    file.write_bytes(file_of(header_of(NO_LOCAL, GATEWAY), []))
    with pytest.raises(ConfigError, match=r"^--recording: the workers in it are of several models, or there is none"):
        run_recorded([file], None, tmp_path / "steps.json", Console(file=io.StringIO()))
