"""Rows in which what the cluster stands on breaks: checkpoint, disk, clock, Ray's head."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.acceptance.faults.cluster import Up, until
from tests.acceptance.faults.kills import AFTER_S, NUM_TOKENS, RATE, WARM_S, afterwards
from tests.acceptance.faults.load import Load, Model
from tests.acceptance.faults.row import Row, all_right
from tests.support.process_figures import children

CLEAR_EXIT_S = 60.0
NUM_FAILED_STARTS = 3
WITHOUT_STORE_S = 70.0
"""Ray's processes end themselves after 60 s without their head's store unless configured otherwise."""
CLOCK_STEP_S = 86_400
CLOCK_VARIABLE = "DISAGG_BENCH_CLOCK"

_CLOCK_C = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>

static volatile long *offset_s;

__attribute__((constructor)) static void open_offset(void) {
    const char *path = getenv("DISAGG_BENCH_CLOCK");
    int file = path ? open(path, O_RDONLY) : -1;
    if (file >= 0) {
        void *page = mmap(0, sizeof(long), PROT_READ, MAP_SHARED, file, 0);
        if (page != MAP_FAILED) offset_s = page;
    }
}

int clock_gettime(clockid_t id, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int status = real(id, now);
    if (status == 0 && offset_s && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) now->tv_sec += *offset_s;
    return status;
}

time_t time(time_t *out) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (out) *out = now.tv_sec;
    return now.tv_sec;
}

int gettimeofday(struct timeval *out, void *zone) {
    struct timespec now;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &now);
    out->tv_sec = now.tv_sec;
    out->tv_usec = now.tv_nsec / 1000;
    return 0;
}
"""


# ---------------------------------------------------------------- checkpoint


async def checkpoint_at_start(up: Up, model: Model) -> Row:
    """`disagg up` with a checkpoint that was cut off in the middle."""
    folder = Path(tempfile.mkdtemp(prefix="disagg-broken-"))
    try:
        broken = Path(shutil.copytree(model.path, folder / "tiny"))
        _cut(broken)
        up._config["model"]["path"] = str(broken)
        began = time.monotonic()
        process = up.launch()
        status = await asyncio.to_thread(process.wait, CLEAR_EXIT_S)
        elapsed_s = time.monotonic() - began
        said = up.output.read_text(errors="replace")
        await up.close()
    finally:
        shutil.rmtree(folder)
    names_it = "model.safetensors" in said
    return Row(
        name="checkpoint_at_start",
        promise="a clear exit that names the file",
        met=status not in (0, None) and names_it and "Traceback" not in said.splitlines()[0],
        figures={"status": float(status), "names_the_file": float(names_it), "exit_s": elapsed_s},
    )


async def checkpoint_at_restart(up: Up, model: Model) -> Row:
    """The checkpoint is cut off while the cluster serves, and then a worker dies: it cannot come back."""
    await up.settled()
    whole = Path(model.path) / "model.safetensors"
    kept = whole.with_suffix(".kept")
    starts = (await up.state())["decode-0"].starts
    async with Load(up.address, model, rate=RATE, num_tokens=NUM_TOKENS) as streams:
        await asyncio.sleep(WARM_S)
        shutil.copy(whole, kept)
        _replace_by_half(whole, kept)
        struck = time.monotonic()
        os.kill(await up.pid("decode-0"), signal.SIGKILL)

        async def has_failed() -> bool:
            worker = (await up.state()).get("decode-0")
            return worker is not None and worker.starts >= starts + NUM_FAILED_STARTS and "safetensors" in worker.detail

        try:
            failing_s = await until(has_failed, 60.0)
        finally:
            kept.replace(whole)
        await up.settled(90.0)
        recovery_s = time.monotonic() - struck
        await asyncio.sleep(AFTER_S)
    seen = await afterwards(up, streams)
    return Row(
        name="checkpoint_at_restart",
        promise="starts fail with back-off and say why; serving goes on; it is back when the file is",
        met=all_right(seen) and not seen["left"],
        recovery_s=recovery_s,
        figures={"three_starts_s": failing_s},
        **seen,
    )


def _cut(folder: Path) -> None:
    weights = folder / "model.safetensors"
    os.truncate(weights, weights.stat().st_size // 2)


def _replace_by_half(file: Path, whole: Path) -> None:
    """A new file, so that those who have the old one open or mapped keep it."""
    half = file.with_suffix(".half")
    half.write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])
    half.replace(file)


# ---------------------------------------------------------------- disk


def full_logs() -> dict[str, Any]:
    """Arguments of an `Up` whose workers log a line a request to a device that is full."""

    def prepare(logs: Path) -> None:
        for name in ("prefill-0", "prefill-1", "decode-0", "decode-1", "gateway"):
            (logs / f"{name}.log").symlink_to("/dev/full")

    return {"prepare_logs": prepare, "environment": {"DISAGG_LOG": "debug"}}


async def disk_full(up: Up, model: Model) -> Row:
    """No log can be written; then a worker dies and comes back."""
    await up.settled()
    async with Load(up.address, model, rate=RATE, num_tokens=NUM_TOKENS) as streams:
        await asyncio.sleep(WARM_S)
        struck, pid = time.monotonic(), await up.pid("decode-0")
        os.kill(pid, signal.SIGKILL)

        async def is_back() -> bool:
            return await up.is_settled() and await up.pid("decode-0") != pid

        await until(is_back, 60.0)
        recovery_s = time.monotonic() - struck
        await asyncio.sleep(AFTER_S)
    seen = await afterwards(up, streams)
    return Row(
        name="disk_full",
        promise="serving goes on where nothing can be written; a worker that dies comes back",
        met=all_right(seen) and not seen["left"],
        recovery_s=recovery_s,
        **seen,
    )


# ---------------------------------------------------------------- clock


def clock_shim() -> dict[str, Any]:
    """Arguments of an `Up` whose processes read the wall clock with an offset that can be changed.

    Raises:
        subprocess.CalledProcessError: if the C compiler, which our kernels need as well, fails.
    """
    folder = Path(tempfile.mkdtemp(prefix="disagg-clock-"))
    source, library, offset = folder / "clock.c", folder / "clock.so", folder / "offset"
    source.write_text(_CLOCK_C)
    offset.write_bytes(bytes(8))
    subprocess.run(
        [os.environ.get("CC", "cc"), "-O1", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True
    )
    return {"environment": {"LD_PRELOAD": str(library), CLOCK_VARIABLE: str(offset)}}


async def clock_jump(up: Up, model: Model) -> Row:
    """The wall clock of every process goes a day forward, and then two days back."""
    offset = Path(up.environment[CLOCK_VARIABLE])
    try:
        async with Load(up.address, model, rate=RATE, num_tokens=NUM_TOKENS) as streams:
            for jump_s in (CLOCK_STEP_S, -CLOCK_STEP_S, 0):
                await asyncio.sleep(WARM_S)
                _set_offset(offset, jump_s)
            await asyncio.sleep(AFTER_S)
        seen = await afterwards(up, streams)
        starts = sum(worker.starts for worker in (await up.state()).values())
    finally:
        shutil.rmtree(offset.parent)
    return Row(
        name="clock_jump",
        promise="nothing expires, no process is lost: only monotonic clocks count",
        met=all_right(seen) and not seen["left"] and starts == 4 and seen["longest_gap_s"] <= 1.0,
        figures={"starts": float(starts)},
        **seen,
    )


def _set_offset(file: Path, seconds: int) -> None:
    """In place: processes have it mapped."""
    with file.open("r+b") as opened:
        opened.write(seconds.to_bytes(8, "little", signed=True))


# ---------------------------------------------------------------- Ray


async def gcs_killed(up: Up, model: Model) -> Row:
    """The store of Ray's head dies and is not restarted."""
    await up.settled()
    assert up.process is not None, "it was started"
    async with Load(up.address, model, rate=RATE, num_tokens=NUM_TOKENS) as streams:
        await asyncio.sleep(WARM_S)
        (store,) = [pid for pid in children(up.process.pid) if _program(pid).endswith("/gcs_server")]
        os.kill(store, signal.SIGKILL)
        await asyncio.sleep(WITHOUT_STORE_S)
    seen = await afterwards(up, streams)
    began = time.monotonic()
    process = up.process
    process.send_signal(signal.SIGINT)
    status = await asyncio.to_thread(process.wait, 60.0)
    return Row(
        name="gcs_killed",
        promise="serving goes on, no stream fails; the cluster can still be stopped",
        met=all_right(seen) and not seen["left"] and status == 0,
        figures={"without_store_s": WITHOUT_STORE_S, "stop_s": time.monotonic() - began, "status": float(status)},
        **seen,
    )


def _program(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().partition(b"\0")[0].decode(errors="replace")
    except OSError:
        return ""
