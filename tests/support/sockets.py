"""Which sockets a process has."""

from __future__ import annotations

import ipaddress
import socket
from pathlib import Path


def listening_addresses(pid: int | None = None) -> set[tuple[str, int]]:
    """(address, port) of every TCP socket on which a process listens, by default this one, from /proc."""
    process = Path("/proc") / ("self" if pid is None else str(pid))
    inodes = set()
    for link in (process / "fd").iterdir():
        try:
            target = str(link.readlink())
        except FileNotFoundError:
            continue  # the descriptor of this very listing
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    found = set()
    for table in ("tcp", "tcp6"):
        for line in (process / "net" / table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                raw, _, port = fields[1].rpartition(":")
                packed = bytes.fromhex(raw)
                address = socket.inet_ntoa(packed[::-1]) if table == "tcp" else _of_six(bytes.fromhex(raw))
                found.add((address, int(port, 16)))
    return found


def _of_six(raw: bytes) -> str:
    """The address in the kernel's order of bytes; one of IPv4 as that."""
    packed = b"".join(raw[i : i + 4][::-1] for i in range(0, 16, 4))
    address = ipaddress.IPv6Address(packed)
    return str(address.ipv4_mapped or address)
