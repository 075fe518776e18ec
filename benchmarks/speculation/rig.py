"""Decoding as on a decode worker: prompts are computed once, and each measured core gets their KV by reserve, scatter
and join.

    Rig.prefill(requests) ──> Prefilled: the first token and the KV
    Rig.run(core, prefilled, batch) ──> Decoded: every answer, and how long its steps took

All cores share one runner and its blocks: one of them has sequences at a time. No prefix is ever hit, because each
sequence has a root hash of its own: what another core wrote to a block in the meantime is unknown to this one.
"""

from __future__ import annotations

import gc
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.speculation.requests import Request
from disagg.engine.commands import (
    Add,
    Ended,
    Event,
    Gather,
    Gathered,
    Join,
    Joined,
    PrefillComputed,
    Release,
    Reserve,
    Reserved,
    Scatter,
    Scattered,
    TokenSampled,
)
from disagg.engine.config import WorkerConfig
from disagg.engine.core.calibration import calibrate
from disagg.engine.core.engine_core import EngineCore
from disagg.engine.parallel.factories import make_runner, warm_up
from disagg.engine.plan import Buffer
from disagg.proto.block_hash import chain_hashes, root_hash
from disagg.proto.ids import AttemptKey, GatewayId, RequestId
from disagg.proto.messages import SequenceSpec, TokenLogprobs
from disagg.proto.token_ids import pack_token_ids

WHOLE = ("stop", "length")
"""Ends of whole answers."""


@dataclass(frozen=True, kw_only=True)
class Prefilled:
    """A request whose prompt is computed."""

    request: Request
    first_token: int
    logprobs: TokenLogprobs | None
    """Log probabilities of the first token, if requested."""
    kv: Buffer


@dataclass(kw_only=True)
class Answer:
    """The tokens of one request, the first one included."""

    token_ids: list[int] = field(default_factory=list)
    gaps_ms: list[float] = field(default_factory=list)
    """Time between two steps that gave it tokens, in milliseconds of steps."""
    last_ms: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Decoded:
    """One run over some requests."""

    answers: tuple[Answer, ...]
    """Answers in the order of the requests."""
    elapsed_s: float
    """Seconds of all steps, without the joins between them."""
    num_steps: int
    num_rows: int
    """Rows of all steps: tokens that were computed, drafts included."""

    @property
    def num_tokens(self) -> int:
        """Tokens that steps gave: all but the first of each answer."""
        return sum(len(answer.token_ids) - 1 for answer in self.answers)

    @property
    def tok_s(self) -> float:
        """Tokens a second of steps."""
        return self.num_tokens / self.elapsed_s


class Rig:
    """One runner on the calling thread, and what measured cores are given."""

    def __init__(self, config: WorkerConfig) -> None:
        self.config = config
        self.runner = make_runner(config)
        warm_up(self.runner, config)
        self.calibration = calibrate(self.runner, config, time.perf_counter)
        self._prefill_core = EngineCore(self.runner, config=config)
        self._num_sequences = 0

    # ------------------------------------------------------------ prompts

    def prefill(self, requests: Sequence[Request]) -> list[Prefilled]:
        """Compute their prompts, one after the other. Requests whose first token is their last are left out.

        Raises:
            RuntimeError: the engine does not compute one of them.
        """
        prefilled = [self._prefill(request) for request in requests]
        return [one for one in prefilled if one is not None]

    def _prefill(self, request: Request) -> Prefilled | None:
        core, spec = self._prefill_core, self._spec(request)
        events = core.handle(Add(spec, hold_after_prefill=True), time.monotonic())
        while core.has_work:
            events += core.step(time.monotonic())
        computed = next((event for event in events if isinstance(event, PrefillComputed)), None)
        if computed is None:
            if isinstance(events[-1], Ended) and events[-1].reason in WHOLE:
                return None
            raise RuntimeError(f"the prompt of {request.name} was not computed: {events}")
        data = self.runner.new_staging(self.runner.layout.bytes_per_token * len(request.prompt))
        gathered = core.handle(Gather(spec.key, 0, 0, len(request.prompt), data), time.monotonic())
        _expect(gathered, Gathered, request)
        core.handle(Release(spec.key), time.monotonic())
        return Prefilled(request=request, first_token=computed.token_id, logprobs=computed.logprobs, kv=data)

    # ------------------------------------------------------------ decoding

    def run(self, core: EngineCore, prefilled: Sequence[Prefilled], batch: int) -> Decoded:
        """All answers, `batch` at a time: where one ends, the next one joins before the next step.

        Raises:
            RuntimeError: the engine does not take a sequence, or one ends in another way than `stop` or `length`.
        """
        waiting = deque(prefilled)
        answers: dict[AttemptKey, Answer] = {}
        num_running, elapsed_s, counts = 0, 0.0, Counter[str]()
        gc.collect()
        while waiting or num_running:
            while waiting and num_running < batch:
                events = self._join(core, waiting.popleft(), answers, elapsed_s * 1e3)
                num_running += 1 - _take(events, answers, elapsed_s * 1e3)
            if not num_running:
                continue
            began = time.perf_counter()
            events = core.step(time.monotonic())
            plan = core.last_plan
            if plan.entries:
                core.observe(plan.measured((time.perf_counter() - began) * 1e3))
            elapsed_s += time.perf_counter() - began
            counts.update(steps=1, rows=plan.num_tokens)
            num_running -= _take(events, answers, elapsed_s * 1e3)
        return Decoded(
            answers=tuple(answers.values()), elapsed_s=elapsed_s, num_steps=counts["steps"], num_rows=counts["rows"]
        )

    def _join(
        self, core: EngineCore, prefilled: Prefilled, answers: dict[AttemptKey, Answer], now_ms: float
    ) -> list[Event]:
        request, now = prefilled.request, time.monotonic()
        spec = self._spec(request)
        _expect(core.handle(Reserve(spec), now), Reserved, request)
        _expect(core.handle(Scatter(spec.key, 0, 0, len(request.prompt), prefilled.kv), now), Scattered, request)
        answers[spec.key] = Answer(last_ms=now_ms)
        events = core.handle(Join(spec.key, prefilled.first_token, prefilled.logprobs), now)
        _expect(events, Joined, request)
        return events

    def _spec(self, request: Request) -> SequenceSpec:
        self._num_sequences += 1
        root = root_hash(f"speculation {self._num_sequences}")
        prompt = pack_token_ids(request.prompt)
        return SequenceSpec(
            request_id=RequestId(f"bench-{self._num_sequences}"),
            attempt=0,
            gateway_id=GatewayId("bench"),
            prompt_token_ids=prompt,
            block_hashes=tuple(chain_hashes(root, prompt)),
            root_hash=root,
            sampling=request.sampling,
        )


def _expect(events: Sequence[Event], kind: type[Event], request: Request) -> None:
    """The first event is of that kind, and not of a failure."""
    if not events or not isinstance(events[0], kind) or getattr(events[0], "ok", True) is not True:
        raise RuntimeError(f"the engine does not take {request.name}: {events}")


def _take(events: Sequence[Event], answers: dict[AttemptKey, Answer], now_ms: float) -> int:
    """Put tokens into the answers; how many of them have ended."""
    num_ended = 0
    for key in dict.fromkeys(event.key for event in events if isinstance(event, TokenSampled)):
        answer = answers[key]
        if answer.token_ids:
            answer.gaps_ms.append(now_ms - answer.last_ms)
        answer.last_ms = now_ms
    for event in events:
        if isinstance(event, TokenSampled):
            answers[event.key].token_ids.append(event.token_id)
        elif isinstance(event, Ended):
            if event.reason not in WHOLE:
                raise RuntimeError(f"an answer ended with {event.reason}: {event.detail}")
            num_ended += 1
    return num_ended
