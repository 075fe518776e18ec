"""The options of `disagg calibrate` and `disagg plan`. What they do is in calibrate.py and plan.py, which are loaded
when a command runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from disagg.cli import completion
from disagg.cluster.system.terminal import console, examples


def register(app: typer.Typer, panel: str) -> None:
    """Add the commands to `app`, in this panel of its help."""
    app.command(
        rich_help_panel=panel,
        epilog=examples(
            "disagg calibrate --model smollm2-135m --out steps.json",
            "disagg calibrate --model smollm2-135m --threads 2 --limit-s 300 --out steps.json",
            "disagg calibrate --recording events/FILE --model smollm2-135m --out steps.json",
        ),
    )(calibrate)
    app.command(
        rich_help_panel=panel,
        epilog=examples(
            "disagg plan --model llama-3-8b --device h100 --prompt-tokens 2048 --output-tokens 256",
            "disagg plan --model llama-3-8b --device h100 --prompt-tokens 2048 --output-tokens 256 --rate 40 "
            "--ttft-ms 500 --tpot-ms 25",
            "disagg plan --model smollm2-135m --device cpu-core --scenario interactive --rate 3",
        ),
    )(plan)


def calibrate(
    out: Annotated[Path, typer.Option("--out", "-o", help="The file to write.", dir_okay=False)],
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            help="Name of an imported model, or its folder. With --recording only a name.",
            autocompletion=completion.imported_models,
        ),
    ] = None,
    recording: Annotated[
        list[Path] | None,
        typer.Option(help="Recorded events of a gateway whose workers' steps are taken; several times for several."),
    ] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    quantization: Annotated[str, typer.Option(help="Of the weights: none, int8 (CPU) or fp8 (GPU).")] = "none",
    device: Annotated[str, typer.Option(help="A torch device: cpu, cuda, cuda:1, ...")] = "cpu",
    threads: Annotated[int, typer.Option(help="Compute threads of the worker.", min=1, max=1024)] = 1,
    kv_cache: Annotated[str, typer.Option("--kv-cache", help="Memory for KV, such as 2GiB.")] = "2GiB",
    token_budget: Annotated[int, typer.Option(help="Tokens of the largest step.", min=16, max=65536)] = 512,
    limit_s: Annotated[float, typer.Option("--limit-s", help="Seconds to measure.", min=1.0, max=86400.0)] = 120.0,
) -> None:
    """Measure steps of one worker's engine on this machine, for `plan` and `simulate`. Nothing else should run.

    With --recording nothing is run: the steps, and what processes of one machine take from each other, are those of a
    cluster that served (`gateway.record_events`).
    """
    from disagg.cli.planning.calibrate import run_calibrate, run_recorded, worker_config
    from disagg.proto.errors import ConfigError

    if recording:
        run_recorded(recording, model, out, console())
        return
    if model is None:
        raise ConfigError("--model: say which model to measure, or give a --recording")
    config = worker_config(
        model,
        dtype=dtype,
        quantization=quantization,
        device=device,
        threads=threads,
        kv_cache=kv_cache,
        token_budget=token_budget,
    )
    run_calibrate(config, model, out, limit_s, console())


def plan(
    model: Annotated[
        str,
        typer.Option(
            "--model",
            "-m",
            help="A well-known model, an imported one, its folder, or a config.json.",
            autocompletion=completion.planned_models,
        ),
    ],
    device: Annotated[
        str,
        typer.Option(
            "--device", "-d", help="h100, h200, b200, a100, l40s or cpu-core.", autocompletion=completion.devices
        ),
    ],
    tp: Annotated[str | None, typer.Option("--tp", help="Widths that may be used, such as 1,2,4.")] = None,
    pp: Annotated[
        str | None,
        typer.Option("--pp", help="Stages of a worker that may be used, such as 1,2,4 (pipeline parallelism)."),
    ] = None,
    ep: Annotated[
        int, typer.Option("--ep", help="Of experts over several workers: only 1 is supported; --tp divides them.")
    ] = 1,
    prompt_tokens: Annotated[int | None, typer.Option("--prompt-tokens", help="Of each request.")] = None,
    output_tokens: Annotated[int | None, typer.Option("--output-tokens", help="Of each answer.")] = None,
    scenario: Annotated[
        str | None,
        typer.Option(
            "--scenario",
            "-s",
            help="Lengths, arrivals and limits of a load test instead.",
            autocompletion=completion.scenarios,
        ),
    ] = None,
    requests: Annotated[int | None, typer.Option("--requests", help="Of the scenario.", min=1)] = None,
    rate: Annotated[float | None, typer.Option("--rate", help="Requests per second.")] = None,
    ttft_ms: Annotated[float | None, typer.Option("--ttft-ms", help="Limit of the time to first token.")] = None,
    tpot_ms: Annotated[float | None, typer.Option("--tpot-ms", help="Limit of the time per further token.")] = None,
    min_attainment: Annotated[float, typer.Option(help="Share of requests that must meet both.")] = 0.9,
    max_gpus: Annotated[int, typer.Option("--max-gpus", help="Devices at most.", min=1, max=4096)] = 64,
    price: Annotated[float | None, typer.Option("--price", help="Of a device, per hour, in any currency.")] = None,
    dtype: Annotated[str, typer.Option(help="Of activations: bfloat16, float16 or float32.")] = "bfloat16",
    weight_dtype: Annotated[
        str | None, typer.Option(help="Of the matrices: also fp8 or int8; of experts on a CPU also mxfp4.")
    ] = None,
    kv_dtype: Annotated[str | None, typer.Option(help="Of keys and values: also fp8 or int8.")] = None,
    perf_tables: Annotated[
        Path | None, typer.Option(help="Folder of measured kernel times (parquet; needs the extra `plan`).")
    ] = None,
    step_times: Annotated[Path | None, typer.Option(help="A file of `disagg calibrate`.")] = None,
    step_overhead_ms: Annotated[float | None, typer.Option(help="Fixed time of a step.", min=0.0)] = None,
    link_gb_s: Annotated[
        float | None, typer.Option("--link-gb-s", help="Between workers, GB/s; the device's network if unset.")
    ] = None,
    token_budgets: Annotated[
        str | None, typer.Option(help="Tokens of a step that are tried, such as 512,2048.")
    ] = None,
    mode: Annotated[str, typer.Option(help="any, disaggregated or colocated.")] = "any",
    max_simulated: Annotated[
        int,
        typer.Option(
            help="Candidates that are simulated, at most; 0.4 as many again with more stages.", min=1, max=1000
        ),
    ] = 12,
    simulate: Annotated[
        bool,
        typer.Option("--simulate/--no-simulate", help="Compare by the simulator, or by the estimate alone."),
    ] = True,
    json: Annotated[Path | None, typer.Option("--json", help="Write everything to this file.")] = None,
    html: Annotated[
        Path | None, typer.Option("--html", help="Write a page with plots to this file (needs the extra `load`).")
    ] = None,
) -> None:
    """What a model needs and can do on a device, and which pools serve a load. Exit status: 0, 1 if none do."""
    from disagg.cli.planning.plan import PlanOptions, run_plan

    options = PlanOptions(
        model=model,
        device=device,
        tp=tp,
        pp=pp,
        ep=ep,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        scenario=scenario,
        requests=requests,
        rate=rate,
        ttft_ms=ttft_ms,
        tpot_ms=tpot_ms,
        min_attainment=min_attainment,
        max_gpus=max_gpus,
        price=price,
        dtype=dtype,
        weight_dtype=weight_dtype,
        kv_dtype=kv_dtype,
        perf_tables=perf_tables,
        step_times=step_times,
        step_overhead_ms=step_overhead_ms,
        link_gb_s=link_gb_s,
        token_budgets=token_budgets,
        mode=mode,
        max_simulated=max_simulated,
        simulate=simulate,
        json=json,
        html=html,
    )
    raise typer.Exit(run_plan(options, console()))
