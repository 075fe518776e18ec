"""`disagg apply` on a real cluster of child processes with tiny models, under open-loop load: no request fails, and
each answer is that of one version of the model."""

from __future__ import annotations

import io
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from rich.console import Console
from safetensors.torch import load_file, save_file

from disagg.cli.operations.apply import ApplyOptions, run_apply
from disagg.client import Client
from disagg.cluster.config.cluster_config import parse_config
from disagg.cluster.hosts.processes import ProcessCluster
from disagg.cluster.system.children import LaunchError
from disagg.proto.errors import ConfigError
from tests.support.tiny_models import make_checkpoint
from tests.support.waiting import LONG_WAIT_S, wait_until

PROMPTS = [[(7 * i + 3 * k) % 250 for k in range(20 + 9 * i)] for i in range(6)]
MAX_TOKENS = 48
WAIT_S = 240.0


def content(model: Path, **decode: Any) -> dict[str, Any]:
    """A cluster's configuration; `decode` goes into its decode pool."""
    pool = {"num_threads": 1, "num_blocks": 256, "cores": "none"}
    return {
        "model": {"name": "tiny", "path": str(model), "dtype": "float32"},
        "gateway": {"port": 0},
        "pools": {"prefill": {**pool, "size": 1}, "decode": {**pool, "size": 2, **decode}},
    }


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two versions of one model: other weights, the same tokenizer."""
    folder = tmp_path_factory.mktemp("models")
    first = make_checkpoint("llama", folder / "v1")
    second = folder / "v2"
    shutil.copytree(first, second)
    weights = load_file(second / "model.safetensors")
    generator = torch.Generator().manual_seed(5)
    save_file(
        {name: w + 0.2 * torch.randn(w.shape, generator=generator) for name, w in weights.items()},
        second / "model.safetensors",
        {"format": "pt"},
    )
    return first, second


@contextmanager
def running(config: dict[str, Any]) -> Iterator[ProcessCluster]:
    with ProcessCluster(parse_config(config)) as cluster:
        yield cluster


def answer(client: Client, number: int) -> list[int]:
    return list(
        client.generate(
            PROMPTS[number], model="tiny", max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True
        ).token_ids
    )


def all_answers(address: str) -> list[list[int]]:
    with Client(address) as client:
        return [answer(client, number) for number in range(len(PROMPTS))]


class Load:
    """Requests at fixed times, each in a thread, whatever becomes of those before."""

    def __init__(self, address: str) -> None:
        self._client = Client(address)
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self.answers: list[tuple[int, list[int]]] = []
        self.failures: list[str] = []
        self._pacer = threading.Thread(target=self._pace)

    def __enter__(self) -> Load:
        self._pacer.start()
        return self

    def _pace(self) -> None:
        count = 0
        while not self._stop.wait(0.1):
            thread = threading.Thread(target=self._one, args=(count % len(PROMPTS),))
            thread.start()
            self._threads.append(thread)
            count += 1

    def _one(self, number: int) -> None:
        try:
            self.answers.append((number, answer(self._client, number)))
        except Exception as error:
            self.failures.append(repr(error))

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._pacer.join()
        for thread in self._threads:
            thread.join()
        self._client.close()

    def check(self, *versions: list[list[int]]) -> list[int]:
        """No request failed, and each answer is whole and of one version; how many there are of each."""
        assert self.failures == []
        counts = [0] * len(versions)
        for number, tokens in self.answers:
            (version,) = [i for i, answers in enumerate(versions) if answers[number] == tokens]
            counts[version] += 1
        return counts


def apply(cluster: ProcessCluster, config: dict[str, Any], folder: Path, **options: Any) -> str:
    """Run the command; what it printed."""
    file = folder / "cluster.yaml"
    file.write_text(yaml.safe_dump(config))
    out = io.StringIO()
    run_apply(cluster.address, file, Console(file=out, width=200), ApplyOptions(wait_s=WAIT_S, **options))
    return out.getvalue()


def pids(cluster: ProcessCluster) -> dict[str, int]:
    return {str(info.worker_id): info.pid for info in cluster.workers}


def is_new(cluster: ProcessCluster) -> set[str]:
    """The ready workers that have the KV blocks of the new configuration."""
    return {str(info.worker_id) for info in cluster.workers if info.num_blocks == 300}


def test_a_new_model_and_another_kv_size_come_without_a_failed_or_altered_request(
    models: tuple[Path, Path], tmp_path: Path
) -> None:
    first, second = models
    with running(content(first)) as cluster:
        before, old = pids(cluster), all_answers(cluster.address)
        with Load(cluster.address) as load:
            assert wait_until(lambda: len(load.answers) > 5, timeout_s=LONG_WAIT_S)
            shown = apply(cluster, content(second, num_blocks=300), tmp_path)
            count = len(load.answers)
            assert wait_until(lambda: len(load.answers) > count + 12, timeout_s=LONG_WAIT_S)
        after, new = pids(cluster), all_answers(cluster.address)
        assert new != old
        of_old, of_new = load.check(old, new)
        assert of_old > 5
        assert of_new > 0
        assert after.keys() == before.keys() == {"prefill-0", "decode-0", "decode-1"}
        assert not set(after.values()) & set(before.values())
        assert {i.worker_id: i.num_blocks for i in cluster.workers} == {
            "prefill-0": 256,
            "decode-0": 300,
            "decode-1": 300,
        }
        assert "generation 2 is applied" in shown
        assert "0 of 3 workers have it" in shown
        assert "next: replaces prefill-0 and decode-1" in shown
        state = cluster.state()
        assert (state.generation, state.rollout, state.rolled_back) == (2, None, None)
    assert cluster.killed == []


def test_threads_sizes_and_another_mode_come_without_a_failed_or_altered_request(
    models: tuple[Path, Path], tmp_path: Path
) -> None:
    config = content(models[0])
    with running(config) as cluster:
        old = all_answers(cluster.address)
        with Load(cluster.address) as load:
            pools = config["pools"]
            threads = {**pools, "prefill": {**pools["prefill"], "num_threads": 2}}
            threads["decode"] = {**pools["decode"], "size": 1}
            assert "generation 2 is applied" in apply(cluster, {**config, "pools": threads}, tmp_path)
            assert pids(cluster).keys() == {"prefill-0", "decode-0"}
            one_pool = {"workers": {**pools["decode"], "size": 2}}
            shown = apply(cluster, {**config, "mode": "elastic", "pools": one_pool}, tmp_path)
            assert "workers change in: workers, prefill, decode" in shown
            count = len(load.answers)
            assert wait_until(lambda: len(load.answers) > count + 12, timeout_s=LONG_WAIT_S)
        assert load.check(old)[0] > 12
        assert pids(cluster).keys() == {"workers-0", "workers-1"}
        state = cluster.state()
        assert (state.generation, [pool.name for pool in state.pools], state.is_settled) == (3, ["workers"], True)
    assert cluster.killed == []


def test_what_can_be_changed_in_place_restarts_nothing(models: tuple[Path, Path], tmp_path: Path) -> None:
    config = content(models[0])
    with running(config) as cluster, Client(cluster.address) as client:
        before = pids(cluster)
        changed = {**config, "placement": {"policy": "round_robin"}, "slo": {"ttft_ms": 5000.0}}
        changed["pools"] = {**config["pools"], "prefill": {**config["pools"]["prefill"], "size": 2}}
        shown = apply(cluster, changed, tmp_path, dry_run=True)
        assert "dry run: nothing was changed" in shown
        assert cluster.state().generation == 1
        shown = apply(cluster, changed, tmp_path)
        assert shown.count("in place") == 3
        assert "workers are replaced" not in shown
        after = pids(cluster)
        assert {name: after[name] for name in before} == before
        assert after.keys() - before.keys() == {"prefill-1"}
        assert wait_until(lambda: client.load(1).policy == "round_robin", timeout_s=30)
        assert "is all that, and runs" in apply(cluster, changed, tmp_path)
        with pytest.raises(ConfigError, match=r"gateway\.port: .*nothing was changed"):
            apply(cluster, {**changed, "gateway": {"port": 1}}, tmp_path)
        with pytest.raises(ConfigError, match=r"model\.name: "):
            apply(cluster, {**changed, "model": {**config["model"], "name": "other"}}, tmp_path)
        assert pids(cluster) == after


def test_workers_that_cannot_start_are_taken_back_and_the_old_ones_never_stop_to_serve(
    models: tuple[Path, Path], tmp_path: Path
) -> None:
    with running(content(models[0])) as cluster:
        before, old = pids(cluster), all_answers(cluster.address)
        with pytest.raises(ConfigError, match=r"decode\.kv_cache_bytes: 1000 bytes hold no block.*nothing was changed"):
            apply(cluster, content(models[0], num_blocks=None, kv_cache_bytes=1000), tmp_path)
        assert pids(cluster) == before
        broken = shutil.copytree(models[0], tmp_path / "broken")
        (broken / "model.safetensors").write_bytes(b"no weights")
        taken_back = pytest.raises(
            LaunchError, match=r"generation 2 was taken back: (prefill|decode)-\d failed 3 times: .*safetensors"
        )
        with Load(cluster.address) as load, taken_back:
            apply(cluster, content(broken), tmp_path)
        assert load.check(old)[0] > 5
        assert pids(cluster) == before
        state = cluster.state()
        assert (state.generation, state.rollout, state.is_settled) == (1, None, True)
        with pytest.raises(ConfigError, match="nothing was changed"):
            apply(cluster, content(tmp_path / "missing"), tmp_path)
        assert pids(cluster) == before


@pytest.mark.slow
def test_workers_that_are_killed_in_the_middle_change_nothing_of_the_end(
    models: tuple[Path, Path], tmp_path: Path
) -> None:
    with running(content(models[0])) as cluster:
        old = all_answers(cluster.address)
        with Load(cluster.address) as load:
            thread = threading.Thread(target=apply, args=(cluster, content(models[0], num_blocks=300), tmp_path))
            thread.start()
            assert wait_until(lambda: "decode-2" in pids(cluster), timeout_s=120)
            os.kill(pids(cluster)["decode-2"], signal.SIGKILL)
            assert wait_until(lambda: {"decode-0", "decode-2"} <= is_new(cluster), timeout_s=120)
            os.kill(pids(cluster)["decode-0"], signal.SIGKILL)
            thread.join()
        load.check(old)
        assert {i.worker_id: i.num_blocks for i in cluster.workers} == {
            "prefill-0": 256,
            "decode-0": 300,
            "decode-1": 300,
        }
        assert cluster.state().is_settled
