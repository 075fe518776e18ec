"""The rules of docs/architecture.md, checked on the source of the repository; and the checks, on planted violations."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath

import pytest

from tests.support import architecture as arch

CODE = arch.source_files(*arch.FOLDERS, "src/disagg")
TESTS = arch.source_files("tests", "benchmarks")
SOURCES = {path: arch.read(path) for path in CODE}

PURE: Mapping[str, tuple[str, ...]] = {
    "autoscaler": (),
    "cluster/core": (),
    "connections": ("shell",),
    "engine": ("checkpoint", "faults", "io", "kv_transfer/transports", "parallel", "runner", "shell"),
    "gateway/auth": ("shell",),
    "gateway/event_loop": ("shell",),
    "gateway/guardrails": ("shell",),
    "gateway/http": ("shell",),
    "gateway/openai": ("shell",),
    "gateway/operators": ("shell",),
    "gateway/other_apis": ("shell",),
    "gateway/requests": (),
    "gateway/rpc": ("shell",),
    "gateway/text": (),
    "kernels/settings": (),
    "loadtests": ("campaign", "generator"),
    "proto": ("clock",),
    "router": ("shell",),
    "simulator": (),
    "step_times": (),
}
"""Folders whose modules, and those of all folders below them, decide and do nothing else. For each the folders below it
that are not held to this."""


def pure_paths(folder: str) -> list[str]:
    """The modules that are held pure because of this entry of `PURE`."""
    shells = [PurePosixPath(folder, shell) for shell in PURE[folder]]
    below = [path for path in CODE if PurePosixPath(path).is_relative_to(folder)]
    return [path for path in below if not any(PurePosixPath(path).is_relative_to(shell) for shell in shells)]


def findings(rule: str, paths: list[str]) -> list[str]:
    check = getattr(arch, rule)
    return [line for path in paths for line in check(path, SOURCES.get(path) or arch.read(path))]


def test_folders_import_only_what_the_map_allows() -> None:
    assert findings("folder_findings", [path for path in CODE if path != "src/disagg/__init__.py"]) == []


def test_rooms_of_the_gateway_import_those_below_them() -> None:
    assert findings("floor_findings", CODE) == []


def test_front_ends_leave_to_calls_what_a_call_takes() -> None:
    assert findings("front_end_findings", CODE) == []


def test_own_code_is_imported_through_disagg() -> None:
    assert findings("bare_name_findings", CODE + TESTS) == []


def test_foreign_packages_have_one_door() -> None:
    assert findings("door_findings", CODE) == []


def test_every_docstring_says_something() -> None:
    assert findings("docstring_findings", CODE + TESTS + arch.source_files("scripts", "examples", "deploy")) == []


def test_nothing_loads_pickles() -> None:
    assert findings("loader_findings", CODE + TESTS) == []


@pytest.mark.parametrize("folder", PURE)
def test_pure_modules_reach_nothing_impure(folder: str) -> None:
    paths = pure_paths(folder)
    assert paths, f"{folder} has no module"
    assert [line for path in paths for line in arch.impurity_findings(path, SOURCES)] == []


def test_at_most_twenty_folders_are_pure_and_their_shells_are_not() -> None:
    """A shell that reaches nothing impure any more is held pure as well."""
    assert len(PURE) <= 20
    for folder, shells in PURE.items():
        for shell in shells:
            paths = [path for path in CODE if PurePosixPath(path).is_relative_to(PurePosixPath(folder, shell))]
            assert any(arch.impurity_findings(path, SOURCES) for path in paths), f"{folder}/{shell} is pure"


def test_no_modules_import_each_other() -> None:
    assert arch.import_cycles(SOURCES) == []


def test_only_the_start_of_a_worker_imports_the_faults() -> None:
    """So that no code of a worker has a branch for faults on purpose: it gets them as its parts, or not at all."""
    importers = {
        path
        for path in CODE
        if any(
            found.name.startswith(("disagg.engine.faults", "disagg.engine.failpoints"))
            for found in arch.imports(path, SOURCES[path])
        )
    }
    assert {path for path in importers if not path.startswith("engine/faults/")} == {"cluster/hosts/worker_host.py"}


TESTS_OF_BENCHMARKS = (
    "tests/unit/benchmarks/*",
    "tests/integration/gpu/*",
    "tests/gpu/*",
    "tests/gpu_stub/*",
)


def test_only_tests_of_benchmarks_import_them() -> None:
    """What benchmarks and other tests share is in tests/support."""
    others = [path for path in TESTS if path.startswith("tests/") and not arch.matches(path, TESTS_OF_BENCHMARKS)]
    importers = {path for path in others for found in arch.imports(path, arch.read(path)) if found.root == "benchmarks"}
    assert importers == set()


def test_only_the_simulated_cluster_imports_the_fast_engine() -> None:
    """So that the second engine stays behind one choice, and can be deleted when plans no longer need it."""
    importers = {
        path
        for path in CODE
        if any(found.name.startswith("disagg.simulator.fast") for found in arch.imports(path, SOURCES[path]))
    }
    assert {path for path in importers if not path.startswith("simulator/fast/")} == {"simulator/cluster.py"}


def test_every_folder_is_linked_under_src() -> None:
    package = arch.REPOSITORY / "src" / "disagg"
    links = {entry.name: entry.readlink().as_posix() for entry in package.iterdir() if entry.is_symlink()}
    assert links == {name: f"../../{name}" for name in arch.FOLDERS} | {"v1": "../../proto/disagg/v1"}


def test_linked_folders_are_namespaces_and_deeper_ones_packages() -> None:
    generated = arch.REPOSITORY / "proto" / "disagg"
    for folder in arch.FOLDERS:
        top = arch.REPOSITORY / folder
        assert not (top / "__init__.py").exists(), f"{folder}/__init__.py would shadow other packages of that name"
        below = {path.parent for path in top.rglob("*.py")} - {top}
        packages = {path for path in below if not path.is_relative_to(generated)}
        assert [str(path) for path in packages if not (path / "__init__.py").exists()] == []


def test_test_folders_are_packages() -> None:
    folders = {(arch.REPOSITORY / path).parent for path in arch.source_files("tests")}
    assert [str(folder) for folder in folders if not (folder / "__init__.py").exists()] == []


# ---------------------------------------------------------------- the checks themselves


PLANTED: list[tuple[str, str, str, list[int]]] = [
    ("folder", "router/x.py", "import disagg.engine.plan", [1]),
    ("folder", "router/x.py", "from disagg import kernels", [1]),
    ("folder", "prefill_worker/x.py", "def f():\n    from disagg.decode_worker import core", [2]),
    ("folder", "engine/model/x.py", "from ...router import core", [1]),
    ("folder", "engine/runner/model/__init__.py", "from . import llama\nfrom .. import plan", []),
    ("folder", "src/disagg/client/x.py", "import disagg.v1\nimport disagg.proto.ids\nimport disagg.engine", [3]),
    ("folder", "engine/x.py", "from disagg.kernels import dispatch\nfrom disagg.engine import plan\nimport os", []),
    ("floor", "gateway/answers/x.py", "from disagg.gateway.text import tokenizer\nimport disagg.proto.ids", []),
    ("floor", "gateway/text/x.py", "from disagg.gateway.answers.answer import Answer", [1]),
    ("floor", "gateway/batches/x.py", "from disagg.gateway.operators.shell.page import Page", [1]),
    ("floor", "gateway/event_loop/x.py", "from disagg.gateway.auth.auth import CALLER", []),
    ("floor", "gateway/attic/x.py", "from disagg.gateway.text import tokenizer", [1]),
    ("floor", "router/x.py", "from disagg.gateway.text import tokenizer", []),
    ("front_end", "gateway/openai/x.py", "from disagg.gateway.requests.charge import Charge", [1]),
    ("front_end", "gateway/other_apis/responses/x.py", "import os\nimport disagg.gateway.guardrails.rules", [2]),
    ("front_end", "gateway/rpc/x.py", "def f():\n    from disagg.gateway import readiness", [2]),
    ("front_end", "gateway/batches/x.py", "from disagg.gateway.usage.recorder import UsageRecorder", [1]),
    ("front_end", "gateway/openai/x.py", "from disagg.gateway.metrics import registry", [1]),
    ("front_end", "gateway/openai/x.py", "from disagg.gateway.calls import Calls", []),
    ("front_end", "gateway/calls.py", "from disagg.gateway.usage.recorder import UsageRecorder", []),
    ("bare_name", "tests/x.py", "import disagg.proto.ids\nimport routers", []),
    ("bare_name", "tests/x.py", "import os\nimport proto.ids", [2]),
    ("bare_name", "tests/x.py", "from engine import plan", [1, 1]),
    ("door", "engine/core/scheduler.py", "import torch.nn", [1]),
    ("door", "engine/runner/model/llama.py", "from torch import Tensor", []),
    ("door", "src/disagg/cli/main.py", "import ray", [1]),
    ("door", "src/disagg/cli/main.py", "import importlib\nimportlib.import_module('ray')", [2]),
    ("door", "cluster/on_ray/actors.py", "import ray.util", []),
    ("door", "gateway/rpc/shell/service.py", "import grpc.aio", []),
    ("door", "router/requests/router_core.py", "import grpc", [1]),
    ("door", "gateway/rpc/shell/service.py", "import starlette.routing\nimport uvicorn\nimport httptools", [1, 2, 3]),
    ("door", "gateway/http/shell/exchange.py", "import starlette.routing\nimport uvicorn\nimport httptools", []),
    ("loader", "engine/runner/weights.py", "import torch\ntorch.load('x')", [2]),
    ("loader", "engine/runner/weights.py", "from torch import load", [1]),
    ("loader", "engine/x.py", "import pickle", [1]),
    ("loader", "engine/x.py", "np.load(f, allow_pickle=True)", [1]),
    ("loader", "engine/x.py", "x = 1\neval(text)\nexec(text)", [2, 3]),
    ("loader", "engine/x.py", "yaml.unsafe_load(text)", [1]),
    ("loader", "engine/x.py", "model.eval()\nre.compile(text)\nyaml.safe_load(text)", []),
    ("loader", "engine/x.py", "import torch\nmodel.load(torch.float32)", []),
    ("docstring", "engine/x.py", '"""See `engine/y.py`."""', [1]),
    ("docstring", "engine/x.py", 'class A(B):\n    def send(self):\n        """See `B.send`."""', [2]),
    ("docstring", "engine/x.py", 'def f():\n    """As `g`."""\n\nasync def g():\n    "Like  a.b."', [1, 4]),
    ("docstring", "engine/x.py", 'class A:\n    """As `rsync -a`, but for one folder."""', []),
    (
        "docstring",
        "engine/x.py",
        'class FreeBlocks:\n    def take_all(self):\n        """Takes all free blocks."""',
        [2],
    ),
    ("docstring", "engine/x.py", 'def num_tokens():\n    """The tokens."""\n\nclass Token:\n    "The token."', [1, 4]),
    ("docstring", "engine/x.py", 'def num_tokens():\n    """Tokens that are not cached."""', []),
    ("docstring", "engine/x.py", 'def outer():\n    def inner():\n        """See `outer`."""', [2]),
    ("size", "engine/x.py", "#\n" * 500, []),
    ("size", "engine/x.py", "#\n" * 501, [1]),
    ("size", "engine/x.py", "def f():\n" + "    g()\n" * 79, []),
    ("size", "engine/x.py", "\nasync def f():\n" + "    g()\n" * 80, [2]),
]


@pytest.mark.parametrize(("rule", "path", "source", "lines"), PLANTED)
def test_a_planted_violation_is_found(rule: str, path: str, source: str, lines: list[int]) -> None:
    found = getattr(arch, f"{rule}_findings")(path, source)
    assert [line.split(": ")[0] for line in found] == [f"{path}:{line}" for line in lines]


def test_a_cycle_is_found() -> None:
    sources = {
        "router/a.py": "from disagg.router.b import f",
        "router/b.py": "def f():\n    from disagg.router import c",
        "router/c.py": "import disagg.router.a",
        "router/d.py": "from disagg.router.a import g",
    }
    assert arch.import_cycles(sources) == [["router/a.py", "router/b.py", "router/c.py"]]


def test_impurity_is_found_directly_and_through_other_modules() -> None:
    sources = {
        "router/core.py": "from disagg.router import books\nimport time",
        "router/books.py": "import numpy as np\nx = np.random.rand()\nimport disagg.router.clock",
        "router/clock.py": "import asyncio",
        "router/placement.py": "import math\nfrom disagg.proto.ids import WorkerId",
        "proto/ids.py": "from typing import NewType",
    }
    assert arch.impurity_findings("router/placement.py", sources) == []
    assert arch.impurity_findings("router/core.py", sources) == [
        "router/books.py:2: numpy.random in a pure module (imported by router/core.py)",
        "router/clock.py:1: asyncio in a pure module (imported by router/core.py)",
        "router/core.py:2: time in a pure module",
    ]
