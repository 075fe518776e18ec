"""`transformers` with a static cache, whose steps it compiles and captures with torch.compile, beside the engine's own
decode steps in the same process: a model of four layers with the shapes of Llama-3-8B, for the compiler's sake.

A program of its own, because compiling takes long: `benchmarks/gpu/model.py` starts it last, for a limited time. On a
CPU nothing is compiled.
"""

from __future__ import annotations

import functools
import time
from typing import Any

import torch

from benchmarks.gpu.model import TINY, Ahead, OneByOne, TensorSizes, make_runner
from benchmarks.gpu.report import RowFile
from benchmarks.gpu.timing import attempt, parse, row_file, wall_ms

LAYERS = 4
SHORT, LONG = 8, 40
"""Tokens of two answers, whose difference is the time of so many steps."""


def peer_of(shape: TensorSizes, device: torch.device) -> Any:
    """The same model with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        vocab_size=shape.vocab_size,
        max_position_embeddings=16384,
        pad_token_id=0,
        eos_token_id=None,
    )
    with torch.device(device):
        return LlamaForCausalLM(config).to(getattr(torch, shape.dtype)).eval()


def peer_ms(model: Any, shape: TensorSizes, batch: int, device: torch.device) -> float:
    """Of one step, from the answers of two lengths; all of `generate` between two steps is in it."""
    prompt_ST = torch.randint(1, shape.vocab_size, (batch, shape.context_len), device=device)

    def generate(num_tokens: int) -> float:
        began = time.perf_counter()
        with torch.inference_mode():
            model.generate(
                prompt_ST,
                attention_mask=torch.ones_like(prompt_ST),
                min_new_tokens=num_tokens,
                max_new_tokens=num_tokens,
                do_sample=False,
                cache_implementation="static",
            ).tolist()
        return (time.perf_counter() - began) * 1e3

    generate(LONG)  # compiles
    generate(SHORT)
    took = {num_tokens: min(generate(num_tokens) for _ in range(3)) for num_tokens in (SHORT, LONG)}
    return (took[LONG] - took[SHORT]) / (LONG - SHORT)


def measure(rows: RowFile, shape: TensorSizes, runner: Any, model: Any, batch: int, device: torch.device) -> None:
    """Both at one batch; the share is their time over ours."""
    step_queue = runner.step_queue
    step = OneByOne(shape, runner, batch).step if step_queue is None else Ahead(shape, step_queue, batch).step
    ours = wall_ms(step, repeats=shape.num_steps)
    theirs = peer_ms(model, shape, batch, device)
    rows.add(
        f"transformers compiled, {shape.num_layers} layers, batch {batch}",
        theirs,
        "ms",
        share=theirs / ours,
        detail=f"static cache; ours {ours:.3f} ms",
    )


def main() -> None:
    """Rows of the section `model`."""
    arguments = parse(main.__doc__)
    device, rows = torch.device(arguments.device), row_file(arguments, "model")
    shape = TensorSizes(num_layers=LAYERS, decode_batches=(64, 1)) if device.type == "cuda" else TINY
    runner = make_runner(shape, device)
    runner.capture_steps()
    model = peer_of(shape, device)
    for batch in shape.decode_batches:
        name = f"transformers compiled, batch {batch}"
        attempt(rows, name, functools.partial(measure, rows, shape, runner, model, batch, device))


if __name__ == "__main__":
    main()
