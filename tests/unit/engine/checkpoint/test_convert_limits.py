"""What the process that converts a file may use."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from disagg.engine.checkpoint.convert_limits import GIB, Limits, limits_for


def test_limits_follow_the_size_of_the_file() -> None:
    assert limits_for(0) == Limits(8 * GIB, 600, GIB)
    assert limits_for(2 * GIB) == Limits(8 * GIB, 840, 21 * GIB)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("bytearray(2 << 30)", "MemoryError"),
        ("open('f', 'wb').write(bytes(2 << 20))", "OSError: [Errno 27] File too large"),
        ("print(1)", ""),
    ],
)
def test_a_process_is_held_to_them(tmp_path: Path, code: str, said: str) -> None:
    program = (
        "from disagg.engine.checkpoint.convert_limits import Limits, limit_this_process\n"
        f"limit_this_process(Limits(1 << 30, 60, 1 << 20))\n{code}"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode != 0, done.stderr.strip().rpartition("\n")[2]) == (bool(said), said)


def test_processor_time_ends_the_process() -> None:
    program = (
        "from disagg.engine.checkpoint.convert_limits import Limits, limit_this_process\n"
        "limit_this_process(Limits(1 << 30, 1, 1 << 20))\nwhile True: pass"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert done.returncode == -signal.SIGXCPU
