"""Whether NIXL moves bytes between two processes of this machine, as one JSON object in the last line of standard
output, behind what UCX writes there: `python -m disagg.engine.kv_transfer.transports.nixl_check`.

A program of its own, so that a library that crashes or hangs does not end the caller. The sender is this process and
the receiver its child: where the kernel lets a process read only its descendants' memory (`ptrace_scope` 1), this pair
fares as two workers do.
"""

from __future__ import annotations

import importlib.metadata
import json
import multiprocessing
import secrets
from multiprocessing.connection import Connection

from disagg.connections.cluster_secret import NUM_BYTES, ClusterSecret
from disagg.engine.kv_transfer.transport import TransportError
from disagg.engine.kv_transfer.transports.nixl import NixlConnector, NixlRendezvous
from disagg.engine.kv_transfer.transports.nixl_agent import MODULES, NixlAgent, NixlError
from disagg.engine.kv_transfer.transports.settings import TransportSettings

HOST = "127.0.0.1"
PAIR = "check"
SET_UP_S = 20.0


def main() -> None:
    """Print version and plugins, empty where it is not installed, and what is wrong, empty where bytes came through."""
    version = installed_version()
    try:
        plugins = NixlAgent("plugins", HOST).plugins
        error = move_bytes()
    except NixlError as failed:
        plugins, error = [], str(failed)
    print("\n" + json.dumps({"version": version, "plugins": plugins, "error": error}))


def installed_version() -> str:
    """Version of NIXL; empty if it is not installed."""
    for module in MODULES:
        try:
            return importlib.metadata.version(module)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


def move_bytes() -> str:
    """Form a pair, which stands once its receiver has read bytes of its sender; what is wrong, or nothing."""
    secret = ClusterSecret(secrets.token_bytes(NUM_BYTES))
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=_receive, args=(secret, theirs), daemon=True)
    child.start()
    theirs.close()
    try:
        address = ours.recv() if ours.poll(SET_UP_S) else ""
        if not address:
            return f"the receiver did not start in {SET_UP_S:g} s"
        transport = NixlConnector(TransportSettings(HOST, secret, SET_UP_S))(PAIR, address)
        ours.send("close")
        transport.close()
        return ""
    except EOFError:
        return "the receiver ended"
    except TransportError as error:
        return str(error)
    finally:
        ours.close()
        child.join(SET_UP_S)
        child.kill()


def _receive(secret: ClusterSecret, link: Connection) -> None:
    rendezvous = NixlRendezvous(TransportSettings(HOST, secret, SET_UP_S))
    link.send(rendezvous.address)
    try:
        transport = rendezvous.accept(PAIR)
    except TransportError:  # the sender has it, too
        return
    link.poll(SET_UP_S)
    transport.close()


if __name__ == "__main__":
    main()
