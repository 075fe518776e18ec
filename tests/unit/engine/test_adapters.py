"""Adapters on real models: tokens of merged weights in fp32, whatever stands beside them in the batch and whoever
computed the prompt; bits of rows without an adapter; and what is written to a slot."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from disagg.engine.adapters.modules import slot_bytes
from disagg.engine.commands import Add, Event
from disagg.engine.config import SpeculationOptions, WorkerConfig
from disagg.engine.core.engine_core import EngineCore
from disagg.engine.parallel.factories import make_runner as make_any_runner
from disagg.engine.plan import StepPlan
from disagg.engine.runner.model_runner import TorchModelRunner
from disagg.engine.sharding.shards import Shard
from disagg.proto.messages import Adapter, SequenceSpec
from tests.support.adapters import ATTENTION, MAX_RANK, MLP, Orders, adapter_of, options_of, with_adapter
from tests.support.engine import handle_all, make_spec, run_until_idle, token_ids_of
from tests.support.ranks import ONE, THREE_STAGES, TWO, TWO_BY_TWO, TWO_STAGES, Ranks
from tests.support.secret import checksum
from tests.support.stepping import chunk, decodes_of, make_runner, make_sequence
from tests.support.tiny_models import VOCAB_SIZE, make_checkpoint, reference_generate
from tests.unit.engine.parallel.ranks import running_group
from tests.unit.engine.test_family_handover import Engine, hand_over

PROMPT = tuple((7 * i * i + 3 * i + 5) % VOCAB_SIZE for i in range(50))
NUM_TOKENS = 12
KINDS = (
    (ATTENTION, 4, False), (MLP, 1, False), ((*ATTENTION, *MLP), 16, False), (ATTENTION[:1], 24, False),
    (MLP[2:], 7, True), (ATTENTION[1:3], 5, False), (ATTENTION[3:], 3, True), (MLP[:1], 9, False),
)  # fmt: skip
"""Modules, rank and rsLoRA of each adapter."""


@dataclass(frozen=True)
class Made:
    """A base, the folder of its adapters, and the base merged with each."""

    base: Path
    folder: Path
    merged: tuple[Path, ...]

    @functools.cached_property
    def adapters(self) -> tuple[Adapter, ...]:
        """With the fingerprints that a runner finds."""
        runner = runner_of(self)
        found = []
        for number in range(len(self.merged)):
            adapter = Adapter(name=f"a{number}", path=f"a{number}")
            found.append(
                Adapter(name=adapter.name, path=adapter.path, fingerprint=runner.read_adapter(adapter).fingerprint)
            )
        return tuple(found)

    def answer(self, number: int | None, num_tokens: int = NUM_TOKENS) -> list[int]:
        """What transformers gives with merged weights; None is the base."""
        return reference_generate(self.base if number is None else self.merged[number], list(PROMPT), num_tokens)[0]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    root = tmp_path_factory.mktemp("adapters")
    base, folder = make_checkpoint("qwen2", root / "base"), root / "folder"
    merged = [
        adapter_of(base, folder, f"a{number}", modules, rank, number, rslora=rslora)
        for number, (modules, rank, rslora) in enumerate(KINDS)
    ]
    return Made(base, folder, tuple(merged))


def runner_of(made: Made, **changes: Any) -> TorchModelRunner:
    return make_runner(made.base, adapters=options_of(made.folder), **changes)


def core_of(runner: Any, made: Made, **changes: Any) -> tuple[EngineCore, Orders]:
    orders = Orders(runner)
    fields: dict[str, Any] = {"roles": ("prefill", "decode"), "max_num_seqs": 16, "token_budget": 64}
    fields |= {"decode_reserve_tokens": 16, **changes}
    config = WorkerConfig(worker_id="w", model_path="fake", adapters=options_of(made.folder), **fields)
    return EngineCore(runner, config=config, order_adapter=orders.order), orders


def spec_of(made: Made, runner: Any, name: str, number: int | None, num_tokens: int = NUM_TOKENS) -> SequenceSpec:
    spec = make_spec(name, PROMPT, max_tokens=num_tokens)
    return spec if number is None else with_adapter(spec, made.adapters[number], runner.fingerprint)


def test_eight_adapters_and_the_base_in_one_batch_are_those_of_merged_weights(made: Made) -> None:
    """Prompts come in chunks beside decodes of others; the second time all prefixes are cached."""
    runner = runner_of(made, num_blocks=128)
    core, orders = core_of(runner, made)
    numbers = [None, *range(len(KINDS))]
    assert len({tuple(made.answer(number)) for number in numbers}) == len(numbers)
    for turn in ("first", "second"):
        events: list[Event] = []
        for number in numbers:
            events += handle_all(core, Add(spec_of(made, runner, f"{turn}-{number}", number)))
        events += orders.run(core)
        for number in numbers:
            assert token_ids_of(events, f"{turn}-{number}") == made.answer(number), number
    assert core.totals().cached_tokens == 48 * len(numbers)


def test_drafts_are_computed_with_the_adapter_of_their_sequence(made: Made) -> None:
    runner = runner_of(made)
    core, orders = core_of(runner, made, speculation=SpeculationOptions(method="lookup", max_draft=4))
    events: list[Event] = []
    for number in (None, 2, 0):
        events += handle_all(core, Add(spec_of(made, runner, f"s{number}", number, 40)))
    events += orders.run(core)
    for number in (None, 2, 0):
        assert token_ids_of(events, f"s{number}") == made.answer(number, 40)


def test_a_draft_model_changes_no_token_of_an_adapter(made: Made, tmp_path: Path) -> None:
    """It drafts as the base would: what it proposes is checked with the adapter."""
    draft = SpeculationOptions(method="draft", model=str(make_checkpoint("qwen2", tmp_path / "draft")), max_draft=3)
    options: dict[str, Any] = {"adapters": options_of(made.folder), "num_blocks": 64, "dtype": "float32"}
    options["speculation"] = draft
    runner = make_any_runner(
        WorkerConfig(worker_id="w", roles=("prefill", "decode"), model_path=str(made.base), **options)
    )
    assert runner.proposer is not None
    core, orders = core_of(runner, made, speculation=draft)
    events: list[Event] = []
    for number in (None, 2, 0):
        events += handle_all(core, Add(spec_of(made, runner, f"s{number}", number, 30)))
    events += orders.run(core)
    for number in (None, 2, 0):
        assert token_ids_of(events, f"s{number}") == made.answer(number, 30)


def test_a_sequence_that_was_preempted_continues_with_its_adapter(made: Made) -> None:
    """Its KV goes to host memory and comes back, or is computed again where there is no room."""
    for swap_bytes, swaps in ((1 << 20, True), (0, False)):
        runner = runner_of(made, num_blocks=9)
        core, orders = core_of(runner, made, num_blocks=9, swap_bytes=swap_bytes, decode_reserve_tokens=0)
        events: list[Event] = []
        for number in (2, 0):
            adapter = made.adapters[number]
            core.keep_adapter(runner.read_adapter(adapter), adapter, 1.0)
            events += handle_all(core, Add(spec_of(made, runner, f"s{number}", number, 28)))
        events += orders.run(core)
        totals = core.totals()
        assert totals.preemptions > 0
        assert (totals.swapped_out_blocks > 0) == swaps
        for number in (2, 0):
            assert token_ids_of(events, f"s{number}") == made.answer(number, 28)


@contextmanager
def running(made: Made, ranks: Ranks, **changes: Any) -> Iterator[tuple[Engine, Orders]]:
    options = {"adapters": options_of(made.folder)}
    if ranks.num_ranks == 1:
        runner = make_runner(made.base, **options)
        runner.checksum = checksum
        core, orders = core_of(runner, made, **changes)
        yield Engine(core, runner, lambda buffer, _: buffer), orders
    else:
        with running_group(made.base, ranks.tp, pp=ranks.pp, num_blocks=64, **options) as group:
            core, orders = core_of(group.runner, made, **changes)
            yield Engine(core, group.runner, group.part), orders


@pytest.mark.parametrize(
    ("prefill", "decode"), [(ONE, TWO), (TWO, ONE), (TWO_STAGES, THREE_STAGES), (TWO_BY_TWO, TWO_STAGES)], ids=str
)
def test_workers_of_other_ranks_continue_with_the_adapter(made: Made, prefill: Ranks, decode: Ranks) -> None:
    """All on both sides loaded before; of the second of each both have the prefix cached."""
    with running(made, prefill) as (source, source_orders), running(made, decode) as (target, target_orders):
        for side, orders in ((source, source_orders), (target, target_orders)):
            for number in (2, 4):
                adapter = made.adapters[number]
                side.core.keep_adapter(orders.runner.read_adapter(adapter), adapter, 1.0)
        events: list[Event] = []
        requests: tuple[tuple[str, int | None], ...] = (("a", 2), ("base", None), ("b", 4), ("again", 2))
        for name, which in requests:
            events += hand_over(source, target, spec_of(made, source.runner, name, which))
        events += run_until_idle(target.core)
        for name, which in requests:
            assert token_ids_of(events, name) == made.answer(which), name
        assert source.core.totals().cached_tokens == 48


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_rows_of_the_base_have_the_same_bits_beside_adapters(made: Made, quantization: str) -> None:
    """bf16: prompts and captured decodes, with and without a row of an adapter."""
    runner = runner_of(made, dtype="bfloat16", quantization=quantization)
    runner.put_adapter(1, runner.read_adapter(made.adapters[2]))
    logits = []
    for slot in (-1, 1):
        base, other = make_sequence(list(PROMPT), [0, 1, 2, 3]), make_sequence(list(PROMPT), [4, 5, 6, 7])
        other.adapter_slot = slot
        found = [runner.forward(StepPlan(prefills=(chunk(base, 0, 50), chunk(other, 0, 50))))]
        for _ in range(2):
            for sequence in (base, other):
                sequence.token_ids.append(17)
            found.append(runner.forward(decodes_of([base, other])))
        logits.append(torch.stack(found))
    plain, beside = logits
    assert runner._replayed is not None
    assert runner._replayed._captured.keys() == {(2, False), (2, True)}
    assert torch.equal(plain[:, 0], beside[:, 0])
    assert not torch.equal(plain[:, 1], beside[:, 1])


def test_memory_is_counted_as_it_is_allocated(made: Made) -> None:
    runner = runner_of(made)
    (size,) = [each.num_bytes for each in runner.buffers if each.name == "adapters"]
    assert size == 8 * slot_bytes(runner.model_config, Shard(), MAX_RANK, 4)
    assert "adapters" not in {each.name for each in make_runner(made.base).buffers}
