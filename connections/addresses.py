"""host:port, where a host that is an IPv6 address stands in brackets."""

from __future__ import annotations

import ipaddress


def join_address(host: str, port: int) -> str:
    """Write an address as `host:port`, or as `[host]:port` for an IPv6 host."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(address: str) -> tuple[str, str]:
    """Host without brackets, and port, neither of them checked; the host of an address without a port is empty."""
    host, _, port = address.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), port


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach what is bound there."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
