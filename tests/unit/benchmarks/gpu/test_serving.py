"""The model that is served on a GPU in a second contact: its checkpoint, its cluster, and the limit of a token."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.gpu import serving
from benchmarks.gpu.timing import Ceilings
from disagg.cluster.config.cluster_config import parse_config
from tests.support.launch import cluster_config
from tests.support.stepping import make_runner, make_sequence, prefill


def test_the_checkpoint_is_one_that_the_engine_loads(tmp_path: Path) -> None:
    serving.write_checkpoint(serving.TINY.shape, tmp_path, torch.device("cpu"))
    files = sorted(path.name for path in tmp_path.iterdir())
    weights = [f"model-{number:05}.safetensors" for number in range(2 + serving.TINY.shape.num_layers)]
    others = ["model.safetensors.index.json", "tokenizer.json", "tokenizer_config.json"]
    assert files == ["config.json", *weights, *others]
    logits = prefill(make_runner(tmp_path, max_num_seqs=2), make_sequence([3, 1, 4, 1, 5], [0, 1]))
    assert logits.isfinite().all()
    assert 0.3 < float(logits.float().std()) < 3.0


@pytest.mark.parametrize("mode", serving.MODES)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_both_shapes_of_the_cluster_have_one_device(tmp_path: Path, mode: str, device: str) -> None:
    given = serving.config(serving.TINY, tmp_path, torch.device(device))
    found = parse_config(cluster_config(given, mode, 7000))
    assert found.mode == mode
    assert {pool["device"] for pool in given["pools"].values()} == {"cpu" if device == "cpu" else "cuda:0"}


def test_the_limit_of_a_token_is_the_time_to_read_weights_and_kv() -> None:
    ceilings = Ceilings(read_gb_s=3000.0, gemm_tflop_s=700.0)
    assert serving.limit_ms(serving.EIGHT, 0, ceilings) == pytest.approx(15.0e9 / 3e12 * 1e3, rel=0.01)
    each = serving.limit_ms(serving.EIGHT, 1, ceilings) - serving.limit_ms(serving.EIGHT, 0, ceilings)
    assert each == pytest.approx(544 * 131072 / 3e9)
    assert serving.EIGHT.nbytes == pytest.approx(16.06e9, rel=0.001)
