"""Every op is tested in all implementations: the torch reference and, where a compiler is, the C++ kernels, for this
processor and, where it has AVX-512, for those that end at AVX2."""

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

AVX2 = "x86-64-v3"


@functools.cache
def compiled(processor: str = "native") -> tuple[NativeOps, str] | str:
    """The C++ kernels and their vector instructions, or why there are none."""
    try:
        library = build.build(build.sources(), build.cache_folder(), build.find_compiler(), processor)
    except build.BuildError as error:
        return str(error)
    return NativeOps(library.path), library.simd


def compiled_or_skip(processor: str = "native") -> tuple[NativeOps, str]:
    """Skips the test where there are none."""
    found = compiled(processor)
    if isinstance(found, str):
        pytest.skip(found)
    return found


@pytest.fixture
def native() -> NativeOps:
    return compiled_or_skip()[0]


@pytest.fixture(params=["reference", "cpu-c++", "cpu-c++-avx2"])
def ops(request: pytest.FixtureRequest) -> ModuleType | NativeOps:
    """An implementation; a C++ op that declines its tensors returns None, and so fails the test."""
    if request.param == "reference":
        return reference
    found, simd = compiled_or_skip()
    if request.param == "cpu-c++":
        return found
    if simd != "avx512":
        pytest.skip("this processor's own kernels are those for AVX2, or it cannot run them")
    return compiled_or_skip(AVX2)[0]


@pytest.fixture
def fresh_choice(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`dispatch` chooses anew in this test, whatever the environment says, and again after it."""
    monkeypatch.delenv("DISAGG_KERNELS", raising=False)
    dispatch._choice.cache_clear()
    dispatch._warn_declined.cache_clear()
    yield
    dispatch._choice.cache_clear()
    dispatch._warn_declined.cache_clear()
