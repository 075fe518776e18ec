"""The checks of `disagg doctor` of pairs of workers: whether KV moves on each, how fast, and which ones are slower.

    each pair (P, D) ──> some pair checks ──> bytes against what the prompts have; the best rate ──> all pairs compared

A pair check moves the KV of a short random prompt. Its time is what a stream would wait for, as the gateway sees it. It
includes some messages, so for a small model the rate depends more on those than on the channel. The judging functions
are pure.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence

from disagg.cli.doctor.finding import Finding
from disagg.client import Client, ClusterState, Probe
from disagg.client.types import WorkerState
from disagg.cluster.system.program import command
from disagg.cluster.system.terminal import format_bytes
from disagg.proto.errors import DisaggError, PermissionDeniedError
from disagg.proto.ids import model_of

NUM_CHECKS = 3
"""Number of checks of each pair: the first one finds sockets and memory cold."""
FAR_BELOW = 1 / 3
"""Fraction of the median rate of all pairs; a slower pair is reported."""

Pair = tuple[str, str]
"""Ids of a prefill and a decode worker."""


def pair_findings(client: Client, state: ClusterState) -> Iterator[Finding]:
    """Findings about each pair as it is checked; then about those that are slow."""
    pairs = pairs_of(state.workers)
    if not pairs:
        is_colocated = any(len(worker.roles) > 1 for worker in state.workers)
        why = "workers do both (colocated), so no KV moves" if is_colocated else "there is no pair that could be used"
        yield Finding("ok" if is_colocated else "FAIL", "KV", why, "" if is_colocated else command("status"))
    rates: dict[Pair, float] = {}
    for prefill, decode in pairs:
        try:
            checks = [client.probe(prefill, decode) for _ in range(NUM_CHECKS)]
        except PermissionDeniedError:
            yield Finding("warn", "KV", "pairs can be probed with the key of an administrator only")
            return
        except DisaggError as error:
            yield Finding("FAIL", "KV", f"{prefill} -> {decode}: {error.code}: {error.detail}", command("status"))
            continue
        finding = pair_finding(prefill, decode, checks)
        best = max(map(rate, checks))
        if finding.level == "ok" and best > 0:
            rates[prefill, decode] = best
        yield finding
    yield from slow_findings(rates)


def pairs_of(workers: Sequence[WorkerState]) -> list[Pair]:
    """All pairs of a usable prefill worker with a usable decode worker of the same model."""
    ready = [worker for worker in workers if worker.phase in ("ready", "")]
    prefills = [worker.worker_id for worker in ready if list(worker.roles) == ["prefill"]]
    decodes = [worker.worker_id for worker in ready if list(worker.roles) == ["decode"]]
    return [(prefill, decode) for prefill in prefills for decode in decodes if model_of(prefill) == model_of(decode)]


def pair_finding(prefill: str, decode: str, checks: Sequence[Probe]) -> Finding:
    """Finding about the bytes that a pair's checks moved: whether they are those of the whole prompts, and the best
    rate."""
    name = f"{prefill} -> {decode}"
    for check in checks:
        if check.kv_bytes != check.expected_bytes:
            text = f"{name}: {check.kv_bytes} bytes moved, the prompt has {check.expected_bytes}"
            return Finding("FAIL", "KV", text, f"disagg drain {decode}")
    best = max(checks, key=rate)
    text = f"{name}: {format_bytes(best.kv_bytes)} by {best.transport} in {best.exposed_ms:.1f} ms"
    if best.exposed_ms > 0:
        text += f", {format_rate(rate(best))}"
    return Finding("ok", "KV", f"{text} (best of {len(checks)})")


def slow_findings(rates: Mapping[Pair, float]) -> list[Finding]:
    """Findings about pairs far below the median of all pairs. With only two pairs the faster one takes the place of the
    median."""
    if len(rates) < 2:
        return []
    usual = max(rates.values()) if len(rates) == 2 else statistics.median(rates.values())
    return [
        Finding(
            "warn",
            "KV",
            f"{prefill} -> {decode} moves {format_rate(measured)} where others move {format_rate(usual)}",
            "compare the network and the load of their hosts",
        )
        for (prefill, decode), measured in rates.items()
        if measured < usual * FAR_BELOW
    ]


def rate(check: Probe) -> float:
    """Rate in MB/s; 0 where the time was too short to measure."""
    return check.kv_bytes / check.exposed_ms / 1e3 if check.exposed_ms > 0 else 0.0


def format_rate(mb_s: float) -> str:
    """Format a rate, with two decimals below 10."""
    return f"{mb_s:.0f} MB/s" if mb_s >= 10 else f"{mb_s:.2f} MB/s"
