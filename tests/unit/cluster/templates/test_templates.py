"""Which templates there are, with templates that load nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from disagg.cluster.system.logs import LoggingConfig
from disagg.cluster.templates import templates
from disagg.cluster.templates.templates import Templates


class StubTemplate:
    """Notes that it was closed."""

    started: list[StubTemplate]

    def __init__(self, *_: Any) -> None:
        self.is_running, self.num_closed = True, 0
        self.started.append(self)

    def close(self) -> None:
        self.is_running = False
        self.num_closed += 1


def test_a_template_that_is_started_while_all_are_closed_is_closed_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the start that waits until it has loaded would hold up the end of the cluster."""
    StubTemplate.started = []
    owner = Templates(tmp_path, LoggingConfig())

    class ClosedMeanwhile(StubTemplate):
        def __init__(self, *arguments: Any) -> None:
            owner.close()  # on the thread that ends the cluster
            super().__init__(*arguments)

    monkeypatch.setattr(templates, "Template", ClosedMeanwhile)
    owner.prepare(None)
    (template,) = StubTemplate.started
    assert (template.num_closed, owner.pids) == (1, [])
    owner.prepare(None)
    assert len(StubTemplate.started) == 1
