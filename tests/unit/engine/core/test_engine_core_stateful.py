"""Random lives of many sequences on one small core, whose steps are computed at once or queued, decodes or prompts,
with drafts or without.
After every command all must be sound, at the end nothing may be held, and whatever was sampled must be what the fake
model says."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from disagg.engine.commands import (
    Add,
    Command,
    Ended,
    Event,
    Gather,
    Gathered,
    Held,
    Hold,
    Join,
    Joined,
    PrefillComputed,
    Release,
    Reserve,
    Reserved,
    ReserveRefused,
    Scatter,
    Scattered,
    TokenSampled,
    Unhold,
)
from disagg.engine.config import Scheduling
from disagg.engine.fake_runner import FakeModelRunner, fake_generate, fake_logprobs
from disagg.engine.kv_transfer.transport import UNKEYED
from disagg.engine.plan import Buffer
from disagg.engine.request import Sequence
from disagg.proto.ids import AttemptKey
from disagg.proto.messages import SequenceSpec, TokenLogprobs
from disagg.proto.token_ids import unpack_token_ids
from tests.support.drafting import KnownDrafts, draft
from tests.support.engine import VOCAB_SIZE, assert_idle, kv_of, make_core, make_prompt, make_spec
from tests.support.queueing import QueueingRunner
from tests.support.stages import StagedRunner


@dataclass(frozen=True)
class Start:
    """A sequence to start; prompts of two families, so that prefixes are shared, with lengths around block ends."""

    kind: str
    num_prompt_tokens: int
    family: int
    max_tokens: int
    priority: int
    timeout_s: float | None
    num_emitted: int
    cached: bool
    stops_at: int | None = None
    """Index of an output token that is a stop id."""

    def spec(self, attempt: int, logprobs: int, windows: tuple[int, ...]) -> SequenceSpec:
        prompt = make_prompt(self.num_prompt_tokens, seed=self.family)
        return make_spec(
            "r",
            prompt,
            max_tokens=self.max_tokens + self.num_emitted,
            emitted=fake_generate(prompt, self.num_emitted, VOCAB_SIZE, windows=windows),
            attempt=attempt,
            priority=self.priority,
            timeout_s=self.timeout_s,
            cached=self.cached,
            logprobs=logprobs,
            stop=self.stops(fake_generate(prompt, (self.stops_at or 0) + 1, VOCAB_SIZE, windows=windows)),
        )

    def stops(self, output: list[int]) -> list[int]:
        """Its stop id, if `output` ends with it and nothing that was emitted does."""
        return [] if self.stops_at is None or output[-1] in output[: self.num_emitted] else output[-1:]


STARTS = st.builds(
    Start,
    kind=st.sampled_from(["run", "reserve", "run", "hold"]),
    num_prompt_tokens=st.sampled_from([33, 16, 31, 48, 17, 32, 1, 15, 60, 64, 65, 90]),
    family=st.integers(0, 1),
    max_tokens=st.sampled_from([50, 17, 2, 1]),
    priority=st.integers(0, 1),
    timeout_s=st.sampled_from([None, None, None, 40.0]),
    num_emitted=st.sampled_from([0, 0, 5]),
    cached=st.sampled_from([True, True, True, False]),
    stops_at=st.sampled_from([None, None, 9, 23]),
)


class CoreMachine(RuleBasedStateMachine):
    """`live` is what the core must hold by its own answers; nothing else is known about its inside."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.attempts = 0
        self.live: dict[AttemptKey, SequenceSpec] = {}
        self.kinds: dict[AttemptKey, str] = {}
        self.tokens: dict[AttemptKey, list[int]] = {}
        self.missing: dict[AttemptKey, list[tuple[int, int, int]]] = {}
        """Cache group, first token and end of what is still to be scattered."""
        self.leaving: dict[AttemptKey, int] = {}
        """Sequences that are held, or will be, and how many of their tokens were known then."""
        self.unread: list[tuple[AttemptKey, Buffer]] = []
        """Buffers of copies that were not answered, which must stay as they are."""

    @initialize(
        num_blocks=st.integers(4, 8),
        block_size=st.sampled_from([16, 16, 32]),
        token_budget=st.sampled_from([3, 20, 64]),
        decode_reserve_tokens=st.sampled_from([0, 0, 24]),
        watermark=st.sampled_from([0.0, 0.0, 0.3]),
        num_swap_slots=st.sampled_from([3, 0, 1, 9]),
        computes_prompts=st.booleans(),
        scheduling=st.sampled_from(["decode_first", "decode_first", "slack", "prefill_first", "static"]),
        queue=st.sampled_from(["none", "decodes", "prompts"]),
        right_drafts=st.sampled_from([None, 0.7, 1.0, 0.0]),
        failing=st.dictionaries(st.integers(0, 40), st.sampled_from(["enqueue", "result"]), max_size=3),
        windows=st.sampled_from([(), (), ((16, 10),), ((5, 8), (40, 14)), ((33, 30),), ((90, 12), (20, 9))]),
    )
    def make(
        self,
        num_blocks: int,
        block_size: int,
        token_budget: int,
        decode_reserve_tokens: int,
        watermark: float,
        num_swap_slots: int,
        computes_prompts: bool,
        scheduling: Scheduling,
        queue: str,
        right_drafts: float | None,
        failing: dict[int, str],
        windows: tuple[tuple[int, int], ...],
    ) -> None:
        self.windows = tuple(window for window, _ in windows)
        self.may_be_preempted = not computes_prompts
        self.queues = queue == "decodes"
        runner: FakeModelRunner | None = None
        if queue == "decodes":
            runner = QueueingRunner(num_blocks, block_size, max_decodes=3, failing=failing, windows=windows)
        elif queue == "prompts":
            pools = [(window, 2 * pool + 10) for window, pool in windows]
            runner = StagedRunner(2, num_blocks, block_size, failing=failing, windows=pools, notices=computes_prompts)
        self.core = make_core(
            num_blocks,
            block_size=block_size,
            token_budget=token_budget,
            decode_reserve_tokens=decode_reserve_tokens,
            watermark=watermark,
            max_num_seqs=4,
            swap_bytes=num_swap_slots * 128 * 8,
            roles=("prefill", "decode") if computes_prompts else ("decode",),
            scheduling=scheduling,
            runner=runner,
            windows=windows,
        )
        self.groups = self.core._groups
        if right_drafts is not None:
            draft(self.core, KnownDrafts(self.answer_of, right=right_drafts, vocab_size=VOCAB_SIZE))

    # ------------------------------------------------------------ commands

    @rule(starts=st.lists(STARTS, min_size=1, max_size=4))
    def start(self, starts: list[Start]) -> None:
        for start in starts:
            self.attempts += 1
            # What asks for log-probabilities is not computed ahead.
            asked = self.attempts % 4 - 1 if not self.queues or self.attempts % 8 == 7 else -1
            spec = start.spec(self.attempts, asked, self.windows)
            self.live[spec.key] = spec
            self.kinds[spec.key] = start.kind
            self.tokens[spec.key] = list(spec.emitted_token_ids)
            self.handle(
                Reserve(spec) if start.kind == "reserve" else Add(spec, hold_after_prefill=start.kind == "hold")
            )

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def start_again(self, data: st.DataObject) -> None:
        key = self.pick(data, self.live)
        self.handle(Add(self.live[key]))
        assert key not in self.live

    @precondition(lambda self: any(self.missing.values()))
    @rule(data=st.data())
    def scatter_one(self, data: st.DataObject) -> None:
        key = self.pick(data, [key for key, ranges in self.missing.items() if ranges])
        self.scatter(key, data.draw(st.sampled_from(self.missing[key])))

    @precondition(lambda self: self.missing)
    @rule(data=st.data())
    def scatter_rest_and_join(self, data: st.DataObject) -> None:
        key = self.pick(data, self.missing)
        for token_range in list(self.missing[key]):
            self.scatter(key, token_range)
        self.join(key)
        assert Joined(key) in self.last_events

    @precondition(lambda self: self.missing)
    @rule(data=st.data())
    def join_now(self, data: st.DataObject) -> None:
        key = self.pick(data, self.missing)
        complete = not self.missing[key]
        self.join(key)
        assert (Joined(key) in self.last_events) == complete

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def gather(self, data: st.DataObject) -> None:
        key = self.pick(data, self.live)
        known = [*unpack_token_ids(self.live[key].prompt_token_ids), *self.tokens[key]]
        start = data.draw(st.integers(0, len(known) - 1))
        end = data.draw(st.integers(start + 1, len(known) + 1))
        out = kv_of([0] * end, start, end)
        group = data.draw(st.integers(0, len(self.groups)))
        self.handle(Gather(key, 0, start, end, out, group=group))
        if Gathered(key, 0, True, UNKEYED(out)) in self.last_events:
            assert out.tolist() == kv_of(known, start, end).tolist()

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        key = self.pick(data, self.live)
        self.handle(Release(key))
        assert self.last_events == []
        self.forget(key)

    @precondition(lambda self: self.live.keys() - self.leaving.keys())
    @rule(data=st.data())
    def hold_one(self, data: st.DataObject) -> None:
        """In any state: only one that decodes is held."""
        key = self.pick(data, self.live.keys() - self.leaving.keys())
        num_known = len(self.tokens[key])
        self.leaving[key] = num_known
        self.handle(Hold(key, len(unpack_token_ids(self.live[key].prompt_token_ids)) + num_known))

    @precondition(lambda self: self.leaving)
    @rule(data=st.data())
    def put_back(self, data: st.DataObject) -> None:
        key = self.pick(data, self.leaving)
        del self.leaving[key]
        self.handle(Unhold(key))
        assert self.last_events == []

    # ------------------------------------------------------------ time

    @rule(num_steps=st.sampled_from([1, 3, 10, 20]))
    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.take(self.core.step(self.now))

    @rule(wait_s=st.sampled_from([1.0, 25.0]))
    def wait(self, wait_s: float) -> None:
        self.now += wait_s
        self.take(self.core.step(self.now))
        deadline = self.core.next_deadline
        assert deadline is None or deadline > self.now

    # ------------------------------------------------------------ checks

    @invariant()  # checked after `make` at the earliest
    def sound(self) -> None:
        counts, problems = self.core.audit()
        assert problems == []
        assert counts["sequences"] == len(self.live)

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        for key in [key for key in self.live if self.kinds[key] != "run"]:
            self.handle(Release(key))
            self.forget(key)
        for key in list(self.leaving):
            self.handle(Unhold(key))
        for _ in range(3000):
            if not self.core.has_work:
                break
            self.take(self.core.step(self.now))
        assert self.live == {}, "sequences that need nobody else must finish"
        assert self.unread == []
        assert_idle(self.core)

    # ------------------------------------------------------------ the model

    def answer_of(self, sequence: Sequence) -> list[int]:
        """What the fake model answers."""
        return self.generate(unpack_token_ids(sequence.spec.prompt_token_ids), sequence.spec.sampling.max_tokens)

    def generate(self, prompt: Seq[int], num_tokens: int) -> list[int]:
        return fake_generate(prompt, num_tokens, VOCAB_SIZE, windows=self.windows)

    def pick(self, data: st.DataObject, keys: Iterable[AttemptKey]) -> AttemptKey:
        return data.draw(st.sampled_from(sorted(keys)))

    def handle(self, command: Command) -> None:
        self.take(self.core.handle(command, self.now))

    def scatter(self, key: AttemptKey, token_range: tuple[int, int, int]) -> None:
        spec = self.live[key]
        known = [*unpack_token_ids(spec.prompt_token_ids), *spec.emitted_token_ids]
        group, start, end = token_range
        buffer = kv_of(known, start, end)
        self.unread.append((key, buffer))
        self.handle(Scatter(key, 0, start, end, buffer, group=group))
        assert self.last_events in ([Scattered(key, 0, ok=True)], [])
        assert self.last_events or self.queues
        self.missing[key].remove(token_range)

    def join(self, key: AttemptKey) -> None:
        del self.missing[key]
        known = [*unpack_token_ids(self.live[key].prompt_token_ids), *self.tokens[key]]
        self.kinds[key] = "run"
        (token_id,) = self.generate(known, 1)
        self.handle(Join(key, token_id, self.logprobs(key, token_id)))

    def logprobs(self, key: AttemptKey, token_id: int) -> TokenLogprobs | None:
        """What must come with a token of that attempt."""
        asked = self.live[key].sampling.logprobs
        return fake_logprobs(token_id, asked, VOCAB_SIZE) if asked >= 0 else None

    def take(self, events: list[Event]) -> None:
        self.last_events = events
        for event in events:
            match event:
                case TokenSampled():
                    assert event.index == len(self.tokens[event.key])
                    assert event.logprobs == self.logprobs(event.key, event.token_id)
                    self.tokens[event.key].append(event.token_id)
                case PrefillComputed():
                    assert self.kinds[event.key] == "hold"
                    assert len(self.tokens[event.key]) == len(self.live[event.key].emitted_token_ids) + 1
                    assert event.logprobs == self.logprobs(event.key, event.token_id)
                case Scattered():
                    key, buffer = self.unread.pop(0)
                    assert event == Scattered(key, 0, ok=True)
                    buffer[:] = 255
                case Held(key=key, ok=ok):
                    if key in self.live and ok:
                        since = self.tokens[key][self.leaving[key] :]
                        assert not since or (*event.token_ids, event.token_id)[-len(since) :] == tuple(since)
                    else:
                        self.leaving.pop(key, None)
                case Reserved():
                    self.missing[event.key] = self.cut(event.key, event.cached_tokens)
                case ReserveRefused():
                    self.forget(event.key)
                case Ended():
                    self.check_end(event)
                    self.forget(event.key)

    def cut(self, key: AttemptKey, cached: int) -> list[tuple[int, int, int]]:
        num_known = self.live[key].num_known_tokens
        return [
            (number, first, min(first + 20, num_known))
            for number, group in enumerate(self.groups)
            for first in range(max(cached, group.kept_from(num_known)), num_known, 20)
        ]

    def check_end(self, event: Ended) -> None:
        spec, output = self.live[event.key], self.tokens[event.key]
        prompt = unpack_token_ids(spec.prompt_token_ids)
        assert output == self.generate(prompt, len(output))
        reasons = ["stop", "length", "deadline", "refused", "failed"]
        assert event.reason in reasons or (event.reason == "preempted" and self.may_be_preempted)
        stops = [index for index, token in enumerate(output) if token in spec.sampling.stop_token_ids]
        assert stops == ([len(output) - 1] if event.reason == "stop" else [])
        if event.reason == "length":
            num_tokens = len(prompt) + len(output)
            assert len(output) == spec.sampling.max_tokens or num_tokens == self.core.max_model_len

    def forget(self, key: AttemptKey) -> None:
        del self.live[key]
        self.missing.pop(key, None)
        self.leaving.pop(key, None)


TestCoreMachine = CoreMachine.TestCase
TestCoreMachine.settings = settings(max_examples=50, stateful_step_count=50, deadline=None)


class LongCoreMachine(CoreMachine):
    """The same, for more runs."""


TestLongCoreMachine = pytest.mark.slow(LongCoreMachine.TestCase)
TestLongCoreMachine.settings = settings(max_examples=300, stateful_step_count=50, deadline=None)
