"""llama.cpp as a peer of the engine's benchmark: the default model as a GGUF file, in bf16 or as it is published
(Q4_1), and runs of its own benchmark program, which times prompts and decode steps of its engine without a server.

scripts/peers/llama_cpp.sh builds the programs. Its decode figure is B x steps over the time of all steps, without
sampling; ours has it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from disagg.cluster.models.catalog import fetch_default_gguf

BENCH = "llama-batched-bench"
QUANTIZE = "llama-quantize"
GGUF_NAME = "model-bf16.gguf"
GIVEN_NAME = "model-given.gguf"
"""The file that the default model is imported from, whose weights `quantization: stored` computes with."""
RUN_TIMEOUT_S = 600.0


@dataclass(frozen=True, kw_only=True)
class PeerRun:
    """One batch size of one run."""

    batch: int
    decode_tok_s: float
    prefill_tok_s: float
    """Tokens per second of all prompts of the batch, one after the other."""


@dataclass(frozen=True, kw_only=True)
class LlamaCpp:
    """The programs and the model."""

    folder: Path
    """Folder of the programs."""
    gguf: Path

    def run(self, batches: Sequence[int], num_prompt: int, num_steps: int, num_threads: int) -> list[PeerRun]:
        """Each batch: its prompts of `num_prompt` tokens, then `num_steps` decode steps.

        Raises:
            RuntimeError: if the program fails, or leaves a batch out.
        """
        command = [
            str(self.folder / BENCH), "-m", str(self.gguf), "-c", str(max(batches) * (num_prompt + num_steps)),
            "-npp", str(num_prompt), "-ntg", str(num_steps), "-npl", ",".join(map(str, batches)),
            "-t", str(num_threads), "-tb", str(num_threads), "--output-format", "jsonl",
        ]  # fmt: skip
        found = parse(_run(command, self.folder))
        if [each.batch for each in found] != list(batches):
            raise RuntimeError(f"{BENCH}: batches {[each.batch for each in found]} came, not {list(batches)}")
        return found


def parse(output: str) -> list[PeerRun]:
    """The runs in what the program prints: lines of JSON among others."""
    rows = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return [
        PeerRun(batch=row["pl"], decode_tok_s=float(row["speed_tg"]), prefill_tok_s=float(row["speed_pp"]))
        for row in rows
    ]


def folder_of(folder: Path, level: str) -> Path:
    """Where the programs for a level of processors are, beside those for this one in `folder`."""
    return folder.with_name(f"{folder.name}-{level}") if level else folder


def open_llama_cpp(folder: Path, *, as_given: bool = False) -> LlamaCpp:
    """llama.cpp in `folder`, with the default model in bf16 or `as_given`; the files are made beside the programs,
    once, from the default model's own GGUF file.

    Raises:
        ValueError: if the programs are not there.
        RuntimeError: if the model cannot be made.
    """
    for name in (BENCH, QUANTIZE):
        if not (folder / name).is_file():
            raise ValueError(f"--llamacpp: {folder} has no {name}; scripts/peers/llama_cpp.sh builds it")
    gguf = folder / (GIVEN_NAME if as_given else GGUF_NAME)
    if not gguf.is_file():
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            given = fetch_default_gguf(Path(scratch), lambda text: print(text, file=sys.stderr, flush=True))
            made = Path(scratch) / gguf.name
            if as_given:
                shutil.copyfile(given, made)
            else:
                _run([str(folder / QUANTIZE), "--allow-requantize", str(given), str(made), "BF16"], folder)
            made.replace(gguf)
    return LlamaCpp(folder=folder, gguf=gguf)


def _run(command: Sequence[str], folder: Path) -> str:
    """The program's output. Builds with shared libraries find them beside the programs."""
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": os.pathsep.join([str(folder), os.environ.get("LD_LIBRARY_PATH", "")]),
    }
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, errors="replace", timeout=RUN_TIMEOUT_S, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"{Path(command[0]).name} failed with status {done.returncode}: {done.stderr[-1000:]}")
    return done.stdout
