"""The setting of where answers decode, changed in a real cluster (fake model); and the twin that its controller keeps
running."""

from __future__ import annotations

import os
import threading

import pytest

from disagg.cli.twin.command import NICENESS
from disagg.client import Client, Targets
from disagg.cluster.config.cluster_config import parse_config
from disagg.cluster.hosts.processes import ProcessCluster
from disagg.cluster.system.process_tools import ProcessRef
from disagg.engine.fake_runner import fake_generate
from disagg.proto.errors import InvalidRequestError
from disagg.v1 import inference_pb2 as pb
from tests.integration.workers.test_processes import FAKE
from tests.support.waiting import wait_until

ELASTIC = {**FAKE, "mode": "elastic"}
TWIN = {**ELASTIC, "placement": {"decodes": "auto"}, "controller": {"twin": "on"}}
PROMPT = tuple(range(100, 180))
NUM_TOKENS = 1000
LONG_S = 120.0


def test_a_change_disturbs_no_request() -> None:
    with ProcessCluster(parse_config(ELASTIC)) as cluster, Client(cluster.address) as client:
        shape = client.shape()
        assert (shape.policy, shape.decodes, shape.changed_by, len(shape.comparisons)) == ("elastic", "spread", "", 0)
        # Streams that run on while the setting changes to and fro: each one is whole.
        answers: list[tuple[int, ...]] = []
        first_tokens = threading.Semaphore(0)

        def stream(number: int) -> None:
            token_ids: list[int] = []
            for delta in client.stream(
                (*PROMPT, number), max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, targets=Targets(tpot_ms=50)
            ):
                if not token_ids:
                    first_tokens.release()
                token_ids += delta.token_ids
            answers.append(tuple(token_ids))

        streams = [threading.Thread(target=stream, args=(number,), daemon=True) for number in range(4)]
        for thread in streams:
            thread.start()
        for _ in streams:
            assert first_tokens.acquire(timeout=LONG_S)
        client.set_decodes("gather", pb.ShapeComparison(cause="by hand", present="spread", chosen="gather"))
        assert client.shape().decodes == "gather"
        for thread in streams:
            while thread.is_alive():
                client.set_decodes("spread")
                client.set_decodes("gather")
        client.set_decodes("spread")
        assert sorted(answers) == sorted(tuple(fake_generate((*PROMPT, number), NUM_TOKENS)) for number in range(4))
        shape = client.shape()
        assert (shape.decodes, shape.changed_by) == ("spread", "a caller without a key")
        assert [each.cause for each in shape.comparisons] == ["by hand"]
        with pytest.raises(
            InvalidRequestError,
            match=r"^decodes: must be spread, gather or split:N \(N workers that take no prompts\), not 'scatter'$",
        ):
            client.set_decodes("scatter")


def test_the_controller_keeps_a_twin_running_that_compares() -> None:
    with ProcessCluster(parse_config(TWIN)) as cluster, Client(cluster.address) as client:
        assert wait_until(lambda: client.shape().load_read > 0, LONG_S)
        first = cluster.twin_pid
        assert first is not None
        assert os.getpriority(os.PRIO_PROCESS, first) == NICENESS
        for number in range(45):
            client.generate((*PROMPT, number), max_tokens=2, targets=Targets(ttft_ms=5000, tpot_ms=50))
        assert wait_until(lambda: len(client.shape().comparisons) == 1, LONG_S)
        (comparison,) = client.shape().comparisons
        assert comparison.cause == "first comparison"
        assert 40 <= comparison.requests <= 45
        assert [option.decodes for option in comparison.options] == ["spread", "gather", "split:1"]
        # Its death harms nothing, and another one follows.
        ProcessRef.of(first).kill()
        assert client.generate(PROMPT, max_tokens=3, temperature=0.0).token_ids == tuple(fake_generate(PROMPT, 3))
        assert wait_until(lambda: cluster.twin_pid not in (None, first), LONG_S)
        last = cluster.twin_pid
        assert last is not None
        process = ProcessRef.of(last)
    assert not process.is_alive()


def test_without_auto_there_is_no_twin() -> None:
    with ProcessCluster(parse_config(ELASTIC)) as cluster:
        assert cluster.twin_pid is None


def test_a_cluster_of_another_mode_has_no_such_setting() -> None:
    with ProcessCluster(parse_config({**FAKE, "mode": "colocated"})) as cluster, Client(cluster.address) as client:
        shape = client.shape()
        assert (shape.policy, shape.decodes) == ("joint", "")
        with pytest.raises(InvalidRequestError, match="no such setting"):
            client.set_decodes("gather")
