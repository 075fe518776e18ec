"""Vectors and scores of prompts against transformers, in fp32: alone, in chunks, in batches, beside answers, behind a
cached prefix, and through the engine core."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from disagg.engine.commands import Add
from disagg.engine.plan import ScheduledSequence, StepPlan
from disagg.engine.request import Sequence
from disagg.engine.runner.model_runner import TorchModelRunner
from disagg.proto.errors import ConfigError
from disagg.proto.messages import Pooling
from tests.support.engine import end_of, handle_all, make_core, make_spec, run_until_idle
from tests.support.stepping import chunk, make_runner, make_sequence
from tests.support.tiny_models import VOCAB_SIZE, make_checkpoint
from tests.unit.engine.parallel.ranks import running_group

PROMPT = [(7 * i * i + 3 * i + 5) % VOCAB_SIZE for i in range(70)]
BLOCKS = [9, 2, 31, 0, 17]
LAST = Pooling(kind="last")
MEAN = Pooling(kind="mean")
SCORE = Pooling(kind="score", score_ids=(17, 40))
POOLINGS = [
    LAST,
    Pooling(kind="last", dimensions=8),
    Pooling(kind="last", normalize=False),
    MEAN,
    Pooling(kind="mean", normalize=False),
    SCORE,
]


@pytest.fixture(scope="module", params=["qwen3", "llama"])
def folder(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    return make_checkpoint(request.param, tmp_path_factory.mktemp("checkpoint") / request.param)


@pytest.fixture(scope="module")
def runner(folder: Path) -> TorchModelRunner:
    return make_runner(folder)


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True
    ).eval()


def expected(model: Any, token_ids: list[int], pooling: Pooling) -> Tensor:
    """By the definitions of Qwen3-Embedding, Qwen3-Reranker and sentence-transformers' mean."""
    with torch.inference_mode():
        hidden_TH = model.model(torch.tensor([token_ids])).last_hidden_state[0]
        if pooling.kind == "score":
            no_yes = model.lm_head(hidden_TH[-1])[[pooling.score_ids[1], pooling.score_ids[0]]]
            return torch.nn.functional.log_softmax(no_yes, dim=0)[1:].exp()
        vector_H = hidden_TH.mean(dim=0) if pooling.kind == "mean" else hidden_TH[-1]
        vector_H = vector_H[: pooling.dimensions or None]
        return torch.nn.functional.normalize(vector_H, dim=0) if pooling.normalize else vector_H


def pooled(token_ids: list[int], pooling: Pooling, blocks: list[int] = BLOCKS) -> Sequence:
    sequence = make_sequence(token_ids, blocks)
    sequence.spec = msgspec.structs.replace(sequence.spec, pooling=pooling)
    return sequence


def assert_same(vector: bytes, wanted: Tensor) -> None:
    found = torch.from_numpy(np.frombuffer(vector, dtype="<f4").copy())
    assert found.shape == wanted.shape
    torch.testing.assert_close(found, wanted, atol=2e-4 * float(wanted.norm()), rtol=0.0)
    assert torch.nn.functional.cosine_similarity(found, wanted, dim=0) > 0.999999


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("ends", [[70], [32, 70], [32, 64, 69, 70], [1, 70]])
def test_a_vector_in_one_chunk_or_several(
    runner: TorchModelRunner, reference: Any, pooling: Pooling, ends: list[int]
) -> None:
    sequence = pooled(PROMPT, pooling)
    for start, end in zip([0, *ends], ends, strict=False):
        entry = chunk(sequence, start, end)
        is_decode = end - start == 1 and start > 0
        plan = StepPlan((entry,), (), pools=True) if is_decode else StepPlan((), (entry,), pools=True)
        vectors = runner.run(plan).vectors
        assert len(vectors) == (end == len(PROMPT))
    assert_same(vectors[sequence.key], expected(reference, PROMPT, pooling))


def test_one_that_is_computed_again_forgets_its_sum(runner: TorchModelRunner, reference: Any) -> None:
    sequence = pooled(PROMPT, MEAN)
    runner.run(StepPlan((), (chunk(sequence, 0, 48),), pools=True))
    runner.run(StepPlan((), (chunk(sequence, 0, 32),), pools=True))
    vectors = runner.run(StepPlan((), (chunk(sequence, 32, 70),), pools=True)).vectors
    assert_same(vectors[sequence.key], expected(reference, PROMPT, MEAN))


def test_a_vector_that_is_not_finite_is_a_fault_of_the_model(folder: Path) -> None:
    runner = make_runner(folder)
    runner._parameters.final_norm_H[3] = float("nan")
    result = runner.run(StepPlan((), (chunk(pooled(PROMPT, LAST), 0, 70),), pools=True))
    assert (result.vectors, result.faults) == ({}, {0: "model"})


def test_all_kinds_in_one_step_beside_answers(runner: TorchModelRunner, reference: Any) -> None:
    """Entries of three and four tokens, in blocks of their own, between two answers: one is decoded, behind a token
    that was forced, and the prompt of the other comes last."""
    kinds = [LAST, MEAN, SCORE, MEAN]
    decoding, prompt = make_sequence(PROMPT[:5], [20]), make_sequence(PROMPT[10:19], [19])
    decoding.token_ids += [*runner.run(StepPlan((), (chunk(decoding, 0, 5),))).token_ids, 7]
    runner.run(StepPlan((ScheduledSequence(decoding, 5, 1, samples=False),)))
    (next_id,) = runner.run(StepPlan((chunk(decoding, 6, 7),))).token_ids
    (first_id,) = runner.run(StepPlan((), (chunk(prompt, 0, 9),))).token_ids
    sequences = []
    for number, pooling in enumerate(kinds):
        sequence = pooled(PROMPT[number : number + 3 + number % 2], pooling, [21 + number])
        sequence.key = sequence.key._replace(attempt=number)
        sequences.append(sequence)
    entries = tuple(ScheduledSequence(each, 0, each.num_tokens, samples=True) for each in (*sequences, prompt))
    forced = ScheduledSequence(decoding, 5, 1, samples=False)
    result = runner.run(StepPlan((forced, chunk(decoding, 6, 7)), entries, pools=True))
    assert (result.token_ids[0], result.token_ids[-1]) == (next_id, first_id)
    assert result.faults == {}
    for sequence, pooling in zip(sequences, kinds, strict=True):
        assert_same(result.vectors[sequence.key], expected(reference, sequence.token_ids, pooling))


def test_through_the_engine_core_with_a_cached_head(folder: Path, reference: Any) -> None:
    core = make_core(runner=make_runner(folder), token_budget=48)
    others = [*PROMPT[:40], 3, 1, 4, 1, 5]
    for name, token_ids, cached in (("a", PROMPT, 0), ("b", others, 32)):
        spec = msgspec.structs.replace(make_spec(name, token_ids, max_tokens=1), pooling=LAST)
        events = handle_all(core, Add(spec)) + run_until_idle(core)
        assert end_of(events, name).cached_tokens == cached
        assert_same(end_of(events, name).vector, expected(reference, token_ids, LAST))


def test_a_checkpoint_of_vectors_has_no_head_and_no_prefix(tmp_path: Path) -> None:
    """As Qwen3-Embedding is published: `tie_word_embeddings` may be false, and there is no LM head anyhow."""
    import transformers

    folder = make_checkpoint("qwen3", tmp_path / "whole")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    vectors = tmp_path / "vectors"
    model.model.save_pretrained(vectors)
    config = json.loads((folder / "config.json").read_text())
    (vectors / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False, "is_matryoshka": True}))
    (vectors / "modules.json").write_text(json.dumps([{"type": "sentence_transformers.models.Pooling"}]))
    assert all(not name.startswith("model.") for name in read_names(vectors))
    runner = make_runner(vectors)
    result = runner.run(StepPlan((), (chunk(pooled(PROMPT, LAST), 0, 70),), pools=True))
    (vector,) = result.vectors.values()
    assert_same(vector, expected(model, PROMPT, LAST))

    (vectors / "modules.json").unlink()
    with pytest.raises(ConfigError, match=r"the weights lack lm_head\.weight"):
        make_runner(vectors)


def read_names(folder: Path) -> list[str]:
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", "pt") as file:
        return list(file.keys())


@pytest.mark.parametrize(("pp", "tp"), [(1, 2), (2, 1), (2, 2)])
@pytest.mark.parametrize("pooling", [LAST, MEAN, SCORE])
def test_several_ranks_give_the_same(folder: Path, reference: Any, pooling: Pooling, pp: int, tp: int) -> None:
    with running_group(folder, tp, pp=pp) as group:
        core = make_core(runner=group.runner, token_budget=48)
        spec = msgspec.structs.replace(make_spec("a", PROMPT, max_tokens=1), pooling=pooling)
        answer = make_spec("x", PROMPT[:20], max_tokens=3)
        events = handle_all(core, Add(answer), Add(spec)) + run_until_idle(core)
    assert_same(end_of(events, "a").vector, expected(reference, PROMPT, pooling))
    assert end_of(events, "x").reason == "length"
