"""The stages of a worker's start."""

from __future__ import annotations

from disagg.engine.start_stages import StartStages
from disagg.proto.messages import StartPhase


def test_each_stage_has_its_time_and_is_said_when_it_begins() -> None:
    now, said = 0.0, list[str]()
    stages = StartStages(lambda: now, said.append)
    stages.add([StartPhase("launch", 0.5)])
    stages.begin("libraries")
    now = 1.0
    stages.begin("weights")
    now = 3.0
    stages.end()
    now = 7.0
    stages.begin("listen")
    now = 8.0
    stages.end()
    stages.end()
    assert said == ["libraries", "weights", "listen"]
    assert stages.phases == (
        StartPhase("launch", 0.5),
        StartPhase("libraries", 1.0),
        StartPhase("weights", 2.0),
        StartPhase("listen", 1.0),
    )
