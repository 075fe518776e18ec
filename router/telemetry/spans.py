"""The time of a request as spans. Pure: made of a trace on demand, and once at its end.

    tokenize_queue  arrival until a thread tokenizes the prompt            large prompts only
    tokenize        until the router has it
    route           until an attempt is placed; again after a lost attempt
    kv_alloc_wait   until the decode worker has reserved room                      pairs only
    prefill_queue   until the first step with some of the prompt
    prefill         until the prompt is computed
    kv_transfer     from the first chunk until all KV is in place                  pairs only; overlaps prefill
    kv_transfer_exposed  from the end of prefill until then                        pairs only: what a stream sees
    decode_queue    until the first decode step
    decode          until the end
    migration       from the decision to move until it has arrived, on the worker that it moves to; overlaps decode
    detokenize      not a span of time but a sum of many; drawn as if it were the last thing

Workers measure durations, the gateway points in time; so the duration of a worker begins at a point in time of the
gateway, and is cut at the next one.
"""

from __future__ import annotations

from typing import NamedTuple

from disagg.proto.ids import WorkerId
from disagg.router.api import AttemptMarks, RequestTrace


class Span(NamedTuple):
    """One stage of a request. Times are on the gateway's monotonic clock."""

    stage: str
    worker_id: WorkerId | None
    """None for a stage in the gateway."""
    start: float
    end: float | None
    """None while the stage lasts."""


_Part = tuple[str, "WorkerId | None", float, "float | None"]
"""The fields of a `Span`."""


def spans_of(trace: RequestTrace) -> list[Span]:
    """All spans so far; the last one has no end while the request runs."""
    return [Span(*part) for part in _parts_of(trace)]


def durations_of(trace: RequestTrace) -> dict[str, float]:
    """Seconds by stage, summed over attempts, of a request that has ended."""
    sums: dict[str, float] = {}
    for stage, _, start, end in _parts_of(trace):
        assert end is not None, f"{stage} of {trace.request_id} has no end"
        sums[stage] = sums.get(stage, 0.0) + end - start
    return sums


def _parts_of(trace: RequestTrace) -> list[_Part]:
    stages = trace.stages
    tokenized, end = stages.get("tokenize", trace.arrival), stages.get("end")
    began = min(trace.arrival + trace.tokenize_queue_s, tokenized)
    parts: list[_Part] = [("tokenize", None, began, tokenized)]
    if trace.tokenize_queue_s:
        parts.insert(0, ("tokenize_queue", None, trace.arrival, began))
    waiting_since: float | None = tokenized
    for marks in trace.marks:
        parts.append(("route", None, marks.queued, marks.placed))
        if marks.path == "pd":
            _add_pair(marks, parts)
        else:
            _add_alone(marks, parts)
        parts += [("migration", move.target, move.began, move.ended) for move in marks.moves]
        waiting_since = marks.ended
    if waiting_since is not None and (end is None or end > waiting_since):
        parts.append(("route", None, waiting_since, end))
    if trace.detokenize_s and end is not None:
        parts.append(("detokenize", None, max(trace.arrival, end - trace.detokenize_s), end))
    return parts


def _add_alone(marks: AttemptMarks, parts: list[_Part]) -> None:
    _add_prefill(marks, marks.decode_worker, marks.placed, parts)
    if marks.computed is not None:
        _add_decode(marks, marks.computed, parts)


def _add_decode(marks: AttemptMarks, begun: float, parts: list[_Part]) -> None:
    """Add one part for each worker that decoded."""
    worker_id = marks.decode_worker
    for move in marks.moves:
        if move.has_arrived and move.ended is not None:
            parts.append(("decode", worker_id, begun, move.ended))
            worker_id, begun = move.target, move.ended
    parts.append(("decode", worker_id, begun, marks.ended))


def _add_pair(marks: AttemptMarks, parts: list[_Part]) -> None:
    start, decode_id = marks.placed, marks.decode_worker
    if marks.alloc_wait_s is not None:
        start = _cut(start + marks.alloc_wait_s, marks.computed)
        parts.append(("kv_alloc_wait", decode_id, marks.placed, start))
    _add_prefill(marks, marks.prefill_worker, start, parts)
    moved = marks.handed_over
    if moved is None:
        if marks.computed is not None and (marks.ended is None or marks.ended > marks.computed):
            parts.append(("kv_transfer_exposed", decode_id, marks.computed, marks.ended))
        return
    if marks.transfer_s:
        parts.append(("kv_transfer", decode_id, max(marks.placed, moved - marks.transfer_s), moved))
    if marks.computed is not None:
        parts.append(("kv_transfer_exposed", decode_id, min(marks.computed, moved), moved))
    begun = moved
    if marks.decode_queue_s is not None:
        begun = _cut(moved + marks.decode_queue_s, marks.ended)
        parts.append(("decode_queue", decode_id, moved, begun))
    _add_decode(marks, begun, parts)


def _add_prefill(marks: AttemptMarks, worker_id: WorkerId | None, start: float, parts: list[_Part]) -> None:
    end = marks.ended if marks.computed is None else marks.computed
    begun = start
    if marks.queue_s is not None:
        begun = _cut(start + marks.queue_s, end)
        parts.append(("prefill_queue", worker_id, start, begun))
    parts.append(("prefill", worker_id, begun, end))


def _cut(time: float, limit: float | None) -> float:
    return time if limit is None else min(time, limit)
