from __future__ import annotations

import pytest

from disagg.client import Finished, Usage
from disagg.cluster.generate import summary


@pytest.mark.parametrize(
    ("cached", "text"),
    [(0, "[20 + 3 tokens, stop; request r1]"), (16, "[20 + 3 tokens, 16 cached, stop; request r1]")],
)
def test_summary(cached: int, text: str) -> None:
    usage = Usage(prompt_tokens=20, cached_tokens=cached, completion_tokens=3)
    assert summary(Finished(reason="stop", usage=usage, request_id="r1")) == text
