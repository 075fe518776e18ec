"""Every op is tested in all implementations: the torch reference and, where a compiler is, the C++ kernels, for this
processor and for every level below it."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

from disagg.kernels import dispatch, reference
from disagg.kernels.cpu import build
from disagg.kernels.cpu.linear import NativeLinear
from disagg.kernels.cpu.ops import NativeOps

torch.set_num_threads(1)

LEVELS = (build.NATIVE, *build.levels_here()[1:])
"""The best level of this processor has what `NATIVE` has."""


@functools.cache
def compiled(level: build.Level) -> tuple[NativeOps, NativeLinear] | str:
    """The C++ kernels, or why there are none."""
    try:
        library = build.build(build.sources(), build.cache_folder(), build.find_compiler(), level)
    except build.BuildError as error:
        return str(error)
    return NativeOps(library.path), NativeLinear.load(library.path)


def compiled_or_skip(level: build.Level) -> tuple[NativeOps, NativeLinear]:
    """Skips the test where there are none."""
    found = compiled(level)
    if isinstance(found, str):
        pytest.skip(found)
    return found


@pytest.fixture(params=LEVELS, ids=lambda level: level.name)
def level(request: pytest.FixtureRequest) -> build.Level:
    """Each level of processors that this machine can compute on."""
    assert isinstance(request.param, build.Level)
    return request.param


@pytest.fixture
def native(level: build.Level) -> NativeOps:
    """The C++ ops of a level."""
    return compiled_or_skip(level)[0]


@pytest.fixture
def products(level: build.Level) -> NativeLinear:
    """The C++ products of a level."""
    return compiled_or_skip(level)[1]


@pytest.fixture(params=[None, *LEVELS], ids=lambda level: f"cpu-c++-{level.name}" if level else "reference")
def ops(request: pytest.FixtureRequest) -> ModuleType | NativeOps:
    """An implementation; a C++ op that declines its tensors returns None, and so fails the test."""
    return reference if request.param is None else compiled_or_skip(request.param)[0]


@pytest.fixture
def fresh_choice(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`dispatch` chooses anew in this test, whatever the environment says, and again after it."""
    monkeypatch.delenv("DISAGG_KERNELS", raising=False)
    caches = (dispatch._choice, dispatch._triton, dispatch._elsewhere, dispatch._warn_declined)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()
