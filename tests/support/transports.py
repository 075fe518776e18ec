"""The byte transports between processes, for tests that run with each."""

from __future__ import annotations

import importlib.util

import pytest

from disagg.engine.kv_transfer.transports.nixl_agent import MODULES
from disagg.engine.kv_transfer.transports.settings import TransportSettings
from tests.support.secret import SECRET

SETTINGS = TransportSettings("127.0.0.1", SECRET)

HAS_NIXL = any(importlib.util.find_spec(name) is not None for name in MODULES)
needs_nixl = pytest.mark.skipif(not HAS_NIXL, reason="the extra `nixl` is not installed")
NIXL = pytest.param("nixl", marks=needs_nixl)
TRANSPORTS = ["gloo", "shm", NIXL]
"""On the CPUs of one host."""
