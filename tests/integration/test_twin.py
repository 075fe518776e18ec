"""The setting of where answers decode, changed in a real cluster (fake model); and a twin beside it."""

from __future__ import annotations

import os
import threading

import pytest

from disagg.cli.twin.command import NICENESS
from disagg.cli.twin.process import TwinProcess
from disagg.client import Client, Targets
from disagg.cluster.config.cluster_config import parse_config
from disagg.cluster.hosts.processes import ProcessCluster
from disagg.cluster.system.process_tools import ProcessRef
from disagg.engine.runner.fake import fake_generate
from disagg.proto.errors import InvalidRequestError
from disagg.v1 import inference_pb2 as pb
from tests.integration.test_processes import FAKE, wait_until

ELASTIC = {**FAKE, "mode": "elastic", "placement": {"decodes": "auto"}}
PROMPT = tuple(range(100, 180))
NUM_TOKENS = 1000
LONG_S = 120.0


def test_a_change_disturbs_no_request_and_a_twin_reports_what_it_compared() -> None:
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
        for number in range(45):
            client.generate((*PROMPT, 50 + number), max_tokens=2, targets=Targets(ttft_ms=5000, tpot_ms=50))
        for thread in streams:
            while thread.is_alive():
                client.set_decodes("spread")
                client.set_decodes("gather")
        client.set_decodes("spread")
        assert sorted(answers) == sorted(tuple(fake_generate((*PROMPT, number), NUM_TOKENS)) for number in range(4))
        shape = client.shape()
        assert (shape.decodes, shape.changed_by) == ("spread", "a caller without a key")
        assert [each.cause for each in shape.comparisons] == ["by hand"]
        with pytest.raises(InvalidRequestError, match=r"^decodes: must be spread or gather, not 'scatter'$"):
            client.set_decodes("scatter")

        # A twin looks, compares these requests, and tells the gateway.
        twin = TwinProcess(cluster.address, 0.0)
        try:
            twin.tick(0.0)
            assert twin.pid is not None
            process = ProcessRef.of(twin.pid)
            assert wait_until(lambda: len(client.shape().comparisons) == 2, LONG_S)
            latest = client.shape().comparisons[0]
            assert latest.cause == "first comparison"
            assert latest.requests == 49
            assert os.getpriority(os.PRIO_PROCESS, twin.pid) == NICENESS
            assert [option.decodes for option in latest.options] == ["spread", "gather"]
            # Its death harms nothing.
            process.kill()
            assert wait_until(lambda: twin.tick(1.0) is not None, LONG_S)
            assert client.generate(PROMPT, max_tokens=3, temperature=0.0).token_ids == tuple(fake_generate(PROMPT, 3))
        finally:
            twin.stop()


def test_a_cluster_of_another_mode_has_no_such_setting() -> None:
    with ProcessCluster(parse_config({**FAKE, "mode": "colocated"})) as cluster, Client(cluster.address) as client:
        shape = client.shape()
        assert (shape.policy, shape.decodes) == ("joint", "")
        with pytest.raises(InvalidRequestError, match="no such setting"):
            client.set_decodes("gather")
