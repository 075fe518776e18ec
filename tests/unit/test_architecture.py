"""The rules of docs/architecture.md, checked on the source of the repository; and the checks, on planted violations."""

from __future__ import annotations

import pytest

from tests.support import architecture as arch

CODE = arch.source_files(*arch.FOLDERS, "src/disagg")
TESTS = arch.source_files("tests", "benchmarks")
SOURCES = {path: arch.read(path) for path in CODE}

PURE = (
    "proto/addresses.py",
    "proto/block_hash.py",
    "proto/cluster_secret.py",
    "proto/control.py",
    "proto/errors.py",
    "proto/frames.py",
    "proto/handover.py",
    "proto/ids.py",
    "proto/membership.py",
    "proto/messages.py",
    "proto/services.py",
    "proto/token_ids.py",
    "cluster/on_ray/nodes/table.py",
    "cluster/hosts/ranks.py",
    "cluster/system/restart_pause.py",
    "loadtests/generator/page_guard.py",
    "router/gateway/auth/audit.py",
    "router/requests/admission.py",
    "router/api.py",
    "router/requests/attempts.py",
    "router/workers/books.py",
    "router/workers/breaker.py",
    "router/config.py",
    "router/requests/router_core.py",
    "router/workers/cost_model.py",
    "router/placement/draw.py",
    "router/requests/events.py",
    "router/placement/fleet.py",
    "router/requests/forecast.py",
    "router/workers/openings.py",
    "router/placement/kinds.py",
    "router/workers/least_squares.py",
    "router/requests/ledger.py",
    "router/limits.py",
    "router/queueing/tenants.py",
    "router/queueing/token_bucket.py",
    "router/telemetry/running_mean.py",
    "router/placement/order.py",
    "router/workers/pairs.py",
    "router/placement/placement.py",
    "router/placement/policies/*.py",
    "router/placement/pools.py",
    "router/workers/prefix_index.py",
    "router/workers/prefix_match.py",
    "router/workers/quarantine.py",
    "router/queueing/queue.py",
    "router/workers/in_use.py",
    "router/requests/integrity.py",
    "router/requests/record.py",
    "router/requests/reservation.py",
    "router/requests/retries.py",
    "router/shell/vigil.py",
    "router/states.py",
    "router/placement/times.py",
    "router/telemetry/traces.py",
    "router/requests/waiting.py",
    "router/requests/wakeups.py",
    "router/workers/worker.py",
    "router/workers/worker_counts.py",
    "router/requests/views.py",
    "router/telemetry/tally.py",
    "router/telemetry/spans.py",
    "router/telemetry/recent.py",
    "router/telemetry/journal.py",
    "router/telemetry/histogram.py",
    "router/requests/explain.py",
    "router/gateway/rpc/from_protobuf.py",
    "router/gateway/http/transport/body_budget.py",
    "router/gateway/http/logprobs.py",
    "router/gateway/labels.py",
    "router/gateway/event_loop/loop_times.py",
    "router/gateway/event_loop/offload_turns.py",
    "router/gateway/text/template_limits.py",
    "router/gateway/http/schema.py",
    "router/gateway/http/transport/silent.py",
    "router/gateway/http/transport/sites.py",
    "router/gateway/http/to_input.py",
    "router/gateway/requests/request.py",
    "router/gateway/requests/sampling.py",
    "router/gateway/requests/shape.py",
    "router/gateway/rpc/admin_answers.py",
    "router/gateway/auth/auth.py",
    "router/gateway/text/detokenizer.py",
    "router/gateway/requests/validate.py",
    "router/gateway/requests/values.py",
    "router/gateway/rpc/watch_places.py",
    "engine/core/batching.py",
    "engine/blocks/block_manager.py",
    "engine/blocks/cached_blocks.py",
    "engine/core/calibration.py",
    "engine/commands.py",
    "engine/config.py",
    "engine/core/counters.py",
    "engine/text_counts.py",
    "engine/core/engine_core.py",
    "engine/faults/failpoints.py",
    "engine/runner/fake.py",
    "engine/core/lazy_heap.py",
    "engine/core/outbox.py",
    "engine/core/pacing.py",
    "engine/plan.py",
    "engine/blocks/prefix_cache.py",
    "engine/randomness.py",
    "engine/request.py",
    "engine/core/intake.py",
    "engine/blocks/kv_cache_manager.py",
    "engine/core/scheduler.py",
    "engine/core/scheduler_audit.py",
    "engine/blocks/swap.py",
    "engine/blocks/swapper.py",
    "engine/core/step_sampler.py",
    "engine/sharding/shards.py",
    "engine/sharding/slices.py",
    "engine/sharding/routes.py",
    "decode_worker/clearance.py",
    "engine/runner/model/sharding.py",
    "engine/runner/model/arrays.py",
    "engine/sharding/parts.py",
    "engine/parallel/steps.py",
    "engine/parallel/messages.py",
    "engine/kv_transfer/transports/checksum.py",
    "engine/kv_transfer/chunks.py",
    "engine/kv_transfer/effects.py",
    "engine/kv_transfer/pair_state.py",
    "engine/kv_transfer/reasons.py",
    "engine/kv_transfer/receive_window.py",
    "engine/kv_transfer/receiver.py",
    "engine/kv_transfer/receiving.py",
    "engine/kv_transfer/send_window.py",
    "engine/kv_transfer/sender.py",
    "engine/kv_transfer/sending.py",
    "cluster/control/changes.py",
    "src/disagg/cli/doctor/finding.py",
    "cluster/config/reader.py",
    "cluster/control/core.py",
    "cluster/control/events.py",
    "cluster/control/gateways.py",
    "cluster/control/workers.py",
    "loadtests/generator/fake_timing.py",
    "loadtests/workload/arrivals.py",
    "loadtests/verdict/comparison.py",
    "loadtests/verdict/goodput.py",
    "loadtests/workload/randomness.py",
    "loadtests/verdict/recordings.py",
    "loadtests/verdict/records.py",
    "loadtests/verdict/report.py",
    "loadtests/verdict/report_html.py",
    "loadtests/workload/scenario.py",
    "loadtests/verdict/search.py",
    "loadtests/verdict/svg.py",
    "loadtests/workload/traces.py",
    "loadtests/workload/workload.py",
)
"""Modules that decide and do nothing else. Each line names at least one file."""


def findings(rule: str, paths: list[str]) -> list[str]:
    check = getattr(arch, rule)
    return [line for path in paths for line in check(path, SOURCES.get(path) or arch.read(path))]


def test_folders_import_only_what_the_map_allows() -> None:
    assert findings("folder_findings", [path for path in CODE if path != "src/disagg/__init__.py"]) == []


def test_own_code_is_imported_through_disagg() -> None:
    assert findings("bare_name_findings", CODE + TESTS) == []


def test_foreign_packages_have_one_door() -> None:
    assert findings("door_findings", CODE) == []


def test_nothing_loads_pickles() -> None:
    assert findings("loader_findings", CODE + TESTS) == []


@pytest.mark.parametrize("glob", PURE)
def test_pure_modules_reach_nothing_impure(glob: str) -> None:
    paths = [path for path in CODE if arch.matches(path, [glob])]
    assert paths, f"{glob} matches no file"
    assert [line for path in paths for line in arch.impurity_findings(path, SOURCES)] == []


def test_files_and_functions_are_short() -> None:
    limits = dict.fromkeys(CODE, arch.MAX_FILE_LINES) | dict.fromkeys(TESTS, arch.MAX_TEST_FILE_LINES)
    assert [line for path, limit in limits.items() for line in arch.size_findings(path, arch.read(path), limit)] == []


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
    ("bare_name", "tests/x.py", "import disagg.proto.ids\nimport routers", []),
    ("bare_name", "tests/x.py", "import os\nimport proto.ids", [2]),
    ("bare_name", "tests/x.py", "from engine import plan", [1, 1]),
    ("door", "engine/core/scheduler.py", "import torch.nn", [1]),
    ("door", "engine/model/llama.py", "from torch import Tensor", []),
    ("door", "src/disagg/cli/main.py", "import ray", [1]),
    ("door", "src/disagg/cli/main.py", "import importlib\nimportlib.import_module('ray')", [2]),
    ("door", "cluster/on_ray/actors.py", "import ray.util", []),
    ("door", "router/gateway/rpc/service.py", "import grpc.aio", []),
    ("door", "router/requests/router_core.py", "import grpc", [1]),
    ("door", "router/gateway/rpc/service.py", "import starlette.routing\nimport uvicorn\nimport httptools", [1, 2, 3]),
    ("door", "router/gateway/http/app.py", "import starlette.routing\nimport uvicorn\nimport httptools", []),
    ("loader", "engine/runner/weights.py", "import torch\ntorch.load('x')", [2]),
    ("loader", "engine/runner/weights.py", "from torch import load", [1]),
    ("loader", "engine/x.py", "import pickle", [1]),
    ("loader", "engine/x.py", "np.load(f, allow_pickle=True)", [1]),
    ("loader", "engine/x.py", "x = 1\neval(text)\nexec(text)", [2, 3]),
    ("loader", "engine/x.py", "yaml.unsafe_load(text)", [1]),
    ("loader", "engine/x.py", "model.eval()\nre.compile(text)\nyaml.safe_load(text)", []),
    ("loader", "engine/x.py", "import torch\nmodel.load(torch.float32)", []),
    ("size", "engine/x.py", "#\n" * 500, []),
    ("size", "engine/x.py", "#\n" * 501, [1]),
    ("size", "engine/x.py", "def f():\n" + "    g()\n" * 79, []),
    ("size", "engine/x.py", "\nasync def f():\n" + "    g()\n" * 80, [2]),
]


@pytest.mark.parametrize(("rule", "path", "source", "lines"), PLANTED)
def test_a_planted_violation_is_found(rule: str, path: str, source: str, lines: list[int]) -> None:
    found = getattr(arch, f"{rule}_findings")(path, source)
    assert [line.split(": ")[0] for line in found] == [f"{path}:{line}" for line in lines]


def test_impurity_is_found_directly_and_through_other_modules() -> None:
    sources = {
        "router/requests/router_core.py": "from disagg.router import books\nimport time",
        "router/workers/books.py": "import numpy as np\nx = np.random.rand()\nimport disagg.router.clock",
        "router/clock.py": "import asyncio",
        "router/placement/placement.py": "import math\nfrom disagg.proto.ids import WorkerId",
        "proto/ids.py": "from typing import NewType",
    }
    assert arch.impurity_findings("router/placement/placement.py", sources) == []
    assert arch.impurity_findings("router/requests/router_core.py", sources) == [
        "router/workers/books.py:2: numpy.random in a pure module (imported by router/requests/router_core.py)",
        "router/clock.py:1: asyncio in a pure module (imported by router/requests/router_core.py)",
        "router/requests/router_core.py:2: time in a pure module",
    ]
