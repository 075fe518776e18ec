"""An estimate of attainment by queueing theory: quick enough to order hundreds of candidates, which the simulator then
judges.

Prefill is a queue M/G/c: Poisson arrivals, c workers, the time by which a prompt delays the next one as service. That
is all of its time; on a worker of several stages, through which prompts follow each other, that of the slowest stage.
The probability to wait is Erlang's C, the mean wait that of Lee and Longton (1959), W = W(M/M/c) (1 + cv^2) / 2 with cv
the coefficient of variation of the service, and the wait of those who wait is taken as exponential.

Decode is processor sharing: with n sequences on a worker each gets a token per t(n). For a service rate that depends
on n only, the number of sequences is distributed as P(n) ~ product over k = 1..n of (arrivals * work * t(k) / k),
whatever the distribution of the answers' lengths (J. W. Cohen, The multiple phase service network with generalized
processor sharing, Acta Informatica 1979). D workers among which requests are evenly spread are one such queue with
t(n / D). A request's TPOT is the mean of t over its life. It varies less than t itself: while about as long as the
queue remembers, an answer averages over it, which leaves `AVERAGED` of the variance.

A colocated worker does both: a step with a chunk of a prompt takes longer, and all of its decodes wait for it. How
many prompts come within an answer's life is Poisson.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from disagg.autoscaler.transfer import KvBytes, exposed_s
from disagg.step_times.interface import (
    BusyTimes,
    LinkTimes,
    StepTimes,
    StepWork,
    busy_s,
    chunks_s,
    decode_s,
    prefill_s,
)

AVERAGED = 0.74
"""Variance of the mean of an exponentially correlated process over one correlation time, in parts of its own:
2 (1 - (1 - 1/e))."""
_MAX_POISSON = 400
_STATES_PER_ROOT = 16

MAX_KINDS = 64
"""Largest number of kinds of requests in an estimate."""


class Lengths(NamedTuple):
    """The lengths of one request in tokens, and its limits in seconds."""

    prompt: int
    output: int
    cached: int = 0
    """Prompt tokens that are expected to be cached."""
    ttft_s: float = math.inf
    """The request's own limit, besides that of the load."""
    tpot_s: float = math.inf

    @property
    def computed(self) -> int:
        """Prompt tokens that have to be computed."""
        return self.prompt - self.cached


class Limits(Protocol):
    """The limits of every request, in seconds; None for no limit."""

    @property
    def ttft_s(self) -> float | None:
        """Limit of the time from arrival to the first token."""
        ...

    @property
    def tpot_s(self) -> float | None:
        """Limit of the mean time per token after the first."""
        ...


class Load(Protocol):
    """Requests that come at random (a Poisson process), each as likely one of `kinds`."""

    @property
    def rate_per_s(self) -> float:
        """Requests per second; above 0."""
        ...

    @property
    def kinds(self) -> tuple[Lengths, ...]:
        """The kinds of requests; at least one."""
        ...

    @property
    def slo(self) -> Limits:
        """Limits of all requests, besides those of a kind."""
        ...


def representative(kinds: Iterable[Lengths], count: int = MAX_KINDS) -> tuple[Lengths, ...]:
    """At most `count` of many requests, evenly spread in the order of their work, so that each stands for equally
    many."""
    ordered = sorted(kinds, key=lambda kind: (kind.computed, kind.output, kind))
    if len(ordered) <= count:
        return tuple(ordered)
    return tuple(ordered[(2 * at + 1) * len(ordered) // (2 * count)] for at in range(count))


@dataclass(frozen=True, kw_only=True)
class WorkerModel:
    """The step times and the capacity of one worker."""

    times: StepTimes
    token_budget: int
    """Tokens of one step, including those of decodes."""
    max_num_seqs: int
    kv_tokens: int
    """Tokens whose KV fits; of a model with windows those that its layers without one keep."""
    most_sequences: Callable[[int], int] | None = None
    """How many sequences of so many tokens fit, for a model with windows; None where `kv_tokens` says it."""
    _seen: dict[tuple[float, ...], float] = field(default_factory=dict, compare=False, repr=False)
    """Computed times in seconds, kept for further calls."""

    def prompt_s(self, kind: Lengths) -> float:
        """Seconds to compute a prompt on an idle worker."""
        key = (kind.computed, kind.cached, -1)
        if key not in self._seen:
            self._seen[key] = prefill_s(self.times, kind.computed, self.token_budget, kind.cached)
        return self._seen[key]

    def busy_s(self, kind: Lengths) -> float:
        """Seconds by which a prompt delays the prompts behind it."""
        key = (kind.computed, kind.cached, -2)
        if key not in self._seen:
            self._seen[key] = busy_s(self.times, kind.computed, self.token_budget, kind.cached)
        return self._seen[key]

    def token_s(self, batch: float, context: float) -> float:
        """Seconds of a decode step, interpolated between whole numbers of sequences."""
        low = max(1, int(batch))
        share = batch - low
        below = self._whole_s(low, context)
        return below if share <= 0.0 else below + share * (self._whole_s(low + 1, context) - below)

    def _whole_s(self, batch: int, context: float) -> float:
        key = (float(batch), context)
        if key not in self._seen:
            self._seen[key] = decode_s(self.times, batch, context)
        return self._seen[key]


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The estimate for one candidate. Shares are 0 where it cannot serve the rate."""

    ttft_attainment: float
    tpot_attainment: float
    utilization: float
    """Utilization of the busier pool; from 1 on the rate cannot be served."""
    mean_batch: float
    """Mean number of sequences on a decode worker."""
    mean_ttft_s: float
    mean_tpot_s: float

    @property
    def attainment(self) -> float:
        """Share of requests that meet both limits."""
        return self.ttft_attainment * self.tpot_attainment


def overloaded(utilization: float) -> Estimate:
    """The estimate for a candidate that cannot serve the rate."""
    return Estimate(
        ttft_attainment=0.0,
        tpot_attainment=0.0,
        utilization=utilization,
        mean_batch=0.0,
        mean_ttft_s=math.inf,
        mean_tpot_s=math.inf,
    )


# ---------------------------------------------------------------- prefill


def erlang_c(num_servers: int, offered: float) -> float:
    """The probability that an arrival waits, with `offered` = arrivals times service; 1 from `num_servers` on."""
    if offered >= num_servers:
        return 1.0
    blocking = 1.0  # Erlang's B by its recursion
    for servers in range(1, num_servers + 1):
        blocking = offered * blocking / (servers + offered * blocking)
        if blocking < 1e-30:  # From here on it only falls.
            return 0.0
    share = offered / num_servers
    return blocking / (1.0 - share + share * blocking)


@dataclass(frozen=True, kw_only=True)
class Wait:
    """The distribution of a wait: 0, or with probability `chance` exponential of mean `mean_s`."""

    chance: float
    mean_s: float

    def within(self, limit_s: float) -> float:
        """The probability that the wait is at most `limit_s`."""
        if limit_s < 0.0:
            return 0.0
        if self.chance == 0.0 or self.mean_s == 0.0:
            return 1.0
        return 1.0 - self.chance * math.exp(-limit_s / self.mean_s)


def wait_of(num_servers: int, rate_per_s: float, services_s: Sequence[float]) -> Wait | None:
    """The wait in an M/G/c queue; None where it grows without limit."""
    mean = sum(services_s) / len(services_s)
    offered = rate_per_s * mean
    if offered >= num_servers:
        return None
    variance = sum((each - mean) ** 2 for each in services_s) / len(services_s)
    variation = variance / (mean * mean) if mean > 0.0 else 0.0
    return Wait(
        chance=erlang_c(num_servers, offered),
        mean_s=mean * (1.0 + variation) / 2.0 / (num_servers - offered),
    )


def prefill_estimate(load: Load, worker: WorkerModel, num_workers: int) -> tuple[float, float, float] | None:
    """(share of requests within the TTFT limit, mean TTFT, utilization) of a pool of prefill workers; None where it
    cannot keep up."""
    alone = [worker.prompt_s(kind) for kind in load.kinds]
    busy = [worker.busy_s(kind) for kind in load.kinds]
    batched = _batched(load.kinds, worker, busy)
    utilization = load.rate_per_s * _mean(batched) / num_workers
    if utilization >= 1.0:
        return None
    # The busier a worker is, the more prompts share a step.
    services = [full + (1.0 - utilization) * (own - full) for own, full in zip(busy, batched, strict=True)]
    wait = wait_of(num_workers, load.rate_per_s, services)
    if wait is None:
        return None
    limits_s = [_limit_s(kind.ttft_s, load.slo.ttft_s) for kind in load.kinds]
    within = _mean([wait.within(limit_s - own) for limit_s, own in zip(limits_s, alone, strict=True)])
    return within, wait.chance * wait.mean_s + _mean(alone), utilization


def _batched(kinds: Sequence[Lengths], worker: WorkerModel, busy: Sequence[float]) -> list[float]:
    """Seconds that each prompt adds to full steps; never more than it adds alone."""
    added, times = [], BusyTimes(worker.times)
    for kind, own in zip(kinds, busy, strict=True):
        together = worker.token_budget // kind.computed
        if together < 2:
            added.append(own)
            continue
        pairs = kind.computed * kind.cached + kind.computed * (kind.computed + 1) // 2
        step = StepWork(together * kind.computed, together * pairs, 0, 0, together)
        added.append(min(own, times.step_s(step) / together))
    return added


# ---------------------------------------------------------------- decode


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """Number and speed of the sequences that a pool decodes."""

    mean_batch: float
    """Mean number of sequences on one worker."""
    mean_tpot_s: float
    tpot_deviation_s: float
    """Standard deviation, in seconds, of the time per token t as requests experience it."""
    full: float
    """The probability that no place is free for one more sequence."""


class _State(NamedTuple):
    number: int
    """Number of sequences in the pool."""
    log_weight: float
    """Logarithm of the state's relative probability."""
    width: int
    """Number of states that this one stands for: itself and those skipped since the one before it."""


def sharing(
    rate_per_s: float, work_tokens: float, num_workers: int, most: int, token_s: Callable[[float], float]
) -> Sharing | None:
    """The equilibrium of `num_workers` on which together `rate_per_s` requests of `work_tokens` arrive. `token_s(n)`
    is the time of a token with n sequences on the worker, of which it holds `most`. None where the work does not get
    done.

    Of many states some stand for those around them: the distribution is about as wide as the root of its mean, of which
    the distance between two of them is a sixteenth."""
    if most < 1 or rate_per_s * work_tokens * token_s(float(most)) >= num_workers * most:
        return None
    largest = num_workers * most
    offered = rate_per_s * work_tokens
    log_weight = highest = 0.0
    states = [_State(0, 0.0, 1)]
    while (before := states[-1].number) < largest and log_weight >= highest - 40.0:
        count = min(largest - before, max(1, math.isqrt(before) // _STATES_PER_ROOT))
        number = before + count
        middle = before + (count + 1) / 2
        # The sum over the states from the one before it on, of log(offered * t / n).
        ratio = offered * token_s(max(1.0, middle / num_workers))
        log_weight += count * math.log(ratio) - (math.lgamma(number + 1) - math.lgamma(before + 1))
        states.append(_State(number, log_weight, count))
        highest = max(highest, log_weight)
    weights = [math.exp(state.log_weight - highest) for state in states]
    total = sum(weight * state.width for weight, state in zip(weights, states, strict=True))
    shares = [weight * state.width / total for weight, state in zip(weights, states, strict=True)]
    mean = sum(state.number * share for state, share in zip(states, shares, strict=True))
    # An arrival finds the same distribution, and adds itself.
    last = states[-1].number
    met = [token_s(max(1.0, min(state.number + 1, last) / num_workers)) for state in states]
    first = sum(share * seconds for share, seconds in zip(shares, met, strict=True))
    second = sum(share * seconds * seconds for share, seconds in zip(shares, met, strict=True))
    return Sharing(
        mean_batch=mean / num_workers,
        mean_tpot_s=first,
        tpot_deviation_s=math.sqrt(max(0.0, second - first * first)),
        full=weights[-1] / total if last == largest else 0.0,
    )


def decode_context(kinds: Sequence[Lengths]) -> float:
    """Tokens that a decoding sequence attends to, on average over the steps of all answers."""
    steps = sum(kind.output - 1 for kind in kinds)
    if steps == 0:
        return _mean([kind.prompt for kind in kinds])
    return sum((kind.output - 1) * (kind.prompt + kind.output / 2.0) for kind in kinds) / steps


def _most(load: Load, worker: WorkerModel) -> int:
    """The most sequences that a worker holds, by its places and by its memory; answers count with half of their
    lengths."""
    steps = [max(1, kind.output - 1) for kind in load.kinds]
    tokens = sum(step * (kind.prompt + kind.output / 2.0) for step, kind in zip(steps, load.kinds, strict=True))
    if worker.most_sequences is not None:
        return min(worker.max_num_seqs, worker.most_sequences(math.ceil(tokens / sum(steps))))
    return min(worker.max_num_seqs, int(worker.kv_tokens / (tokens / sum(steps))))


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """What a pool of decode workers attains under a load."""

    tpot_share: float
    """Share of requests within the TPOT limit."""
    full: float
    """The probability that no place is free for one more sequence."""
    mean_batch: float
    """Mean number of sequences on one worker."""
    utilization: float
    """Share of its places that are taken."""
    mean_tpot_s: float


def decode_estimate(
    load: Load, prefill: WorkerModel, decode: WorkerModel, num_decode: int, kv_bytes: KvBytes, link: LinkTimes
) -> Decoding | None:
    """The estimate for a decode pool that gets its sequences from workers like `prefill`; None where it cannot serve
    the rate."""
    context = decode_context(load.kinds)
    work = _mean([kind.output - 1 for kind in load.kinds])
    most = _most(load, decode)
    shared = sharing(load.rate_per_s, max(work, 1e-9), num_decode, most, lambda batch: decode.token_s(batch, context))
    if shared is None:
        return None
    exposed = _mean([_exposed_s(kind, prefill, kv_bytes, link) for kind in load.kinds])
    return Decoding(
        tpot_share=_tpot_share(load, shared, exposed, 0.0, 0.0),
        full=shared.full,
        mean_batch=shared.mean_batch,
        utilization=shared.mean_batch / most,
        mean_tpot_s=shared.mean_tpot_s + exposed / max(1.0, work),
    )


def disaggregated(
    load: Load,
    prefill: WorkerModel,
    num_prefill: int,
    decode: WorkerModel,
    num_decode: int,
    kv_bytes: KvBytes,
    link: LinkTimes,
) -> Estimate:
    """The estimate for a prefill pool and a decode pool."""
    computed = prefill_estimate(load, prefill, num_prefill)
    decoding = decode_estimate(load, prefill, decode, num_decode, kv_bytes, link)
    if computed is None or decoding is None:
        return overloaded(_overload(load, prefill, num_prefill, decode, num_decode))
    ttft_share, mean_ttft_s, utilization = computed
    return Estimate(
        ttft_attainment=ttft_share * (1.0 - decoding.full),
        tpot_attainment=decoding.tpot_share,
        utilization=max(utilization, decoding.utilization),
        mean_batch=decoding.mean_batch,
        mean_ttft_s=mean_ttft_s,
        mean_tpot_s=decoding.mean_tpot_s,
    )


def _exposed_s(kind: Lengths, prefill: WorkerModel, kv_bytes: KvBytes, link: LinkTimes) -> float:
    seconds = prefill.prompt_s(kind)
    num_chunks = -(-kind.computed // prefill.token_budget)
    return exposed_s(kv_bytes(kind.prompt), seconds, num_chunks, link)


def _overload(load: Load, prefill: WorkerModel, num_prefill: int, decode: WorkerModel, num_decode: int) -> float:
    busy = [prefill.busy_s(kind) for kind in load.kinds]
    prompts = load.rate_per_s * _mean(_batched(load.kinds, prefill, busy)) / num_prefill
    most = max(1, _most(load, decode))
    seconds = decode.token_s(most, decode_context(load.kinds))
    answers = load.rate_per_s * _mean([kind.output - 1 for kind in load.kinds]) * seconds / most / num_decode
    return max(1.0, prompts, answers)


def _tpot_share(load: Load, shared: Sharing, exposed_s: float, prompts_per_s: float, delay_s: float) -> float:
    """Share of requests within the TPOT limit: a normal time per token, and the delays of prompts (each `delay_s`, of
    which `prompts_per_s` come to a worker) that fall into an answer's life, Poisson."""
    deviation = shared.tpot_deviation_s * math.sqrt(AVERAGED)
    found = []
    for kind in load.kinds:
        steps = kind.output - 1
        limit_s = _limit_s(kind.tpot_s, load.slo.tpot_s)
        if steps == 0 or limit_s == math.inf:
            found.append(1.0)
            continue
        room = limit_s - shared.mean_tpot_s - exposed_s / steps
        if prompts_per_s == 0.0 or delay_s <= 0.0:
            found.append(_normal(room, deviation))
            continue
        expected = prompts_per_s * steps * shared.mean_tpot_s
        found.append(_with_delays(room, deviation, expected, delay_s / steps))
    return _mean(found)


def _with_delays(room: float, deviation: float, expected: float, delay: float) -> float:
    """P(normal + delay * Poisson(expected) <= room)."""
    if expected > _MAX_POISSON / 2:
        return _normal(room - delay * expected, math.hypot(deviation, delay * math.sqrt(expected)))
    total, weight = 0.0, math.exp(-expected)
    for number in range(_MAX_POISSON):
        if number:
            weight *= expected / number
        total += weight * _normal(room - delay * number, deviation)
        if number > expected and weight < 1e-9:
            break
    return total


def _normal(room: float, deviation: float) -> float:
    if deviation <= 0.0:
        return 1.0 if room >= 0.0 else 0.0
    return 0.5 * math.erfc(-room / deviation / math.sqrt(2.0))


# ---------------------------------------------------------------- both in one


def colocated(load: Load, worker: WorkerModel, num_workers: int) -> Estimate:
    """The estimate for workers that do both by chunked prefill: decodes first, prompts with the rest of the token
    budget."""
    context = decode_context(load.kinds)
    work = _mean([kind.output - 1 for kind in load.kinds])
    most = min(_most(load, worker), worker.token_budget - 1)
    rate = load.rate_per_s / num_workers
    batch, found = 1.0, None
    for _ in range(8):  # chunks depend on the batch, and the batch on how long the chunks take
        prompts = [_mixed(kind, worker, batch, context) for kind in load.kinds]
        busy = rate * _mean([seconds for seconds, _ in prompts])
        if busy >= 1.0:
            return overloaded(busy)
        chunks = rate * _mean([count for _, count in prompts])

        def token_s(batch: float, busy: float = busy, chunks: float = chunks) -> float:
            return 1.0 / (chunks + (1.0 - busy) / worker.token_s(batch, context))

        found = sharing(load.rate_per_s, max(work, 1e-9), num_workers, most, token_s)
        if found is None:
            return overloaded(1.0)
        if abs(found.mean_batch - batch) < 0.01 * batch:
            break
        batch = max(1.0, found.mean_batch)
    assert found is not None
    alone_s = worker.token_s(batch, context)
    services = [seconds for seconds, _ in prompts]
    wait = wait_of(num_workers, load.rate_per_s, services)
    if wait is None:
        return overloaded(busy)
    limits_s = [_limit_s(kind.ttft_s, load.slo.ttft_s) for kind in load.kinds]
    step_s = alone_s / 2.0 if found.mean_batch >= 0.5 else 0.0  # of the step that is under way
    within = _mean([wait.within(limit_s - step_s - own) for limit_s, own in zip(limits_s, services, strict=True)])
    # `token_s` has the mean delay by prompts; here it is taken apart, because a short answer meets few of them.
    steady = Sharing(
        mean_batch=found.mean_batch,
        mean_tpot_s=min(found.mean_tpot_s, alone_s),
        tpot_deviation_s=found.tpot_deviation_s,
        full=found.full,
    )
    count = _mean([count for _, count in prompts])
    delay = max(0.0, _mean(services) - count * alone_s)
    # Prompts in a second of undelayed decoding: the delays make an answer's life longer.
    stretched = rate * found.mean_tpot_s / steady.mean_tpot_s
    return Estimate(
        ttft_attainment=within * (1.0 - found.full),
        tpot_attainment=_tpot_share(load, steady, 0.0, stretched, delay),
        utilization=max(busy, found.mean_batch / most),
        mean_batch=found.mean_batch,
        mean_ttft_s=wait.chance * wait.mean_s + step_s + _mean(services),
        mean_tpot_s=found.mean_tpot_s,
    )


def _mixed(kind: Lengths, worker: WorkerModel, batch: float, context: float) -> tuple[float, int]:
    """The seconds and the number of steps that a prompt takes beside a batch of decodes."""
    decodes = round(batch)
    room = max(1, worker.token_budget - decodes)
    seconds = chunks_s(worker.times, kind.computed, room, kind.cached, decodes, round(decodes * context))
    return seconds, -(-kind.computed // room)


def _limit_s(own_s: float, of_all_s: float | None) -> float:
    return own_s if of_all_s is None else min(own_s, of_all_s)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
