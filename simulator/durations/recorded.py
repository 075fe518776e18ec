"""Step times, sharing and overheads of a serving cluster, from recordings of a router's events (`router/recording`).

    trace(events)      -> WorkerTrace of each worker: its steps with their times, its messages
    calibrate(traces)  -> samples of steps as they are without neighbours, Sharing, Overheads

The measured time of a step is its time alone, plus shares of the time in which other workers of the machine computed,
plus the time that the gateway took of its core. All of this is linear in its unknowns, which come from one
least-squares fit of relative errors, none negative. The gateway's part is found before that, from the time between two
steps: it is longer on the worker whose core the gateway has.

A report of steps comes up to an interval after they ended (20 ms), which blurs which neighbour computed meanwhile, so
that shares come out too low. So a step ended when the message with its tokens came, where there is one.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from statistics import fmean
from typing import NamedTuple

from disagg.proto.errors import ConfigError
from disagg.proto.ids import RequestId, WorkerId
from disagg.proto.messages import Load, StepSample, WorkerInfo
from disagg.router.requests.events import Event, FromWorker, Submit, WorkerReported, WorkerUp
from disagg.simulator.durations.drafts import Drafts
from disagg.simulator.durations.fitted import MIN_SAMPLES, features, work_of
from disagg.simulator.durations.overheads import Overheads, Sharing
from disagg.step_times.least_squares import Moments

WARM_UP_S = 3.0
"""Seconds after the first step whose steps are ignored."""
LONGEST_GAP_S = 0.05
"""Longest time in seconds between the messages of two consecutive steps."""
SEEN_S = 0.03
"""Uncertainty, in seconds, of a step's end where no message shows it."""
SAME_S = 0.005
"""Seconds by which the message of a step may come after its report."""
MOST_ENDED = 8
"""Most prompts that may end in one step. Each adds a token to its message."""
MIN_GAPS = 20
"""Least number of gaps, and of steps, with one number of decodes for which a mean is taken."""
CONTEXT_BUCKET = 128
"""Width, in tokens a sequence, of the ranges of context in which decode steps count as one kind."""
MAX_MEANS = 8
"""Most samples that stand for all steps of one kind."""


class TimedStep(NamedTuple):
    """A step and about when it ran, in seconds of the router's clock."""

    begin: float
    end: float
    sample: StepSample


@dataclass
class WorkerTrace:
    """The steps and messages of one worker."""

    info: WorkerInfo | None = None
    steps: list[TimedStep] = field(default_factory=list)
    messages: list[tuple[float, int]] = field(default_factory=list)
    """The time and the number of tokens of each update."""
    decoding: list[Load] = field(default_factory=list)
    """The loads of reports of a worker that decodes."""

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles that the worker registered for."""
        return () if self.info is None else self.info.roles


@dataclass
class Trace:
    """The contents of one recording, by worker."""

    workers: dict[WorkerId, WorkerTrace] = field(default_factory=dict)
    first_tokens_s: list[tuple[WorkerId, float, float]] = field(default_factory=list)
    """For each request: the worker of the first token, the arrival, the time of that token."""

    @property
    def infos(self) -> list[WorkerInfo]:
        """The infos with which the workers registered."""
        return [worker.info for worker in self.workers.values() if worker.info is not None]


class Calibration(NamedTuple):
    """The result of `calibrate`."""

    samples: tuple[StepSample, ...]
    """Means of steps, each without the influence of neighbours."""
    sharing: Sharing | None
    """The slowdown by neighbours; None where no worker had a neighbour."""
    overheads: Overheads
    drafts: Drafts | None = None
    """Means of steps with drafts; None where there were none."""


def trace(events: Iterable[tuple[float, Event]]) -> Trace:
    """Sort a recording by worker."""
    found = Trace()
    arrived: dict[RequestId, float] = {}
    reports: dict[WorkerId, list[tuple[float, tuple[StepSample, ...]]]] = {}
    for now, event in events:
        match event:
            case WorkerUp(info=info):
                found.workers.setdefault(info.worker_id, WorkerTrace()).info = info
            case WorkerReported(report=report):
                worker = found.workers.setdefault(report.worker_id, WorkerTrace())
                if report.load.num_running and any(sample.num_decodes for sample in report.steps):
                    worker.decoding.append(report.load)
                reports.setdefault(report.worker_id, []).append((now, report.steps))
            case FromWorker(worker_id=worker_id, update=update):
                worker = found.workers.setdefault(worker_id, WorkerTrace())
                worker.messages.append((now, sum(len(out.token_ids) for out in update.tokens)))
                for out in update.tokens:
                    if (came := arrived.pop(out.request_id, None)) is not None:
                        found.first_tokens_s.append((worker_id, came, now))
            case Submit(request=request):
                arrived[request.request_id] = now
            case _:
                """Other events have no durations."""
    for worker_id, worker in found.workers.items():
        has_drafts = any(load.rows_per_step > 1.0 for load in worker.decoding)
        worker.steps = _timed(reports.get(worker_id, ()), worker.messages, has_drafts=has_drafts)
    return found


def _timed(
    reports: Iterable[tuple[float, tuple[StepSample, ...]]], messages: Sequence[tuple[float, int]], *, has_drafts: bool
) -> list[TimedStep]:
    """The steps of a worker's reports with their times. A step ended when the first message came that has as many
    tokens as the step sampled and belongs to no earlier step; at the latest when its report came, less the steps after
    it. With drafts a step has as many tokens as rows at the most."""
    times = [time for time, _ in messages]
    found: list[TimedStep] = []
    first = 0
    for now, samples in reports:
        latest = [now - after_ms / 1e3 for after_ms in accumulate((each.ms for each in samples[:0:-1]), initial=0.0)]
        for sample, end in zip(samples, reversed(latest), strict=False):
            least = 1 if has_drafts else max(1, sample.num_decodes)
            most = sample.num_decodes + (MOST_ENDED if sample.prefill_tokens else 0)
            at = max(first, bisect_left(times, end - (SEEN_S if sample.num_decodes else SAME_S)))
            while at < len(times) and times[at] <= end + SAME_S and not least <= messages[at][1] <= most:
                at += 1
            if at < len(times) and times[at] <= end + SAME_S:
                end, first = times[at], at + 1
            found.append(TimedStep(end - sample.ms / 1e3, end, sample))
    found.sort(key=lambda step: step.end)
    return found


def calibrate(traces: Sequence[Trace], *, is_one_machine: bool) -> Calibration:
    """Fit all recordings together. With `is_one_machine` the workers of a recording share it, and the gateway has the
    core of the first that computes prompts (as `cluster/config/core_layout.py` gives them).

    Raises:
        ConfigError: too few steps.
    """
    own_s, update_s, token_s = _gaps(traces, is_one_machine=is_one_machine)
    steps = [step for each in traces for step in _disturbed(each, update_s, token_s, is_one_machine=is_one_machine)]
    if len(steps) < MIN_SAMPLES:
        raise ConfigError(f"recording: {len(steps)} measured steps are too few; at least {MIN_SAMPLES} are needed")
    shares = _fit_shares(steps) if is_one_machine else (0.0,) * 4
    samples = _means([(step.sample, step.sample.ms - step.lost_ms(shares)) for step in steps])
    sharing = None
    if is_one_machine:
        sharing = Sharing(
            prefill_by_prefill=shares[0],
            prefill_by_decode=shares[1],
            decode_by_prefill=shares[2],
            decode_by_decode=shares[3],
            update_s=update_s,
            token_s=token_s,
        )
    return Calibration(samples, sharing, Overheads(message_s=_message_s(traces, own_s), step_s=own_s), _drafts(traces))


def _drafts(traces: Sequence[Trace]) -> Drafts | None:
    """The means of all reports of workers that decode; None where each step gave each sequence one token."""
    loads = [load for each in traces for worker in each.workers.values() for load in worker.decoding]
    if not any(load.rows_per_step > 1.0 for load in loads):
        return None
    tokens = fmean(load.tokens_per_step for load in loads)
    return Drafts(tokens_per_step=tokens, rows_per_step=max(tokens, fmean(load.rows_per_step for load in loads)))


# ---------------------------------------------------------------- between two steps


def _gaps(traces: Sequence[Trace], *, is_one_machine: bool) -> tuple[float, float, float]:
    """The seconds of a worker between two steps, and those that the gateway takes of its neighbour's core for a message
    and for each token of it."""
    alone: list[tuple[int, float, int]] = []
    beside: list[tuple[int, float, int]] = []
    for each in traces:
        neighbour = gateway_neighbour(each.workers) if is_one_machine else None
        for worker_id, worker in each.workers.items():
            (beside if worker_id == neighbour else alone).extend(_mean_gaps(worker))
    own_s = max(0.0, _weighted_mean([(gap_s, number) for _, gap_s, number in alone]))
    extra = [(tokens, gap_s - own_s, number) for tokens, gap_s, number in beside]
    if not extra:
        return own_s, 0.0, 0.0
    moments = Moments(2)
    for tokens, gap_s, number in extra:
        moments.add([(0, 1.0), (1, float(tokens))], gap_s, float(number))
    for unknown in range(2):  # in case all messages have as many tokens
        moments.add([(unknown, 1.0)], 0.0, 1e-9)
    update_s, token_s = moments.solve()
    return own_s, update_s, token_s


def _mean_gaps(worker: WorkerTrace) -> list[tuple[int, float, int]]:
    """For each number of sequences in a decode step: that number, the mean seconds between the messages of consecutive
    steps less the mean step, and the number of such gaps."""
    between: dict[int, list[float]] = {}
    for (before, num_before), (now, num_tokens) in pairwise(worker.messages):
        if num_tokens == num_before > 0 and now - before < LONGEST_GAP_S:
            between.setdefault(num_tokens, []).append(now - before)
    lengths: dict[int, list[float]] = {}
    for _, _, sample in worker.steps:
        if sample.prefill_tokens == 0 and sample.ms < LONGEST_GAP_S * 1e3:
            lengths.setdefault(sample.num_decodes, []).append(sample.ms / 1e3)
    return [
        (number, _mean(times) - _mean(lengths[number]), len(times))
        for number, times in between.items()
        if len(times) >= MIN_GAPS and len(lengths.get(number, ())) >= MIN_GAPS
    ]


def _message_s(traces: Sequence[Trace], own_s: float) -> float:
    """Seconds of one message. From a request to its first token there are two messages, and four where the worker first
    asks a decode worker for room; the rest of the time is steps with prompts. The lower quartile is taken, as the time
    on an idle worker."""
    rests: list[float] = []
    for each in traces:
        for worker_id, came, first in each.first_tokens_s:
            worker = each.workers[worker_id]
            steps = [
                step.sample.ms / 1e3
                for step in worker.steps
                if step.sample.prefill_tokens and came < step.begin + SEEN_S and step.end < first + SEEN_S
            ]
            if steps:
                rest_s = first - came - sum(steps) - len(steps) * own_s
                rests.append(rest_s / (2 if "decode" in worker.roles else 4))
    rests.sort()
    return max(0.0, rests[len(rests) // 4]) if rests else 0.0


# ---------------------------------------------------------------- beside neighbours


class _Disturbed(NamedTuple):
    """A step, and the milliseconds that other processes computed meanwhile."""

    sample: StepSample
    beside_prefill_ms: float
    beside_decode_ms: float
    gateway_ms: float

    @property
    def beside(self) -> tuple[float, float, float, float]:
        """Milliseconds of the neighbours' steps, in the order of the shares of `Sharing`."""
        if self.sample.prefill_tokens:
            return self.beside_prefill_ms, self.beside_decode_ms, 0.0, 0.0
        return 0.0, 0.0, self.beside_prefill_ms, self.beside_decode_ms

    def lost_ms(self, shares: Sequence[float]) -> float:
        return self.gateway_ms + sum(share * ms for share, ms in zip(shares, self.beside, strict=True))


class _Until:
    """The total length of the intervals before a time."""

    def __init__(self, intervals: Iterable[tuple[float, float]]) -> None:
        ordered = sorted(intervals)
        self._begins = [begin for begin, _ in ordered]
        self._ends = [end for _, end in ordered]
        self._before = list(accumulate((end - begin for begin, end in ordered), initial=0.0))

    def until(self, time: float) -> float:
        at = bisect_right(self._begins, time)
        if at == 0:
            return 0.0
        return self._before[at - 1] + min(time, self._ends[at - 1]) - self._begins[at - 1]

    def between(self, begin: float, end: float) -> float:
        return max(0.0, self.until(end) - self.until(begin))


def gateway_neighbour(workers: Mapping[WorkerId, WorkerTrace]) -> WorkerId | None:
    """The worker on the gateway's core: the first one that computes prompts."""
    return min((each for each, worker in workers.items() if "prefill" in worker.roles), default=None)


def _disturbed(each: Trace, update_s: float, token_s: float, *, is_one_machine: bool) -> list[_Disturbed]:
    begin = min((worker.steps[0].begin for worker in each.workers.values() if worker.steps), default=0.0) + WARM_UP_S
    prefills, decodes = (
        {
            worker_id: _Until((s.begin, s.end) for s in worker.steps if bool(s.sample.prefill_tokens) == is_prefill)
            for worker_id, worker in each.workers.items()
        }
        for is_prefill in (True, False)
    )
    neighbour = gateway_neighbour(each.workers) if is_one_machine else None
    found = []
    for worker_id, worker in each.workers.items():
        others = [other for other in each.workers if other != worker_id] if is_one_machine else []
        messages = sorted(message for other in others for message in each.workers[other].messages)
        taken = [0.0, *accumulate(update_s + tokens * token_s for _, tokens in messages)]
        times = [time for time, _ in messages]
        for step in worker.steps:
            if step.begin < begin:
                continue
            gateway_s = 0.0
            if worker_id == neighbour:
                gateway_s = taken[bisect_left(times, step.end)] - taken[bisect_left(times, step.begin)]
            prefill_s = sum(prefills[other].between(step.begin, step.end) for other in others)
            decode_s = sum(decodes[other].between(step.begin, step.end) for other in others)
            found.append(_Disturbed(step.sample, prefill_s * 1e3, decode_s * 1e3, gateway_s * 1e3))
    return found


def _fit_shares(steps: Sequence[_Disturbed]) -> tuple[float, ...]:
    """Fit the shares in two passes. The second one weighs steps by the predictions of the first, so that a step that
    was delayed by another cause does not count more."""
    rows = [[*features(work_of(step.sample)), *step.beside] for step in steps]
    units = [max(column) or 1.0 for column in zip(*rows, strict=True)]
    weights = [step.sample.ms for step in steps]
    solution: list[float] = []
    for _ in range(2):
        moments = Moments(len(units))
        for row, step, weight in zip(rows, steps, weights, strict=True):
            scaled = [(i, value / units[i] / weight) for i, value in enumerate(row) if value]
            moments.add(scaled, max(0.0, step.sample.ms - step.gateway_ms) / weight)
        for i in range(len(units)):
            moments.add([(i, 1.0)], 0.0, 1e-6)
        solution = moments.solve()
        weights = [
            max(
                0.1 * step.sample.ms, sum(x * value / unit for x, value, unit in zip(solution, row, units, strict=True))
            )
            for row, step in zip(rows, steps, strict=True)
        ]
    return tuple(min(0.9, value / unit) for value, unit in zip(solution[-4:], units[-4:], strict=True))


def _means(steps: Sequence[tuple[StepSample, float]]) -> tuple[StepSample, ...]:
    """A few mean samples for each kind of step. The time without neighbours counts as at least a tenth of the measured
    one."""
    kinds: dict[tuple[int, ...], list[tuple[StepSample, float]]] = {}
    for sample, alone_ms in steps:
        bucket = sample.decode_context // (CONTEXT_BUCKET * max(1, sample.num_decodes))
        kind = (sample.prefill_tokens, sample.prefill_attended, sample.num_decodes, bucket)
        kinds.setdefault(kind, []).append((sample, max(alone_ms, 0.1 * sample.ms)))
    found = []
    for members in kinds.values():
        number = min(MAX_MEANS, len(members))
        for start in range(number):
            part = members[start::number]
            first = part[0][0]
            found.append(
                StepSample(
                    _mean([alone_ms for _, alone_ms in part]),
                    first.prefill_tokens,
                    first.prefill_attended,
                    first.num_decodes,
                    round(_mean([float(sample.decode_context) for sample, _ in part])),
                )
            )
    return tuple(found)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _weighted_mean(values: Sequence[tuple[float, int]]) -> float:
    total = sum(number for _, number in values)
    return sum(value * number for value, number in values) / total if total else 0.0
