"""Leaves out of NIXL's wheels what moving KV by UCX does not need, so that they can be carried to a machine.

    python scripts/trim_nixl.py FOLDER      every nixl_*.whl in it, in place, under the same name

What goes: the part for expert parallelism (`nixl_ep_*`), the programs beside the library (`nixl_*.scripts`), and all
plugins but UCX's. Libraries that only those plugins used stay: whether another needs them is not looked into. A wheel
that was trimmed already stays as it is. Needs nothing besides Python.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import re
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

LEFT_OUT = re.compile(r"nixl_ep_\w+/|\.?nixl_\w+\.scripts[^/]*/")
"""How names begin that go."""
PLUGIN = re.compile(r"(?:^|/)libplugin_(?!\w*UCX)[^/]*$")


def is_kept(name: str) -> bool:
    """Whether a file of a wheel stays in it."""
    return not (LEFT_OUT.match(name) or PLUGIN.search(name))


def trim(wheel: Path) -> tuple[int, int]:
    """Write the wheel anew without what goes, its RECORD included; bytes (before, after)."""
    before = wheel.stat().st_size
    trimmed = wheel.with_suffix(".trimmed")
    with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(trimmed, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as to:
        kept = [entry for entry in source.infolist() if is_kept(entry.filename)]
        if len(kept) == len(source.infolist()):
            trimmed.unlink()
            return before, before
        rows = []
        record = next(entry for entry in kept if re.fullmatch(r"[^/]+\.dist-info/RECORD", entry.filename))
        for entry in kept:
            if entry is not record:
                content = source.read(entry)
                to.writestr(entry, content, zipfile.ZIP_DEFLATED)
                rows.append((entry.filename, _hash(content), len(content)))
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([*rows, (record.filename, "", "")])
        to.writestr(record, text.getvalue(), zipfile.ZIP_DEFLATED)
    trimmed.replace(wheel)
    return before, wheel.stat().st_size


def _hash(content: bytes) -> str:
    """As RECORD has it."""
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()


def main(arguments: Sequence[str]) -> int:
    """The exit status."""
    if len(arguments) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    wheels = sorted(Path(arguments[0]).glob("nixl_*.whl"))
    if not wheels:
        print(f"{arguments[0]}: there is no nixl_*.whl", file=sys.stderr)
        return 1
    for wheel in wheels:
        before, after = trim(wheel)
        print(f"{wheel.name}: {before / 1e6:.1f} MB, now {after / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
