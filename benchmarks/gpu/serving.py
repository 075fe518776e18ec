"""A model of 1B, and one of the shapes of Llama-3-8B, with random weights, served on one GPU: colocated, and by a
prefill and a decode worker that share it.

The checkpoint is written where large files may be (`DISAGG_GPU_CHECK_SCRATCH`), the cluster is started as a user starts
it, and a closed loop sends prompts of 512 tokens for 64 tokens each. A prefill and a decode worker on one GPU without
MPS take turns: what they show is that the hand-over is right and what it costs there, not how fast it is on two. The
limit of a token is the time to read the weights and the KV of all streams, as in `model`.
"""

from __future__ import annotations

import asyncio
import functools
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks import load
from benchmarks.gpu import model
from benchmarks.gpu.report import RowFile
from benchmarks.gpu.timing import Ceilings, attempt, parse, read_ceilings, row_file
from tests.support import inference_stub
from tests.support.launch import launched
from tests.support.tiny_models import VOCAB_SIZE, make_checkpoint

GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Load:
    """A model and what it is asked."""

    name: str
    shape: model.TensorSizes
    streams: tuple[int, ...] = (8, 32, 128)
    input_tokens: int = 512
    output_tokens: int = 64
    cache_bytes: int = 12 * GIB
    """Bytes of the cache of each worker."""

    @property
    def nbytes(self) -> int:
        """Bytes of the checkpoint."""
        embedding = self.shape.hidden_size * self.shape.vocab_size * getattr(torch, self.shape.dtype).itemsize
        return model.weight_bytes(self.shape) + int(embedding)


EIGHT = Load(name="8B", shape=model.TensorSizes())
ONE = Load(name="1B", shape=model.TensorSizes(hidden_size=2048, intermediate_size=8192, num_layers=16))
TINY = Load(
    name="tiny",
    shape=model.TensorSizes(
        hidden_size=64,
        intermediate_size=96,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        vocab_size=VOCAB_SIZE,
        dtype="float32",
    ),
    streams=(2,),
    input_tokens=20,
    output_tokens=5,
    cache_bytes=64 << 20,
)
MODES = ("colocated", "disaggregated")


def write_checkpoint(shape: model.TensorSizes, folder: Path, device: torch.device) -> None:
    """Random weights whose outputs keep their size, norms of one, and the tokenizer of a tiny model: a file for each
    layer, and an index."""
    make_checkpoint("llama", folder / "tiny")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder / "tiny" / file, folder / file)
    shutil.rmtree(folder / "tiny")
    shape.write_config(folder)
    (folder / "model.safetensors").unlink()
    places: dict[str, str] = {}
    for number, tensors in enumerate(_weights(shape, device)):
        file = f"model-{number:05}.safetensors"
        save_file({name: tensor.contiguous().cpu() for name, tensor in tensors.items()}, folder / file)
        places |= dict.fromkeys(tensors, file)
    pairs = ", ".join(f'"{name}": "{file}"' for name, file in places.items())
    (folder / "model.safetensors.index.json").write_text(f'{{"weight_map": {{{pairs}}}}}', encoding="utf-8")


def _weights(shape: model.TensorSizes, device: torch.device) -> Iterator[dict[str, Tensor]]:
    dtype: torch.dtype = getattr(torch, shape.dtype)
    H, F, D = shape.hidden_size, shape.intermediate_size, shape.hidden_size // shape.num_heads
    Q, K = shape.num_heads * D, shape.num_kv_heads * D

    def matrix(out_features: int, in_features: int) -> Tensor:
        return torch.empty(out_features, in_features, dtype=dtype, device=device).normal_(0.0, in_features**-0.5)

    ones = torch.ones(H, dtype=dtype, device=device)
    yield {"model.embed_tokens.weight": matrix(shape.vocab_size, H) * H**0.5, "model.norm.weight": ones}
    yield {"lm_head.weight": matrix(shape.vocab_size, H)}
    for layer in range(shape.num_layers):
        sizes = {
            "self_attn.q_proj": (Q, H),
            "self_attn.k_proj": (K, H),
            "self_attn.v_proj": (K, H),
            "self_attn.o_proj": (H, Q),
            "mlp.gate_proj": (F, H),
            "mlp.up_proj": (F, H),
            "mlp.down_proj": (H, F),
        }
        tensors = {f"model.layers.{layer}.{name}.weight": matrix(*size) for name, size in sizes.items()}
        norms = ("input_layernorm", "post_attention_layernorm")
        yield tensors | {f"model.layers.{layer}.{name}.weight": ones.clone() for name in norms}


def config(asked: Load, folder: Path, device: torch.device) -> dict[str, Any]:
    """Configuration of a cluster whose workers all have this device."""
    place = "cuda:0" if device.type == "cuda" else "cpu"
    pool = {"device": place, "kv_cache_bytes": asked.cache_bytes, "size": 1}
    decodes = {**pool, "max_num_seqs": max(asked.streams)}
    return {
        "model": {"path": str(folder), "dtype": asked.shape.dtype},
        "pools": {"prefill": pool, "decode": decodes, "colocated": decodes},
        "transfer": {"transport": "shm"},
    }


def measure(rows: RowFile, asked: Load, mode: str, folder: Path, device: torch.device, ceilings: Ceilings) -> None:
    """Closed loops against a cluster of this mode, behind one that is not counted: staging memory is taken at its first
    use, and so are kernels loaded."""
    with launched(mode, config(asked, folder, device), "processes") as address:
        asyncio.run(run(address, asked, asked.streams[0], first_seed=0))
        for streams in asked.streams:
            name = f"{asked.name}, {mode}, {streams} streams"
            attempt(rows, name, functools.partial(measure_loop, rows, name, asked, address, streams, ceilings))


def measure_loop(rows: RowFile, name: str, asked: Load, address: str, streams: int, ceilings: Ceilings) -> None:
    """Tokens a second, time to the first token, and time of a token beside its limit."""
    figures = load.figures([asyncio.run(run(address, asked, streams, first_seed=1000 * streams))])
    rows.add(f"{name}: output", figures.tok_s, "tokens/s", detail=f"{figures.requests} requests")
    for kind, values in (("TTFT", figures.ttft_ms), ("TPOT", figures.tpot_ms)):
        share = limit_ms(asked, streams, ceilings) / values["p50"] if kind == "TPOT" else None
        rows.add(f"{name}: {kind}", values["p50"], "ms", share=share, detail=f"median; p99 {values['p99']:.1f} ms")


async def run(address: str, asked: Load, streams: int, first_seed: int) -> load.Run:
    """Two requests for each stream, with prompts of their own from this seed on."""
    shape = load.RequestSizes(input_tokens=asked.input_tokens, output_tokens=asked.output_tokens)
    async with inference_stub.channel(address) as connection:
        stub = inference_stub.service(connection)
        served = await inference_stub.only_model(stub)
        work = load.requests(served, shape, first_seed=first_seed, count=2 * streams)
        elapsed_s, timings = await load.closed_loop(stub, work, streams)
    return load.Run(mode="", concurrency=streams, repeat=0, elapsed_s=elapsed_s, timings=timings)


def limit_ms(asked: Load, streams: int, ceilings: Ceilings) -> float:
    """To read the weights once, and the KV of all streams in the middle of their answers."""
    shape = asked.shape
    head_dim = shape.hidden_size // shape.num_heads
    token_bytes = 2 * shape.num_layers * shape.num_kv_heads * head_dim * int(getattr(torch, shape.dtype).itemsize)
    kv_bytes = streams * (asked.input_tokens + asked.output_tokens // 2) * token_bytes
    return (model.weight_bytes(shape) + kv_bytes) / ceilings.read_gb_s / 1e6


def main() -> None:
    """The section `load`."""
    arguments = parse(main.__doc__)
    device, rows = torch.device(arguments.device), row_file(arguments, "load")
    ceilings = read_ceilings(arguments.ceilings)
    scratch = os.environ.get("DISAGG_GPU_CHECK_SCRATCH")
    for asked in (ONE, EIGHT) if device.type == "cuda" else (TINY,):
        has_room = scratch is not None and shutil.disk_usage(scratch).free > 1.2 * asked.nbytes
        with tempfile.TemporaryDirectory(dir=scratch if has_room else None) as name:
            folder = Path(name)
            write_checkpoint(asked.shape, folder, device)
            if device.type == "cuda":
                torch.cuda.empty_cache()
            for mode in MODES:
                measured = functools.partial(measure, rows, asked, mode, folder, device, ceilings)
                attempt(rows, f"{asked.name}, {mode}", measured)


if __name__ == "__main__":
    main()
