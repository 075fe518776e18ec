"""The engine's own runner on the device: tokens against transformers, KV that moves, and the core around it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from disagg.engine.commands import Add, Ended, TokenSampled
from disagg.engine.config import SpeculationOptions, WorkerConfig
from disagg.engine.core.engine_core import EngineCore
from disagg.engine.request import WindowTable
from disagg.engine.runner import model_runner
from disagg.engine.runner.model_runner import TorchModelRunner
from disagg.kernels import dispatch
from disagg.kernels.triton.ops import TritonOps
from disagg.proto.ids import GatewayId, RequestId
from disagg.proto.messages import Sampling, SequenceSpec
from disagg.proto.token_ids import pack_token_ids
from tests.gpu import reference
from tests.support.drafting import KnownDrafts, draft
from tests.support.stepping import (
    assert_logits_close,
    decode,
    decodes_of,
    generate,
    make_runner,
    make_sequence,
    prefill,
)
from tests.support.tiny_models import VOCAB_SIZE, make_checkpoint

PROMPT = [(11 * i * i + 2 * i + 1) % VOCAB_SIZE for i in range(75)]
BLOCKS = [9, 2, 31, 0, 17, 5, 40]
NUM_TOKENS = 20
KINDS = ("llama", "qwen3", "mistral")
OTHER_KINDS = ("gemma2", "gemma3", "gpt_oss", "glm4_moe", "deepseek_v3")
"""With windows, soft caps, sinks, experts, two cache groups, and latent attention."""

cuda: Any = torch.cuda
"""Untyped: torch's stubs lack types for events."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: make_checkpoint(kind, tmp_path_factory.mktemp(kind)) for kind in (*KINDS, *OTHER_KINDS)}


def runner_of(folder: Path, device: torch.device, **changes: object) -> TorchModelRunner:
    return make_runner(folder, device=str(device), max_num_seqs=8, **changes)


@pytest.mark.parametrize("kind", [*KINDS, *OTHER_KINDS])
def test_greedy_tokens_equal_transformers(folders: dict[str, Path], device: torch.device, kind: str) -> None:
    expected_ids, expected = reference.greedy(folders[kind], PROMPT, NUM_TOKENS, device)
    sequence = make_sequence(PROMPT, BLOCKS)
    found = generate(runner_of(folders[kind], device), sequence, NUM_TOKENS, chunk_tokens=32)
    assert sequence.token_ids[len(PROMPT) :] == expected_ids
    if kind in KINDS:
        assert_logits_close(found, expected)
    else:  # experts multiply the error of fp32
        torch.testing.assert_close(found, expected, atol=5e-3, rtol=0.0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["qwen3", *OTHER_KINDS])
def test_no_op_falls_back_to_the_reference(
    folders: dict[str, Path], device: torch.device, kind: str, dtype: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A prefill, decodes, gather and scatter: each by a kernel of its own."""
    dispatch._warn_declined.cache_clear()
    runner = runner_of(folders[kind], device, dtype=dtype)
    runner.capture_steps()
    sequence = make_sequence(PROMPT, BLOCKS)
    generate(runner, sequence, 3)
    for number, group in enumerate(runner.layout.groups):
        buffer = runner.new_staging(75 * group.bytes_per_token)
        runner.gather(BLOCKS, 0, 75, buffer, group=number)
        runner.scatter(BLOCKS, 0, 75, buffer, group=number)
    assert isinstance(dispatch._ops(torch.empty(0, device=device)), TritonOps)
    assert [record.message for record in caplog.records if "reference" in record.message] == []


def test_a_batch_computes_what_each_sequence_does_alone(folders: dict[str, Path], device: torch.device) -> None:
    folder = folders["llama"]
    runner = runner_of(folder, device)
    prompts = [PROMPT[: 5 + 17 * row] for row in range(5)]
    sequences = [make_sequence(prompt, list(range(8 * row, 8 * row + 8))) for row, prompt in enumerate(prompts)]
    for sequence in sequences:
        sequence.token_ids.append(int(prefill(runner, sequence).argmax()))
    decode(runner, sequences, 9)
    for prompt, sequence in zip(prompts, sequences, strict=True):
        assert sequence.token_ids[len(prompt) :] == reference.greedy(folder, prompt, 10, device)[0]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_bf16_is_as_close_to_fp32_as_transformers_is(folders: dict[str, Path], device: torch.device, kind: str) -> None:
    """The error of bf16, root mean square over all logits of fixed tokens, at most a quarter above transformers'."""
    folder = folders[kind]
    exact = reference.logits(folder, PROMPT, "float32", device)[40:]
    theirs = (reference.logits(folder, PROMPT, "bfloat16", device)[40:] - exact).square().mean().sqrt()
    runner = runner_of(folder, device, dtype="bfloat16")
    rows = [prefill(runner, make_sequence(PROMPT[:41], BLOCKS))]
    for end in range(42, len(PROMPT) + 1):  # one by one, each from the KV of those before
        rows += [prefill(runner, make_sequence(PROMPT[:end], BLOCKS), start=end - 1)]
    ours = (torch.stack(rows).float() - exact).square().mean().sqrt()
    assert ours <= 1.25 * theirs


@pytest.mark.parametrize(("start", "end"), [(0, 75), (5, 61)])
def test_kv_moves_between_workers_of_different_blocks(
    folders: dict[str, Path], device: torch.device, start: int, end: int
) -> None:
    """All of it decodes on as where it came from; a part of it comes back to the bit."""
    source, target = (runner_of(folders["qwen3"], device, block_size=size) for size in (16, 32))
    sequence = make_sequence(PROMPT, BLOCKS)
    first = int(prefill(source, sequence).argmax())
    nbytes = (end - start) * source.layout.bytes_per_token
    sent, back = source.new_staging(nbytes), target.new_staging(nbytes)
    checksum = source.gather(sequence.block_table, start, end, sent)
    table = [7, 1, 12, 3]
    target.scatter(table, start, end, sent)
    assert target.gather(table, start, end, back) == checksum
    assert torch.equal(torch.as_tensor(back), torch.as_tensor(sent))
    if (start, end) == (0, len(PROMPT)):
        moved = make_sequence([*PROMPT, first], table)
        decode(target, [moved], NUM_TOKENS - 1)
        expected = reference.greedy(folders["qwen3"], PROMPT, NUM_TOKENS, device)[0]
        assert moved.token_ids[len(PROMPT) :] == expected


@pytest.mark.parametrize("kind", OTHER_KINDS)
def test_each_cache_group_moves_to_another_worker(folders: dict[str, Path], device: torch.device, kind: str) -> None:
    """Of a window what is kept of it, into other blocks than those of the full group."""
    source, target = (runner_of(folders[kind], device) for _ in range(2))
    sequence, end = make_sequence(PROMPT, BLOCKS), len(PROMPT)
    first = int(prefill(source, sequence).argmax())
    tables = [[7, 1, 12, 3, 30, 5], [2, 9, 8, 4, 11, 6]]
    for number, group in enumerate(source.layout.groups):
        start = group.kept_from(end)
        buffer = source.new_staging((end - start) * group.bytes_per_token)
        source.gather(sequence.block_table, start, end, buffer, group=number)
        target.scatter(tables[number], start, end, buffer, group=number)
    moved = make_sequence([*PROMPT, first], tables[0])
    moved.windows = [WindowTable(list(tables[1]), 0, 0, 0, 0)]
    decode(target, [moved], NUM_TOKENS - 1)
    assert moved.token_ids[end:] == reference.greedy(folders[kind], PROMPT, NUM_TOKENS, device)[0]


def config_of(folder: Path, device: torch.device, **changes: Any) -> WorkerConfig:
    fields: dict[str, Any] = {
        "worker_id": "gpu-0",
        "roles": ("prefill", "decode"),
        "model_path": str(folder),
        "device": str(device),
        "dtype": "float32",
        "token_budget": 64,
    }
    return WorkerConfig(**{**fields, **changes})


def answers(core: EngineCore, samplings: list[Sampling]) -> tuple[list[list[int]], list[str]]:
    """What the core answers to prompts of 30, 39, 48 ... tokens, and why each ended."""
    names = [f"r{row}" for row in range(len(samplings))]
    events = []
    for row, sampling in enumerate(samplings):
        spec = SequenceSpec(
            request_id=RequestId(names[row]),
            attempt=0,
            gateway_id=GatewayId("g"),
            prompt_token_ids=pack_token_ids(PROMPT[: 30 + 9 * row]),
            sampling=sampling,
        )
        events += core.handle(Add(spec), now=0.0)
    while core.has_work:
        events += core.step(now=1.0)
    sampled = [event for event in events if isinstance(event, TokenSampled)]
    ends = {event.key.request_id: event.reason for event in events if isinstance(event, Ended)}
    assert core.audit()[1] == []
    return (
        [[event.token_id for event in sampled if event.key.request_id == name] for name in names],
        [ends[RequestId(name)] for name in names],
    )


def test_the_core_serves_several_requests(folders: dict[str, Path], device: torch.device) -> None:
    """Prompts beside decodes, one that is preempted to host memory and resumed, and nothing held at the end."""
    folder = folders["llama"]
    config = config_of(folder, device, num_blocks=14, max_num_seqs=4, decode_reserve_tokens=0, watermark=0.0)
    core = EngineCore(TorchModelRunner(config), config=config)
    found, reasons = answers(core, [Sampling(temperature=0.0, max_tokens=40)] * 4)
    assert reasons == ["length"] * 4
    for row, tokens in enumerate(found):
        assert tokens == reference.greedy(folder, PROMPT[: 30 + 9 * row], 40, device)[0]
    assert core.totals().preemptions > 0


@pytest.mark.gpu
def test_steps_that_are_launched_ahead_answer_the_same(folders: dict[str, Path], device: torch.device) -> None:
    """Greedy and drawn, with a stop that is found a step late, and answers that end one by one."""
    folder = folders["qwen3"]
    stop = reference.greedy(folder, PROMPT[:30], 20, device)[0][9]
    samplings = [
        Sampling(temperature=0.0, max_tokens=100, stop_token_ids=(stop,)),
        Sampling(temperature=0.0, max_tokens=90),
        Sampling(temperature=0.9, max_tokens=100, seed=7),
        Sampling(temperature=1.2, max_tokens=80, seed=2**64 - 5, top_k=40, top_p=0.9),
        Sampling(temperature=0.8, max_tokens=30, seed=1, min_p=0.02),
    ]
    found = []
    for ahead in (True, False):
        config = config_of(folder, device, num_blocks=80, max_num_seqs=8, step_ahead=ahead)
        runner = TorchModelRunner(config)
        model_runner.warm_up(runner)
        assert (runner.step_queue is not None) == ahead
        found.append(answers(EngineCore(runner, config=config), samplings))
    assert found[0] == found[1]
    (greedy, *_), reasons = found[0]
    assert (greedy[-1], len(greedy), reasons[0]) == (stop, greedy.index(stop) + 1, "stop")


def test_drafts_beside_steps_that_are_launched_ahead_answer_the_same(
    folders: dict[str, Path], device: torch.device
) -> None:
    """By lookup, in answers that a bias makes repeat two tokens, and of known answers, right and wrong ones."""
    bias = ((40, 30.0), (41, 30.0))
    samplings = [
        Sampling(temperature=0.0, max_tokens=60),
        Sampling(temperature=0.9, max_tokens=50, seed=7),
        Sampling(temperature=1.2, max_tokens=50, seed=2**64 - 5, top_k=40, top_p=0.9),
        Sampling(temperature=0.0, max_tokens=60, logit_bias=bias),
        Sampling(temperature=1.0, max_tokens=60, seed=3, repetition_penalty=1.1, logprobs=1),
    ]
    found = []
    lookup = SpeculationOptions(method="lookup", max_draft=6)
    for options in (SpeculationOptions(method="off"), lookup):
        config = config_of(folders["qwen3"], device, num_blocks=80, max_num_seqs=24, speculation=options)
        runner = TorchModelRunner(config)
        model_runner.warm_up(runner)
        core = EngineCore(runner, config=config)
        found.append(answers(core, samplings))
    assert found[0] == found[1]
    assert core._scheduler.speculation is not None
    assert core._scheduler.speculation.totals.accepted > 0
    known = {f"r{row}": answer for row, answer in enumerate(found[0][0])}
    for right in (0.9, 0.0):
        draft(core, KnownDrafts(known, right=right, vocab_size=VOCAB_SIZE))
        assert answers(core, samplings) == found[0]


@pytest.mark.gpu
def test_a_launch_waits_for_nothing(folders: dict[str, Path], device: torch.device) -> None:
    """The step, its draws and the copy of its ids: no call of it makes the host wait for the device."""
    config = config_of(folders["qwen3"], device, num_blocks=80, max_num_seqs=8)
    runner = TorchModelRunner(config)
    model_runner.warm_up(runner)
    step_queue = runner.step_queue
    assert step_queue is not None
    batch = [make_sequence(PROMPT[: 20 + row], [4 * row + i for i in range(4)], temperature=0.9) for row in range(5)]
    launched = None
    for num_pending in (0, 1):  # what is compiled at its first use may wait
        launched = step_queue.enqueue(decodes_of(batch, num_pending), launched)
    assert launched is not None
    for sequence, token_id in zip(batch, launched.result().token_ids, strict=True):
        sequence.token_ids += [token_id, token_id]
    cuda._sleep(2_000_000_000)  # the device is busy for a second or so
    asleep = cuda.Event()
    asleep.record()
    torch.cuda.set_sync_debug_mode("error")
    try:
        after = step_queue.enqueue(decodes_of(batch, 1), step_queue.enqueue(decodes_of(batch, 0), None))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not asleep.query(), "the host waited for the device"
    assert len(after.result().token_ids) == 5
