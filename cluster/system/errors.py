"""Errors of starting a cluster that are no mistake in its configuration (those are
`disagg.proto.errors.ConfigError`)."""

from __future__ import annotations


class LaunchError(RuntimeError):
    """A process could not be started; the message says which and why, with the end of its log."""
