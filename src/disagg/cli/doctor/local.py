"""The checks of `disagg doctor` of this machine. Each check reads the machine and gives what it read to a pure function
that judges it."""

from __future__ import annotations

import importlib.metadata
import json
import os
import resource
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from disagg.cli.doctor.finding import Finding
from disagg.cluster.models.catalog import DEFAULT_MODEL, ModelEntry, cache_dir, list_models
from disagg.cluster.system.cores import available_cores, num_cuda_devices
from disagg.cluster.system.program import command
from disagg.engine.checkpoint.checkpoint import read_model_config
from disagg.proto.errors import ConfigError

MIN_PYTHON = (3, 11)
MIN_MEMORY_BYTES = 3 << 30
"""Least memory for the default cluster with the default model: two KV caches of 1 GiB, and two processes with
weights."""
MIN_OPEN_FILES = 4096
"""Least number of open files: each client's connection is one, and some dozens are our own."""
MIN_CORES = 2
DESCRIBE_TIMEOUT_S = 540.0
"""Time limit in seconds. The first time, the kernels are compiled; on a GPU each attention provider may take `PROBE_S`
besides."""
NIXL_CHECK_S = 90.0
BF16_BYTES = 2
DTYPE_BYTES = {"bfloat16": BF16_BYTES, "float32": 4}
RAY_TOKEN_FILE = "~/.ray/auth_token"


def local_findings() -> Iterator[Finding]:
    """Check this machine, one item after the other, and yield findings as they come."""
    yield python_finding(sys.version_info[:3])
    yield from _engine()
    checks: tuple[Callable[[], Finding], ...] = (
        _transports,
        lambda: cores_finding(len(available_cores())),
        _memory,
        lambda: files_finding(resource.getrlimit(resource.RLIMIT_NOFILE)[0]),
        _ray,
        _models,
    )
    for check in checks:
        yield check()


# ---------------------------------------------------------------- judged


def python_finding(version: tuple[int, int, int]) -> Finding:
    """Finding about the version of Python."""
    text = ".".join(map(str, version))
    if version < MIN_PYTHON:
        return Finding("FAIL", "Python", f"{text} is too old", "make PYTHON=python3.12 install")
    return Finding("ok", "Python", text)


def engine_finding(described: dict[str, object]) -> Finding:
    """Finding about torch and the kernels, as `disagg.kernels.describe` reports them."""
    kernels = str(described["cpu_kernels"])
    text = f"torch {described['torch']}, {described['num_cuda_devices']} CUDA devices, CPU kernels: {kernels}"
    if not kernels.startswith("torch reference"):
        if "DISAGG_KERNELS" in kernels:
            return Finding("warn", "engine", f"{text}; slower on a GPU", "unset DISAGG_KERNELS")
        return Finding("ok", "engine", text)
    if "DISAGG_KERNELS" in kernels:
        return Finding("warn", "engine", f"{text}; several times slower", "unset DISAGG_KERNELS")
    return Finding("warn", "engine", f"{text}; several times slower", "install a C++ compiler, such as g++")


def speed_finding(described: Mapping[str, Any], model: ModelEntry | None) -> Finding:
    """Finding about the speed of the CPU, and the time per token of a model that follows from it; `described` as
    above."""
    dtype, alone = described["cpu_dtype"], described["speed"][0]
    rates = "; ".join(
        f"{_threads(of['threads'])}: reads {of['read_gb_s']:.1f} GB/s, multiplies {of['gflop_s']:.0f} GFLOP/s"
        for of in described["speed"]
    )
    text = f"{dtype} by the engine's products, {rates}"
    if model is not None:
        num_weights = model.nbytes / BF16_BYTES
        token_ms = num_weights * DTYPE_BYTES[dtype] / alone["read_gb_s"] / 1e6
        prompt_ms = 2 * num_weights / alone["gflop_s"] / 1e6
        text += f"; on one thread a token of {model.name} takes {token_ms:.3g} ms, one of a prompt {prompt_ms:.2g} ms"
    return Finding("ok", "speed", text)


def _threads(count: int) -> str:
    return "1 thread" if count == 1 else f"{count} threads"


def gpu_finding(num_devices: int | None, described: Mapping[str, Any]) -> Finding | None:
    """Finding about the machine's NVIDIA devices, if it has any; `described` as above."""
    seen, torch = described["num_cuda_devices"], f"torch {described['torch']}"
    if not num_devices and not seen:
        return None
    if described["cuda"] is None:
        text = f"{num_devices} NVIDIA devices, but {torch} is built for CPUs"
        return Finding("FAIL", "GPUs", text, "install a torch with CUDA")
    if not seen:
        text = (
            f"{torch} (CUDA {described['cuda']}) sees none of {num_devices} NVIDIA devices: its driver may be too old"
        )
        return Finding("FAIL", "GPUs", text, "nvidia-smi shows the driver; CUDA 13 needs 580 or newer")
    if lacks := described["triton_lacks"]:
        text = f"Triton cannot launch kernels: {', '.join(lacks)} missing"
        return Finding("FAIL", "GPUs", text, "apt install gcc python3-dev; pip install triton")
    return Finding("ok", "GPUs", f"{seen}, CUDA {described['cuda']}")


def attention_finding(described: Mapping[str, Any]) -> Finding:
    """Finding about the attention providers on the first GPU, or what is known of them without one: which one `auto`
    is, and why others cannot be used."""
    refusals: dict[str, str | None] = described["attention"]
    auto, *others = refusals
    text = "; ".join(f"{name}: {refusals[name] or 'can be named in kernels.attention'}" for name in others)
    if not described["num_cuda_devices"]:
        known = refusals[auto] or "there is none to try it"
        return Finding("ok", "attention", f"on CPU the kernels above; on a GPU auto is {auto} ({known}); {text}")
    if refusals[auto]:
        return Finding("FAIL", "attention", f"{auto}: {refusals[auto]}; {text}", "make gpu-check has the details")
    return Finding("ok", "attention", f"auto is {auto}; {text}")


def transports_finding(checked: Mapping[str, Any]) -> Finding:
    """Finding about NIXL, as `nixl_check` reports it, and about the choice of `transfer.transport: auto`."""
    auto = (
        "auto on CPU is shm with network.bind: loopback (the fastest within a host) and gloo with node; on GPUs it is "
        "NIXL where bytes come through when a pair is formed, else those"
    )
    if not checked["version"]:
        return Finding("ok", "transports", f"NIXL is not installed; {auto}", "pip install 'disagg[nixl]', for GPUs")
    if checked["error"]:
        text = f"NIXL {checked['version']} moves nothing within this host: {checked['error']}; {auto}"
        return Finding("warn", "transports", text, "transfer.transport: shm or gloo do without it")
    plugins = ", ".join(checked["plugins"])
    return Finding("ok", "transports", f"NIXL {checked['version']} works within this host (has {plugins}); {auto}")


def cores_finding(num_cores: int) -> Finding:
    """Finding about the cores that this process may use."""
    if num_cores < MIN_CORES:
        text = f"{num_cores}: prefill and decode share it, which is fine for trying out, not for timing"
        return Finding("warn", "cores", text)
    return Finding("ok", "cores", str(num_cores))


def memory_finding(num_bytes: int) -> Finding:
    """Finding about the available memory."""
    text = f"{num_bytes / (1 << 30):.1f} GiB are free"
    if num_bytes < MIN_MEMORY_BYTES:
        need = f"the default cluster takes up to {MIN_MEMORY_BYTES >> 30} GiB"
        return Finding("warn", "memory", f"{text}; {need}", "lower pools.*.kv_cache_bytes in the configuration")
    return Finding("ok", "memory", text)


def files_finding(soft_limit: int) -> Finding:
    """Finding about the number of files that one process may open."""
    if soft_limit == resource.RLIM_INFINITY or soft_limit >= MIN_OPEN_FILES:
        shown = "no limit" if soft_limit == resource.RLIM_INFINITY else f"at most {soft_limit}"
        return Finding("ok", "open files", shown)
    text = f"at most {soft_limit}, and every connection of a client is one"
    return Finding("warn", "open files", text, f"ulimit -n {MIN_OPEN_FILES}")


def ray_finding(version: str, has_token: bool, file_mode: int | None, auth_mode: str) -> Finding:
    """Finding about Ray and its token. `file_mode`: permission bits of the token's file, None without one."""
    if file_mode is not None and file_mode & 0o077:
        text = f"{version}; others can read the token in {RAY_TOKEN_FILE} (mode {file_mode:o})"
        return Finding("warn", "Ray", text, f"chmod 600 {RAY_TOKEN_FILE}")
    if auth_mode and auth_mode.lower() != "token":
        text = f"{version}; RAY_AUTH_MODE={auth_mode}: clusters of several machines run without authentication"
        return Finding("warn", "Ray", text, "unset RAY_AUTH_MODE")
    if has_token:
        return Finding("ok", "Ray", f"{version}, with a token for clusters of several machines")
    return Finding("ok", "Ray", f"{version}; no token yet, which only `ray up` needs: ray get-auth-token --generate")


def models_finding(models: list[ModelEntry], cache: Path, refused: Mapping[str, str] | None = None) -> Finding:
    """Finding about the model cache. `refused`: why a model of it cannot be served, by name."""
    if refused:
        text = "; ".join(f"{name} cannot be served: {reason}" for name, reason in refused.items())
        return Finding("warn", "models", text, command("model import --force"))
    names = ", ".join(
        f"{entry.name} ({entry.weight_format})" if entry.weight_format else entry.name for entry in models
    )
    if DEFAULT_MODEL in {entry.name for entry in models}:
        return Finding("ok", "models", f"{names} in {cache}")
    text = f"{names} in {cache}; not the default one" if names else f"none in {cache}"
    return Finding("warn", "models", text, command(f"model import {DEFAULT_MODEL}"))


# ---------------------------------------------------------------- read


def _engine() -> Iterator[Finding]:
    """Findings about the engine, from a process of its own: see `disagg.kernels.describe`."""
    command = [sys.executable, "-m", "disagg.kernels.describe"]
    install = "install disagg anew: make install"
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DESCRIBE_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        yield Finding("FAIL", "engine", f"torch did not load in {DESCRIBE_TIMEOUT_S:g} s", install)
        return
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        yield Finding("FAIL", "engine", f"torch does not load: {lines[-1]}", install)
        return
    described = json.loads(done.stdout)
    yield engine_finding(described)
    entry = next((entry for entry in list_models() if entry.name == DEFAULT_MODEL), None)
    yield speed_finding(described, entry)
    if (gpus := gpu_finding(num_cuda_devices(os.environ), described)) is not None:
        yield gpus
    yield attention_finding(described)


def _transports() -> Finding:
    """Finding about transports, from a process of its own: see `nixl_check`."""
    command = [sys.executable, "-m", "disagg.engine.kv_transfer.transports.nixl_check"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=NIXL_CHECK_S, check=False)
    except subprocess.TimeoutExpired:
        why = f"its check did not end in {NIXL_CHECK_S:g} s"
    else:
        if not done.returncode:
            return transports_finding(json.loads(done.stdout.splitlines()[-1]))
        why = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
    return transports_finding({"version": "(installed)", "plugins": [], "error": why})


def _memory() -> Finding:
    numbers = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines())
    return memory_finding(int(numbers["MemAvailable"].split()[0]) * 1024)


def _ray() -> Finding:
    from disagg.cluster.on_ray.joined import has_token

    try:
        version = importlib.metadata.version("ray")
    except importlib.metadata.PackageNotFoundError:
        return Finding("warn", "Ray", "not installed; only --launcher processes works", "pip install 'ray[default]'")
    file = Path(RAY_TOKEN_FILE).expanduser()
    mode = stat.S_IMODE(file.stat().st_mode) if file.is_file() else None
    return ray_finding(version, has_token(), mode, os.environ.get("RAY_AUTH_MODE", ""))


def _models() -> Finding:
    models = list_models()
    return models_finding(models, cache_dir(), dict(_refused(models)))


def _refused(models: list[ModelEntry]) -> Iterator[tuple[str, str]]:
    """Models whose config.json asks for what this version does not serve, and what that is."""
    for entry in models:
        try:
            read_model_config(entry.path)
        except ConfigError as error:
            yield entry.name, str(error)
