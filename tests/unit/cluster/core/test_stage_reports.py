"""What a worker's start tells the controller. Messages go into a list."""

from __future__ import annotations

import queue
import threading
from typing import Any

import pytest

from disagg.cluster.control import controller_link
from disagg.cluster.control.controller_link import StageReports
from disagg.proto.control import WorkerStarting
from disagg.proto.errors import UnavailableError
from disagg.proto.ids import WorkerId
from tests.support.secret import SECRET

NAME = WorkerId("decode-0")


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> queue.SimpleQueue[Any]:
    messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
    monkeypatch.setattr(controller_link, "_tell", lambda resolve, secret, message, timeout_s: messages.put(message))
    return messages


def test_a_stage_that_lasts_is_told(told: queue.SimpleQueue[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller_link, "STAGE_S", 0.0)
    reports = StageReports(lambda: "", SECRET, NAME, "start-1")
    reports("loads the weights")
    message = told.get(timeout=60.0)
    reports.close()
    assert message == WorkerStarting(worker_id=NAME, doing="loads the weights", start_id="start-1")


def test_a_stage_that_is_over_soon_is_not_told(told: queue.SimpleQueue[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller_link, "STAGE_S", 60.0)
    reports = StageReports(lambda: "", SECRET, NAME, "start-1")
    reports("loads torch")
    reports("loads the weights")
    reports.close()
    for thread in threading.enumerate():
        if thread.name == "stages":
            thread.join()
    assert told.empty()


def test_a_controller_that_is_away_holds_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = threading.Event()

    def resolve() -> str:
        asked.set()
        raise UnavailableError("no controller", "controller_away")

    monkeypatch.setattr(controller_link, "STAGE_S", 0.0)
    reports = StageReports(resolve, SECRET, NAME, "start-1")
    reports("loads the weights")
    assert asked.wait(60.0)
    reports.close()
    reports.close()
