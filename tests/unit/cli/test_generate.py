from __future__ import annotations

import pytest

from disagg.cli.generate import run_generate, summary
from disagg.client import Finished, Usage
from disagg.proto.errors import ConfigError


@pytest.mark.parametrize(
    ("cached", "text"),
    [(0, "[20 + 3 tokens, stop; request r1]"), (16, "[20 + 3 tokens, 16 cached, stop; request r1]")],
)
def test_summary(cached: int, text: str) -> None:
    usage = Usage(prompt_tokens=20, cached_tokens=cached, completion_tokens=3)
    assert summary(Finished(reason="stop", usage=usage, request_id="r1")) == text


@pytest.mark.parametrize("address", ["", "box", "box:", "8470", ":1x"])
def test_what_is_no_address(address: str) -> None:
    with pytest.raises(ConfigError, match=r"^--address: expected host:port; got "):
        run_generate(address, b"x", chat=True, max_tokens=1, temperature=0.0)


def test_a_prompt_that_is_not_utf8() -> None:
    with pytest.raises(ConfigError, match=r"^prompt: not UTF-8 at byte 2$"):
        run_generate("127.0.0.1:1", b"ab\xff", chat=True, max_tokens=1, temperature=0.0)
