"""The pair streams of all tests here are played by the test."""

from __future__ import annotations

import pytest

from disagg.prefill_worker import link as link_module
from tests.support.roles import PlayedStream


@pytest.fixture(autouse=True)
def streams(monkeypatch: pytest.MonkeyPatch) -> list[PlayedStream]:
    made: list[PlayedStream] = []
    monkeypatch.setattr(PlayedStream, "all", made, raising=False)
    monkeypatch.setattr(link_module, "PairStream", PlayedStream)
    return made
