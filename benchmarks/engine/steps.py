"""Decode steps and prompts of the engine alone, beside what the machine could do, and beside llama.cpp.

python -m benchmarks.engine --json FILE
python -m benchmarks.engine --llamacpp build/peers/llama.cpp/bin      the programs of scripts/peers/llama_cpp.sh
python -m benchmarks.engine --quantization none int8
python -m benchmarks.engine --quantization none stored --llamacpp build/peers/llama.cpp/bin
    `stored` beside llama.cpp with the same file (Q4_1), the others beside llama.cpp in bf16
python -m benchmarks.engine --levels --llamacpp build/peers/llama.cpp/bin
    the same at each level of processors below this one: AVX-512 without BF16, AVX2. llama.cpp is built for the same
    levels: llama_cpp.sh FOLDER LEVEL

Each repeat measures, for each engine, the ceilings of its cores, decode steps of several batch sizes and prompts;
llama.cpp runs after it in one repeat and before it in the next. An engine is a process, pinned to the first cores; the
others wait meanwhile. A share is the limit of the step (`step_limit.py`: one op after the other, each at the ceilings
of the same repeat) over its median time. Beside it is the share of what the machine usually gives: of the limit at the
median burst of reading, where the ceiling is the best one. Ratios to llama.cpp compare tokens/s over all steps of the
same contexts. Everything reported is the median over the repeats.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.engine.ceilings import Ceilings, print_ceilings
from benchmarks.engine.llamacpp import LlamaCpp, PeerRun, folder_of, open_llama_cpp
from benchmarks.engine.process import Engine, running_engine
from benchmarks.engine.step_limit import Work, decode_works, limit_s, overlapped_limit_s, prefill_works
from disagg.cluster.models.catalog import DEFAULT_MODEL, resolve_model
from disagg.cluster.system.cores import available_cores
from disagg.engine.checkpoint.checkpoint import read_model_config
from disagg.engine.checkpoint.model_config import ModelConfig
from disagg.engine.config import Quantization, WorkerConfig
from disagg.kernels.cpu import build
from disagg.kernels.quantize import STORED
from tests.support.reports import positive, print_table, report, write_json

BATCHES = [1, 2, 4, 6, 8, 16, 32]
SHARED_BATCHES = (1, 8, 32)
"""Those that are compared with llama.cpp, and stand in the summary."""
WEIGHT_BYTES: Mapping[Quantization, float] = {
    "none": 2.0,
    "stored": 0.625,
    "stored_sums": 0.625,
    "int8": 1.0,
    "int4": 0.625,
}
SHORT: Mapping[str, str] = {"x86-64-v4": "avx512", "x86-64-v3": "avx2", "armv8-a": "neon"}
"""Levels that `--levels` measures -> what the summary calls them."""
PeerKey = tuple[str, bool]
"""A peer: the level of processors, and whether it has the weights of the published file, as `stored` has, or bf16."""
PROMPT_REPEATS = 3
PROMPTS = (1, 2)
"""How many prompts the `--input-tokens` are divided into. Two are computed together, but for their attention."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One engine that is measured."""

    num_threads: int
    quantization: Quantization
    level: str = ""
    """Of processors, see `DISAGG_CPU_LEVEL`; empty for this very one."""

    @property
    def peer(self) -> PeerKey:
        """The peer that it is compared with."""
        return self.level, self.quantization in STORED

    @property
    def name(self) -> str:
        """For tables and rows."""
        weights = "bf16" if self.quantization == "none" else self.quantization
        threads = f"{self.num_threads} thread{'s' if self.num_threads > 1 else ''}"
        return ", ".join(filter(None, (weights, threads, self.level)))


@dataclass(frozen=True, kw_only=True)
class Decode:
    """One batch size in one repeat."""

    batch: int
    steps_ms: tuple[float, ...]
    ceilings: Ceilings
    """Ceilings of the machine at that time: the better ones of before and after."""

    @property
    def step_ms(self) -> float:
        """Milliseconds of the median step."""
        return statistics.median(self.steps_ms)

    @property
    def tok_s(self) -> float:
        """Tokens per second over all steps."""
        return self.batch * len(self.steps_ms) / sum(self.steps_ms) * 1e3


@dataclass(frozen=True, kw_only=True)
class Repeat:
    """What one engine did in one repeat."""

    decodes: tuple[Decode, ...]
    prefills_ms: tuple[float, ...]
    """Milliseconds of the prefill of each of `PROMPTS`."""
    ceilings: Ceilings
    """Ceilings that were measured beside the prompts."""


@dataclass(kw_only=True)
class Measured:
    """All repeats."""

    kinds: dict[Kind, list[Repeat]] = field(default_factory=dict)
    peers: dict[PeerKey, list[list[PeerRun]]] = field(default_factory=dict)
    """Results of each peer in each repeat; empty without peers."""


def measure_engine(engine: Engine, options: argparse.Namespace) -> Repeat:
    """One repeat of one engine. The ceilings of a shared machine drift, so that they are measured again and again."""
    seen = [engine.ceilings()]
    prefills_ms = tuple(
        statistics.median(engine.prefill(options.input_tokens // count, count) for _ in range(PROMPT_REPEATS))
        for count in PROMPTS
    )
    seen.append(engine.ceilings())
    decodes = []
    for batch in options.batches:
        steps_ms = tuple(engine.decode(batch, options.input_tokens, options.steps))
        seen.append(engine.ceilings())
        decodes.append(Decode(batch=batch, steps_ms=steps_ms, ceilings=best_of(seen[-2:])))
    return Repeat(ceilings=best_of(seen[:2]), decodes=tuple(decodes), prefills_ms=prefills_ms)


def measure(options: argparse.Namespace, model_path: Path, peers: Mapping[PeerKey, LlamaCpp]) -> Measured:
    """All repeats, the order turned round from one to the next. The peers of a level stand behind its engines."""
    measured = Measured(kinds={kind: [] for kind in kinds(options)}, peers={peer: [] for peer in peers})
    with ExitStack() as stack:
        engines = {
            kind: stack.enter_context(running_engine(worker_config(kind, model_path), level=kind.level))
            for kind in measured.kinds
        }
        levels = dict.fromkeys(kind.level for kind in engines)
        turns: list[Kind | PeerKey] = []
        for level in levels:
            turns += [kind for kind in engines if kind.level == level]
            turns += [peer for peer in peers if peer[0] == level]
        for repeat in range(options.repeats):
            for turn in turns if repeat % 2 == 0 else reversed(turns):
                name = turn.name if isinstance(turn, Kind) else f"llama.cpp {peers[turn].gguf.name} {turn[0]}"
                print(f"repeat {repeat + 1}: {name} ...", file=sys.stderr, flush=True)
                if isinstance(turn, Kind):
                    measured.kinds[turn].append(measure_engine(engines[turn], options))
                else:
                    threads = max(options.threads)
                    found = peers[turn].run(SHARED_BATCHES, options.input_tokens, options.steps, threads)
                    measured.peers[turn].append(found)
    return measured


def kinds(options: argparse.Namespace) -> list[Kind]:
    """Every quantization with every number of threads, at every level."""
    return [
        Kind(num_threads=threads, quantization=quantization, level=level)
        for level in levels_of(options)
        for quantization in options.quantization
        for threads in options.threads
    ]


def levels_of(options: argparse.Namespace) -> list[str]:
    """Those to measure, of all that this processor has and for which there is a name in the summary."""
    return [level.name for level in build.levels_here() if level.name in SHORT] if options.levels else [""]


def worker_config(kind: Kind, model_path: Path) -> WorkerConfig:
    """A worker's defaults, but for what is measured, on the first cores."""
    return WorkerConfig(
        worker_id="bench",
        roles=("prefill", "decode"),
        model_path=str(model_path),
        cores=available_cores()[: kind.num_threads],
        num_threads=kind.num_threads,
        quantization=kind.quantization,
    )


# ---------------------------------------------------------------- what is reported


def decode_rows(measured: Measured, model: ModelConfig, context: float) -> list[dict[str, Any]]:
    """A row for each engine and batch size; `context` is the mean over the steps."""
    rows = []
    for kind, repeats in measured.kinds.items():
        for index, first in enumerate(repeats[0].decodes):
            works = decode_works(model, first.batch, context, WEIGHT_BYTES[kind.quantization])
            steps_ms = [repeat.decodes[index].step_ms for repeat in repeats]
            ceilings = [repeat.decodes[index].ceilings for repeat in repeats]
            whole_ms = [overlapped_limit_s(works, each) * 1e3 for each in ceilings]
            row = {
                "what": "decode",
                "engine": kind.name,
                "threads": kind.num_threads,
                "quantization": kind.quantization,
                "level": kind.level,
                "batch": first.batch,
                "step_ms": _median(steps_ms),
                "tok_s": _median([repeat.decodes[index].tok_s for repeat in repeats]),
                **_beside_limit(works, ceilings, steps_ms),
                "overlapped_share": ratio(whole_ms, steps_ms),
                "all_step_ms": [round(step_ms, 4) for step_ms in steps_ms],
            }
            rows.append({**row, **_decode_beside_peer(measured, kind, index, first.batch)})
    return rows


def _beside_limit(works: Sequence[Work], ceilings: Sequence[Ceilings], times_ms: Sequence[float]) -> dict[str, float]:
    """The limit, and its shares of the times, one of each repeat."""
    limits_ms = [limit_s(works, each) * 1e3 for each in ceilings]
    usual_ms = [limit_s(works, at_median_read(each)) * 1e3 for each in ceilings]
    return {
        "limit_ms": _median(limits_ms),
        "share": ratio(limits_ms, times_ms),
        "share_of_usual": ratio(usual_ms, times_ms),
    }


def _decode_beside_peer(measured: Measured, kind: Kind, index: int, batch: int) -> dict[str, float]:
    """llama.cpp's tokens/s and ours over them, where both have this batch size and as many threads."""
    peer = measured.peers.get(kind.peer)
    if not peer or batch not in SHARED_BATCHES or kind.num_threads != _peer_threads(measured):
        return {}
    theirs = [next(each.decode_tok_s for each in runs if each.batch == batch) for runs in peer]
    ours = [repeat.decodes[index].tok_s for repeat in measured.kinds[kind]]
    return {"llamacpp_tok_s": _median(theirs), "over_llamacpp": ratio(ours, theirs)}


def prefill_rows(measured: Measured, model: ModelConfig, num_tokens: int) -> list[dict[str, Any]]:
    """A row for each engine and number of prompts that `num_tokens` are divided into."""
    return [
        _prefill_row(measured, model, kind, index, num_tokens // count)
        for kind in measured.kinds
        for index, count in enumerate(PROMPTS)
    ]


def _prefill_row(measured: Measured, model: ModelConfig, kind: Kind, index: int, num_tokens: int) -> dict[str, Any]:
    """`PROMPTS[index]` prompts of `num_tokens` each."""
    count, repeats = PROMPTS[index], measured.kinds[kind]
    works = prefill_works(model, num_tokens, WEIGHT_BYTES[kind.quantization], num_prompts=count)
    times_ms = [repeat.prefills_ms[index] for repeat in repeats]
    tok_s = [count * num_tokens / time_ms * 1e3 for time_ms in times_ms]
    row: dict[str, Any] = {
        "what": "prefill",
        "engine": kind.name,
        "threads": kind.num_threads,
        "quantization": kind.quantization,
        "level": kind.level,
        "prompts": count,
        "tokens": num_tokens,
        "ms": _median(times_ms),
        "tok_s": _median(tok_s),
        **_beside_limit(works, [repeat.ceilings for repeat in repeats], times_ms),
    }
    peer = measured.peers.get(kind.peer)
    if count == 1 and peer and kind.num_threads == _peer_threads(measured):
        theirs = [next(each.prefill_tok_s for each in runs if each.batch == 1) for runs in peer]
        row |= {"llamacpp_tok_s": _median(theirs), "over_llamacpp": ratio(tok_s, theirs)}
    return row


def ceiling_rows(measured: Measured) -> list[dict[str, Any]]:
    """The ceilings of every repeat, by number of threads and level."""
    return [
        {"what": "ceilings", "threads": threads, "level": level, **msgspec.to_builtins(each)}
        for (threads, level), found in ceilings_of(measured).items()
        for each in found
    ]


def ceilings_of(measured: Measured) -> dict[tuple[int, str], list[Ceilings]]:
    """All that were measured, by number of threads and level."""
    found: dict[tuple[int, str], list[Ceilings]] = {}
    for kind, repeats in measured.kinds.items():
        for repeat in repeats:
            of_decodes = [decode.ceilings for decode in repeat.decodes]
            found.setdefault((kind.num_threads, kind.level), []).extend([repeat.ceilings, *of_decodes])
    return found


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Flat figures. `decode_limit_share_b<B>` is of one thread, which is what a worker has by default, and
    `..._t2` of two; of quantized weights, after their name. `decode_share_of_usual_b<B>` is the share at the median
    burst of reading. Those of levels: `level_summary`."""
    flat: dict[str, float] = {}
    for row in rows:
        if row["level"]:
            continue
        prefix = "" if row["quantization"] == "none" else f"{row['quantization']}_"
        suffix = "" if row["threads"] == 1 else f"_t{row['threads']}"
        if row["what"] == "decode":
            name = f"b{row['batch']}"
            flat[f"{prefix}decode_limit_share_{name}{suffix}"] = row["share"]
            flat[f"{prefix}decode_share_of_usual_{name}{suffix}"] = row["share_of_usual"]
            flat[f"{prefix}decode_tok_s_{name}{suffix}"] = row["tok_s"]
            if "over_llamacpp" in row:
                flat[f"{prefix}decode_over_llamacpp_{name}"] = row["over_llamacpp"]
        else:
            name = "prefill" if row["prompts"] == 1 else f"prefill_{row['prompts']}_prompts"
            flat[f"{prefix}{name}_limit_share{suffix}"] = row["share"]
            flat[f"{prefix}{name}_tok_s{suffix}"] = row["tok_s"]
            if "over_llamacpp" in row:
                flat[f"{prefix}prefill_over_llamacpp"] = row["over_llamacpp"]
    return flat


def level_summary(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Of each level with as many threads as it was measured with at most: shares of the limit, tokens/s over llama.cpp,
    and over those of bf16 for other weights; `_b<B>` for B sequences, `_prompt` for one prompt."""
    flat: dict[str, float] = {}
    most = max((row["threads"] for row in rows), default=0)
    bf16 = {(row["level"], _work(row)): row["tok_s"] for row in rows if _is_bf16(row, most)}
    for row in rows:
        if not row["level"] or row["threads"] != most or row.get("prompts", 1) != 1:
            continue
        end = f"{SHORT[row['level']]}_{_work(row)}"
        if _is_bf16(row, most):
            flat[f"share_{end}"] = row["share"]
            if "over_llamacpp" in row:
                flat[f"over_llamacpp_{end}"] = row["over_llamacpp"]
        elif (row["level"], _work(row)) in bf16:
            flat[f"{row['quantization']}_over_bf16_{end}"] = round(row["tok_s"] / bf16[row["level"], _work(row)], 4)
    return flat


def _is_bf16(row: Mapping[str, Any], num_threads: int) -> bool:
    return bool(row["threads"] == num_threads and row["quantization"] == "none" and row.get("prompts", 1) == 1)


def _work(row: Mapping[str, Any]) -> str:
    return f"b{row['batch']}" if row["what"] == "decode" else "prompt"


def ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """The median of the ratios of each repeat."""
    return _median([above / below for above, below in zip(numerators, denominators, strict=True)])


def _median(values: Sequence[float]) -> float:
    return round(statistics.median(values), 4)


def _peer_threads(measured: Measured) -> int:
    """llama.cpp runs with as many threads as the widest engine."""
    return max(kind.num_threads for kind in measured.kinds)


def print_tables(rows: Sequence[dict[str, Any]], measured: Measured) -> None:
    """Ceilings, then one table of everything."""
    print_ceilings([(threads, best_of(found), level) for (threads, level), found in ceilings_of(measured).items()])
    columns = ("engine", "work", "ms", "tok/s", "limit ms", "share", "of usual", "llama.cpp tok/s", "ours over it")
    lines = []
    for row in rows:
        decodes = row["what"] == "decode"
        work = f"decode {row['batch']}" if decodes else prompts_name(row["prompts"], row["tokens"])
        figures = (f"{row['step_ms'] if decodes else row['ms']:.2f}", f"{row['tok_s']:.1f}", f"{row['limit_ms']:.2f}")
        beside = (f"{row['llamacpp_tok_s']:.1f}", f"{row['over_llamacpp']:.2f}") if "over_llamacpp" in row else ("", "")
        shares = (f"{row['share']:.2f}", f"{row['share_of_usual']:.2f}")
        lines.append((row["engine"], work, *figures, *shares, *beside))
    print_table("the engine alone", columns, lines)


def prompts_name(num_prompts: int, num_tokens: int) -> str:
    """For tables and rows."""
    return f"prompt of {num_tokens}" if num_prompts == 1 else f"{num_prompts} prompts of {num_tokens}"


def best_of(found: Sequence[Ceilings]) -> Ceilings:
    """The highest of each, and the median of the medians."""
    return Ceilings(
        read_gb_s=max(each.read_gb_s for each in found),
        gemm_gflop_s=max(each.gemm_gflop_s for each in found),
        median_read_gb_s=statistics.median(each.median_read_gb_s for each in found),
    )


def at_median_read(ceilings: Ceilings) -> Ceilings:
    """The same where memory is read as fast as in the median burst."""
    return msgspec.structs.replace(ceilings, read_gb_s=ceilings.median_read_gb_s)


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that say which engines are measured, and on what."""
    num_cores = len(available_cores())
    parser.add_argument("--model", default=DEFAULT_MODEL, help="a model of the cache, or a checkpoint folder")
    parser.add_argument("--threads", type=positive, nargs="+", default=sorted({1, min(2, num_cores)}))
    parser.add_argument("--batches", type=positive, nargs="+", default=BATCHES)
    parser.add_argument("--levels", action="store_true", help="at each level of processors below this one")
    parser.add_argument("--quantization", choices=[*WEIGHT_BYTES], nargs="+", default=["none"])
    parser.add_argument(
        "--input-tokens", type=positive, default=512, help="of a prompt, and the context before decoding"
    )


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.engine", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_engine_arguments(parser)
    parser.add_argument("--steps", type=positive, default=64, help="decode steps of each batch size")
    parser.add_argument("--repeats", type=positive, default=6)
    parser.add_argument("--llamacpp", type=Path, help="the folder of its programs; needs the default model")
    parser.add_argument("--json", type=Path, help="write the report to this file")
    options = parser.parse_args(argv)
    if options.llamacpp and options.model != DEFAULT_MODEL:
        parser.error("--llamacpp needs the default model: llama.cpp is given its GGUF file")
    if options.llamacpp and not {*SHARED_BATCHES} <= {*options.batches}:
        parser.error(f"--llamacpp needs the batches {', '.join(map(str, SHARED_BATCHES))}")
    if options.input_tokens < 16:
        parser.error("--input-tokens must be at least 16")
    return options


def main() -> None:
    """Measure, print the tables, write the report."""
    options = parse_arguments()
    model_path = resolve_model(options.model)
    peers = {}
    if options.llamacpp:
        wanted = dict.fromkeys(kind.peer for kind in kinds(options))
        peers = {
            (level, as_given): open_llama_cpp(folder_of(options.llamacpp, level), as_given=as_given)
            for level, as_given in wanted
        }
    measured = measure(options, model_path, peers)
    model = read_model_config(model_path)
    rows = decode_rows(measured, model, options.input_tokens + options.steps / 2)
    rows += prefill_rows(measured, model, options.input_tokens)
    print_tables(rows, measured)
    if options.json:
        write_json(options.json, report([*ceiling_rows(measured), *rows], {**summary(rows), **level_summary(rows)}))
        print(f"report: {options.json}")
