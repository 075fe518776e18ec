"""Which sockets this process has."""

from __future__ import annotations

import socket
from pathlib import Path


def listening_addresses() -> set[tuple[str, int]]:
    """(address, port) of every TCP socket on which this process listens, from /proc."""
    inodes = set()
    for link in Path("/proc/self/fd").iterdir():
        try:
            target = str(link.readlink())
        except FileNotFoundError:
            continue  # the descriptor of this very listing
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                raw, _, port = fields[1].rpartition(":")
                packed = bytes.fromhex(raw)
                address = socket.inet_ntoa(packed[::-1]) if table == "tcp" else f"tcp6 {raw}"
                found.add((address, int(port, 16)))
    return found
