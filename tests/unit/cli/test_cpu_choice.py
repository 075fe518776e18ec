"""What is said of how CPUs compute, and what `model.dtype: auto` becomes."""

from __future__ import annotations

import io
from collections.abc import Mapping

import pytest
from rich.console import Console

from disagg.cli.launch import cpu_choice
from disagg.cluster.config.cluster_config import ClusterConfig, parse_config
from disagg.cluster.control.plan import ClusterPlan
from disagg.cluster.control.plans import config_hash_of
from disagg.engine.shell.cpu_dtype import CpuDtype

SLOW = CpuDtype("float32", "torch", "no C++ compiler on PATH (looked for c++)")
FAST = CpuDtype("bfloat16", "C++ for avx512")


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    found: dict[str, object] = {"is": FAST}
    monkeypatch.setattr(cpu_choice, "cpu_dtype_here", lambda: found["is"])
    return found


def choose(config: Mapping[str, object]) -> tuple[str, list[str]]:
    out = io.StringIO()
    dtype = cpu_choice.choose_cpu_dtype(parse_config(dict(config)), Console(file=out, width=300))
    return dtype, out.getvalue().splitlines()


def test_one_line_says_what_was_chosen_and_why(said: dict[str, object]) -> None:
    assert choose({}) == ("bfloat16", ["  kernels CPUs compute in bfloat16, by C++ for avx512"])
    said["is"] = SLOW
    line = "  note   CPUs compute in {}, by torch, which is slow: no C++ compiler on PATH (looked for c++){}; "
    line += "a C++ compiler, such as g++, makes it several times faster"
    chosen = "; float32 is the fastest here"
    assert choose({}) == ("float32", [line.format("float32", chosen)])
    assert choose({"model": {"dtype": "bfloat16"}}) == ("float32", [line.format("bfloat16", "")])
    assert choose({"model": {"quantization": "int8"}})[1] == [line.format("bfloat16", chosen)]


def test_nothing_is_looked_for_where_no_cpu_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_choice, "cpu_dtype_here", lambda: pytest.fail("not needed"))
    assert choose({"model": {"path": "fake"}}) == ("bfloat16", [])
    gpu = {"device": "cuda"}
    assert choose({"pools": {"prefill": gpu, "decode": gpu}}) == ("bfloat16", [])


@pytest.mark.parametrize(
    ("model", "device", "expected"),
    [
        ({}, "cpu", "float32"),
        ({"dtype": "bfloat16"}, "cpu", "bfloat16"),
        ({"quantization": "int8"}, "cpu", "bfloat16"),
        ({"share_weights": True}, "cpu", "bfloat16"),
        ({}, "cuda", "bfloat16"),
    ],
)
def test_all_workers_of_a_cluster_get_the_same_dtype(model: dict[str, object], device: str, expected: str) -> None:
    pools = {"prefill": {"device": device}, "decode": {"device": device}}
    plan = ClusterPlan(config_of(model, pools), {"": "fake"}, (0, 1), cpu_dtype="float32")
    assert {worker.dtype for worker in plan.workers} == {expected}


def test_another_choice_is_another_configuration_of_workers() -> None:
    config = config_of({}, {})
    hashes = {
        config_hash_of(ClusterPlan(config, {"": "fake"}, (0, 1), cpu_dtype=dtype), "decode")
        for dtype in ("float32", "bfloat16", "bfloat16")
    }
    assert len(hashes) == 2


def config_of(model: Mapping[str, object], pools: Mapping[str, object]) -> ClusterConfig:
    return parse_config({"model": {"path": "fake", **model}, "pools": dict(pools)})
