"""`disagg load run` on a gateway with API keys and mutual TLS. `/metrics` agrees with what the load test counted."""

from __future__ import annotations

import os
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from disagg.cli import load_commands
from disagg.client import Client
from disagg.cluster.config.cluster_config import parse_config
from disagg.cluster.hosts.processes import ProcessCluster
from disagg.loadtests.generator.recorder import read_info
from disagg.loadtests.records import RequestRecord, read_file
from disagg.proto.errors import OverloadedError
from tests.support.certificates import Authority
from tests.support.metrics import Samples, read_samples, value

KEY = "key-of-the-operators-0001"
OUTPUT_TOKENS = 12
SCENARIO = f"""
workload: {{kind: random, isl: [8, 64], osl: {OUTPUT_TOKENS}}}
arrivals: {{rate_per_s: 30, num_requests: 60}}
"""
TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificates, keys and the scenario; load tests are run from here."""
    made = tmp_path_factory.mktemp("protected")
    authority = Authority(made)
    authority.issue("server")
    authority.issue("client")
    keys = made / "keys.yaml"
    keys.touch(mode=0o600)
    keys.write_text(f"- {{tenant: ops, key: {KEY}, admin: true}}\n")
    (made / "plain.yaml").write_text(SCENARIO)
    return made


@pytest.fixture(scope="module")
def cluster(folder: Path) -> Iterator[ProcessCluster]:
    tls = {"cert": str(folder / "server.crt"), "key": str(folder / "server.key"), "client_ca": str(folder / "ca.pem")}
    config = {
        "model": {"path": "fake"},
        "transfer": {"transport": "shm"},
        "gateway": {"port": 0, "http_port": 0, "api_keys": str(folder / "keys.yaml"), "tls": tls},
        "pools": {"prefill": {"num_blocks": 256}, "decode": {"num_blocks": 256}},
    }
    with ProcessCluster(parse_config(config)) as running:
        yield running
    assert running.killed == []


def load_run(
    folder: Path, cluster: ProcessCluster, *arguments: str, key: str = KEY
) -> subprocess.CompletedProcess[str]:
    """The command as an operator types it in `folder`, whose files the environment names."""
    credentials = {
        "DISAGG_API_KEY": key,
        "DISAGG_CA_CERT": "ca.pem",
        "DISAGG_CLIENT_CERT": "client.crt",
        "DISAGG_CLIENT_KEY": "client.key",
    }
    words = ["load", "run", "--scenario", "plain.yaml", "--address", cluster.address, "--generator-nice", "0"]
    return subprocess.run(
        [sys.executable, "-m", "disagg.cli", *words, *arguments],
        cwd=folder,
        env=os.environ | credentials,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def recorded(folder: Path, cluster: ProcessCluster, name: str, *arguments: str) -> list[RequestRecord]:
    """The records of a run of 60 requests that came to its end."""
    files = ("--record", f"{name}.jsonl", "--html", f"{name}.html", "--json", f"{name}.json")
    ended = load_run(folder, cluster, *files, *arguments)
    # A generator that was late on a busy machine makes the run invalid; its records are as good here.
    said = ended.stdout + ended.stderr
    assert ended.returncode in (load_commands.EXIT_MET, load_commands.EXIT_MISSED, load_commands.EXIT_INVALID), said
    record = folder / f"{name}.jsonl"
    assert read_info(record).is_complete
    written = [(folder / f"{name}.{kind}").read_text() for kind in ("jsonl", "run", "html", "json")]
    assert not any(KEY in text for text in (said, *written))
    found = read_file(record)
    assert len(found) == 60
    return found


def scrape(http: httpx.Client, done: Callable[[Samples], bool]) -> Samples:
    """The metrics, once they have that value: a client has its last token before the gateway has counted the call."""
    deadline = time.monotonic() + 10
    while True:
        response = http.get("/metrics")
        assert response.status_code == 200
        found = read_samples(response.content)
        if done(found):
            return found
        assert time.monotonic() < deadline, f"the metrics never said so: {found}"
        time.sleep(0.02)


@pytest.fixture
def http(folder: Path, cluster: ProcessCluster) -> Iterator[httpx.Client]:
    ca, certificate, private = (str(folder / name) for name in ("ca.pem", "client.crt", "client.key"))
    with Client(cluster.address, KEY, ca, certificate, private) as client:
        address = client.cluster_state().http_address
    context = ssl.create_default_context(cafile=ca)
    context.load_cert_chain(certificate, private)
    with httpx.Client(base_url=f"https://{address}", verify=context, timeout=60) as opened:
        assert opened.get("/metrics").status_code == 401
        opened.headers["authorization"] = f"Bearer {KEY}"
        yield opened


def test_a_load_test_without_the_key_says_what_is_missing(folder: Path, cluster: ProcessCluster) -> None:
    ended = load_run(folder, cluster, key="")
    assert ended.returncode == 1
    assert "UNAUTHENTICATED: a valid API key is needed" in ended.stderr
    assert "set DISAGG_API_KEY" in ended.stderr


def test_metrics_agree_with_what_the_load_test_counted(
    folder: Path, cluster: ProcessCluster, http: httpx.Client
) -> None:
    """One run with targets that all meet, one with a target that no worker can meet, which is refused."""
    easy = recorded(folder, cluster, "easy", "--slo-ttft-ms", "60000", "--slo-tpot-ms", "60000")
    hard = recorded(folder, cluster, "hard", "--slo-ttft-ms", "0.001", "--seed", "1")
    records = easy + hard
    ok = [record for record in records if record.status == "ok"]
    refused = [record for record in records if record.status == "refused"]
    assert len(ok) + len(refused) == 120
    assert {record.status for record in easy} == {"ok"}
    assert refused

    found = scrape(http, lambda samples: sum(samples.get("disagg_calls_total", {}).values()) == 120)
    for outcome, of_outcome in (("ok", ok), (OverloadedError.code, refused)):
        assert value(found, "disagg_calls_total", protocol="grpc", outcome=outcome) == len(of_outcome)
    check_requests(found, ok, refused)
    for slo in ("ttft", "both"):
        assert value(found, "disagg_slo_requests_total", slo=slo, met="true") == len(easy)
        assert value(found, "disagg_slo_requests_total", slo=slo, met="false") == len(hard)
    assert value(found, "disagg_slo_requests_total", slo="tpot", met="true") == len(easy)
    assert value(found, "disagg_slo_requests_total", slo="tpot", met="false") == 0


def check_requests(found: Samples, ok: list[RequestRecord], refused: list[RequestRecord]) -> None:
    prompt_tokens = sum(record.num_prompt_tokens for record in ok)
    output_tokens = sum(len(record.token_times_s) for record in ok)
    assert output_tokens == len(ok) * OUTPUT_TOKENS
    assert value(found, "disagg_requests_total", outcome="length") == len(ok)
    assert value(found, "disagg_requests_total", outcome=OverloadedError.code) == len(refused)
    assert sum(found["disagg_requests_total"].values()) == len(ok) + len(refused)
    assert value(found, "disagg_prompt_tokens_total") == prompt_tokens
    assert value(found, "disagg_cached_prompt_tokens_total") == sum(record.cached_tokens for record in ok)
    assert value(found, "disagg_output_tokens_total") == output_tokens
    assert sum(found["disagg_time_to_first_token_seconds_count"].values()) == len(ok)
    assert value(found, "disagg_inter_token_latency_seconds_count") == output_tokens - len(ok)
    model = {"model_name": "fake"}
    assert value(found, "vllm:request_success_total", model, finished_reason="length") == len(ok)
    assert value(found, "vllm:prompt_tokens_total", model) == prompt_tokens
    assert value(found, "vllm:generation_tokens_total", model) == output_tokens
    assert value(found, "vllm:time_to_first_token_seconds_count", model) == len(ok)
    assert value(found, "vllm:request_generation_tokens_sum", model) == output_tokens
