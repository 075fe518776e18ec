"""What tests share: a checkpoint, the templates that clusters are forked from, and the order of the files: processes
of pytest-xdist that share them end at about the same time.

With `--dist loadfile` each process takes the next file of the order when it has no other, so the longest ones must not
be the last (`--no-loadscope-reorder`: pytest-xdist would put those with the fewest tests there).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from disagg.cluster.hosts import processes
from disagg.cluster.templates.templates import Templates
from tests.support.gateway import write_checkpoint
from tests.support.shared_templates import SHARED, SharedTemplates

LONGEST = (
    "failpoints",
    "exactness",
    "worker_faults",
    "matrix",
    "ray_cluster",
    "scaling",
    "ray_detached",
    "templates",
    "apply",
    "tensor_parallel",
    "deaths_of_controllers",
    "migration",
    "controller",
    "recovery",
    "batch_control",
    "nixl_transport",
    "hand_over",
    "usage",
    "gpu_isolation",
    "standstill",
    "twin",
    "several_models",
    "tool_calls",
    "load_generator",
    "recording",
    "load_commands",
    "load_protected",
    "input_messages",
    "shm_transport",
    "attention_probe",
    "gpu_contact",
    "several_gateways",
)
"""The files that take longest, `test_*.py`, by their time."""
_PLACES = {f"test_{name}": place for place, name in enumerate(LONGEST)}


@pytest.fixture(scope="session", autouse=True)
def shared_templates() -> Iterator[None]:
    """Clusters are forked from templates of the test process, unless a test uses `own_templates`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "Templates", SharedTemplates)
        yield
    SHARED.close()


@pytest.fixture
def own_templates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each cluster has the templates that it has without tests."""
    monkeypatch.setattr(processes, "Templates", Templates)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of a tiny model, for a gateway."""
    return write_checkpoint(tmp_path_factory.mktemp("tiny"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sorts the tests of this folder by their file; what pytest was asked for by node ids too."""
    own = [place for place, item in enumerate(items) if "integration" in item.path.parts]
    ordered = sorted((items[place] for place in own), key=lambda item: _PLACES.get(item.path.stem, len(_PLACES)))
    for place, item in zip(own, ordered, strict=True):
        items[place] = item
