"""What each rank of a worker is told, and which models ranks can share."""

from __future__ import annotations

import json
import os
from pathlib import Path

import msgspec
import pytest

from disagg.cluster.config.cluster_config import parse_config
from disagg.cluster.control.plan import plan_cluster
from disagg.cluster.core import ranks
from disagg.cluster.hosts.rank_process import RankStart
from disagg.cluster.system.cores import VISIBLE_DEVICES, own_devices, see_own_devices
from disagg.engine.config import WorkerConfig, check_kv_stays_private
from disagg.engine.sharding.shards import Shard
from disagg.proto.errors import ConfigError
from tests.support.pooled_models import BERT, write_json
from tests.support.secret import SECRET


def worker(tp: int, cores: tuple[int, ...] = (), device: str = "cpu", pp: int = 1) -> WorkerConfig:
    return WorkerConfig(
        worker_id="decode-0", roles=("decode",), model_path="/m", cores=cores, device=device, tp=tp, pp=pp
    )


def test_rank_0_has_its_worker_s_name_and_the_others_lead_back_to_it() -> None:
    assert [ranks.rank_name("decode-12", rank) for rank in range(3)] == [
        "decode-12",
        "decode-12.rank-1",
        "decode-12.rank-2",
    ]
    assert {ranks.worker_of(ranks.rank_name("decode-12", rank)) for rank in range(3)} == {"decode-12"}
    assert ranks.worker_of("gateway") == "gateway"


@pytest.mark.parametrize(
    ("cores", "tp", "shares"),
    [
        ((), 2, [(), ()]),
        ((4, 5, 6, 7), 2, [(4, 5), (6, 7)]),
        ((4, 5, 6), 2, [(4,), (5, 6)]),
        ((4, 5, 6), 3, [(4,), (5,), (6,)]),
        ((0, 1), 4, [(0,), (1,), (0,), (1,)]),
    ],
)
def test_each_rank_has_its_share_of_the_cores(cores: tuple[int, ...], tp: int, shares: list[tuple[int, ...]]) -> None:
    assert [ranks.rank_cores(cores, Shard(rank, tp)) for rank in range(tp)] == shares
    assert [ranks.rank_cores(cores, Shard(0, 1, rank, tp)) for rank in range(tp)] == shares


@pytest.mark.parametrize(
    ("device", "sees_all", "devices"),
    [
        ("cpu", True, ["cpu", "cpu"]),
        ("cuda", True, ["cuda:0", "cuda:1"]),
        ("cuda:2", True, ["cuda:2", "cuda:3"]),
        ("cuda", False, ["cuda", "cuda"]),
    ],
)
def test_ranks_that_see_all_devices_take_different_ones(device: str, sees_all: bool, devices: list[str]) -> None:
    config = worker(2, cores=(0, 1), device=device)
    found = [ranks.rank_config(config, rank, sees_all_devices=sees_all) for rank in range(2)]
    assert [each.device for each in found] == devices
    assert [each.cores for each in found] == [(0,), (1,)]
    assert {msgspec.structs.replace(each, device=device, cores=(0, 1)) for each in found} == {config}


def test_ranks_are_numbered_stage_by_stage() -> None:
    config = worker(2, cores=tuple(range(8)), device="cuda:1", pp=2)
    found = [ranks.rank_config(config, rank, sees_all_devices=True) for rank in range(config.num_ranks)]
    assert [each.device for each in found] == ["cuda:1", "cuda:2", "cuda:3", "cuda:4"]
    assert [each.cores for each in found] == [(0, 1), (2, 3), (4, 5), (6, 7)]


@pytest.mark.parametrize(
    ("device", "count", "visible", "own"),
    [
        ("cpu", 1, None, None),
        ("cuda", 1, None, "0"),
        ("cuda:2", 1, None, "2"),
        ("cuda:2", 2, None, "2,3"),
        ("cuda:1", 1, "4,7", "7"),
        ("cuda", 2, "GPU-a,GPU-b,GPU-c", "GPU-a,GPU-b"),
        ("cuda:1", 2, "4,7", None),
        ("cuda", 1, "", None),
    ],
)
def test_a_process_sees_its_own_devices_only(device: str, count: int, visible: str | None, own: str | None) -> None:
    assert own_devices(device, count, visible) == own


def test_the_first_of_its_own_devices_is_the_first_that_a_process_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VISIBLE_DEVICES, "3,5,6")
    assert (see_own_devices("cuda:1", 2), os.environ[VISIBLE_DEVICES]) == ("cuda", "5,6")
    assert (see_own_devices("cuda:1", 1), os.environ[VISIBLE_DEVICES]) == ("cuda", "6")
    assert (see_own_devices("cuda:1", 1), os.environ[VISIBLE_DEVICES]) == ("cuda:1", "6")
    assert (see_own_devices("cpu", 1), os.environ[VISIBLE_DEVICES]) == ("cpu", "6")


@pytest.mark.parametrize(
    ("device", "sees_all", "expected"),
    [("cpu", True, "cpu"), ("cuda:1", True, "cuda:1"), ("cpu", False, "cpu"), ("cuda:1", False, "cuda")],
)
def test_the_only_rank_has_the_device_of_its_worker_where_that_is_visible(
    device: str, sees_all: bool, expected: str
) -> None:
    config = worker(1, cores=(0, 1), device=device)
    assert ranks.rank_config(config, 0, sees_all_devices=sees_all) == msgspec.structs.replace(config, device=expected)


@pytest.mark.parametrize(
    ("host", "pp", "is_allowed", "is_refused"),
    [
        ("10.0.0.1", 2, False, True),
        ("10.0.0.1", 2, True, False),
        ("127.0.0.3", 2, False, False),
        ("10.0.0.1", 1, False, False),
    ],
)
def test_stages_send_nothing_in_clear_where_others_may_read(
    host: str, pp: int, is_allowed: bool, is_refused: bool
) -> None:
    """Neither of a worker that hands nothing over."""
    config = msgspec.structs.replace(
        worker(1, pp=pp), host=host, plaintext_kv=is_allowed, roles=("prefill", "decode"), transport="shm"
    )
    if is_refused:
        with pytest.raises(
            ConfigError, match=r"network\.plaintext_kv: what 2 stages compute of prompts would leave 10"
        ):
            check_kv_stays_private(config)
    else:
        check_kv_stays_private(config)


def test_what_a_rank_reads_is_what_was_written() -> None:
    start = RankStart(config=worker(2), rank=1, leader_address="127.0.0.1:5", secret=SECRET)
    assert msgspec.json.decode(msgspec.json.encode(start), type=RankStart) == start
    assert "..." in repr(start)
    assert SECRET.value.hex() not in repr(start)


LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 384,
    "max_position_embeddings": 128,
    "eos_token_id": 1,
}


def checkpoint(folder: Path, **values: int) -> str:
    (folder / "config.json").write_text(json.dumps({**LLAMA, **values}))
    (folder / "tokenizer.json").write_text("{}")
    return str(folder)


@pytest.mark.parametrize(
    ("tp", "values", "named"),
    [
        (3, {}, r"^pools\.decode\.tp: tp is 3, .*`num_attention_heads`.*\(8\)"),
        (4, {"intermediate_size": 98}, r"^pools\.decode\.tp: tp is 4, .*`intermediate_size`.*\(98\)"),
        (
            2,
            {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8},
            r"^pools\.decode\.tp: tp is 2, .*`num_key_value_heads`.*\(3\)",
        ),
    ],
)
def test_ranks_that_cannot_share_the_model_are_an_error_before_anything_starts(
    tmp_path: Path, tp: int, values: dict[str, int], named: str
) -> None:
    raw = {"model": {"path": checkpoint(tmp_path, **values)}, "pools": {"decode": {"tp": tp}}}
    with pytest.raises(ConfigError, match=named):
        plan_cluster(parse_config(raw))


def test_whole_experts_of_a_model_without_experts_are_an_error_before_anything_starts(tmp_path: Path) -> None:
    raw = {"model": {"path": checkpoint(tmp_path)}, "pools": {"decode": {"tp": 2, "ep": True}}}
    with pytest.raises(ConfigError, match=r"^pools\.decode\.ep: ep is true, but LlamaForCausalLM has no experts$"):
        plan_cluster(parse_config(raw))


@pytest.mark.parametrize("mode", ["disaggregated", "colocated", "elastic"])
def test_more_stages_than_layers_are_an_error_before_anything_starts(tmp_path: Path, mode: str) -> None:
    name = {"disaggregated": "prefill", "colocated": "colocated", "elastic": "workers"}[mode]
    path = checkpoint(tmp_path, num_hidden_layers=3)
    raw = {"mode": mode, "model": {"path": path}, "pools": {name: {"tp": 2, "pp": 4}}}
    with pytest.raises(ConfigError) as raised:
        plan_cluster(parse_config(raw))
    assert str(raised.value) == f"pools.{name}.pp: pp is 4; this model has 3 layers, and each stage needs one"


@pytest.mark.parametrize(("field", "count"), [("tp", 2), ("pp", 3)])
def test_an_encoder_of_several_ranks_is_an_error_before_anything_starts(tmp_path: Path, field: str, count: int) -> None:
    write_json(tmp_path / "config.json", BERT)
    write_json(tmp_path / "tokenizer.json", {})
    raw = {"mode": "colocated", "model": {"path": str(tmp_path)}, "pools": {"colocated": {field: count}}}
    with pytest.raises(ConfigError) as raised:
        plan_cluster(parse_config(raw))
    assert str(raised.value) == f"pools.colocated.{field}: BertModel runs on one rank; {field} is {count}"


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (4, 1), (8, 1), (1, 2), (4, 3)])
def test_ranks_that_can_share_it_are_planned(tmp_path: Path, tp: int, pp: int) -> None:
    path = checkpoint(tmp_path, num_hidden_layers=3)
    raw = {"model": {"path": path}, "pools": {"prefill": {"tp": tp, "pp": pp}}}
    prefill, decode = plan_cluster(parse_config(raw)).workers
    assert [(each.tp, each.pp, each.num_ranks) for each in (prefill, decode)] == [(tp, pp, tp * pp), (1, 1, 1)]
