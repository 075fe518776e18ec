"""The requests of a load test: prompts and output lengths, complete before the run begins.

    WorkloadConfig + ArrivalConfig ──outline──> [OutlinedRequest] ──plan──> [PlannedRequest] ──> open_loop.py
                                                      └──> the simulator, which needs no token ids

A plan is a function of the two configs, the size of the vocabulary and the trace file, if there is one: the same seeds
give the same token ids and due times on every machine (see randomness.py). Clusters that are compared thus get equal
work. Prompts are random token ids; their meaning does not matter, because answers have forced lengths.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple, TypeVar

import msgspec

from disagg.loadtests.records import PlannedRequest
from disagg.loadtests.workload.arrivals import MICROSECONDS, ArrivalConfig, due_times, window_s
from disagg.loadtests.workload.randomness import Stream, token_ids
from disagg.loadtests.workload.traces import BLOCK_TOKENS, TraceFormat, TraceRequest, read_trace

_Number = TypeVar("_Number", int, float)

Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 24)]
# No limits by msgspec.Meta in unions with tuples of fixed length: msgspec 0.22 reads beyond its memory for those.
Length = int | tuple[int, int]
"""Number of tokens or turns, at least 1, or `[least, most]`, both included and all equally likely."""
Seconds = float | tuple[float, float]
"""Time of at least 0 seconds, or `[least, most]`, with all times between them equally likely."""
Scale = Annotated[float, msgspec.Meta(gt=0, le=1e6)]


class RandomWorkload(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="random", tag_field="kind"
):
    """Workload of prompts that have nothing in common."""

    isl: Length
    """Number of prompt tokens."""
    osl: Length
    """Number of output tokens."""
    seed: int = 0

    def __post_init__(self) -> None:
        _check_lengths(isl=self.isl, osl=self.osl)


class SharedPrefixWorkload(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="shared_prefix", tag_field="kind"
):
    """Workload of prompts that begin with one of a few prefixes, drawn evenly, as with system prompts or few-shot
    examples."""

    num_prefixes: Count
    prefix_tokens: Count
    """Number of tokens of each prefix."""
    own_tokens: Length
    """Number of prompt tokens after the prefix, which no other request has."""
    osl: Length
    seed: int = 0

    def __post_init__(self) -> None:
        _check_lengths(own_tokens=self.own_tokens, osl=self.osl)


class MultiTurnWorkload(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="multi_turn", tag_field="kind"
):
    """Conversations: each turn's prompt is all prompts and answers before it, and some new tokens.

    The arrival process starts conversations; its rate counts requests, so that it starts rate / (mean turns)
    conversations a second. Each later turn is planned a think time after the turn before it was planned, and is due
    then or, if that is later, when the answer before it has ended. That is known only during the run, so
    that the record of a request, not the plan, has its true due time.
    """

    turns: Length
    """Number of requests in a conversation."""
    new_tokens: Length
    """Number of new prompt tokens of each turn."""
    osl: Length
    """Number of output tokens of each turn."""
    think_time_s: Seconds = 1.0
    """Time from one turn's planned time to that of the next."""
    seed: int = 0

    def __post_init__(self) -> None:
        _check_lengths(turns=self.turns, new_tokens=self.new_tokens, osl=self.osl)
        _check_range("think_time_s", _bounds(self.think_time_s), 0)


class TraceWorkload(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="trace", tag_field="kind"
):
    """Requests as long as those of a trace (see traces.py), scaled to what the model can take.

    A 512-token block of a `mooncake` trace becomes `tokens_per_block` tokens drawn from its hash id, so that prompts
    share exactly the leading blocks that their ids share. The shorter block at the end of a prompt keeps its share of a
    block, rounded down but at least one token. Prompts of an `azure` trace have nothing in common.
    """

    path: str
    """Path of the trace file."""
    format: TraceFormat
    first_n: Count | None = None
    """Number of requests of the file to use, the first ones; None for all."""
    time_scale: Scale = 1.0
    """Factor on the trace's own times: 10 replays it ten times slower. For arrivals of kind `trace` without a rate."""
    tokens_per_block: Annotated[int, msgspec.Meta(ge=1, le=BLOCK_TOKENS)] = 16
    """Number of tokens that stand for 512 of a `mooncake` trace; 512 replays whole lengths."""
    input_scale: Scale = 1.0
    """Factor on prompt lengths of an `azure` trace."""
    output_scale: Scale = 1.0
    """Factor on output lengths."""
    max_input_tokens: Count | None = None
    """Largest prompt length; longer prompts, after scaling, are cut to this."""
    max_output_tokens: Count | None = None
    """Largest answer length; longer answers, after scaling, are cut to this."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.format == "mooncake" and self.input_scale != 1.0:
            raise ValueError("input_scale: not for format mooncake; set tokens_per_block")
        if self.format == "azure" and self.tokens_per_block != 16:
            raise ValueError("tokens_per_block: not for format azure; set input_scale")


WorkloadConfig = RandomWorkload | SharedPrefixWorkload | MultiTurnWorkload | TraceWorkload
"""Configuration of the requests; in files the key `kind` names the struct."""

_LENGTH_FIELDS = {
    RandomWorkload: "isl",
    SharedPrefixWorkload: "prefix_tokens",
    MultiTurnWorkload: "turns",
    TraceWorkload: "max_input_tokens",
}


class PromptPart(NamedTuple):
    """Tokens of a prompt that are drawn from one key: of two parts with the same key the shorter is a prefix of the
    longer."""

    num_tokens: int
    key: tuple[int | str, ...]

    def token_ids(self, vocab_size: int) -> tuple[int, ...]:
        """The ids, each in [0, vocab_size)."""
        return token_ids(self.num_tokens, vocab_size, *self.key)


@dataclass(frozen=True, kw_only=True, slots=True)
class OutlinedRequest:
    """Planned request whose prompt is not drawn yet, only its keys; fields as in `PlannedRequest`."""

    index: int
    due_s: float
    parts: tuple[PromptPart, ...]
    """Parts of the prompt, or of its new part in a later turn."""
    max_tokens: int
    after: int | None = None
    group: str = ""

    @property
    def num_prompt_tokens(self) -> int:
        """Number of tokens of all parts."""
        return sum(part.num_tokens for part in self.parts)

    def planned(self, vocab_size: int) -> PlannedRequest:
        """The planned request with its token ids."""
        return PlannedRequest(
            index=self.index,
            due_s=self.due_s,
            prompt_token_ids=tuple(token_id for part in self.parts for token_id in part.token_ids(vocab_size)),
            max_tokens=self.max_tokens,
            after=self.after,
            group=self.group,
        )


@dataclass(frozen=True, kw_only=True)
class Outline:
    """All requests of a run, without token ids."""

    requests: list[OutlinedRequest]
    """Requests in the order of their due times, as in `Plan`."""
    window_s: float
    """Duration that the arrivals stand for, as in `Plan`."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All requests of a run."""

    requests: list[PlannedRequest]
    """Requests in the order of their due times; a conversation's turns in their own order."""
    window_s: float
    """Duration that the arrivals stand for, in seconds: the divisor of goodput."""


def outline(workload: WorkloadConfig, arrivals: ArrivalConfig, *, max_model_len: int) -> Outline:
    """Outline the requests of a run and its length; arguments and errors as in `plan`."""
    if arrivals.kind == "trace" and not isinstance(workload, TraceWorkload):
        raise ValueError("arrivals.kind: times of a trace need a workload of kind trace")
    match workload:
        case RandomWorkload():
            requests = _outline_random(workload, arrivals)
        case SharedPrefixWorkload():
            requests = _outline_shared_prefix(workload, arrivals)
        case MultiTurnWorkload():
            requests = _outline_multi_turn(workload, arrivals)
        case TraceWorkload():
            requests = _outline_trace(workload, arrivals)
    _check_fits(requests, _LENGTH_FIELDS[type(workload)], max_model_len)
    due_s = [request.due_s for request in requests]
    nominal_s = window_s(arrivals, due_s)
    # The last turns of conversations are due after the last conversation has begun.
    late_s = due_s[-1] if isinstance(workload, MultiTurnWorkload) else 0.0
    return Outline(requests=requests, window_s=max(nominal_s, late_s))


def plan(workload: WorkloadConfig, arrivals: ArrivalConfig, *, vocab_size: int, max_model_len: int) -> Plan:
    """Plan the requests of a run and its length.

    Args:
        workload: prompts and lengths.
        arrivals: times of the requests.
        vocab_size: token ids are drawn from [0, vocab_size).
        max_model_len: largest number of tokens of a prompt (with the conversation before it) plus its answer.

    Raises:
        ValueError: naming the field, if a request cannot fit the model, if the two configs do not go together, or if
            a trace cannot be read or has too few requests.
    """
    if vocab_size < 1:
        raise ValueError(f"vocab_size: expected at least 1; got {vocab_size}")
    outlined = outline(workload, arrivals, max_model_len=max_model_len)
    return Plan(requests=[request.planned(vocab_size) for request in outlined.requests], window_s=outlined.window_s)


def plan_requests(
    workload: WorkloadConfig, arrivals: ArrivalConfig, *, vocab_size: int, max_model_len: int
) -> list[PlannedRequest]:
    """The requests of `plan`; raises as it does."""
    return plan(workload, arrivals, vocab_size=vocab_size, max_model_len=max_model_len).requests


# ---------------------------------------------------------------- kinds


def _outline_random(workload: RandomWorkload, arrivals: ArrivalConfig) -> list[OutlinedRequest]:
    requests = []
    for index, due_s in enumerate(due_times(arrivals)):
        lengths = Stream("random lengths", workload.seed, index)
        num_tokens = _draw(workload.isl, lengths)
        requests.append(
            OutlinedRequest(
                index=index,
                due_s=due_s,
                parts=(PromptPart(num_tokens, ("random prompt", workload.seed, index)),),
                max_tokens=_draw(workload.osl, lengths),
            )
        )
    return requests


def _outline_shared_prefix(workload: SharedPrefixWorkload, arrivals: ArrivalConfig) -> list[OutlinedRequest]:
    requests = []
    for index, due_s in enumerate(due_times(arrivals)):
        draws = Stream("shared prefix lengths", workload.seed, index)
        prefix = draws.integer(0, workload.num_prefixes - 1)
        shared = PromptPart(workload.prefix_tokens, ("shared prefix", workload.seed, prefix))
        own = PromptPart(_draw(workload.own_tokens, draws), ("own tokens", workload.seed, index))
        requests.append(
            OutlinedRequest(
                index=index,
                due_s=due_s,
                parts=(shared, own),
                max_tokens=_draw(workload.osl, draws),
                group=f"prefix {prefix}",
            )
        )
    return requests


@dataclass(frozen=True, kw_only=True)
class _Turn:
    due_s: float
    conversation: int
    turn: int
    num_new_tokens: int
    num_output_tokens: int


def _outline_multi_turn(workload: MultiTurnWorkload, arrivals: ArrivalConfig) -> list[OutlinedRequest]:
    assert arrivals.rate_per_s is not None
    mean_turns = sum(_bounds(workload.turns)) / 2
    starts = due_times(msgspec.structs.replace(arrivals, rate_per_s=arrivals.rate_per_s / mean_turns))
    turns = [turn for conversation, start_s in enumerate(starts) for turn in _turns(workload, conversation, start_s)]
    turns.sort(key=lambda turn: (turn.due_s, turn.conversation, turn.turn))
    if arrivals.duration_s is not None:
        turns = [turn for turn in turns if turn.due_s < arrivals.duration_s]
    index_of = {(turn.conversation, turn.turn): index for index, turn in enumerate(turns)}
    return [
        OutlinedRequest(
            index=index,
            due_s=turn.due_s,
            parts=(PromptPart(turn.num_new_tokens, ("turn", workload.seed, turn.conversation, turn.turn)),),
            max_tokens=turn.num_output_tokens,
            after=index_of.get((turn.conversation, turn.turn - 1)),
            group=f"conversation {turn.conversation}",
        )
        for index, turn in enumerate(turns[: arrivals.num_requests])
    ]


def _turns(workload: MultiTurnWorkload, conversation: int, start_s: float) -> list[_Turn]:
    draws = Stream("conversation", workload.seed, conversation)
    low_s, high_s = _bounds(workload.think_time_s)
    due_s = start_s
    turns = []
    for turn in range(_draw(workload.turns, draws)):
        turns.append(
            _Turn(
                due_s=round(due_s, MICROSECONDS),
                conversation=conversation,
                turn=turn,
                num_new_tokens=_draw(workload.new_tokens, draws),
                num_output_tokens=_draw(workload.osl, draws),
            )
        )
        due_s += low_s + (high_s - low_s) * draws.uniform()
    return turns


def _outline_trace(workload: TraceWorkload, arrivals: ArrivalConfig) -> list[OutlinedRequest]:
    own_pace = arrivals.kind == "trace" and arrivals.rate_per_s is None
    if workload.time_scale != 1.0 and not own_pace:
        raise ValueError("time_scale: only for arrivals of kind trace without rate_per_s, which sets the pace itself")
    trace = read_trace(Path(workload.path), workload.format, workload.first_n)
    times = due_times(arrivals, [request.time_s * workload.time_scale for request in trace])
    if len(times) > len(trace):
        raise ValueError(
            f"arrivals.num_requests: {len(times)} requests would be due, but the trace has {len(trace)}; "
            "lower num_requests, duration_s or rate_per_s"
        )
    return [
        OutlinedRequest(
            index=index,
            due_s=due_s,
            parts=_cut(_trace_prompt(workload, index, request), workload.max_input_tokens),
            max_tokens=_scaled(request.num_output_tokens, workload.output_scale, workload.max_output_tokens),
        )
        for index, (due_s, request) in enumerate(zip(times, trace, strict=False))
    ]


def _trace_prompt(workload: TraceWorkload, index: int, request: TraceRequest) -> tuple[PromptPart, ...]:
    if not request.block_ids:
        num_tokens = _scaled(request.num_input_tokens, workload.input_scale, workload.max_input_tokens)
        return (PromptPart(num_tokens, ("trace prompt", workload.seed, index)),)
    *full, last = request.block_ids
    num_last = request.num_input_tokens - BLOCK_TOKENS * len(full)
    tokens_per_block = workload.tokens_per_block
    num_tail_tokens = max(1, num_last * tokens_per_block // BLOCK_TOKENS)
    return (
        *(PromptPart(tokens_per_block, ("trace block", workload.seed, block_id)) for block_id in full),
        PromptPart(num_tail_tokens, ("trace block", workload.seed, last)),
    )


def _cut(parts: tuple[PromptPart, ...], most: int | None) -> tuple[PromptPart, ...]:
    """The first `most` tokens; all of them where that is None."""
    if most is None or sum(part.num_tokens for part in parts) <= most:
        return parts
    kept: list[PromptPart] = []
    for part in parts:
        kept.append(part._replace(num_tokens=min(part.num_tokens, most)))
        most -= part.num_tokens
        if most <= 0:
            break
    return tuple(kept)


# ---------------------------------------------------------------- lengths


def _bounds(value: _Number | tuple[_Number, _Number]) -> tuple[_Number, _Number]:
    return value if isinstance(value, tuple) else (value, value)


def _draw(length: Length, draws: Stream) -> int:
    low, high = _bounds(length)
    return draws.integer(low, high)


def _scaled(num_tokens: int, scale: float, most: int | None) -> int:
    """A length times a factor, at least 1 and at most `most`."""
    scaled = max(1, round(num_tokens * scale))
    return scaled if most is None else min(scaled, most)


def _check_lengths(**lengths: Length) -> None:
    for field, length in lengths.items():
        _check_range(field, _bounds(length), 1)


def _check_range(field: str, bounds: tuple[float, float], least: int) -> None:
    """Refuse a range that is empty, endless or below `least`."""
    low, high = bounds
    if not least <= low <= high < math.inf:
        raise ValueError(f"{field}: expected a number of at least {least}, or [least, most]; got {[low, high]}")


def _check_fits(requests: Sequence[OutlinedRequest], field: str, max_model_len: int) -> None:
    """Refuse a plan with a request that the model can never take; the answers before a turn count."""
    num_tokens: list[int] = []
    for request in requests:
        before = 0 if request.after is None else num_tokens[request.after]
        total = before + request.num_prompt_tokens + request.max_tokens
        if total > max_model_len:
            raise ValueError(
                f"{field}: request {request.index} needs {total} tokens with its {request.max_tokens} output tokens, "
                f"but max_model_len is {max_model_len}"
            )
        num_tokens.append(total)
