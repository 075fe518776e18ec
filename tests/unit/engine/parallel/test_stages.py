"""A model in stages computes what it computes in one: ranks as threads."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from disagg.engine.commands import Add, Event, PrefillComputed, Release
from disagg.engine.config import SpeculationOptions, WorkerConfig
from disagg.engine.core.engine_core import EngineCore
from disagg.engine.plan import ModelRunner, StepPlan
from disagg.engine.rank_messages import decode_step, encode_step
from disagg.engine.runner.model.parameters import ModelParameters
from disagg.engine.runner.model_runner import TorchModelRunner
from disagg.engine.runner.shared_weights import _flat
from disagg.engine.sharding.shards import Shard
from disagg.proto.errors import ConfigError
from tests.support.engine import (
    assert_idle,
    handle_all,
    logprobs_of,
    make_core,
    make_spec,
    run_until_idle,
    token_ids_of,
)
from tests.support.stepping import chunk, decodes_of, generate, last_token, make_runner, make_sequence
from tests.support.tiny_models import STAGE_KINDS, VOCAB_SIZE, make_checkpoint, reference_generate
from tests.unit.engine.parallel.ranks import TIMEOUT_S, Ranks, running_group, running_ranks

PROMPT = [(7 * i * i + 3 * i + 5) % VOCAB_SIZE for i in range(75)]
BLOCKS = [9, 2, 31, 0, 17, 5, 40]
HIDDEN = 64

FolderOf = Callable[[str], Path]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> FolderOf:
    """Checkpoints, each made when it is first asked for."""
    root = tmp_path_factory.mktemp("checkpoints")
    return functools.cache(lambda kind: make_checkpoint(kind, root / kind))


# ---------------------------------------------------------------- the same numbers


class Case(NamedTuple):
    kind: str
    pp: int
    tp: int
    ep: bool = False
    dtype: str = "bfloat16"


QUICK = {
    Case("llama_four_tied", 4, 1),
    Case("llama_four", 2, 2, dtype="float32"),
    Case("qwen3_moe_four", 2, 2, ep=True, dtype="float32"),
    Case("gpt_oss_four", 2, 1),
    Case("deepseek_v3_four", 2, 1),
    Case("gemma3", 4, 1),
    Case("olmo3", 2, 1, dtype="float32"),
    Case("granite", 2, 1),
}
"""One of each form of layers for every change; the rest of the matrix is slow."""


def cases() -> list[Any]:
    found = []
    for kind in (*STAGE_KINDS, "gemma2", "gemma3", "olmo3", "smollm3_windows", "granite", "qwen2_moe"):
        most = 3 if kind in ("granite", "qwen2_moe") else 4  # layers
        for pp, tp, dtype in itertools.product((2, 3, 4), (1, 2, 4), ("float32", "bfloat16")):
            for ep in (False, True) if tp > 1 and "moe" in kind + "_moe" * (kind == "gpt_oss_four") else (False,):
                case = Case(kind, pp, tp, ep, dtype)
                if pp <= most and pp * tp <= 8:
                    marks = () if case in QUICK else pytest.mark.slow
                    ranks = f"pp{pp}-tp{tp}{'-ep' if ep else ''}"
                    found.append(pytest.param(case, id=f"{kind}-{ranks}-{dtype}", marks=marks))
    return found


def test_the_quick_cases_are_cases() -> None:
    assert {param.values[0] for param in cases() if not param.marks} == QUICK


@pytest.mark.parametrize("case", cases())
def test_the_bits_are_those_of_one_stage(folder_of: FolderOf, case: Case) -> None:
    """Of as many ranks, in chunks and decode steps; in fp32 the tokens are those of one rank."""
    folder, options = folder_of(case.kind), dict[str, Any](dtype=case.dtype)
    alone, stage, staged = (make_sequence(PROMPT, BLOCKS) for _ in range(3))
    if case.tp == 1:
        expected = generate(make_runner(folder, **options), stage, 20, chunk_tokens=33)
    else:
        with running_ranks(folder, case.tp, ep=case.ep, **options) as ranks:
            expected = generate(ranks, stage, 20, chunk_tokens=33)
    with running_ranks(folder, case.tp, pp=case.pp, ep=case.ep, **options) as ranks:
        logits = generate(ranks, staged, 20, chunk_tokens=33)
        assert ranks.arithmetic == f"{make_runner(folder, **options).arithmetic}{_of_ranks(case)}"
    assert torch.equal(logits, expected)
    assert staged.token_ids == stage.token_ids
    assert len(set(staged.token_ids[len(PROMPT) :])) > 5
    if case.dtype == "float32" and case.tp > 1:
        generate(make_runner(folder), alone, 20, chunk_tokens=33)
        assert staged.token_ids == alone.token_ids


def _of_ranks(case: Case) -> str:
    return f", {case.tp} ranks{' with whole experts' if case.ep else ''}" if case.tp > 1 else ""


def test_decodes_and_prompts_share_a_step_that_may_sample_nothing(folder_of: FolderOf) -> None:
    plans: list[StepPlan] = []
    decoding, ending, going_on = (
        make_sequence([*PROMPT[:20], 3], [20, 21]),
        make_sequence(PROMPT, BLOCKS),
        make_sequence(PROMPT[10:], [1, 3, 60, 4, 6]),
    )
    plans.append(StepPlan(prefills=(chunk(decoding, 0, 20), chunk(ending, 0, 40))))
    plans.append(StepPlan((last_token(decoding),), (chunk(going_on, 0, 33), chunk(ending, 40, 75))))
    plans.append(StepPlan(prefills=(chunk(going_on, 33, 40),)))
    runner = make_runner(folder_of("gpt_oss_four"), dtype="bfloat16")
    with running_ranks(folder_of("gpt_oss_four"), 1, pp=3, dtype="bfloat16") as ranks:
        for plan, num_samples in zip(plans, (0, 2, 0), strict=True):
            logits = ranks.forward(plan)
            assert logits.shape == (num_samples, runner.vocab_size)
            assert torch.equal(logits, runner.forward(plan))


def test_rank_0_alone_samples_and_knows_grammars(folder_of: FolderOf) -> None:
    """Also log-probabilities, of prompts as well."""
    folder = folder_of("llama_four")
    drawn = make_sequence(PROMPT, BLOCKS, temperature=0.9, seed=5, top_p=0.8, logprobs=2, prompt_logprobs=2)
    forced = make_sequence(PROMPT[:30], [20, 21], logit_bias=((9, 100.0),))
    plan = StepPlan(prefills=(chunk(drawn, 0, 75), chunk(forced, 0, 30)))
    expected = make_runner(folder, dtype="bfloat16").run(plan)
    with running_ranks(folder, 2, pp=2) as ranks:
        assert [runner._masks is not None for runner in ranks.runners] == [True, False, False, False]
    with running_ranks(folder, 1, pp=2, dtype="bfloat16") as ranks:
        assert ranks.run(plan) == expected
    assert expected.token_ids[1] == 9
    assert len(expected.prompt_logprobs[drawn.key]) == 74


# ---------------------------------------------------------------- through the engine


@pytest.mark.parametrize(
    ("kind", "pp", "tp"),
    [
        ("llama_four", 2, 1),
        pytest.param("llama_four", 4, 1, marks=pytest.mark.slow),
        pytest.param("llama_four", 2, 2, marks=pytest.mark.slow),
        pytest.param("llama_four", 4, 2, marks=pytest.mark.slow),
        pytest.param("qwen3_moe_four", 2, 2, marks=pytest.mark.slow),
        pytest.param("deepseek_v3_four", 4, 1, marks=pytest.mark.slow),
        ("gemma3", 4, 1),
        pytest.param("gpt_oss_four", 2, 2, marks=pytest.mark.slow),
    ],
)
def test_answers_are_those_of_transformers(folder_of: FolderOf, kind: str, pp: int, tp: int) -> None:
    """Three prompts in chunks of 16 tokens, decoded together; the second time their prefixes are cached. Then first
    tokens only, as where another worker decodes: their chunks are under way together."""
    folder = folder_of(kind)
    prompts = [tuple(PROMPT[:50]), tuple(PROMPT[20:61]), (*PROMPT[:32], *PROMPT[3:9])]
    expected = [reference_generate(folder, list(prompt), 10)[0] for prompt in prompts]
    with running_group(folder, tp, pp=pp, token_budget=16) as group:
        core = make_core(runner=group.runner, token_budget=16)
        for turn, cached in (("first", 0), ("second", 48 + 32 + 32)):
            specs = [make_spec(f"{turn}-{place}", prompt, max_tokens=10) for place, prompt in enumerate(prompts)]
            before = core.totals().cached_tokens
            events = [*handle_all(core, *map(Add, specs)), *run_until_idle(core)]
            assert [token_ids_of(events, f"{turn}-{place}") for place in range(3)] == expected
            assert core.totals().cached_tokens - before >= cached
        specs = [make_spec(f"held-{place}", prompt[::-1], cached=False) for place, prompt in enumerate(prompts)]
        events = [*handle_all(core, *(Add(spec, hold_after_prefill=True) for spec in specs)), *run_until_idle(core)]
        first = {event.key: event.token_id for event in events if isinstance(event, PrefillComputed)}
        assert [first[spec.key] for spec in specs] == [
            reference_generate(folder, list(prompt[::-1]), 1)[0][0] for prompt in prompts
        ]
        handle_all(core, *(Release(spec.key) for spec in specs))
        assert_idle(core)


@pytest.mark.parametrize("options", [{}, {"kv_cache_dtype": "int8"}], ids=["kv-auto", "kv-int8"])
def test_drafts_grammars_and_draws_are_those_of_one_process(folder_of: FolderOf, options: dict[str, Any]) -> None:
    """In bf16, three sequences together, of which one repeats itself."""
    folder, found = folder_of("llama_four"), []
    specs = [
        make_spec("drafts", PROMPT[:20] * 3, max_tokens=20),
        make_spec("grammar", PROMPT[:30], max_tokens=12, grammar="start: /[a-f]{12}/", logprobs=2, prompt_logprobs=1),
        make_spec("bias", PROMPT[9:40], max_tokens=12, logit_bias=((7, 100.0), (8, 100.0))),
    ]

    def answers(runner: ModelRunner) -> list[Event]:
        config = WorkerConfig(
            worker_id="worker",
            roles=("prefill", "decode"),
            model_path="fake",
            token_budget=32,
            speculation=SpeculationOptions(method="lookup", max_draft=4),
        )
        core = EngineCore(runner, config=config)
        events = [*handle_all(core, *map(Add, specs)), *run_until_idle(core)]
        assert_idle(core)
        return events

    found.append(answers(make_runner(folder, dtype="bfloat16", **options)))
    with running_group(folder, 1, pp=3, dtype="bfloat16", **options) as group:
        found.append(answers(group.runner))
    for spec in specs:
        one, staged = (token_ids_of(events, spec.request_id) for events in found)
        assert one == staged
        assert len(one) == spec.sampling.max_tokens
    assert logprobs_of(found[0], "grammar") == logprobs_of(found[1], "grammar")


# ---------------------------------------------------------------- steps under way


def launched(ranks: Ranks, plans: list[StepPlan]) -> list[Any]:
    """The results of all plans, which rank 0 launches before it takes any."""
    first, *others = ranks.runners
    steps = [(plan, first.arrays(plan)) for plan in plans]
    orders = [encode_step(arrays) for _, arrays in steps]

    def follow(runner: TorchModelRunner) -> None:
        for order in orders:
            runner.compute(decode_step(order))

    running = [ranks._pool.submit(follow, runner) for runner in others]
    queued = [first.launch(plan, arrays) for plan, arrays in steps]
    results = [each.result() for each in queued]
    for each in running:
        each.result(TIMEOUT_S)
    return results


@pytest.mark.parametrize("pp", [1, 2, 4])
def test_steps_may_be_launched_before_earlier_results_are_taken(folder_of: FolderOf, pp: int) -> None:
    """Four chunks of a prompt, then another prompt, whose first one begins beside the last of the first."""
    first, second = make_sequence(PROMPT, BLOCKS), make_sequence(PROMPT[5:50], [50, 51, 52])
    plans = [StepPlan(prefills=(chunk(first, start, start + 20),)) for start in (0, 20, 40)]
    plans.append(StepPlan(prefills=(chunk(first, 60, 75), chunk(second, 0, 5))))
    plans.append(StepPlan(prefills=(chunk(second, 5, 45),)))
    folder = folder_of("llama_four")
    runner = make_runner(folder, dtype="bfloat16")
    expected = [runner.run(plan) for plan in plans]
    with running_ranks(folder, 1, pp=pp, dtype="bfloat16") as ranks:
        if pp == 1:
            ranks.runners[0] = runner
        assert launched(ranks, plans) == expected
    assert [len(each.token_ids) for each in expected] == [0, 0, 0, 1, 1]


@pytest.mark.parametrize(("pp", "tp"), [(2, 1), (2, 2), (4, 1)])
def test_stages_exchange_the_hidden_rows_and_the_logits_that_are_sampled(folder_of: FolderOf, pp: int, tp: int) -> None:
    """Bytes: tokens x hidden x 2 from each rank to the one of its place, rows x vocabulary x 2 back."""
    sequence, other = make_sequence(PROMPT, BLOCKS), make_sequence(PROMPT[:30], [50, 51])
    with running_ranks(folder_of("llama_four"), tp, pp=pp, dtype="bfloat16") as ranks:
        num_bytes = ranks.collectives[0]._links.num_bytes
        ranks.forward(StepPlan(prefills=(chunk(sequence, 0, 60),)))
        links = [(number, number + tp, "rows") for number in range(tp * (pp - 1))]
        assert num_bytes == dict.fromkeys(links, 60 * HIDDEN * 2)
        num_bytes.clear()
        ranks.forward(StepPlan(prefills=(chunk(sequence, 60, 75), chunk(other, 0, 30))))
        back = [(tp * (pp - 1) + rank, 0, "results") for rank in range(tp)]
        assert num_bytes == {
            **dict.fromkeys(links, 45 * HIDDEN * 2),
            **dict.fromkeys(back, 2 * VOCAB_SIZE // tp * 2),
        }
        num_bytes.clear()
        sequence.token_ids.append(3)
        other.token_ids.append(3)
        ranks.forward(decodes_of([sequence, other]))
        assert num_bytes[0, tp, "rows"] == 2 * HIDDEN * 2


def test_ranks_add_up_within_their_stage(folder_of: FolderOf) -> None:
    """Twice a layer, and at the embedding on the first one."""
    with running_ranks(folder_of("llama_four"), 2, pp=2) as ranks:
        ranks.forward(StepPlan(prefills=(chunk(make_sequence(PROMPT, BLOCKS), 0, 75),)))
        assert [collective.num_reduced for collective in ranks.collectives] == [1 + 4, 1 + 4, 4, 4]


@pytest.mark.parametrize("lost", [1, 2])
def test_a_stage_that_leaves_fails_the_others(folder_of: FolderOf, lost: int) -> None:
    plan = StepPlan(prefills=(chunk(make_sequence(PROMPT, BLOCKS), 0, 75),))
    with running_ranks(folder_of("llama_four"), 1, pp=3) as ranks:
        first, second, third = ranks.runners
        arrays = first.arrays(plan)
        queued = first.launch(plan, arrays)
        if lost == 2:
            second.compute(arrays)
        ranks.collectives[lost].close()
        with pytest.raises(RuntimeError, match=r"nothing came on \(2, 0, 'results'\)"):
            queued.result()
        if lost == 1:
            with pytest.raises(RuntimeError, match=r"nothing came on \(1, 2, 'rows'\)"):
                third.compute(arrays)


# ---------------------------------------------------------------- what each stage holds


def numbers_of(parameters: ModelParameters) -> dict[str, int]:
    """Bytes of what a rank has, each tensor once."""
    tensors = {name: tensor for name, tensor in _flat(parameters).items() if tensor.numel()}
    return {name: tensor.numel() * tensor.element_size() for name, tensor in tensors.items()}


@pytest.mark.parametrize("kind", ["llama_four", "llama_four_tied", "gpt_oss_four", "deepseek_v3_four"])
@pytest.mark.parametrize("pp", [2, 4])
def test_no_weight_and_no_kv_is_on_two_stages(folder_of: FolderOf, kind: str, pp: int) -> None:
    """The parts add up to the whole. (Packed, tied embeddings are two matrices on one stage as well.)"""
    whole = make_runner(folder_of(kind), dtype="bfloat16")
    weights = sum(numbers_of(whole._parameters).values())
    with running_ranks(folder_of(kind), 1, pp=pp, dtype="bfloat16", roles=("decode",)) as ranks:
        held = [numbers_of(runner._parameters) for runner in ranks.runners]
        assert sum(sum(each.values()) for each in held) == weights
        assert [("embedding_VH" in each) for each in held] == [True] + [False] * (pp - 1)
        assert [("final_norm_H" in each) for each in held] == [False] * (pp - 1) + [True]
        assert [any("lm_head" in name for name in each) for each in held] == [False] * (pp - 1) + [True]
        assert sum(runner._cache.nbytes for runner in ranks.runners) == whole._cache.nbytes
        sizes = [{buffer.name: buffer.num_bytes for buffer in runner.buffers} for runner in ranks.runners]
        kv = [sum(size for name, size in each.items() if name.startswith("kv")) for each in sizes]
        assert kv == [runner._cache.nbytes for runner in ranks.runners]


def test_ranks_report_the_whole_model(folder_of: FolderOf) -> None:
    whole = make_runner(folder_of("gemma3"), dtype="bfloat16")
    with running_ranks(folder_of("gemma3"), 1, pp=4, dtype="bfloat16", roles=("decode",)) as ranks:
        for number, runner in enumerate(ranks.runners):
            assert (runner.layout, runner.fingerprint) == (whole.layout, whole.fingerprint)
            assert (runner.vocab_size, runner.max_model_len) == (whole.vocab_size, whole.max_model_len)
            assert (runner.arithmetic, runner.window_blocks) == (whole.arithmetic, whole.window_blocks)
            assert (runner.shape.tp, runner.shape.stage_ends) == (1, (1, 2, 3, 4))
            assert runner.shard == Shard(0, 1, number, 4)


def test_memory_holds_more_blocks_of_fewer_layers(folder_of: FolderOf) -> None:
    """Of three layers the first stage has two, in as many bytes; all take what it has room for."""
    folder = folder_of("llama")
    layout = make_runner(folder).layout
    layer_bytes = layout.bytes_per_token * 16 // 3
    fields: dict[str, Any] = {"roles": ("prefill",), "dtype": "float32", "kv_cache_bytes": 24 * layer_bytes}
    config = WorkerConfig(worker_id="test-0", model_path=str(folder), pp=2, **fields)
    runners = [TorchModelRunner(config, Shard(0, 1, stage, 2)) for stage in range(2)]
    assert sorted(runner.num_blocks for runner in runners) == [12, 24]
    with running_ranks(folder, 1, pp=2, num_blocks=None, kv_cache_bytes=24 * layer_bytes) as ranks:
        assert {runner.num_blocks for runner in ranks.runners} == {12}
        assert sorted(runner._cache.nbytes for runner in ranks.runners) == [12 * layer_bytes, 24 * layer_bytes]


def test_a_stage_may_have_no_layer_of_the_first_cache_group(folder_of: FolderOf) -> None:
    """One of four layers attends to all tokens."""
    with running_ranks(folder_of("gemma3"), 1, pp=4, num_blocks=None, kv_cache_bytes=1 << 20, token_budget=64) as ranks:
        full = [runner._cache._groups_NL2KBD[0].numel() > 0 for runner in ranks.runners]
        windows = [runner._cache._groups_NL2KBD[1].numel() > 0 for runner in ranks.runners]
        assert full == [False, False, True, False]
        assert windows == [True, True, False, True]
        assert all(runner._cache.nbytes <= 1 << 20 for runner in ranks.runners)


def test_more_stages_than_layers_are_refused_before_weights_are_read(tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path)
    (folder / "model.safetensors").unlink()
    config = WorkerConfig(worker_id="test-0", roles=("prefill",), model_path=str(folder), num_blocks=4, pp=4)
    with pytest.raises(ConfigError, match=r"^pp is 4; this model has 3 layers, and each stage needs one$"):
        TorchModelRunner(config, Shard(0, 1, 0, 4))


def test_a_tensor_of_another_stage_is_looked_at(tmp_path: Path) -> None:
    """Every rank reads the headers of all of them."""
    folder = make_checkpoint("llama", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.2.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors")
    config = WorkerConfig(worker_id="test-0", roles=("prefill",), model_path=str(folder), num_blocks=4, pp=3)
    with pytest.raises(ConfigError, match=r"the weights lack model\.layers\.2\.mlp\.up_proj\.weight$"):
        TorchModelRunner(config, Shard(0, 1, 0, 3))
