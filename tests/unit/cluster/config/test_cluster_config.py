from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from disagg.cluster.config.cluster_config import (
    ClusterConfig,
    PoolConfig,
    load_config,
    override,
    parse_config,
    unused_pools,
)
from disagg.cluster.core.config_reader import parse_size
from disagg.connections.addresses import is_loopback
from disagg.gateway.auth.tls_files import TlsFiles
from disagg.gateway.config import BatchOptions, UsageOptions
from disagg.proto.errors import ConfigError
from disagg.router.config import RecordingOptions

POOL_KEYS = (
    "size, min_size, max_size, cores, block_size, token_budget, swap_bytes, decode_reserve_tokens, node_labels, "
    "tp, pp, ep, num_threads, kv_cache_bytes, num_blocks, scheduling, max_itl_ms, step_ahead, skip_forced, "
    "speculation, max_num_seqs, cached_share, cached_keep_s, device, watermark"
)
SECTIONS = (
    "model, kernels, gateway, mode, pools, adapters, models, placement, slo, network, controller, kv_cache, transfer, "
    "recovery, ray, autoscaler, metrics, logging"
)


@pytest.mark.parametrize("raw", [None, {}, {"pools": None}, {"pools": {"prefill": {}}}])
def test_everything_has_a_default(raw: object) -> None:
    config = parse_config(raw)
    assert config == ClusterConfig()
    assert config.mode == "disaggregated"
    assert config.pools.prefill.size == config.pools.decode.size == 1
    assert (config.gateway.host, config.gateway.port) == ("127.0.0.1", 8470)


def test_the_whole_file_as_documented(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(
        """
        model: {name: smollm2-135m, path: null, dtype: float32}
        gateway: {host: 127.0.0.1, port: 9000, max_queued: 7}
        mode: colocated
        pools:
          prefill: {size: 2, tp: 3, num_threads: 1, cores: [0, 1, 5], kv_cache_bytes: 1GiB, token_budget: 128}
          colocated: {size: 4, cores: none, block_size: 32, max_num_seqs: 9, device: cpu}
        placement: {local_prefill: never}
        transfer: {transport: gloo, chunk_bytes: 1MiB, staging_bytes: 8MiB, lease_timeout_s: 3, heartbeat_s: 0.25}
        ray: {address: local, temp_dir: /tmp/x}
        """
    )
    config = load_config(file)
    assert config.model.dtype == "float32"
    assert config.gateway.max_queued == 7
    assert config.mode == "colocated"
    assert config.pools.prefill == PoolConfig(
        size=2, tp=3, num_threads=1, cores=(0, 1, 5), kv_cache_bytes=2**30, num_blocks=None, token_budget=128
    )
    assert config.pools.colocated == PoolConfig(size=4, cores="none", block_size=32, max_num_seqs=9)
    assert config.placement.local_prefill == "never"
    assert (config.transfer.chunk_bytes, config.transfer.staging_bytes) == (2**20, 2**23)
    assert (config.transfer.lease_timeout_s, config.transfer.heartbeat_s) == (3.0, 0.25)
    assert config.ray.temp_dir == "/tmp/x"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "pools: {prefill: {sizee: 1}}",
            f"pools.prefill.sizee: unknown key, did you mean 'size' or 'min_size'?; allowed here: {POOL_KEYS}",
        ),
        ("zzz: 1", f"zzz: unknown key; allowed here: {SECTIONS}"),
        ("7: 1", f"7: unknown key; allowed here: {SECTIONS}"),
        (
            "mode: collocated",
            "mode: 'collocated' is not allowed, did you mean 'colocated'?; "
            "choose from: disaggregated, colocated, elastic",
        ),
        ("mode: [colocated]", "mode: expected disaggregated | colocated | elastic; got ['colocated']"),
        ("placement: {local_prefill: no}", "placement.local_prefill: expected auto | never; got False"),
        ("pools: {decode: {cores: 5}}", "pools.decode.cores: expected auto | none | array; got 5"),
        (
            "modle: {name: x}",
            f"modle: unknown key, did you mean 'mode' or 'model'?; allowed here: {SECTIONS}",
        ),
        (
            "placement: {decodes: auto}",
            "placement.decodes: auto is for mode elastic with policy auto or elastic; "
            "got mode disaggregated, policy auto",
        ),
        (
            "{mode: elastic, placement: {decodes: auto, policy: joint}}",
            "placement.decodes: auto is for mode elastic with policy auto or elastic; got mode elastic, policy joint",
        ),
        (
            "{mode: colocated, placement: {decodes: gather}}",
            "placement.decodes: gather is for mode elastic with policy auto or elastic; "
            "got mode colocated, policy auto",
        ),
        (
            "{mode: elastic, placement: {decodes: 'split:0'}}",
            "placement.decodes: must be spread, gather, auto or split:N (N workers that take no prompts); "
            "got 'split:0'",
        ),
        (
            "{mode: elastic, placement: {decodes: 'split:2'}, pools: {workers: {size: 2}}}",
            "placement.decodes: split:2 leaves none of 2 workers for prompts; see pools.workers.size",
        ),
        (
            '{mode: elastic, controller: {twin: "on"}}',
            "controller.twin: on is for placement.decodes auto, not spread",
        ),
        (
            "{mode: elastic, placement: {decodes: auto}, metrics: {num_traces: 39}}",
            "metrics.num_traces: placement.decodes auto compares settings on 40 requests or more; got 39",
        ),
        (
            "{mode: elastic, pools: {workers: {scheduling: static}}}",
            "pools.workers.scheduling: static is for mode colocated; choose decode_first or slack",
        ),
        (
            "pools: {decode: {scheduling: static}}",
            "pools.decode.scheduling: static is for mode colocated; choose decode_first or slack",
        ),
        (
            "{mode: colocated, pools: {colocated: {max_itl_ms: 50}}}",
            "pools.colocated.max_itl_ms: is for scheduling slack only, not decode_first",
        ),
        ("model: {path: ''}", "model.path: expected str of length >= 1; got ''"),
        ("model: {dtype: int4}", "model.dtype: 'int4' is not allowed; choose from: float32, bfloat16, float16, auto"),
        (
            "model: {quantization: int5}",
            "model.quantization: 'int5' is not allowed, did you mean 'int8' or 'int4'?; "
            "choose from: none, stored, stored_sums, int8, int4, fp8",
        ),
        (
            "model: {quantization: int8, dtype: float32}",
            "model.quantization: int8 needs dtype bfloat16, not float32",
        ),
        (
            "{model: {quantization: int8}, pools: {prefill: {device: cuda}, decode: {device: 'cuda:1'}}}",
            "model.quantization: int8 is for device cpu, not cuda",
        ),
        (
            "{model: {quantization: fp8}}",
            "model.quantization: fp8 is for device cuda, not cpu",
        ),
        (
            "{model: {kv_cache_dtype: fp8}}",
            "model.kv_cache_dtype: fp8 is for device cuda, not cpu",
        ),
        (
            "{model: {kv_cache_dtype: int8}, pools: {prefill: {device: cuda}, decode: {device: 'cuda:1'}}}",
            "model.kv_cache_dtype: int8 is for device cpu, not cuda",
        ),
        (
            "{model: {kv_cache_dtype: int4}}",
            "model.kv_cache_dtype: 'int4' is not allowed, did you mean 'int8'?; choose from: auto, int8, fp8",
        ),
        (
            "{kernels: {attention: flashinfer}}",
            "kernels.attention: flashinfer is for device cuda, not cpu",
        ),
        (
            "{kernels: {attention: fa3}}",
            "kernels.attention: 'fa3' is not allowed; choose from: auto, triton, flashinfer",
        ),
        (
            "{model: {quantization: int8}, pools: {decode: {tp: 2}}}",
            "model.quantization: int8 is for workers of one rank, not of 2",
        ),
        (
            "{model: {quantization: stored}, pools: {prefill: {pp: 2, tp: 2}}}",
            "model.quantization: stored is for workers of one rank, not of 4",
        ),
        (
            "{model: {share_weights: true}, pools: {prefill: {pp: 2}}}",
            "model.share_weights: only workers of one rank share their weights, not of 2",
        ),
        (
            "{pools: {decode: {pp: 2, speculation: {method: draft, model: fake}}}}",
            "pools.decode.speculation.method: draft is for workers of one rank, not of 2",
        ),
        ("pools: {prefill: {pp: 0}}", "pools.prefill.pp: expected int >= 1; got 0"),
        ("pools: {prefill: {tp: 65}}", "pools.prefill.tp: a worker has at most 64 ranks; got 65"),
        ("pools: {decode: {tp: 2, pp: 33}}", "pools.decode.pp: a worker has at most 64 ranks; got 66"),
        ("pools: {decode: {cores: [1, 2, 3], tp: 2, pp: 2}}", "pools.decode.pp: 4 ranks do not fit on 3 cores"),
        (
            "pools: {decode: {cores: [1, 2, 3], pp: 2, num_threads: 2}}",
            "pools.decode.num_threads: 2 threads of 2 ranks do not fit on 3 cores",
        ),
        (
            "{kv_cache: {tiers: {disk: {path: /kv, bytes: 1GiB}}}, pools: {prefill: {pp: 2}}}",
            "kv_cache.tiers.disk: is for workers of one rank; pools.prefill.pp is 2",
        ),
        (
            "model: {share_weights: maybe}",
            "model.share_weights: expected bool; got 'maybe'",
        ),
        (
            "{model: {share_weights: true}, pools: {decode: {tp: 2}}}",
            "model.share_weights: only workers of one rank share their weights, not of 2",
        ),
        (
            "{model: {share_weights: true}, pools: {prefill: {device: cuda}, decode: {device: 'cuda:1'}}}",
            "model.share_weights: only weights on device cpu are shared, not on cuda",
        ),
        (
            "transfer: {transport: gluon}",
            "transfer.transport: 'gluon' is not allowed, did you mean 'gloo'?; "
            "choose from: auto, gloo, shm, nixl, nccl, local",
        ),
        ("pools: {decode: {size: 0}}", "pools.decode.size: expected int >= 1; got 0"),
        ("pools: {decode: {size: two}}", "pools.decode.size: expected int; got 'two'"),
        ("pools: {decode: {size: true}}", "pools.decode.size: expected int; got True"),
        ("pools: {decode: 3}", "pools.decode: expected a mapping of keys to values; got 3"),
        ("- a", "the configuration: expected a mapping of keys to values; got ['a']"),
        (
            "pools: {decode: {kv_cache_bytes: 1 apple}}",
            "pools.decode.kv_cache_bytes: '1 apple' is not a size such as 64MiB, 1GiB or 1000000, or auto",
        ),
        ("pools: {decode: {kv_cache_bytes: -5}}", "pools.decode.kv_cache_bytes: expected int >= 1; got -5"),
        ("pools: {decode: {cores: all}}", "pools.decode.cores: 'all' is not allowed; choose from: auto, none"),
        ("pools: {decode: {cores: [-1]}}", "pools.decode.cores: expected int >= 0; got [-1]"),
        (
            "pools: {decode: {cores: [1, 1]}}",
            "pools.decode.cores: expected auto, none, or a list of different cores; got [1, 1]",
        ),
        (
            "pools: {decode: {cores: [1], num_threads: 2}}",
            "pools.decode.num_threads: 2 threads do not fit on 1 core",
        ),
        ("pools: {decode: {cores: [1], tp: 2}}", "pools.decode.tp: 2 ranks do not fit on 1 core"),
        (
            "pools: {decode: {cores: [1, 2, 3], tp: 2, num_threads: 2}}",
            "pools.decode.num_threads: 2 threads of 2 ranks do not fit on 3 cores",
        ),
        (
            "pools: {prefill: {speculation: {method: lookup}}}",
            "pools.prefill.speculation: is for pools that decode; set it in pools.decode",
        ),
        (
            "pools: {decode: {speculation: {max_draft: 0}}}",
            "pools.decode.speculation.max_draft: expected int >= 1; got 0",
        ),
        (
            "pools: {decode: {speculation: {max_draft: 16}}}",
            "pools.decode.speculation.max_draft: expected int <= 15; got 16",
        ),
        (
            "pools: {decode: {speculation: {method: medusa}}}",
            "pools.decode.speculation.method: 'medusa' is not allowed; choose from: auto, lookup, draft, off",
        ),
        (
            "pools: {decode: {ep: true}}",
            "pools.decode.ep: with tp 1 a rank has all experts of its layers; set tp to at least 2, or leave ep out",
        ),
        ("pools: {decode: {tp: 0}}", "pools.decode.tp: expected int >= 1; got 0"),
        ("pools: {prefill: {block_size: 24}}", "pools.prefill.block_size: 24 is not a multiple of 16"),
        ("pools: {prefill: {device: tpu}}", "pools.prefill.device: expected cpu, cuda or cuda:<index>; got 'tpu'"),
        (
            "pools: {prefill: {device: cuda}}",
            "pools.decode.device: all pools need the same kind of device; got cpu, cuda",
        ),
        ("pools: {prefill: {watermark: 1.0}}", "pools.prefill.watermark: expected float < 1.0; got 1.0"),
        (
            "transfer: {transport: nccl}",
            "transfer.transport: nccl moves KV between CUDA devices only; use gloo or auto with device cpu",
        ),
        (
            "transfer: {chunk_bytes: 2MiB, staging_bytes: 1MiB}",
            "transfer.chunk_bytes: 2097152 is larger than transfer.staging_bytes (1048576)",
        ),
        (
            "transfer: {heartbeat_s: 3}",
            "transfer.heartbeat_s: 3.0 must be at most half of transfer.lease_timeout_s (5.0), "
            "or leases run out between heartbeats",
        ),
        ("kv_cache: {tiers: {}}", "kv_cache.tiers: needs host_bytes or disk; leave it out for no tiers"),
        (
            "kv_cache: {tiers: {disk: {path: /kv}}}",
            "kv_cache.tiers.disk.bytes: must be set where kv_cache.tiers.disk is",
        ),
        ("kv_cache: {tiers: {host_bytes: -1}}", "kv_cache.tiers.host_bytes: expected int >= 0; got -1"),
        (
            "{kv_cache: {tiers: {disk: {path: /kv, bytes: 1GiB}}}, pools: {prefill: {tp: 2}}}",
            "kv_cache.tiers.disk: is for workers of one rank; pools.prefill.tp is 2",
        ),
        (
            "{kv_cache: {fetch: true, tiers: {disk: {path: /kv, bytes: 1GiB}}}, pools: {decode: {tp: 2}}}",
            "kv_cache.tiers.disk: is for workers of one rank; pools.decode.tp is 2, and with kv_cache.fetch its "
            "workers have tiers, too",
        ),
        (
            "{kv_cache: {tiers: {host_bytes: 1GiB}}, pools: {prefill: {device: cuda}, decode: {device: cuda}}}",
            "kv_cache.tiers: is for workers on device cpu, not cuda",
        ),
        ("transfer: {lease_timeout_s: .nan}", "transfer.lease_timeout_s: expected float > 0.0; got nan"),
        ("transfer: {lease_timeout_s: .inf}", "transfer.lease_timeout_s: expected float <= 86400.0; got inf"),
        ("gateway: {port: 70000}", "gateway.port: expected int <= 65535; got 70000"),
        ("gateway: {max_unfinished_bytes: 0}", "gateway.max_unfinished_bytes: expected int >= 1; got 0"),
        (
            "gateway: {max_unfinished_bytes: 2TiB}",
            "gateway.max_unfinished_bytes: expected int <= 1099511627776; got 2199023255552",
        ),
        ("gateway: {max_keyless_watches: 0}", "gateway.max_keyless_watches: expected int >= 1; got 0"),
        ("gateway: {max_keyless_watches: 65537}", "gateway.max_keyless_watches: expected int <= 65536; got 65537"),
        (
            "pools: {decode: {decode_reserve_tokens: 0}}",
            "pools.decode.decode_reserve_tokens: expected int >= 1; got 0",
        ),
        (
            "gateway: {host: 0.0.0.0}",
            "gateway.host: 0.0.0.0 can be reached by others; "
            "set gateway.tls, because keys, prompts and answers would travel in clear text; "
            "and gateway.api_keys or gateway.tls.client_ca, because every caller would be admitted; "
            "or bind to 127.0.0.1; or set gateway.insecure: true",
        ),
    ],
)
def test_a_mistake_names_its_place_and_what_is_allowed(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(yaml.safe_load(text))
    assert str(caught.value) == message


def test_a_pool_that_the_mode_does_not_use_may_be_odd() -> None:
    raw: dict[str, Any] = {"mode": "colocated", "pools": {"prefill": {"block_size": 24}}}
    assert parse_config(raw).pools.prefill.block_size == 24


def test_binding_to_other_interfaces_must_be_asked_for_by_name() -> None:
    assert parse_config({"gateway": {"host": "0.0.0.0", "insecure": True}}).gateway.host == "0.0.0.0"


def test_http_is_beside_grpc() -> None:
    ports = [{}, {"port": 9000}, {"port": 0}, {"http_port": 5}, {"http_port": 0}, {"http_port": None}]
    assert [parse_config({"gateway": each}).gateway.chosen_http_port for each in ports] == [8471, 9001, 0, 5, 0, None]


@pytest.mark.parametrize(
    ("gateway", "message"),
    [
        ({"port": 5, "http_port": 5}, "gateway.http_port: 5 is gateway.port already; gRPC and HTTP need one each"),
        ({"port": 65535}, "gateway.http_port: there is no port after 65535; set one, or null"),
        ({"http_port": 65536}, "gateway.http_port: expected int <= 65535; got 65536"),
        ({"http_port": "next"}, "gateway.http_port: 'next' is not allowed; choose from: auto"),
    ],
)
def test_ports_that_cannot_be(gateway: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config({"gateway": gateway})
    assert str(caught.value) == message


TLS = {"cert": "/c", "key": "/k"}


@pytest.mark.parametrize(
    "gateway",
    [
        {"tls": TLS, "api_keys": "/a"},
        {"tls": {**TLS, "client_ca": "/ca"}},
        {"insecure": True},
        {"insecure": True, "api_keys": "/a"},
        {"insecure": True, "tls": TLS},
    ],
)
def test_what_others_may_reach(gateway: dict[str, Any]) -> None:
    assert parse_config({"gateway": {"host": "0.0.0.0", **gateway}}).gateway.host == "0.0.0.0"


@pytest.mark.parametrize(
    ("gateway", "missing"),
    [
        ({"tls": TLS}, "gateway.api_keys or gateway.tls.client_ca, because every caller would be admitted"),
        ({"api_keys": "/a"}, "gateway.tls, because keys, prompts and answers would travel in clear text"),
    ],
)
def test_half_of_what_others_reaching_it_needs(gateway: dict[str, Any], missing: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config({"gateway": {"host": "10.0.0.1", **gateway}})
    assert str(caught.value) == (
        f"gateway.host: 10.0.0.1 can be reached by others; set {missing}; "
        "or bind to 127.0.0.1; or set gateway.insecure: true"
    )


@pytest.mark.parametrize(
    ("tls", "message"),
    [
        ({"cert": "/c"}, "gateway.tls.key: must be set where gateway.tls is"),
        ({**TLS, "ca": "/x"}, "gateway.tls.ca: unknown key; allowed here: cert, key, client_ca"),
        ("/c", "gateway.tls: expected a mapping of keys to values; got '/c'"),
    ],
)
def test_a_tls_section_that_cannot_be(tls: object, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config({"gateway": {"tls": tls}})
    assert str(caught.value) == message


def test_files_are_found_from_the_configuration_s_folder(tmp_path: Path) -> None:
    file = tmp_path / "disagg.yaml"
    tls, recording = "{cert: tls/c.pem, key: /etc/k.pem}", "{folder: events, max_bytes: 1GiB}"
    stores = "batches: {folder: batches}, usage: {folder: usage}"
    file.write_text(f"gateway: {{api_keys: keys.yaml, tls: {tls}, record_events: {recording}, {stores}}}")
    gateway = load_config(file).gateway
    assert gateway.record_events == RecordingOptions(folder=str(tmp_path / "events"), max_bytes=1 << 30)
    assert gateway.api_keys == str(tmp_path / "keys.yaml")
    assert gateway.batches == BatchOptions(folder=str(tmp_path / "batches"))
    assert gateway.usage == UsageOptions(folder=str(tmp_path / "usage"))
    assert gateway.tls == TlsFiles(cert=str(tmp_path / "tls/c.pem"), key="/etc/k.pem")
    assert override(load_config(file), {}).gateway == gateway


def test_a_model_s_folder_is_found_from_the_working_directory_of_who_reads_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("v1", "there", "there/v1"):
        (tmp_path / folder).mkdir()
    (tmp_path / "there/disagg.yaml").write_text("model: {name: m, path: ./v1}")
    (tmp_path / "there/named.yaml").write_text("model: {path: v1}")
    (tmp_path / "there/hub.yaml").write_text("model: {path: org/v1}")
    monkeypatch.chdir(tmp_path)
    paths = [load_config(Path("there") / f"{name}.yaml").model.path for name in ("disagg", "named", "hub")]
    assert paths == [str(tmp_path / "v1"), "v1", "org/v1"]


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("::1", True), ("localhost", True), ("127.8.8.8", True), ("10.0.0.1", False), ("box", False)],
)
def test_loopback(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("10", 10),
        ("1KiB", 1024),
        ("1.5GiB", 3 << 29),
        ("64 MiB", 64 << 20),
        ("2GB", 2 * 10**9),
        ("3k", 3072),
        ("7B", 7),
    ],
)
def test_sizes(text: str, num_bytes: int) -> None:
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "-1MiB", "1XB", "1e3", "nan"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        parse_size(text)


def test_override_is_checked_like_the_file() -> None:
    config = override(ClusterConfig(), {"pools.decode.size": 3, "model.path": "fake"})
    assert (config.pools.decode.size, config.model.path) == (3, "fake")
    with pytest.raises(ConfigError, match=r"^pools\.decode\.size: expected int >= 1; got 0$"):
        override(ClusterConfig(), {"pools.decode.size": 0})


def test_override_keeps_what_the_file_said() -> None:
    config = parse_config({"pools": {"prefill": {"cores": [3]}}, "gateway": {"max_queued": 5}})
    assert override(config, {"gateway.port": 0}).pools.prefill.cores == (3,)
    assert override(config, {}) == config


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml: cannot be read"):
        load_config(tmp_path / "none.yaml")


def test_a_file_that_is_no_yaml(tmp_path: Path) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text("pools: {")
    with pytest.raises(ConfigError, match=r"bad\.yaml: not valid YAML"):
        load_config(file)


@pytest.mark.parametrize("text", ["mode: colocated\nmode: disaggregated", "pools: {decode: {size: 1, size: 2}}"])
def test_a_key_that_is_written_twice(tmp_path: Path, text: str) -> None:
    file = tmp_path / "twice.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"twice\.yaml: not valid YAML \('(mode|size)' is written twice in .* line 1"):
        load_config(file)


@pytest.mark.parametrize(
    ("model", "name"),
    [({}, "smollm2-135m"), ({"name": "a"}, "a"), ({"path": "/m/b"}, "b"), ({"path": "/m/b", "name": "c"}, "c")],
)
def test_the_name_that_requests_use(model: dict[str, str], name: str) -> None:
    assert parse_config({"model": model}).model.served_name == name


def test_pools_that_the_mode_does_not_use_are_noted() -> None:
    config = parse_config({"mode": "elastic", "pools": {"prefill": {"size": 2}, "decode": {"size": 3}}})
    assert unused_pools(config) == ("pools.prefill, pools.decode: not used in mode elastic, which has pools.workers",)
    config = parse_config({"pools": {"workers": {"size": 3}, "decode": {"size": 3}}})
    assert unused_pools(config) == (
        "pools.workers: not used in mode disaggregated, which has pools.prefill and pools.decode",
    )
    assert unused_pools(parse_config({"mode": "elastic", "pools": {"workers": {"size": 3}}})) == ()


def test_on_and_off_need_no_quotes() -> None:
    config = parse_config(yaml.safe_load("{network: {encryption: off}, controller: {twin: off}}"))
    assert (config.network.encryption, config.controller.twin) == ("off", "off")
    assert parse_config(yaml.safe_load("network: {encryption: on}")).network.encryption == "on"
    with pytest.raises(ConfigError, match=r"^network\.bind: expected loopback \| node; got True$"):
        parse_config(yaml.safe_load("network: {bind: on}"))


@pytest.mark.parametrize(
    ("raw", "field"),
    [
        ({"gateway": {"replicas": 0}}, "gateway.replicas"),
        ({"gateway": {"replicas": 65}}, "gateway.replicas"),
        ({"gateway": {"replicas": 3, "replica_http_port": 65534}}, "gateway.replica_http_port"),
        ({"gateway": {"replicas": 2, "replica_http_port": 8470}}, "gateway.replica_http_port"),
        ({"gateway": {"replicas": 2, "replica_http_port": 8469}}, "gateway.replica_http_port"),
        ({"gateway": {"replicas": 2}, "mode": "elastic", "placement": {"decodes": "auto"}}, "gateway.replicas"),
    ],
)
def test_gateways_that_cannot_be_are_refused(raw: object, field: str) -> None:
    with pytest.raises(ConfigError, match=f"^{field}: "):
        parse_config(raw)


def test_each_gateway_has_a_name_and_a_port_of_its_own() -> None:
    config = parse_config({"gateway": {"replicas": 2, "replica_http_port": 9471}})
    assert (config.gateway.replicas, config.gateway.replica_http_port) == (2, 9471)
