"""The summary of `benchmarks.tiers`, out of its rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.tiers import choice
from benchmarks.tiers.clusters import ALL, DISK, MODES, NONE, PEER
from benchmarks.tiers.conversations import Turn
from benchmarks.tiers.sources import AT_REST, FETCHING
from tests.support.reports import percentile

Row = Mapping[str, Any]
LONG, AGENTS, LOCAL = "long", "agents", "local"
CHOICE, CHOICE_OF_LINK, CHOICE_OF_DISK = "choice", "choice of a link", "choice of a disk"
AFTER_A_PAUSE = " after a pause"
WORST = {
    CHOICE: "choice_disk_worst",
    CHOICE_OF_LINK: "choice_link_worst",
    CHOICE_OF_LINK + AFTER_A_PAUSE: "choice_link_paused_worst",
    CHOICE_OF_DISK: "choice_simulated_disk_worst",
    CHOICE_OF_DISK + AFTER_A_PAUSE: "choice_simulated_disk_paused_worst",
}
"""Figure of each part that is about a choice."""
CONVERSATIONS = (LONG, AGENTS, LOCAL)


def row_of(part: str, mode: str, repeat: int, turns: Sequence[Turn], *, restarted: bool = False) -> dict[str, Any]:
    """A round of conversations as one row."""
    good = [turn for turn in turns if not turn.error]
    return {
        "part": part,
        "mode": mode,
        "repeat": repeat,
        "turn": turns[0].turn,
        "restarted": restarted,
        "requests": len(turns),
        "prompt_tokens": sum(turn.prompt_tokens for turn in turns),
        "computed_tokens": sum(turn.computed_tokens for turn in turns),
        "ttft_ms": [round(turn.ttft_s * 1e3, 3) for turn in good],
        "tpot_ms": [round(turn.tpot_s * 1e3, 3) for turn in good],
        "answer_ms": [round((turn.ttft_s + turn.tpot_s * (len(turn.token_ids) - 1)) * 1e3, 3) for turn in good],
        "errors": [turn.error for turn in turns if turn.error],
        "tokens": {turn.conversation: list(turn.token_ids) for turn in good},
    }


def select(rows: Iterable[Row], part: str, mode: str, *, restarted: bool = False, later: bool = False) -> list[Row]:
    """The rounds of a mode; `later`: without the first turns."""
    return [
        row
        for row in rows
        if (row["part"], row.get("mode"), row.get("restarted", False)) == (part, mode, restarted)
        and "turn" in row
        and not (later and row["turn"] == 0)
    ]


def computed(rows: Sequence[Row], part: str, mode: str, *, restarted: bool = False) -> float | None:
    """Prompt tokens that a run of a mode computed, the mean over the repeats; None where it was not run."""
    found = select(rows, part, mode, restarted=restarted)
    num_runs = len({row["repeat"] for row in found})
    return sum(row["computed_tokens"] for row in found) / num_runs if num_runs else None


def ttfts(rows: Sequence[Row], part: str, mode: str) -> list[float]:
    """Milliseconds to the first token of all later turns."""
    return [ms for row in select(rows, part, mode, later=True) for ms in row["ttft_ms"]]


def answers(rows: Sequence[Row], part: str, mode: str) -> list[float]:
    """Milliseconds to the last token of all later turns."""
    return [ms for row in select(rows, part, mode, later=True) for ms in row.get("answer_ms", ())]


def others(rows: Sequence[Row], part: str, mode: str, name: str) -> list[float]:
    """Times of the streams beside the conversations, of all runs of a mode."""
    return [ms for row in rows if (row["part"], row.get("mode")) == (f"{part} others", mode) for ms in row[name]]


def source_gaps(rows: Sequence[Row], phase: str) -> list[float]:
    """Times between the tokens of a source's streams."""
    return [ms for row in rows if row["part"] == "source" and row["phase"] == phase for ms in row["gap_ms"]]


def num_wrong(rows: Sequence[Row]) -> int:
    """Answers whose tokens are not those of the cluster without tiers, in the same turn."""
    wrong = 0
    for row in rows:
        if "tokens" not in row or row["mode"] == NONE:
            continue
        plain = next((r for r in select(rows, row["part"], NONE) if r["turn"] == row["turn"]), None)
        if plain is None:
            plain = next((r for r in rows if r.get("mode") == NONE and r.get("turn") == row["turn"]), None)
        if plain is not None:
            wrong += sum(plain["tokens"].get(number, tokens) != tokens for number, tokens in row["tokens"].items())
    return wrong


def ratio(numerator: float | None, denominator: float | None) -> float | None:
    """None where either is missing."""
    return round(numerator / denominator, 4) if numerator is not None and denominator else None


def _percentile(values: Sequence[float], percent: float) -> float | None:
    return percentile(values, percent) if values else None


def summarize(rows: Sequence[Row], reuse_trace: float | None) -> dict[str, float | None]:
    """Flat figures by name; see command.py."""
    flat: dict[str, float | None] = {}
    none = computed(rows, LONG, NONE)
    flat["computed_none_over_all"] = ratio(none, computed(rows, LONG, ALL))
    for mode in MODES[1:]:
        flat[f"computed_{mode}_over_none"] = ratio(computed(rows, LONG, mode), none)
    plain = _percentile(ttfts(rows, AGENTS, NONE), 50)
    flat["turn2_ttft_over_none"] = ratio(_percentile(ttfts(rows, AGENTS, PEER), 50), plain)
    flat["turn2_ttft_all_over_none"] = ratio(_percentile(ttfts(rows, AGENTS, ALL), 50), plain)
    for part in CONVERSATIONS:
        tpot = _percentile(others(rows, part, NONE, "tpot_ms"), 99)
        for mode in MODES[1:]:
            name = f"{part}_{mode}"
            flat[f"{name}_ttft_p50_over_none"] = ratio(
                _percentile(ttfts(rows, part, mode), 50), _percentile(ttfts(rows, part, NONE), 50)
            )
            flat[f"{name}_ttft_p99_over_none"] = ratio(
                _percentile(ttfts(rows, part, mode), 99), _percentile(ttfts(rows, part, NONE), 99)
            )
            flat[f"{name}_answer_p50_over_none"] = ratio(
                _percentile(answers(rows, part, mode), 50), _percentile(answers(rows, part, NONE), 50)
            )
            flat[f"{name}_others_tpot_p99_over_none"] = ratio(
                _percentile(others(rows, part, mode, "tpot_ms"), 99), tpot
            )
    cold = computed(rows, LONG, NONE, restarted=True)
    flat["restart_computed_over_cold"] = ratio(computed(rows, LONG, DISK, restarted=True), cold)
    flat["source_itl_p99_over_rest"] = ratio(
        _percentile(source_gaps(rows, FETCHING), 99), _percentile(source_gaps(rows, AT_REST), 99)
    )
    chosen = {part: [dict(row) for row in rows if row["part"] == part] for part in WORST}
    worst = {part: choice.worst(found) for part, found in chosen.items()}
    flat["choice_worst"] = max([value for value in worst.values() if value is not None], default=None)
    flat |= {name: worst[part] for part, name in WORST.items()}
    flat["wrong"] = float(num_wrong(rows) + sum(choice.num_wrong(found) for found in chosen.values()))
    flat["failed"] = float(sum(len(row.get("errors", ())) for row in rows))
    flat["reuse_trace"] = reuse_trace
    return {name: value for name, value in flat.items() if value is not None or name in MUST_SHOW}


MUST_SHOW = (
    "computed_none_over_all",
    "turn2_ttft_over_none",
    "restart_computed_over_cold",
    "choice_worst",
    "wrong",
    "failed",
    "reuse_trace",
)
"""Figures that every report has, `null` where they were not measured."""


def mean_ms(values: Sequence[float], percent: float) -> str:
    """A cell of a table."""
    return f"{percentile(values, percent):.0f}" if values else "-"


def tables(rows: Sequence[Row]) -> list[tuple[str, tuple[str, ...], list[tuple[str, ...]]]]:
    """Title, columns and lines of what was measured."""
    found: list[tuple[str, tuple[str, ...], list[tuple[str, ...]]]] = []
    for part in CONVERSATIONS:
        lines: list[tuple[str, ...]] = []
        for mode in MODES:
            if not (tokens := computed(rows, part, mode)):
                continue
            later, gaps = ttfts(rows, part, mode), others(rows, part, mode, "gap_ms")
            tpots = others(rows, part, mode, "tpot_ms")
            lines.append(
                (mode, f"{tokens:.0f}", *(mean_ms(later, percent) for percent in (50, 99)),
                 f"{percentile(tpots, 99):.1f}" if tpots else "-", f"{percentile(gaps, 99):.1f}" if gaps else "-")
            )  # fmt: skip
        if lines:
            columns = ("mode", "computed tokens", "TTFT of turn 2+ ms p50", "p99", "others: TPOT ms p99", "ITL ms p99")
            found.append((f"conversations: {part}", columns, lines))
    phases = [(phase, source_gaps(rows, phase)) for phase in (AT_REST, FETCHING)]
    if all(gaps for _, gaps in phases):
        lines = [(phase, *(f"{percentile(gaps, p):.1f}" for p in (50, 99))) for phase, gaps in phases]
        found.append(("a source's streams: ITL ms", ("phase", "p50", "p99"), lines))
    for part in WORST:
        chosen = [dict(row) for row in rows if row["part"] == part]
        if not chosen:
            continue
        ways = (choice.COMPUTED, choice.LOADED, choice.CHOSEN)
        lengths = dict.fromkeys(row["length"] for row in chosen)
        lines = [(str(n), *(f"{choice.median_of(chosen, n, way):.0f}" for way in ways)) for n in lengths]
        found.append((f"{part}: TTFT ms by the length of the prefix", ("tokens", *ways), lines))
    return found
