"""What penalties cost a decode step: the sampler alone, over sequences of several lengths.

    python -m benchmarks.engine.penalties [--sequences 32] [--tokens 500,8000,32000] [--vocab 49152] [--json FILE]

Each step appends the sampled token to each sequence, as an engine does. Contexts are half prompt, half output, of ids
drawn from the whole vocabulary, which is the worst there is. Rows: greedy without penalties, with all three, drawn with
all three; the first step of a sequence, which counts its whole text, is a column of its own.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from disagg.engine.request import Sequence, SequenceState
from disagg.engine.runner.sampler import Sampler
from disagg.proto.ids import GatewayId, RequestId
from disagg.proto.messages import Sampling, SequenceSpec
from disagg.proto.token_ids import pack_token_ids
from tests.support.reports import print_table, report, write_json

PENALTIES = {"repetition_penalty": 1.1, "presence_penalty": 0.1, "frequency_penalty": 0.1}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 0.0},
    "penalized": {"temperature": 0.0, **PENALTIES},
    "drawn": {"temperature": 0.8, "top_p": 0.9},
    "drawn and penalized": {"temperature": 0.8, "top_p": 0.9, **PENALTIES},
}


def make_sequence(rng: random.Random, num_tokens: int, vocab_size: int, sampling: dict[str, Any]) -> Sequence:
    """Half prompt, half output."""
    ids = [rng.randrange(vocab_size) for _ in range(num_tokens)]
    spec = SequenceSpec(
        request_id=RequestId("r"),
        attempt=0,
        gateway_id=GatewayId("g"),
        prompt_token_ids=pack_token_ids(ids[: num_tokens // 2]),
        sampling=Sampling(max_tokens=1 << 20, seed=rng.getrandbits(64), **sampling),
    )
    return Sequence(spec, SequenceState.RUNNING, token_ids=ids)


def measure(kind: str, num_sequences: int, num_tokens: int, vocab_size: int, num_steps: int) -> dict[str, Any]:
    """Milliseconds of a step: the first one, and the median of those that follow."""
    rng = random.Random(3)
    sequences = [make_sequence(rng, num_tokens, vocab_size, KINDS[kind]) for _ in range(num_sequences)]
    generator = torch.Generator().manual_seed(4)
    logits = [(torch.randn(num_sequences, vocab_size, generator=generator) * 3).bfloat16() for _ in range(4)]
    sampler, times = Sampler(vocab_size), []
    for step in range(num_steps):
        began = time.perf_counter()
        tokens = sampler.sample(logits[step % len(logits)], sequences)
        times.append(time.perf_counter() - began)
        for sequence, token in zip(sequences, tokens, strict=True):
            sequence.token_ids.append(token)
    return {
        "kind": kind,
        "sequences": num_sequences,
        "tokens": num_tokens,
        "first_ms": round(times[0] * 1e3, 3),
        "step_ms": round(statistics.median(times[1:]) * 1e3, 3),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--tokens", default="500,8000,32000")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--vocab", type=int, default=49_152)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    measure("penalized", 2, 100, arguments.vocab, 3)
    rows = [
        measure(kind, arguments.sequences, int(num_tokens), arguments.vocab, arguments.steps)
        for num_tokens in arguments.tokens.split(",")
        for kind in arguments.kinds.split(",")
    ]
    print_table(
        f"A sampling step of {arguments.sequences} sequences, one core",
        ["kind", "tokens each", "first step ms", "step ms"],
        [[row["kind"], *(str(row[name]) for name in ("tokens", "first_ms", "step_ms"))] for row in rows],
    )
    if arguments.json:
        write_json(arguments.json, report(rows, {f"{r['kind']}_{r['tokens']}_ms": r["step_ms"] for r in rows}))


if __name__ == "__main__":
    main()
