"""LoRA adapters of a real cluster with two gateways and the deterministic model, whose tokens depend on the adapter's
content: added, served, replaced and removed under load, and kept by a gateway that is killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
import yaml
from safetensors.numpy import save_file

from disagg.client import Client
from disagg.cluster.config.cluster_config import parse_config
from disagg.cluster.hosts import processes
from disagg.cluster.hosts.processes import ProcessCluster
from disagg.engine.fake_runner import fake_generate
from disagg.proto.control import GatewayRecord
from disagg.proto.errors import DisaggError, InvalidRequestError, ModelNotFoundError, PermissionDeniedError
from tests.support.secret import SECRET
from tests.support.waiting import LONG_WAIT_S, wait_until
from tests.support.workers import wait_until_workers_idle

PROMPT = tuple(range(40))
KEYS: list[dict[str, Any]] = [
    {"tenant": "ops", "key": "key-of-the-operators-1", "scopes": ["admin", "inference"]},
    {"tenant": "team", "key": "key-of-the-team-000002"},
    {"tenant": "base", "key": "key-of-base-only-00003", "models": ["fake"]},
]
ADMIN, TEAM, BASE = (entry["key"] for entry in KEYS)
LONG = 600


def write_adapter(folder: Path, name: str, seed: int) -> None:
    """One of rank 4, with this content."""
    place = folder / name
    place.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8.0, "bias": "none", "use_dora": False}
    (place / "adapter_config.json").write_text(json.dumps(config))
    dice, module = np.random.default_rng(seed), "base_model.model.model.layers.0.self_attn.q_proj"
    parts = {
        f"{module}.lora_A.weight": dice.standard_normal((4, 8), dtype=np.float32),
        f"{module}.lora_B.weight": dice.standard_normal((8, 4), dtype=np.float32),
    }
    save_file(parts, place / "adapter_model.safetensors")


def content(folder: Path, **models: str) -> dict[str, Any]:
    keys = folder / "keys.yaml"
    keys.touch(mode=0o600)
    keys.write_text(yaml.safe_dump(KEYS))
    return {
        "model": {"path": "fake", "max_model_len": 4096},
        "transfer": {"transport": "shm"},
        "gateway": {"port": 0, "http_port": 0, "api_keys": str(keys), "replicas": 2},
        "pools": {name: {"num_blocks": 2048, "max_num_seqs": 16} for name in ("prefill", "decode")},
        "adapters": {"folder": str(folder / "adapters"), "max_loaded": 4, "models": models},
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("filed", "sql", "law", "kept", "http")):
        write_adapter(folder / "adapters", name, seed)
    (folder / "adapters" / "broken").mkdir()
    return folder


@pytest.fixture(scope="module")
def cluster(folder: Path) -> Iterator[ProcessCluster]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "new_secret", lambda network: SECRET)  # so that the test may audit the workers
        with ProcessCluster(parse_config(content(folder, filed="filed"))) as running:
            yield running
    assert running.killed == []


def gateways(cluster: ProcessCluster) -> list[GatewayRecord]:
    return [record for record in cluster.state().gateways if record.phase == "ready"]


def tokens(client: Client, model: str, num_tokens: int = 20) -> list[int]:
    answer = client.generate(PROMPT, model=model, max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    return list(answer.token_ids)


def test_an_adapter_of_the_configuration_is_served_without_an_operator(cluster: ProcessCluster) -> None:
    with Client(cluster.address, api_key=ADMIN) as admin:
        assert wait_until(lambda: [each.phase for each in admin.adapters()] == ["ready"], LONG_WAIT_S)
        (filed,) = admin.adapters()
        assert (filed.name, filed.base, filed.in_file) == ("filed", "fake", True)
        assert tokens(admin, "filed") == fake_generate(PROMPT, 20, adapter=filed.fingerprint)
        with pytest.raises(InvalidRequestError, match=r"^name: filed is in the configuration"):
            admin.remove_adapter("filed")


def test_an_adapter_is_added_and_served_by_all_gateways_over_both_protocols(cluster: ProcessCluster) -> None:
    with Client(cluster.address, api_key=ADMIN) as admin:
        sql, notes = admin.add_adapter("sql", "sql")
        assert (sql.phase, sql.bytes, notes) == ("ready", 4 * 64, [])
        for path, why in (("broken", "adapter_config.json"), ("none", "no such folder"), ("../sql", "without ..")):
            with pytest.raises(InvalidRequestError, match=why):
                admin.add_adapter("bad", path)
    assert len(gateways(cluster)) == 2
    for record in gateways(cluster):
        with Client(record.own_address, api_key=TEAM) as client:
            assert {model.name for model in client.models()} == {"fake", "filed", "sql"}
            expected = fake_generate(PROMPT, 20, adapter=sql.fingerprint)
            assert tokens(client, "sql") == expected != tokens(client, "fake") == fake_generate(PROMPT, 20)
            with pytest.raises(PermissionDeniedError):
                client.add_adapter("other", "law")
        with Client(record.own_address, api_key=BASE) as client:
            assert [model.name for model in client.models()] == ["fake"]
            with pytest.raises(PermissionDeniedError):
                tokens(client, "sql")
        with http_of(record, TEAM) as http:
            listed = {each["id"]: each["parent"] for each in http.get("/v1/models").json()["data"]}
            assert listed == {"fake": None, "filed": "fake", "sql": "fake"}
            body = {"model": "sql", "prompt": list(PROMPT), "max_tokens": 20, "temperature": 0, "ignore_eos": True}
            answer = http.post("/v1/completions", json=body).json()
            text = http.post("/detokenize", json={"model": "sql", "tokens": expected}).json()["prompt"]
            assert (answer["model"], answer["choices"][0]["text"]) == ("sql", text)


def test_over_http_as_with_vllm(cluster: ProcessCluster) -> None:
    first, second = gateways(cluster)
    body = {"lora_name": "http", "lora_path": "http"}
    with http_of(first, TEAM) as http:
        assert http.post("/v1/load_lora_adapter", json=body).status_code == 403
    with http_of(first, ADMIN) as http, http_of(second, ADMIN) as other:
        assert http.post("/v1/load_lora_adapter", json=body).text == "Success: LoRA adapter 'http' added successfully."
        assert "already been loaded" in other.post("/v1/load_lora_adapter", json=body).json()["error"]["message"]
        assert other.get("/v1/models/http").json()["root"] == "http"
        assert other.post("/v1/unload_lora_adapter", json={"lora_name": "http"}).status_code == 200
        assert http.get("/v1/models/http").status_code == 404
        assert http.post("/v1/unload_lora_adapter", json={"lora_name": "http"}).status_code == 404


def test_replaced_and_removed_under_load(cluster: ProcessCluster, folder: Path) -> None:
    with Client(cluster.address, api_key=ADMIN) as admin:
        before, _ = admin.add_adapter("law", "law")
        streams = [Stream(record.own_address, "law") for record in gateways(cluster)]
        write_adapter(folder / "adapters", "law", 99)
        after, _ = admin.add_adapter("law", "law")
        assert after.fingerprint != before.fingerprint
        assert tokens(admin, "law") == fake_generate(PROMPT, 20, adapter=after.fingerprint)
        found = admin.explain(admin.requests(1)[0].request_id)
        assert (found.model, found.prefill_cached_tokens) == ("law", 0)
        streams += [Stream(record.own_address, "law") for record in gateways(cluster)]
        admin.remove_adapter("law")
        for record in gateways(cluster):
            with Client(record.own_address, api_key=TEAM) as client, pytest.raises(ModelNotFoundError):
                tokens(client, "law")
        ended = [stream.join() for stream in streams]
    for fingerprint, streamed in zip([before.fingerprint] * 2 + [after.fingerprint] * 2, ended, strict=True):
        assert streamed == fake_generate(PROMPT, LONG, adapter=fingerprint)


def apply_others(cluster: ProcessCluster, folder: Path) -> None:
    """`disagg apply` adds and removes adapters of the configuration in place."""
    with Client(cluster.address, api_key=ADMIN) as admin:
        pids = {info.pid for info in cluster.workers}
        applied = admin.apply(msgspec.to_builtins(parse_config(content(folder, applied="http"))))
        assert {(change.field, change.how) for change in applied.changes} == {
            ("adapters.models.filed", "in place"),
            ("adapters.models.applied", "in place"),
        }
        phases = {"applied": "ready", "sql": "ready"}
        assert wait_until(lambda: {each.name: each.phase for each in admin.adapters()} == phases, LONG_WAIT_S)
        fingerprint = admin.adapters()[0].fingerprint
        assert tokens(admin, "applied") == fake_generate(PROMPT, 20, adapter=fingerprint)
        with pytest.raises(ModelNotFoundError):
            tokens(admin, "filed")
    assert {info.pid for info in cluster.workers} == pids


def test_apply_and_a_gateway_that_is_killed(cluster: ProcessCluster, folder: Path) -> None:
    """Both last: the controller keeps a thread of `apply`, and the new gateway is a process of this test."""
    apply_others(cluster, folder)
    with Client(cluster.address, api_key=ADMIN) as admin:
        kept, _ = admin.add_adapter("kept", "kept")
    record = gateways(cluster)[0]
    os.kill(record.pid, signal.SIGKILL)
    assert wait_until(lambda: record.pid not in {each.pid for each in gateways(cluster)}, LONG_WAIT_S)
    assert wait_until(lambda: len(gateways(cluster)) == 2, LONG_WAIT_S)
    new = next(each for each in gateways(cluster) if each.name == record.name)
    assert new.pid != record.pid
    with Client(new.own_address, api_key=TEAM) as client:
        assert tokens(client, "kept") == fake_generate(PROMPT, 20, adapter=kept.fingerprint)
    asyncio.run(wait_until_workers_idle(cluster.workers, cluster.secret))
    cluster.stop()


def http_of(record: GatewayRecord, key: str) -> httpx.Client:
    headers = {"authorization": f"Bearer {key}"}
    return httpx.Client(base_url=f"http://{record.own_http_address}", headers=headers, timeout=60.0)


class Stream:
    """A long answer, which has begun."""

    def __init__(self, address: str, model: str) -> None:
        self._address, self._model = address, model
        self._begun = threading.Event()
        self._token_ids: list[int] = []
        self._error: DisaggError | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        assert self._begun.wait(LONG_WAIT_S)

    def _run(self) -> None:
        try:
            with Client(self._address, api_key=TEAM) as client:
                options: dict[str, Any] = {"max_tokens": LONG, "temperature": 0.0, "ignore_eos": True}
                for delta in client.stream(PROMPT, model=self._model, **options):
                    self._token_ids.extend(delta.token_ids)
                    self._begun.set()
        except DisaggError as error:
            self._error = error
        finally:
            self._begun.set()

    def join(self) -> list[int]:
        self._thread.join()
        assert self._error is None
        return self._token_ids
