"""The verdicts of the example of a service are answers that the gateway takes."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

from disagg.gateway.guardrails.shell import service
from disagg.gateway.requests.verdicts import ALLOW, Replace, Stop, Verdict

EXAMPLE = Path(__file__).resolve().parents[4] / "examples" / "guard_service.py"


@pytest.mark.parametrize(
    ("subject", "text", "verdict"),
    [
        ("prompt", "What is the Weather like?", Stop("we do not talk about the weather")),
        ("answer", "The weather is fine.", ALLOW),
        ("answer", "Stop that!", Replace(("Stop that.",), "calm")),
    ],
)
def test_its_verdicts(subject: str, text: str, verdict: Verdict) -> None:
    decide = runpy.run_path(str(EXAMPLE))["verdict"]
    answer = json.dumps(decide({"subject": subject, "texts": [{"role": "", "text": text}]})).encode()
    assert service.read_verdict(answer) == verdict
