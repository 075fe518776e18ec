"""How often bf16 changes a greedy token: the same prompts through both pools, through one pool, and by `transformers`
in fp32.

    python -m benchmarks.quality.flips [--prompts 32] [--tokens 64] [--json FILE]

In fp32 all of them agree (tests/integration/answers/test_exactness.py). In bf16 another batch, or another order of
sums, flips a near tie now and then. Two answers are compared up to their first difference, because after it their
contexts differ: the flip rate is the number of answers that differ over the number of tokens compared, in flips per
1,000 tokens."""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from disagg.client import AsyncClient
from disagg.cluster.config.cluster_config import parse_config
from disagg.cluster.hosts.processes import ProcessCluster
from disagg.cluster.models.catalog import resolve_model
from tests.support.reports import print_table, report, write_json

SUBJECTS = ("rivers", "bread", "glass", "the moon", "bees", "old maps", "steel", "wool", "tides", "chess")
QUESTIONS = ("What is known about {}?", "Write a short story about {}.", "List five facts about {}.", "Who uses {}?")


def prompts(count: int) -> list[str]:
    """Questions, the same at every call."""
    every = [question.format(subject) for subject in SUBJECTS for question in QUESTIONS]
    return random.Random(0).sample(every, count)


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    """The index of the first token that differs; None where the shorter one begins the longer."""
    return next((index for index, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), None)


def flips(name: str, left: Sequence[Sequence[int]], right: Sequence[Sequence[int]]) -> dict[str, Any]:
    """One row: how many answers differ, and flips per 1,000 compared tokens."""
    differences = [first_difference(a, b) for a, b in zip(left, right, strict=True)]
    flipped = [index for index in differences if index is not None]
    compared = sum(
        min(len(a), len(b)) if index is None else index + 1
        for a, b, index in zip(left, right, differences, strict=True)
    )
    return {
        "compared": name,
        "answers": len(differences),
        "differ": len(flipped),
        "tokens_compared": compared,
        "flips_per_1000": round(1000 * len(flipped) / compared, 3),
    }


async def _generate(address: str, token_ids: list[list[int]], num_tokens: int, together: bool) -> list[list[int]]:
    async with AsyncClient(address) as client:

        async def one(ids: list[int]) -> list[int]:
            answer = await client.generate(ids, max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
            return list(answer.token_ids)

        if together:
            return list(await asyncio.gather(*map(one, token_ids)))
        return [await one(ids) for ids in token_ids]


async def _tokenize(address: str, texts: list[str]) -> list[list[int]]:
    async with AsyncClient(address) as client:
        return [await client.tokenize([{"role": "user", "content": text}]) for text in texts]


def _cluster(mode: str, dtype: str) -> ProcessCluster:
    model = {"name": "smollm2-135m", "dtype": dtype, "max_model_len": 1024}
    never = {"local_prefill": "never"}
    return ProcessCluster(parse_config({"model": model, "mode": mode, "gateway": {"port": 0}, "placement": never}))


def _reference(folder: Path, token_ids: list[list[int]], num_tokens: int) -> list[list[int]]:
    """Greedy answers of `transformers` in fp32."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    answers = []
    with torch.inference_mode():
        for ids in token_ids:
            output = model.generate(
                torch.tensor([ids]), do_sample=False, max_new_tokens=num_tokens, eos_token_id=None, pad_token_id=0
            )
            answers.append(output[0, len(ids) :].tolist())
    return answers


def measure(num_prompts: int, num_tokens: int) -> list[dict[str, Any]]:
    """All rows."""
    with _cluster("disaggregated", "bfloat16") as cluster:
        token_ids = asyncio.run(_tokenize(cluster.address, prompts(num_prompts)))
        apart = asyncio.run(_generate(cluster.address, token_ids, num_tokens, together=False))
        apart_batch = asyncio.run(_generate(cluster.address, token_ids, num_tokens, together=True))
    with _cluster("colocated", "bfloat16") as cluster:
        whole = asyncio.run(_generate(cluster.address, token_ids, num_tokens, together=False))
        whole_batch = asyncio.run(_generate(cluster.address, token_ids, num_tokens, together=True))
    exact = _reference(resolve_model("smollm2-135m"), token_ids, num_tokens)
    return [
        flips("two pools / one pool, alone", apart, whole),
        flips("two pools / one pool, in batches", apart_batch, whole_batch),
        flips("two pools, alone / in a batch", apart, apart_batch),
        flips("two pools, alone / transformers fp32", apart, exact),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--prompts", type=int, default=32, help=f"at most {len(SUBJECTS) * len(QUESTIONS)}")
    parser.add_argument("--tokens", type=int, default=64, help="output tokens of each answer")
    parser.add_argument("--json", type=Path, default=None, help="write the report to this file")
    options = parser.parse_args(arguments)
    rows = measure(options.prompts, options.tokens)
    columns = list(rows[0])
    print_table("greedy tokens in bf16", columns, [[str(row[column]) for column in columns] for row in rows])
    names = ("pools_alone", "pools_batched", "batching", "fp32")
    summary = {f"flips_per_1000_{name}": float(row["flips_per_1000"]) for name, row in zip(names, rows, strict=True)}
    if options.json is not None:
        write_json(options.json, report(rows, summary))
    return 0


if __name__ == "__main__":
    sys.exit(main())
