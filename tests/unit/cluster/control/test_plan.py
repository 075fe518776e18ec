from __future__ import annotations

from typing import Any

import msgspec
import pytest

from disagg.cluster.config.cluster_config import ClusterConfig, active_pools, parse_config
from disagg.cluster.config.core_layout import CorePlan, check_devices, plan_cores, worker_device
from disagg.cluster.control.plan import (
    ClusterPlan,
    gateway_config,
    plan_cluster,
    router_config,
    swap_bytes,
    transport_name,
    worker_config,
)
from disagg.cluster.core.config_reader import read_struct
from disagg.engine.config import (
    DiskTier,
    EngineLimits,
    KernelOptions,
    ModelOptions,
    SpeculationOptions,
    TierOptions,
    TransferLimits,
)
from disagg.engine.kv_transfer.transports import nixl_agent
from disagg.gateway.auth.tls_files import TlsFiles
from disagg.gateway.config import ModelSource
from disagg.proto.control import PoolName
from disagg.proto.errors import ConfigError
from disagg.proto.ids import Incarnation, WorkerId
from disagg.proto.messages import KvLayout, WorkerInfo
from disagg.router.config import RecordingOptions


def make_info(worker_id: str, max_model_len: int = 100, fingerprint: str = "f") -> WorkerInfo:
    kv_layout = KvLayout.dense(num_layers=1, num_kv_heads=1, head_dim=1, dtype="fake", bytes_per_token=4)
    return WorkerInfo(
        worker_id=WorkerId(worker_id),
        incarnation=Incarnation("i"),
        roles=("prefill",),
        address="127.0.0.1:1",
        pid=1,
        fingerprint=fingerprint,
        kv_layout=kv_layout,
        num_blocks=1,
        block_size=16,
        max_num_seqs=1,
        token_budget=1,
        max_model_len=max_model_len,
    )


def test_one_prefill_and_one_decode_worker_get_a_core_each_and_the_gateway_sits_with_prefill() -> None:
    plan = plan_cores(parse_config({}), (0, 1))
    assert plan == CorePlan({"prefill-0": (0,), "decode-0": (1,)}, gateways=((0,),), warnings=())


def test_further_gateways_get_the_cores_that_no_worker_has() -> None:
    config = parse_config({"gateway": {"replicas": 3}})
    assert plan_cores(config, (4, 5, 6)).gateways == ((4,), (6,), ())
    assert plan_cores(config, (4, 5)).gateways == ((4,), (), ())


def test_cores_wrap_around_with_a_warning() -> None:
    config = parse_config({"pools": {"prefill": {"size": 2}, "decode": {"size": 1, "num_threads": 2}}})
    plan = plan_cores(config, (4, 6, 7))
    assert plan.workers == {"prefill-0": (4,), "prefill-1": (6,), "decode-0": (7, 4)}
    assert plan.warnings == ("core 4 is shared by prefill-0, decode-0: fine for trying out, not for timing",)


def test_more_threads_than_cores_take_each_core_once() -> None:
    config = parse_config({"mode": "colocated", "pools": {"colocated": {"num_threads": 8}}})
    assert plan_cores(config, (0, 1)).workers == {"colocated-0": (0, 1)}


def test_explicit_cores_none_and_gpus_are_left_as_they_are() -> None:
    config = parse_config({"pools": {"prefill": {"cores": [9]}, "decode": {"cores": "none"}}})
    plan = plan_cores(config, (0, 1))
    assert plan.workers == {"prefill-0": (9,), "decode-0": ()}
    assert plan.gateway == (9,)
    assert plan.warnings == ("core 9 (for prefill-0) is not among this process's cores; they will not be pinned",)
    gpu = parse_config({"pools": {"prefill": {"device": "cuda"}, "decode": {"device": "cuda"}}})
    assert plan_cores(gpu, (0, 1)).workers == {"prefill-0": (), "decode-0": ()}


GPU_POOLS: list[tuple[dict[str, Any], list[str]]] = [
    ({"prefill": {"device": "cuda"}, "decode": {"device": "cuda"}}, ["cuda:0", "cuda:1"]),
    (
        {"prefill": {"device": "cuda", "size": 2}, "decode": {"device": "cuda", "tp": 2}},
        ["cuda:0", "cuda:1", "cuda:2"],
    ),
    ({"prefill": {"device": "cuda", "pp": 3}, "decode": {"device": "cuda"}}, ["cuda:0", "cuda:3"]),
    ({"prefill": {"device": "cuda:2", "size": 2}, "decode": {"device": "cuda"}}, ["cuda:2", "cuda:3", "cuda:0"]),
]


@pytest.mark.parametrize(("pools", "devices"), GPU_POOLS)
def test_each_worker_has_devices_of_its_own(pools: dict[str, Any], devices: list[str]) -> None:
    config = parse_config({"pools": pools})
    plan = ClusterPlan(config, {"": "fake"}, (0, 1))
    assert [worker.device for worker in plan.workers] == devices
    check_devices(config, 4)
    check_devices(config, None)


def test_workers_that_come_later_take_the_next_devices() -> None:
    config = parse_config({"pools": {"prefill": {"device": "cuda", "tp": 2}, "decode": {"device": "cuda"}}})
    pools: tuple[PoolName, ...] = ("prefill", "decode")
    assert [[worker_device(config, pool, index) for pool in pools] for index in range(3)] == [
        ["cuda:0", "cuda:2"],
        ["cuda:3", "cuda:5"],
        ["cuda:6", "cuda:8"],
    ]


@pytest.mark.parametrize(
    ("pools", "error"),
    [
        (
            {"prefill": {"device": "cuda", "tp": 2}, "decode": {"device": "cuda:1"}},
            "pools.decode.device: decode-0 would share CUDA device 1 with prefill-0; "
            "name the device in every pool, such as cuda:0, where that is meant",
        ),
        (
            {"prefill": {"device": "cuda", "size": 3}, "decode": {"device": "cuda", "tp": 2}},
            "pools: decode-0 needs CUDA device 4; this machine has 4, and each rank of a worker takes one. "
            "Pools that name the same one, such as cuda:0, share it",
        ),
        (
            {"prefill": {"device": "cuda"}, "decode": {"device": "cuda", "tp": 2, "pp": 2}},
            "pools: decode-0 needs CUDA device 4; this machine has 4, and each rank of a worker takes one. "
            "Pools that name the same one, such as cuda:0, share it",
        ),
    ],
)
def test_devices_that_are_not_there_are_refused(pools: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError) as raised:
        check_devices(parse_config({"pools": pools}), 4)
    assert str(raised.value) == error


@pytest.mark.parametrize("transport", ["auto", "gloo", "shm", "nixl"])
def test_both_pools_share_a_device_that_both_name(transport: str) -> None:
    pools = {
        "prefill": {"device": "cuda:0", "kv_cache_bytes": "2GiB"},
        "decode": {"device": "cuda:0", "num_blocks": 100},
    }
    config = parse_config({"pools": pools, "transfer": {"transport": transport}})
    check_devices(config, 1)
    assert [worker.device for worker in ClusterPlan(config, {"": "fake"}, (0, 1)).workers] == ["cuda:0", "cuda:0"]


@pytest.mark.parametrize("measures", ["prefill", "decode"])
def test_no_worker_measures_a_device_that_it_shares(measures: str) -> None:
    pool = {"device": "cuda:0", "kv_cache_bytes": "2GiB"}
    pools = {"prefill": pool, "decode": pool} | {measures: {"device": "cuda:0"}}
    with pytest.raises(ConfigError) as raised:
        check_devices(parse_config({"pools": pools}), 1)
    assert str(raised.value) == (
        f"pools.{measures}.kv_cache_bytes: auto is for a CUDA device of its own; "
        "set a size where workers share device 0"
    )


def test_nccl_joins_two_workers_on_one_device_only_where_that_is_asked_for() -> None:
    pool = {"device": "cuda:0", "kv_cache_bytes": "2GiB"}
    config = parse_config({"pools": {"prefill": pool, "decode": pool}, "transfer": {"transport": "nccl"}})
    with pytest.raises(ConfigError) as raised:
        check_devices(config, 1)
    assert str(raised.value) == (
        "pools.decode.device: decode-0 would share CUDA device 0 with prefill-0, which NCCL refuses; use another "
        "transfer.transport, or set DISAGG_NCCL_ONE_GPU=1 in the environment: KV then goes through sockets, right but "
        "slowly"
    )
    check_devices(config, 1, nccl_shares=True)


def test_who_asks_for_it_still_names_the_device() -> None:
    config = parse_config(
        {"pools": {"prefill": {"device": "cuda"}, "decode": {"device": "cuda:0"}}, "transfer": {"transport": "nccl"}}
    )
    with pytest.raises(ConfigError, match="name the device in every pool, such as cuda:0, where that is meant"):
        check_devices(config, 1, nccl_shares=True)


@pytest.mark.parametrize(
    ("device", "transports"), [("cpu", ["gloo", "shm", "nixl"]), ("cuda", ["gloo", "shm", "nixl", "nccl"])]
)
def test_a_transport_that_is_named_is_taken(device: str, transports: list[str]) -> None:
    for transport in transports:
        pools = {"prefill": {"device": device}, "decode": {"device": device}}
        config = parse_config({"pools": pools, "transfer": {"transport": transport}})
        assert transport_name(config) == transport


def test_nixl_without_its_extra_is_refused_by_the_name_of_the_field(monkeypatch: pytest.MonkeyPatch) -> None:
    config = parse_config({"model": {"path": "fake"}, "transfer": {"transport": "nixl"}})
    monkeypatch.setattr(nixl_agent, "MODULES", ("no_such_package",))
    with pytest.raises(ConfigError) as raised:
        plan_cluster(config)
    assert str(raised.value) == "transfer.transport: nixl needs the extra `nixl` (pip install 'disagg[nixl]')"


def test_worker_configs_carry_pool_transfer_and_model() -> None:
    config = parse_config(
        {
            "model": {"dtype": "float32", "max_model_len": 50},
            "pools": {
                "prefill": {"size": 2, "num_blocks": 11, "swap_bytes": 0},
                "decode": {"token_budget": 33, "block_size": 32, "swap_bytes": "1GiB"},
            },
            "transfer": {"chunk_bytes": 1024, "staging_bytes": 4096, "lease_timeout_s": 2},
        }
    )
    workers = ClusterPlan(config, {"": "/m"}, (0, 1)).workers
    assert [(w.worker_id, w.roles, w.cores) for w in workers] == [
        ("prefill-0", ("prefill",), (0,)),
        ("prefill-1", ("prefill",), (1,)),
        ("decode-0", ("decode",), (0,)),
    ]
    assert [w.num_blocks for w in workers] == [11, 11, None]
    assert [w.swap_bytes for w in workers] == [0, 0, 1 << 30]
    assert (workers[2].token_budget, workers[2].block_size) == (33, 32)
    for worker in workers:
        assert (worker.model_path, worker.dtype, worker.max_model_len) == ("/m", "float32", 50)
        assert worker.transfer == TransferLimits(chunk_bytes=1024, staging_bytes=4096, lease_timeout_s=2.0)
        assert (worker.host, worker.port, worker.transport) == ("127.0.0.1", 0, "shm")


@pytest.mark.parametrize(
    ("device", "budget", "block", "swap", "chunk", "staging", "tail"),
    [("cpu", 512, 16, 256 << 20, 4 << 20, 64 << 20, 32), ("cuda", 4096, 64, 0, 64 << 20, 512 << 20, 0)],
)
def test_defaults_are_those_of_the_device(
    device: str, budget: int, block: int, swap: int, chunk: int, staging: int, tail: int
) -> None:
    pool = {"device": device}
    config = parse_config({"pools": {"prefill": pool, "decode": pool}, "transfer": {"max_pairs": 3}})
    for worker in ClusterPlan(config, {"": "/m"}, (0, 1)).workers:
        assert (worker.token_budget, worker.block_size, worker.kv_cache_bytes) == (budget, block, "auto")
        assert (worker.swap_bytes, worker.tail_tokens) == (swap, tail)
        assert worker.transfer == TransferLimits(chunk_bytes=chunk, staging_bytes=staging, max_pairs=3)


def test_a_chunk_is_compared_with_the_staging_memory_of_the_device() -> None:
    transfer = {"chunk_bytes": "128MiB"}
    with pytest.raises(
        ConfigError, match=r"chunk_bytes: 134217728 is larger than transfer\.staging_bytes \(67108864\)"
    ):
        parse_config({"transfer": transfer})
    pool = {"device": "cuda"}
    parse_config({"pools": {"prefill": pool, "decode": pool}, "transfer": transfer})


def other_value(field: msgspec.structs.FieldInfo) -> Any:
    """A value that the field's default is not."""
    words = {
        "dtype": "float16",
        "quantization": "int8",
        "kv_cache_dtype": "fp8",
        "scheduling": "static",
        "attention": "triton",
    }
    named = words | {"device": "cuda:1", "watermark": 0.5, "max_model_len": 50, "num_blocks": 11, "max_itl_ms": 40.0}
    named |= {"kv_cache_bytes": 12345, "speculation": SpeculationOptions(method="off", max_draft=3)}
    if field.name in named:
        return named[field.name]
    return not field.default if isinstance(field.default, bool) else type(field.default)(field.default / 2 + 1)


def test_each_limit_of_the_yaml_reaches_the_worker() -> None:
    """Whatever a shared struct has is a key of its section and a value of the process, without a list in between."""
    sections = {
        kind: {field.name: other_value(field) for field in msgspec.structs.fields(kind)}
        for kind in (ModelOptions, KernelOptions, EngineLimits, TransferLimits)
    }
    model, kernels, pool, transfer = sections.values()
    raw = {"mode": "colocated", "model": model, "kernels": kernels, "pools": {"colocated": pool}, "transfer": transfer}
    config = read_struct(ClusterConfig, msgspec.to_builtins(raw))  # unchecked: the values need not go together
    worker = worker_config(config, "colocated", 0, "/m", (0,))
    for kind, values in sections.items():
        source = worker.transfer if kind is TransferLimits else worker
        assert {name: getattr(source, name) for name in values} == values


@pytest.mark.parametrize(("shared", "path"), [(False, "/kv/prefill-1"), (True, "/kv")])
def test_workers_that_compute_prompts_have_tiers_in_folders_of_their_own(shared: bool, path: str) -> None:
    tiers = {"host_bytes": "1MiB", "disk": {"path": "/kv", "bytes": "1GiB", "shared": shared}}
    config = parse_config({"kv_cache": {"tiers": tiers}, "pools": {"prefill": {"size": 2}}})
    _, prefill, decode = ClusterPlan(config, {"": "/m"}, (0, 1)).workers
    assert decode.tiers is None
    with_fetch = parse_config({"kv_cache": {"tiers": tiers, "fetch": True}, "pools": {"prefill": {"size": 2}}})
    assert ClusterPlan(with_fetch, {"": "/m"}, (0, 1)).workers[2].tiers == TierOptions(
        host_bytes=1 << 20,
        disk=DiskTier(path=path.replace("prefill-1", "decode-0"), bytes=1 << 30, shared=shared),
    )
    assert prefill.tiers == TierOptions(host_bytes=1 << 20, disk=DiskTier(path=path, bytes=1 << 30, shared=shared))


@pytest.mark.parametrize("fetch", [False, True])
def test_all_workers_fetch_or_none(fetch: bool) -> None:
    plan = ClusterPlan(parse_config({"kv_cache": {"fetch": fetch}}), {"": "/m"}, (0, 1))
    assert [worker.fetch for worker in plan.workers] == [fetch, fetch]


@pytest.mark.parametrize("shared", [False, True])
def test_worker_configs_say_whether_weights_are_shared(shared: bool) -> None:
    config = parse_config({"model": {"share_weights": shared}})
    assert [worker.share_weights for worker in ClusterPlan(config, {"": "/m"}, (0, 1)).workers] == [shared] * 2


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_worker_configs_carry_the_quantization(quantization: str) -> None:
    config = parse_config({"model": {"quantization": quantization}})
    assert [worker.quantization for worker in ClusterPlan(config, {"": "/m"}, (0, 1)).workers] == [quantization] * 2


@pytest.mark.parametrize(("pool", "expected"), [({}, 256 << 20), ({"device": "cuda"}, 0), ({"swap_bytes": 5}, 5)])
def test_host_memory_follows_the_device(pool: dict[str, object], expected: int) -> None:
    config = parse_config({"mode": "colocated", "pools": {"colocated": pool}})
    assert swap_bytes(config.pools.colocated) == expected


@pytest.mark.parametrize(("gateway", "expected_s"), [({}, 0.0), ({"token_interval_ms": 20}, 0.02)])
def test_workers_are_told_how_often_clients_get_tokens(gateway: dict[str, object], expected_s: float) -> None:
    config = parse_config({"gateway": gateway})
    assert worker_config(config, "decode", 0, "/m", (0,)).token_interval_s == expected_s


def test_a_colocated_worker_has_both_roles() -> None:
    config = parse_config({"mode": "colocated"})
    (worker,) = ClusterPlan(config, {"": "fake"}, (0,)).workers
    assert (worker.worker_id, worker.roles) == ("colocated-0", ("prefill", "decode"))


@pytest.mark.parametrize(("pool", "expected"), [({}, 16), ({"device": "cuda"}, 64), ({"block_size": 48}, 48)])
def test_blocks_are_larger_on_a_gpu(pool: dict[str, object], expected: int) -> None:
    config = parse_config({"mode": "colocated", "pools": {"colocated": pool}})
    (worker,) = ClusterPlan(config, {"": "fake"}, (0,)).workers
    assert worker.block_size == expected


@pytest.mark.parametrize(
    ("device", "bind", "transport"),
    [("cpu", "loopback", "shm"), ("cpu", "node", "gloo"), ("cuda:1", "loopback", "auto"), ("cuda:1", "node", "auto")],
)
def test_auto_transport_follows_device_and_network(device: str, bind: str, transport: str) -> None:
    pools = {"prefill": {"device": device}, "decode": {"device": device}}
    config = parse_config({"pools": pools, "network": {"bind": bind}})
    assert transport_name(config) == transport


def test_router_and_gateway_configs() -> None:
    config = parse_config(
        {
            "model": {"name": "m"},
            "gateway": {
                "port": 5,
                "max_queued": 6,
                "max_connections": 7,
                "max_grpc_connections": 9,
                "max_unfinished_bytes": "3MiB",
                "max_keyless_watches": 11,
                "api_keys": "/a",
                "tls": {"cert": "/c", "key": "/k"},
            },
            "placement": {"local_prefill": "never"},
            "pools": {"decode": {"decode_reserve_tokens": 77, "watermark": 0.5}},
        }
    )
    router = router_config(config)
    assert (router.local_prefill, router.max_queued) == ("never", 6)
    assert (router.decode_reserve_tokens, router.watermark) == (77, 0.5)
    gateway = gateway_config(config, {"": "/m"}, [make_info("a", 100), make_info("b", 90)])
    assert gateway.models == (ModelSource(name="m", path="/m", prefix_root="m", max_model_len=90),)
    assert (gateway.host, gateway.port, gateway.http_port) == ("127.0.0.1", 5, 6)
    assert (gateway.max_connections, gateway.max_grpc_connections, gateway.api_keys) == (7, 9, "/a")
    assert (gateway.max_unfinished_bytes, gateway.max_keyless_watches) == (3 << 20, 11)
    assert gateway.tls == TlsFiles(cert="/c", key="/k")


def test_the_policy_follows_from_the_mode_and_auto_begins_with_spread() -> None:
    elastic = router_config(parse_config({"mode": "elastic", "placement": {"decodes": "auto"}}))
    assert (elastic.policy, elastic.decodes) == ("elastic", "spread")
    gather = router_config(parse_config({"mode": "elastic", "placement": {"decodes": "gather"}}))
    assert (gather.policy, gather.decodes) == ("elastic", "gather")
    assert router_config(parse_config({})).policy == "joint"


def test_events_are_recorded_where_that_is_configured() -> None:
    for recording in (None, {"folder": "/e", "max_bytes": 7}):
        plan = plan_cluster(parse_config({"model": {"path": "fake"}, "gateway": {"record_events": recording}}))
        expected = recording and RecordingOptions(folder="/e", max_bytes=7)
        assert plan.gateway([make_info("a", 100)]).recording == expected


@pytest.mark.parametrize(
    ("sizes", "threads", "available", "cores"),
    [
        # two cores: each pool keeps to its own
        ((1, 1), (1, 1), (0, 1), {"prefill": [(0,), (0,), (0,)], "decode": [(1,), (1,), (1,)]}),
        # enough cores: nobody shares, whatever grows
        ((1, 2), (1, 1), tuple(range(9)), {"prefill": [(0,), (3,), (5,)], "decode": [(1,), (2,), (4,), (6,)]}),
        ((1, 1), (2, 1), tuple(range(6)), {"prefill": [(0, 1), (3, 4)], "decode": [(2,), (5,)]}),
    ],
)
def test_workers_that_come_later_go_on_round_the_cores(
    sizes: tuple[int, int],
    threads: tuple[int, int],
    available: tuple[int, ...],
    cores: dict[PoolName, list[tuple[int, ...]]],
) -> None:
    pools = {
        name: {"size": size, "num_threads": count}
        for name, size, count in zip(("prefill", "decode"), sizes, threads, strict=True)
    }
    plan = ClusterPlan(parse_config({"pools": pools}), {"": "fake"}, available)
    for pool, expected in cores.items():
        assert [plan.worker(pool, index).cores for index in range(len(expected))] == expected


def test_each_rank_takes_cores_for_its_threads() -> None:
    pools = {"prefill": {"pp": 2, "num_threads": 2}, "decode": {"size": 2, "tp": 1}}
    plan = plan_cores(parse_config({"pools": pools}), tuple(range(10, 16)))
    assert plan.workers == {"prefill-0": (10, 11, 12, 13), "decode-0": (14,), "decode-1": (15,)}
    assert plan.warnings == ()
    (prefill, *decode) = ClusterPlan(parse_config({"pools": pools}), {"": "fake"}, tuple(range(10, 16))).workers
    assert (prefill.num_ranks, prefill.num_threads, prefill.cores) == (2, 2, (10, 11, 12, 13))
    assert [worker.tp for worker in decode] == [1, 1]


@pytest.mark.parametrize(
    ("pools", "expected"),
    [
        ({"prefill": {"num_threads": "auto"}, "decode": {"num_threads": "auto"}}, {"prefill-0": 4, "decode-0": 4}),
        ({"prefill": {"num_threads": 2}, "decode": {"num_threads": "auto"}}, {"prefill-0": 2, "decode-0": 6}),
        ({"prefill": {"num_threads": "auto", "tp": 2}}, {"prefill-0": 3, "decode-0": 1}),
        ({"prefill": {"num_threads": "auto", "pp": 2}}, {"prefill-0": 3, "decode-0": 1}),
        ({"decode": {"num_threads": "auto", "cores": [2, 3, 5]}}, {"prefill-0": 1, "decode-0": 3}),
        ({"decode": {"num_threads": "auto", "size": 9}}, {"prefill-0": 1, "decode-8": 1}),
    ],
)
def test_threads_without_a_number_share_the_cores_that_are_left(
    pools: dict[str, object], expected: dict[str, int]
) -> None:
    plan = ClusterPlan(parse_config({"pools": pools}), {"": "fake"}, tuple(range(8)))
    workers = {worker.worker_id: worker for worker in plan.workers}
    for name, count in expected.items():
        pool = plan.pool(name.rpartition("-")[0])
        assert workers[name].num_threads == pool.num_threads == count
        is_open = dict(active_pools(plan.config))[name.rpartition("-")[0]].num_threads == "auto"
        assert workers[name].threads_are_open == (is_open and count > 1)
        assert plan.cores.workers[name] == workers[name].cores


def test_the_fake_model_has_a_layer_for_each_stage_in_every_pool() -> None:
    config = parse_config({"model": {"path": "fake"}, "pools": {"prefill": {"pp": 3}, "decode": {"pp": 2}}})
    assert [worker.fake_layers for worker in plan_cluster(config, (0, 1)).workers] == [3, 3]
    assert [worker.fake_layers for worker in plan_cluster(parse_config({"model": {"path": "fake"}})).workers] == [1, 1]


def test_ranks_that_share_cores_are_warned_about() -> None:
    config = parse_config({"mode": "colocated", "pools": {"colocated": {"tp": 2, "pp": 2}}})
    plan = plan_cores(config, (0, 1))
    assert plan.workers == {"colocated-0": (0, 1)}
    assert plan.warnings == ("the 4 ranks of colocated-0 share 2 cores: fine for trying out, not for timing",)


def test_a_plan_for_the_gateway_remembers_its_ports() -> None:
    plan = ClusterPlan(parse_config({"gateway": {"port": 0}}), {"": "fake"}, (0, 1))
    infos = [make_info("a"), make_info("b")]
    first, again = plan.gateway(infos), plan.gateway(infos, port=77, http_port=78)
    assert (first.gateway.port, first.gateway.http_port) == (0, 0)
    assert (again.gateway.port, again.gateway.http_port) == (77, 78)
    assert first.gateway_id != again.gateway_id
    assert (first.workers, first.cores) == (tuple(infos), (0,))
