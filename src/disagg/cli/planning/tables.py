"""The tables and charts of `disagg plan`, for the terminal and for its HTML page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from disagg.loadtests.verdict.plots import Chart, Series
from disagg.loadtests.verdict.report import TextTable
from disagg.loadtests.verdict.report_html import charts_html, page, table_html
from disagg.simulator.plan.candidates import Answer, Judged
from disagg.simulator.plan.load import Load
from disagg.simulator.plan.memory import GB
from disagg.simulator.plan.report import Facts, price_per_million_output, verdict
from disagg.simulator.plan.sweep import SweepRow
from disagg.simulator.world.settings import EngineKind

MAX_SHOWN = 6
"""Number of candidates in the table."""


def width_table(facts: Facts, load: Load) -> TextTable:
    """Table of a worker by its stages and ranks."""
    return TextTable(
        title=f"a worker by its stages and ranks, with one request of {load.mean_prompt:.0f} + "
        f"{load.mean_output:.0f} tokens",
        columns=("pp x tp", "step", "weights GB", "KV GB", "KV tokens", "sequences", "TTFT ms", "TPOT ms"),
        rows=[
            (
                f"{width.pp} x {width.tp}{' ep' if width.ep else ''}",
                str(width.token_budget),
                f"{width.memory.weight_bytes / GB:.1f}",
                f"{width.memory.kv_bytes / GB:.1f}",
                str(width.kv_tokens),
                str(width.sequences),
                f"{width.ttft_s * 1e3:.1f}",
                f"{width.tpot_s * 1e3:.1f}",
            )
            for width in facts.widths
        ],
        note="step: tokens of the largest one; GB are of each device, of the stage with least room; sequences are what "
        "fits of this length",
    )


def sweep_table(facts: Facts) -> TextTable:
    """Table of one worker by its batch."""
    columns = ("batch", "TPOT ms", "decode tokens/s", "requests/s", "output tokens/s", "price/M tokens", "kJ/M tokens")
    return TextTable(
        title=f"one worker of pp {facts.sweep_pp} x tp {facts.sweep_tp} that decodes a batch and computes its prompts",
        columns=(*columns, "fits"),
        rows=[
            (
                str(row.batch),
                f"{row.tpot_s * 1e3:.1f}",
                f"{row.tokens_per_s:.0f}",
                f"{row.served_per_s:.2f}",
                f"{row.output_tokens_per_s:.0f}",
                f"{row.price_per_million:.3f}",
                f"{row.joules_per_million / 1e3:.0f}",
                "yes" if row.fits else "no",
            )
            for row in facts.sweep
        ],
    )


def pools_table(answer: Answer, load: Load, engine: EngineKind | None) -> TextTable:
    """Table of the best candidates. `engine`: the simulator's engine that judged them; None for the estimate."""
    judge = "estimated" if engine is None else f"simulated, {engine} engine"
    shown = (answer.best, *answer.judged[: MAX_SHOWN - 1])
    return TextTable(
        title=f"{load.rate_per_s:g} requests/s, limits {load.slo}, for {100 * load.min_attainment:g} % of them "
        f"({judge})",
        columns=("pools", "devices", "per hour", "per M", "attained", "est.", "TTFT ms", "TPOT ms"),
        rows=[_row(judged, load, is_best=judged is answer.best and answer.is_met) for judged in shown],
        note="per M: price of a million output tokens; est.: attained by queueing theory; times are means",
    )


def _row(judged: Judged, load: Load, *, is_best: bool) -> tuple[str, ...]:
    found = judged.judgement
    return (
        f"{'*' if is_best else ' '} {judged.candidate}",
        str(judged.candidate.num_devices),
        f"{judged.price_per_hour:.2f}",
        f"{price_per_million_output(judged, load):.3f}",
        f"{100 * found.attainment:.1f}%",
        f"{100 * judged.estimate.attainment:.1f}%",
        f"{found.mean_ttft_s * 1e3:.0f}",
        f"{found.mean_tpot_s * 1e3:.1f}",
    )


def plan_page(
    title: str,
    lines: list[str],
    facts: Facts,
    answer: Answer | None,
    load: Load,
    engine: EngineKind | None,
    reasons: Sequence[str] = (),
) -> str:
    """All tables and charts as one HTML page. Raises `ConfigError` where charts cannot be drawn."""

    def parts() -> Iterator[str]:
        rows = [(line.partition(": ")[0], line.partition(": ")[2]) for line in lines]
        if answer is not None:
            rows.append(("verdict", verdict(answer, load)))
            rows += [(each.partition(": ")[0], each.partition(": ")[2]) for each in reasons]
        yield table_html(TextTable(title="the plan", columns=("", ""), rows=rows))
        yield charts_html(sweep_charts(facts, load))
        if answer is not None:
            yield table_html(pools_table(answer, load, engine))
        yield table_html(sweep_table(facts))
        yield table_html(width_table(facts, load))

    return page(title, parts())


def sweep_charts(facts: Facts, load: Load) -> list[Chart]:
    """TPOT and throughput over the batch, and price over TPOT. Batches that do not fit into memory are left out, but
    for the first chart."""
    fitting = [row for row in facts.sweep if row.fits]

    def tpot_ms(row: SweepRow) -> float:
        return row.tpot_s * 1e3

    limit_ms = None if load.slo.tpot_s is None else load.slo.tpot_s * 1e3
    return [
        Chart(
            title="time per output token",
            x_label="batch",
            y_label="ms",
            series=[
                Series(name="fits", points=[(row.batch, tpot_ms(row)) for row in fitting]),
                Series(
                    name="too large", points=[(r.batch, tpot_ms(r)) for r in facts.sweep if not r.fits], style="dots"
                ),
            ],
            x_scale="log",
            y_mark=limit_ms,
        ),
        Chart(
            title="throughput of one worker",
            x_label="batch",
            y_label="tokens/s",
            series=[
                Series(name="decode alone", points=[(r.batch, r.tokens_per_s) for r in fitting], style="dashed"),
                Series(name="with its prompts", points=[(row.batch, row.output_tokens_per_s) for row in fitting]),
            ],
            x_scale="log",
        ),
        Chart(
            title="price of a million output tokens",
            x_label="TPOT, ms",
            y_label="price",
            series=[Series(name="", points=[(tpot_ms(row), row.price_per_million) for row in fitting])],
            x_mark=limit_ms,
        ),
    ]
