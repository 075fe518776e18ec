"""Builders for engine tests: specs, cores over the fake runner, and the hand-over done by hand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from disagg.engine.blocks.block_manager import BlockManager
from disagg.engine.blocks.swap import SwapIn, SwapPool
from disagg.engine.commands import Add, Command, Ended, Event, Gather, Release, Reserve, Scatter, TokenSampled
from disagg.engine.config import Scheduling, WorkerConfig
from disagg.engine.core.engine_core import EngineCore
from disagg.engine.core.scheduler import Effect, Scheduler
from disagg.engine.core.scheduler_audit import check_plan, scheduler_findings
from disagg.engine.core.slack import Slack
from disagg.engine.fake_runner import FAKE_FINGERPRINT, FakeModelRunner, fake_generate
from disagg.engine.plan import Buffer, ModelRunner, StepPlan, StepResult
from disagg.engine.request import Sequence as EngineSequence
from disagg.engine.request import SequenceState
from disagg.proto.block_hash import chain_hashes, root_hash
from disagg.proto.ids import AttemptKey, BlockHash, GatewayId, RequestId
from disagg.proto.messages import (
    ONE_RANK,
    ParallelShape,
    RoleName,
    Sampling,
    SequenceSpec,
    StepSample,
    Targets,
    TokenLogprobs,
)
from disagg.proto.token_ids import pack_token_ids, unpack_token_ids

VOCAB_SIZE = 1000
GATEWAY = GatewayId("gateway")
ROOT = root_hash(FAKE_FINGERPRINT)
BLOCK = 16
IDLE = {"sequences": 0, "blocks_active": 0, "blocks_reserved": 0, "swap_bytes": 0, "copies": 0, "fetches": 0}
"""What the audit of a core counts that holds nothing."""


def make_prompt(num_tokens: int, seed: int = 0) -> tuple[int, ...]:
    """Token ids that differ between seeds from the first token on."""
    return tuple((seed * 37 + 7 * i + 1) % VOCAB_SIZE for i in range(num_tokens))


def make_spec(
    request_id: str,
    prompt: Sequence[int],
    *,
    max_tokens: int = 4,
    min_tokens: int = 0,
    stop: Sequence[int] = (),
    logit_bias: Sequence[tuple[int, float]] = (),
    logprobs: int = -1,
    prompt_logprobs: int = -1,
    emitted: Sequence[int] = (),
    attempt: int = 1,
    priority: int = 0,
    timeout_s: float | None = None,
    cached: bool = True,
    targets: Targets | None = None,
    grammar: str = "",
) -> SequenceSpec:
    """A spec with the hashes that the gateway would send; `cached` false leaves them out."""
    return SequenceSpec(
        request_id=RequestId(request_id),
        attempt=attempt,
        gateway_id=GATEWAY,
        prompt_token_ids=pack_token_ids(prompt),
        emitted_token_ids=tuple(emitted),
        block_hashes=tuple(chain_hashes(ROOT, pack_token_ids([*prompt, *emitted]))) if cached else (),
        root_hash=ROOT if cached else BlockHash(b""),
        sampling=Sampling(
            temperature=0.0,
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            stop_token_ids=tuple(stop),
            logit_bias=tuple(logit_bias),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            grammar=grammar,
        ),
        priority=priority,
        timeout_s=timeout_s,
        targets=targets,
    )


def key_of(request_id: str, attempt: int = 1) -> AttemptKey:
    return AttemptKey(RequestId(request_id), attempt)


def make_core(
    num_blocks: int = 10,
    *,
    block_size: int = BLOCK,
    max_model_len: int = 4096,
    max_num_seqs: int = 8,
    token_budget: int = 64,
    decode_reserve_tokens: int = 512,
    watermark: float = 0.0,
    swap_bytes: int = 0,
    roles: tuple[RoleName, ...] = ("prefill", "decode"),
    scheduling: Scheduling = "decode_first",
    tail_tokens: int = 0,
    runner: ModelRunner | None = None,
    windows: Sequence[tuple[int, int]] = (),
    calibration: Sequence[StepSample] = (),
) -> EngineCore:
    """A core over a fake runner; ten blocks of 16 tokens by default, and no host memory."""
    config = WorkerConfig(
        worker_id="worker",
        roles=roles,
        model_path="fake",
        max_num_seqs=max_num_seqs,
        token_budget=token_budget,
        decode_reserve_tokens=decode_reserve_tokens,
        watermark=watermark,
        swap_bytes=swap_bytes,
        scheduling=scheduling,
        tail_tokens=tail_tokens,
    )
    if runner is None:
        runner = FakeModelRunner(num_blocks, block_size, max_model_len, VOCAB_SIZE, windows=windows)
    return EngineCore(runner, config=config, calibration=calibration)


def run_until_idle(core: EngineCore, now: float = 0.0, max_steps: int = 10_000) -> list[Event]:
    """Step until there is no work; the core must be sound after every step."""
    events: list[Event] = []
    for _ in range(max_steps):
        if not core.has_work:
            return events
        events += core.step(now)
        assert_sound(core)
    raise AssertionError(f"still busy after {max_steps} steps")


def handle_all(core: EngineCore, *commands: Command, now: float = 0.0) -> list[Event]:
    """Handle commands in order; the core must be sound after each."""
    events: list[Event] = []
    for command in commands:
        events += core.handle(command, now)
        assert_sound(core)
    return events


def assert_sound(core: EngineCore) -> None:
    assert core.audit()[1] == []


def assert_idle(core: EngineCore) -> None:
    """Nothing is held, and nothing is wrong."""
    assert core.audit() == (IDLE, [])


def token_ids_of(events: Sequence[Event], request_id: str, attempt: int = 1) -> list[int]:
    """The output of one attempt; its indices must count up by one."""
    sampled = [e for e in events if isinstance(e, TokenSampled) and e.key == key_of(request_id, attempt)]
    indices = [e.index for e in sampled]
    assert indices == list(range(min(indices, default=0), min(indices, default=0) + len(indices)))
    return [e.token_id for e in sampled]


def logprobs_of(events: Sequence[Event], request_id: str, attempt: int = 1) -> list[TokenLogprobs | None]:
    """What came with the output of one attempt."""
    return [e.logprobs for e in events if isinstance(e, TokenSampled) and e.key == key_of(request_id, attempt)]


def end_of(events: Sequence[Event], request_id: str, attempt: int = 1) -> Ended:
    """The one `Ended` of an attempt."""
    (ended,) = [e for e in events if isinstance(e, Ended) and e.key == key_of(request_id, attempt)]
    return ended


def kv_of(token_ids: Sequence[int], start: int, end: int) -> Buffer:
    """What a fake runner gathers for tokens [start, end): K is the token id, V the position."""
    words = np.array([token_ids[start:end], range(start, end)], dtype=np.uint32)
    return words.reshape(-1).view(np.uint8).copy()


def move_kv(source: EngineCore, target: EngineCore, key: AttemptKey, ranges: Sequence[tuple[int, int]]) -> list[Event]:
    """Gather each range from `source` and scatter it into `target`; the answers in order."""
    events: list[Event] = []
    for seq, (start, end) in enumerate(ranges):
        buffer: Buffer = np.empty((end - start) * 8, dtype=np.uint8)
        events += handle_all(source, Gather(key, seq, start, end, buffer))
        events += handle_all(target, Scatter(key, seq, start, end, buffer))
    return events


class FailingRunner(FakeModelRunner):
    """A fake runner whose operations named in `failing` raise: `error`, or one that names the operation."""

    def __init__(self, num_blocks: int = 10, block_size: int = BLOCK) -> None:
        super().__init__(num_blocks, block_size, 4096, VOCAB_SIZE)
        self.failing: set[str] = set()
        self.error: Exception | None = None

    def run(self, plan: StepPlan) -> StepResult:
        self._fail_if_told("run")
        return super().run(plan)

    def gather(
        self,
        block_table: Sequence[int],
        start: int,
        end: int,
        out: Buffer,
        peer: ParallelShape = ONE_RANK,
        group: int = 0,
    ) -> int:
        self._fail_if_told("gather")
        return super().gather(block_table, start, end, out, peer, group)

    def scatter(
        self,
        block_table: Sequence[int],
        start: int,
        end: int,
        data: Buffer,
        peer: ParallelShape = ONE_RANK,
        group: int = 0,
    ) -> None:
        self._fail_if_told("scatter")
        super().scatter(block_table, start, end, data, peer, group)

    def _fail_if_told(self, operation: str) -> None:
        if operation in self.failing:
            raise self.error or RuntimeError(f"{operation} is broken")


def make_scheduler(
    num_blocks: int = 10,
    *,
    block_size: int = BLOCK,
    max_num_seqs: int = 8,
    token_budget: int = 64,
    max_model_len: int = 4096,
    decode_reserve_tokens: int = 512,
    num_watermark_blocks: int = 0,
    tail_tokens: int = 0,
    scheduling: Scheduling = "decode_first",
    swap: SwapPool | None = None,
    recomputes: bool = True,
    slack: Slack[EngineSequence] | None = None,
) -> Scheduler:
    return Scheduler(
        BlockManager(num_blocks, block_size, num_watermark_blocks),
        max_num_seqs=max_num_seqs,
        token_budget=token_budget,
        max_model_len=max_model_len,
        decode_reserve_tokens=decode_reserve_tokens,
        tail_tokens=tail_tokens,
        scheduling=scheduling,
        swap=swap,
        recomputes=recomputes,
        slack=slack,
    )


def make_sequence(
    spec: SequenceSpec, *, arrival: float = 0.0, hold: bool = False, state: SequenceState = SequenceState.WAITING
) -> EngineSequence:
    return EngineSequence(
        spec=spec,
        state=state,
        hold_after_prefill=hold,
        arrival=arrival,
        token_ids=[*unpack_token_ids(spec.prompt_token_ids), *spec.emitted_token_ids],
        block_hashes=list(spec.block_hashes),
    )


def step_scheduler(scheduler: Scheduler, token_id: int = 7) -> tuple[StepPlan, list[Event]]:
    """Schedule and apply one step in which every sequence samples `token_id`; copies count as made."""
    plan, _, events = step_with_effects(scheduler, token_id)
    return plan, events


def step_with_effects(scheduler: Scheduler, token_id: int = 7) -> tuple[StepPlan, list[Effect], list[Event]]:
    """The same, with the copies ordered before the step."""
    plan = scheduler.schedule()
    check_plan(scheduler, plan)
    effects = scheduler.take_effects()
    for effect in effects:
        if isinstance(effect, SwapIn):
            scheduler.resumed(effect.sequence)
    ended = [effect for effect in effects if isinstance(effect, Ended)]
    events = scheduler.apply(plan, StepResult([token_id for entry in plan.entries if entry.samples]))
    assert scheduler_findings(scheduler) == []
    return plan, effects, [*ended, *events]


def shape_of(plan: StepPlan) -> tuple[list[tuple[str, int, int]], list[tuple[str, int, int]]]:
    """Decodes and prefills as (request id, start, number of tokens)."""
    decodes = [(str(e.sequence.key.request_id), e.start, e.num_tokens) for e in plan.decodes]
    prefills = [(str(e.sequence.key.request_id), e.start, e.num_tokens) for e in plan.prefills]
    return decodes, prefills


def add_to(
    scheduler: Scheduler,
    request_id: str,
    num_tokens: int,
    *,
    seed: int | None = None,
    max_tokens: int = 4,
    priority: int = 0,
    arrival: float = 0.0,
    hold: bool = False,
) -> None:
    """Queue a sequence whose prompt is its own, unless `seed` is shared."""
    prompt = make_prompt(num_tokens, seed=sum(request_id.encode()) if seed is None else seed)
    spec = make_spec(request_id, prompt, max_tokens=max_tokens, priority=priority)
    scheduler.add(make_sequence(spec, arrival=arrival, hold=hold))


def states_of(scheduler: Scheduler) -> dict[str, str]:
    return {str(key.request_id): sequence.state.value for key, sequence in scheduler.sequences.items()}


def expected_output(prompt: tuple[int, ...], num_tokens: int) -> list[int]:
    return fake_generate(prompt, num_tokens, VOCAB_SIZE)


def new_buffer(num_tokens: int) -> Buffer:
    """Room for the KV of `num_tokens` tokens, zeroed."""
    return np.zeros(num_tokens * 8, dtype=np.uint8)


def core_in_state(state: str) -> EngineCore:
    """A core in which sequence `a` of 40 prompt tokens is in `state`."""
    core = make_core(token_budget=32)
    spec = make_spec("a", make_prompt(40), timeout_s=100.0)
    match state:
        case "waiting":
            handle_all(core, Add(spec))
        case "running":
            handle_all(core, Add(spec))
            core.step(0.0)
        case "held":
            handle_all(core, Add(spec, hold_after_prefill=True))
            run_until_idle(core)
        case "reserved":
            handle_all(core, Reserve(spec), Scatter(key_of("a"), 0, 0, 20, kv_of(make_prompt(40), 0, 20)))
        case "suspended":
            core = make_core(4, decode_reserve_tokens=0, swap_bytes=1024)
            ahead = make_spec("ahead", make_prompt(15, seed=1), max_tokens=40, priority=1)
            handle_all(core, Add(ahead), Add(spec))
            while not core.audit()[0]["swap_bytes"]:
                core.step(0.0)
            handle_all(core, Release(ahead.key))
    (sequence,) = core._scheduler.sequences.values()
    assert sequence.state.value == state
    return core
