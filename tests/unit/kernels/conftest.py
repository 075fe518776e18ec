"""Every op is tested in both implementations: the torch reference and, where a compiler is, the C++ kernels."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

from disagg.kernels import dispatch, reference
from disagg.kernels.cpu import build
from disagg.kernels.cpu.ops import NativeOps

torch.set_num_threads(1)


@functools.cache
def native_ops() -> NativeOps | str:
    """The C++ kernels, or why there are none."""
    try:
        return NativeOps(build.build(build.sources(), build.cache_folder(), build.find_compiler()).path)
    except build.BuildError as error:
        return str(error)


@pytest.fixture
def native() -> NativeOps:
    ops = native_ops()
    if isinstance(ops, str):
        pytest.skip(ops)
    return ops


@pytest.fixture(params=["reference", "cpu-c++"])
def ops(request: pytest.FixtureRequest) -> ModuleType | NativeOps:
    """An implementation; a C++ op that declines its tensors returns None, and so fails the test."""
    if request.param == "reference":
        return reference
    found: NativeOps = request.getfixturevalue("native")
    return found


@pytest.fixture
def fresh_choice(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`dispatch` chooses anew in this test, whatever the environment says, and again after it."""
    monkeypatch.delenv("DISAGG_KERNELS", raising=False)
    dispatch._choice.cache_clear()
    dispatch._warn_declined.cache_clear()
    yield
    dispatch._choice.cache_clear()
    dispatch._warn_declined.cache_clear()
