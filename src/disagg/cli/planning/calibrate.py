"""`disagg calibrate`: writes a file of step times for `disagg plan` and `disagg simulate`.

run_calibrate    measures steps of one worker's engine on this machine
run_recorded     takes what workers measured while they served, from recordings of their gateway
"""

from __future__ import annotations

import datetime
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from rich.console import Console

from disagg.cluster.core.config_reader import parse_size
from disagg.cluster.models.catalog import FAKE_MODEL, resolve_model
from disagg.cluster.system.program import command
from disagg.cluster.system.terminal import table
from disagg.engine.config import WorkerConfig
from disagg.engine.core.calibration import clear_blocks, dummy_step
from disagg.engine.parallel.factories import make_runner, warm_up
from disagg.engine.plan import ModelRunner, StepPlan
from disagg.proto.errors import ConfigError
from disagg.proto.messages import StepSample
from disagg.router.recording.entries import Handled
from disagg.router.recording.recording_file import RecordingError, RecordingReader
from disagg.simulator.durations.calibration_file import StepRecording, decode_recording, encode_recording
from disagg.simulator.durations.fitted import FITS, MIN_SAMPLES, error_of, held_out_error
from disagg.simulator.durations.grid import grid
from disagg.simulator.durations.recorded import Trace, calibrate, trace

MIN_ROUNDS, MAX_ROUNDS = 3, 50
WARM_UPS = 1
"""Runs of each step before the first one that counts."""

Clock = Callable[[], float]


def worker_config(
    model: str, *, dtype: str, quantization: str, device: str, threads: int, kv_cache: str, token_budget: int
) -> WorkerConfig:
    """Configuration of one worker that computes prompts and decodes. Raises `ConfigError`."""
    try:
        kv_cache_bytes = parse_size(kv_cache)
    except ValueError as error:
        raise ConfigError(f"--kv-cache: {error}") from None
    path = model if model == FAKE_MODEL else str(resolve_model(model))
    values = {
        "worker_id": "calibrate-0",
        "roles": ("prefill", "decode"),
        "model_path": path,
        "dtype": dtype,
        "quantization": quantization,
        "device": device,
        "num_threads": threads,
        "kv_cache_bytes": kv_cache_bytes,
        "token_budget": token_budget,
    }
    try:
        return msgspec.convert(values, WorkerConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"calibrate: {error}") from None


def measure(
    runner: ModelRunner, config: WorkerConfig, clock: Clock, limit_s: float, say: Callable[[str], None]
) -> tuple[StepSample, ...]:
    """Measure the steps of the grid. Each time is the lower quartile of several runs, because a disturbance only makes
    a run longer.

    Each round runs the whole grid, so that a disturbance of some duration affects a few runs of every step and not all
    runs of a few. The first round sets how many there is time for.

    Raises:
        ConfigError: not even one round is possible within `limit_s`; says how many steps were.
    """
    steps = grid(
        token_budget=config.token_budget,
        max_len=min(runner.max_model_len, runner.num_blocks * runner.block_size),
        num_blocks=runner.num_blocks,
        block_size=runner.block_size,
        max_num_seqs=config.max_num_seqs,
    )
    plans = [dummy_step(runner, **step._asdict()) for step in steps]
    clear_blocks(runner, plans)
    end = clock() + limit_s
    times: list[list[float]] = [[] for _ in plans]
    done = _round(runner, plans, times, clock, end - (1.0 - 1.0 / MIN_ROUNDS) * limit_s, WARM_UPS)
    if done < MIN_SAMPLES:
        raise ConfigError(
            f"--limit-s: {limit_s:g} s are too short: one round measured {done} of {len(plans)} steps, "
            f"and {MIN_SAMPLES} are needed"
        )
    if done < len(plans):
        say(f"the {len(plans) - done} longest of {len(plans)} steps are left out: --limit-s is too short for them")
    for _ in range(MAX_ROUNDS - 1):
        _round(runner, plans[:done], times, clock, end, 0)
        if clock() >= end:
            break
    say(f"{done} steps, {sum(map(len, times))} runs")
    return tuple(
        plan.measured(sorted(runs)[(len(runs) - 1) // 4] * 1e3) for plan, runs in zip(plans, times, strict=True) if runs
    )


def _round(
    runner: ModelRunner,
    plans: Sequence[StepPlan],
    times: list[list[float]],
    clock: Clock,
    end: float,
    warm_ups: int,
) -> int:
    """Run each plan once, until `end`, and return how many were run."""
    for at, plan in enumerate(plans):
        for _ in range(warm_ups):
            runner.run(plan)
        started = clock()
        if started >= end:
            return at
        runner.run(plan)
        times[at].append(clock() - started)
    return len(plans)


def print_fits(console: Console, samples: Sequence[StepSample], expert_share: float) -> None:
    """Print the errors of both fits, for these steps and for steps that were held out."""
    shown = table("fit", "mean>", "median>", "p90>", "worst>", "held out: mean>", "median>", "p90>", "worst>")
    for name, make in FITS.items():
        seen, unseen = error_of(make(samples, expert_share), samples), held_out_error(make, samples, expert_share)
        shown.add_row(
            name,
            *(
                f"{100.0 * value:.1f} %"
                for error in (seen, unseen)
                for value in (error.mean, error.median, error.p90, error.worst)
            ),
        )
    console.print(shown)


def run_calibrate(
    config: WorkerConfig, name: str, out: Path, limit_s: float, console: Console, clock: Clock = time.monotonic
) -> None:
    """Measure, write the file, and print how well the fits predict. Raises `ConfigError`."""
    if not out.parent.is_dir():
        raise ConfigError(f"--out: there is no folder {out.parent}")

    def say(line: str) -> None:
        console.print(line, highlight=False, markup=False, soft_wrap=True)

    runner = make_runner(config)
    warm_up(runner, config)
    samples = measure(runner, config, clock, limit_s, say)
    recording = StepRecording(
        model=name,
        fingerprint=runner.fingerprint,
        dtype=config.dtype,
        quantization=config.quantization,
        device=config.device,
        num_threads=config.num_threads,
        tp=runner.shape.tp,
        machine=machine_name(),
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        kv_bytes_per_token=runner.layout.bytes_per_token,
        kv_windows=runner.layout.windows,
        expert_share=runner.expert_share,
        samples=samples,
    )
    out.write_bytes(encode_recording(recording))
    print_fits(console, samples, recording.expert_share)
    say(f"written to {out}; next: {command(f'plan --step-times {out} --device cpu-core --model {name} ...')}")


def run_recorded(files: Sequence[Path], model: str | None, out: Path, console: Console) -> None:
    """Fit recordings of a router's events, write the file, print what was found. Raises `ConfigError`."""
    if not out.parent.is_dir():
        raise ConfigError(f"--out: there is no folder {out.parent}")
    traces, epoch_s = [], 0.0
    for file in files:
        found, began_s = _read_trace(file)
        traces.append(found)
        epoch_s = max(epoch_s, began_s)
    infos = [info for each in traces for info in each.infos]
    if len({(info.fingerprint, info.kv_layout) for info in infos}) != 1:
        raise ConfigError("--recording: the workers in it are of several models, or there is none; record one model")
    is_one_machine = all(len({info.address.rpartition(":")[0] for info in each.infos}) == 1 for each in traces)
    samples, sharing, overheads, drafts = calibrate(traces, is_one_machine=is_one_machine)
    layout = infos[0].kv_layout
    recording = StepRecording(
        model=model or infos[0].fingerprint,
        fingerprint=infos[0].fingerprint,
        dtype=layout.groups[0].dtype,
        machine=machine_name(),
        date=datetime.datetime.fromtimestamp(epoch_s, datetime.UTC).isoformat(timespec="seconds"),
        kv_bytes_per_token=layout.bytes_per_token,
        kv_windows=layout.windows,
        expert_share=infos[0].expert_share,
        overheads=overheads,
        sharing=sharing,
        drafts=drafts,
        samples=samples,
    )
    out.write_bytes(encode_recording(recording))
    print_fits(console, samples, recording.expert_share)
    found_s = table("per", "ms>")
    for part in (overheads, *([sharing] if sharing is not None else [])):
        for name, value in msgspec.structs.asdict(part).items():
            if value:
                found_s.add_row(name, f"{value:.3f} of a step" if "_by_" in name else f"{value * 1e3:.3f}")
    console.print(found_s)
    if drafts is not None:
        per_step = f"{drafts.tokens_per_step:.2f} tokens and {drafts.rows_per_step:.2f} rows"
        console.print(f"with drafts a decode step has {per_step} for each sequence", highlight=False)
    console.print(f"written to {out}; next: {command(f'simulate ... --times {out}')}", highlight=False, soft_wrap=True)


def _read_trace(file: Path) -> tuple[Trace, float]:
    """Read one recording, and when it began in seconds since the epoch."""
    try:
        with file.open("rb") as opened:
            reader = RecordingReader(opened)
            events = ((entry.now, entry.event) for entry in reader.entries() if isinstance(entry, Handled))
            return trace(events), reader.header.epoch_s
    except OSError as error:
        raise ConfigError(f"--recording: {file} cannot be read: {error.strerror}") from None
    except RecordingError as error:
        raise ConfigError(f"--recording: {file}: {error}") from None


def machine_name() -> str:
    """Name of the processor, as the operating system gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def read_recording(file: Path, flag: str = "--step-times") -> StepRecording:
    """Read a file of `disagg calibrate`. Raises `ConfigError` that names the flag, the file and the field."""
    try:
        content = file.read_bytes()
    except OSError as error:
        raise ConfigError(f"{flag}: {file} cannot be read: {error.strerror}") from None
    return decode_recording(content, f"{flag}: {file}")
