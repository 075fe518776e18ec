"""Connections: the protocol, silent ones, unfinished bodies, errors on the wire."""
