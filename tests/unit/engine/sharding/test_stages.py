"""Which layers each stage has: cuts by weights, against all cuts that there are."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from disagg.engine.checkpoint.checkpoint import read_model_config
from disagg.engine.checkpoint.model_config import ModelConfig
from disagg.engine.runner.model.parameters import LayerParameters, allocate_parameters
from disagg.engine.sharding.model_shards import rank_model
from disagg.engine.sharding.shards import WHOLE, Shard
from disagg.engine.sharding.stages import even_ends, layer_weights, stage_ends, stage_layers, stage_ranges
from disagg.proto.errors import ConfigError
from tests.support.tiny_models import FAMILY_KINDS, KINDS, transformers_config


@functools.cache
def model_of(kind: str, folder: Path) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(transformers_config(kind)))
    return read_model_config(folder)


def largest(weights: list[int], ends: tuple[int, ...]) -> int:
    return max(sum(weights[start:end]) for start, end in pairwise((0, *ends)))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=9), st.data())
def test_the_largest_stage_is_the_smallest_that_any_cut_gives(weights: list[int], data: st.DataObject) -> None:
    parts = data.draw(st.integers(1, len(weights)))
    ends = even_ends(weights, parts)
    cuts = [(*cut, len(weights)) for cut in itertools.combinations(range(1, len(weights)), parts - 1)]
    assert ends in cuts
    assert largest(weights, ends) == min(largest(weights, cut) for cut in cuts)


def test_early_stages_are_filled_first() -> None:
    assert even_ends([1] * 7, 3) == (3, 5, 7)
    assert even_ends([1] * 7, 2) == (4, 7)
    assert even_ends([5, 1, 1, 1, 1, 5], 3) == (1, 5, 6)


def test_embedding_and_head_count(tmp_path: Path) -> None:
    """Each takes as much as two layers of this model do."""
    model = model_of("llama", tmp_path)
    layer = layer_weights(model, model.layers[0])
    model = dataclasses.replace(model, layers=model.layers[:1] * 6, vocab_size=2 * layer // model.hidden_size)
    assert stage_ends(model, 2) == (3, 6)
    assert stage_ends(model, 4) == (1, 4, 5, 6)
    assert stage_ranges(stage_ends(model, 4)) == (range(1), range(1, 4), range(4, 5), range(5, 6))


def test_more_stages_than_layers_are_refused(tmp_path: Path) -> None:
    model = model_of("llama", tmp_path)
    assert stage_ends(model, 3) == (1, 2, 3)
    text = r"^pools\.prefill\.pp is 4; this model has 3 layers, and each stage needs one$"
    with pytest.raises(ConfigError, match=text):
        stage_ends(model, 4, "pools.prefill.")
    with pytest.raises(ConfigError, match=r"^pp is 4; this model has 3 layers"):
        rank_model(model, Shard(0, 1, 3, 4))


@pytest.mark.parametrize("kind", [*KINDS, *FAMILY_KINDS])
def test_the_weights_of_a_layer_are_those_of_its_parameters(tmp_path: Path, kind: str) -> None:
    model = model_of(kind, tmp_path)
    parameters = allocate_parameters(model, torch.bfloat16, torch.device("meta"))
    for layer, held in zip(model.layers, parameters.layers, strict=True):
        assert layer_weights(model, layer) == sum(weight.numel() for weight in weights_of(held))


def weights_of(layer: LayerParameters) -> Iterator[Tensor]:
    for holder in (layer, layer.ffn, layer.latent):
        if holder is not None:
            for field in dataclasses.fields(holder):
                value = getattr(holder, field.name)
                if "_weight_" in field.name and value is not None:
                    yield value


def test_stages_have_each_layer_once_and_whatever_the_ranks_of_a_stage(tmp_path: Path) -> None:
    model = model_of("gemma3", tmp_path)
    assert stage_layers(model, WHOLE) == range(4)
    for stages in (2, 3, 4):
        parts = [[stage_layers(model, Shard(rank, 2, stage, stages)) for stage in range(stages)] for rank in range(2)]
        assert parts[0] == parts[1]
        assert [layer for part in parts[0] for layer in part] == list(range(4))
        layers = [rank_model(model, Shard(0, 1, stage, stages)).layers for stage in range(stages)]
        assert tuple(itertools.chain(*layers)) == model.layers


def test_a_stage_has_the_heads_of_its_rank(tmp_path: Path) -> None:
    model = model_of("gemma3", tmp_path)
    of_rank, of_stage = rank_model(model, Shard(1, 2)), rank_model(model, Shard(1, 2, 1, 2))
    layers = stage_layers(model, Shard(1, 2, 1, 2))
    assert of_stage == dataclasses.replace(of_rank, layers=of_rank.layers[layers.start : layers.stop])


@pytest.mark.parametrize(("stage", "stages"), [(-1, 2), (2, 2), (0, 0)])
def test_a_stage_that_does_not_exist_is_refused(stage: int, stages: int) -> None:
    text = f"^there is no rank 0 of stage {stage} among {stages} stages of 2 ranks$"
    with pytest.raises(ValueError, match=text):
        Shard(0, 2, stage, stages)


def test_ranks_are_numbered_stage_by_stage() -> None:
    shards = [Shard.of_number(number, 2, 3) for number in range(6)]
    assert shards == [Shard(rank, 2, stage, 3) for stage in range(3) for rank in range(2)]
    assert [shard.number for shard in shards] == list(range(6))
    assert [shard.is_first for shard in shards] == [True, True, False, False, False, False]
    assert [shard.is_last for shard in shards] == [False, False, False, False, True, True]
    assert {shard.num_ranks for shard in shards} == {6}
    assert shards[3].in_stage == Shard(1, 2)
    with pytest.raises(ValueError, match="there is no rank 0 of stage 3"):
        Shard.of_number(6, 2, 3)
