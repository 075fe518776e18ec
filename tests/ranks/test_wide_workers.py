"""The tests of tests/integration/workers/test_tensor_parallel.py with workers of four ranks: more than the model has KV
heads."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.workers.test_tensor_parallel import NARROW, Pair, check_answers
from tests.support.tiny_models import make_checkpoint

PAIRS = [Pair(4, 2, NARROW), Pair(2, 4, NARROW), Pair(4, 1, NARROW), Pair(1, 4, NARROW)]


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair.prefill}-to-{pair.decode}")
async def test_answers_are_those_of_transformers(tmp_path: Path, pair: Pair) -> None:
    await check_answers(make_checkpoint(pair.kind, tmp_path / "model"), pair)
