"""Names of shapes, and the configurations that they stand for."""

from __future__ import annotations

from pathlib import Path

import pytest

from disagg.cluster.config.cluster_config import ClusterConfig, parse_config
from disagg.loadtests.campaign.shapes import parse_shape, parse_shapes
from disagg.proto.errors import ConfigError

BASE = parse_config(
    {"model": {"path": "fake"}, "gateway": {"port": 9000}, "pools": {"colocated": {"kv_cache_bytes": 4096}}}
)


@pytest.mark.parametrize(
    ("name", "mode", "kind", "sizes", "num_threads", "scheduling", "token_budget"),
    [
        ("1p1d", "disaggregated", "disaggregated", (1, 1), 1, "decode_first", 512),
        ("2p3d:256", "disaggregated", "disaggregated", (2, 3), 1, "decode_first", 256),
        ("2x1-chunked:128", "colocated", "chunked", (2,), 1, "decode_first", 128),
        ("1x2-chunked", "colocated", "chunked", (1,), 2, "decode_first", 512),
        ("2x1-slack:1024", "colocated", "slack", (2,), 1, "slack", 1024),
        ("2x1-prefill-first", "colocated", "prefill_first", (2,), 1, "prefill_first", 512),
        ("2x1-static:64", "colocated", "static", (2,), 1, "static", 64),
    ],
)
def test_a_name(
    name: str, mode: str, kind: str, sizes: tuple[int, ...], num_threads: int, scheduling: str, token_budget: int
) -> None:
    shape = parse_shape(name, BASE)
    pools = shape.config.pools
    assert (shape.name, shape.config.mode, shape.kind) == (name, mode, kind)
    if mode == "disaggregated":
        assert (pools.prefill.size, pools.decode.size) == sizes
        assert (pools.prefill.num_threads, pools.decode.num_threads) == (1, 1)
        assert pools.prefill.tokens_per_step == token_budget
    else:
        assert (pools.colocated.size,) == sizes
        assert (pools.colocated.num_threads, pools.colocated.scheduling) == (num_threads, scheduling)
        assert pools.colocated.tokens_per_step == token_budget


@pytest.mark.parametrize(("name", "decodes"), [("3x1-elastic", "spread"), ("3x1-gather:2048", "gather")])
def test_elastic_workers_by_where_answers_decode(name: str, decodes: str) -> None:
    shape = parse_shape(name, BASE)
    assert (shape.kind, shape.config.mode, shape.config.placement.decodes) == ("elastic", "elastic", decodes)
    workers = shape.config.pools.workers
    assert (workers.size, workers.scheduling) == (3, "slack")
    assert workers.tokens_per_step == (2048 if ":" in name else 1024)


def test_shapes_share_the_base_but_for_port_and_admission() -> None:
    for shape in parse_shapes(["1p1d", "2x1-static"], BASE):
        assert shape.config.model.path == "fake"
        assert shape.config.pools.colocated.kv_cache_bytes == 4096
        assert shape.config.gateway.port == 0
        assert shape.config.placement.admission is False
        assert parse_config(shape.raw) == shape.config


def test_a_file_is_called_by_its_name_and_stands_for_itself(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("mode: colocated\npools: {colocated: {size: 3, scheduling: static}}\n")
    shape = parse_shape(str(file), ClusterConfig())
    assert (shape.name, shape.kind, shape.config.pools.colocated.size) == ("mine", "static", 3)
    assert shape.config.gateway.port == 0


@pytest.mark.parametrize("name", ["", "1p", "1x1", "2x1-fast", "1p1d:", "0p1d", "1p1d:0", "2x0-chunked"])
def test_no_shape(name: str) -> None:
    with pytest.raises(ConfigError):
        parse_shape(name, BASE)


def test_a_name_that_comes_twice() -> None:
    with pytest.raises(ConfigError, match="once"):
        parse_shapes(["1p1d", "1p1d"], BASE)
