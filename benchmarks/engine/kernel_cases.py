"""The calls that benchmarks.engine.kernels times: every op of `kernels/dispatch.py` in the shapes of a model.

A case is made when its turn comes and dropped afterwards, because its operands are large: whatever a step reads from
memory is there as often as is needed to fill `COLD_BYTES`, and call i takes copy i, as the layers of a model take
turns. What stays in the caches in a step (activations, norms) is the same for all calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.engine.step_limit import dense_features
from disagg.engine.checkpoint.model_config import ModelConfig
from disagg.kernels import dispatch, reference
from disagg.kernels.ops import AttentionForm, PrefillChunk, Prefills, RopeWrite

COLD_BYTES = 256 << 20
"""More than the caches hold."""
BLOCK_TOKENS = 16
EPS = 1e-5
ROWS = (1, 8, 32, 512)

Call = Callable[[int], object]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One op with one shape."""

    op: str
    shape: str
    ours: Call
    """Call number i; takes copy i modulo `copies`."""
    reference: Call
    copies: int
    nbytes: float = 0.0
    """Read from memory, or written there, by one call; 0 where all stays in the caches."""
    flop: float = 0.0


Maker = Callable[[], Case]


def makers(model: ModelConfig) -> Iterator[Maker]:
    """All cases, each to be made when it is needed."""
    query, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    shapes = {
        "qkv": (model.hidden_size, query + 2 * kv),
        "o": (query, model.hidden_size),
        "gate_up": (model.hidden_size, 2 * dense_features(model)),
        "down": (dense_features(model), model.hidden_size),
        "head": (model.hidden_size, model.vocab_size),
    }
    for name, (inputs, outputs) in shapes.items():
        for rows in ROWS if name != "head" else ROWS[:-1]:
            yield lambda name=name, rows=rows, i=inputs, o=outputs: linear(name, rows, i, o)  # type: ignore[misc]
    for rows in ROWS:
        yield lambda rows=rows: norm(model, rows)  # type: ignore[misc]
        yield lambda rows=rows: activation(model, rows)  # type: ignore[misc]
        yield lambda rows=rows: rope_and_write(model, rows)  # type: ignore[misc]
    for batch, context in ((1, 300), (8, 300), (32, 300), (8, 2000)):
        yield lambda batch=batch, context=context: decode_attention(model, batch, context)  # type: ignore[misc]
    for start in (0, 1536):
        yield lambda start=start: prefill_attention(model, 512, start)  # type: ignore[misc]
    for rows in ROWS[:-1]:
        yield lambda rows=rows: argmax(model, rows)  # type: ignore[misc]
    yield lambda: embedding(model, 32)


# ---------------------------------------------------------------- products


def linear(name: str, rows: int, inputs: int, outputs: int) -> Case:
    """`linear` of one of the model's matrices; of gate_up with the activation, of o and down with the norm."""
    nbytes = 2 * inputs * outputs
    copies = -(-COLD_BYTES // nbytes)
    plain = [_random(outputs, inputs) for _ in range(copies)]
    packed = [dispatch.pack_weight(weight) for weight in plain]
    x, residual, norm_O = _random(rows, inputs), _random(rows, outputs), _random(outputs)

    def ours(i: int) -> object:
        weight = packed[i % copies]
        if name == "gate_up":
            return dispatch.linear_silu_mul(x, weight, None)
        if name in ("o", "down"):
            return dispatch.linear_add_rms_norm(x, weight, None, residual, norm_O, EPS)
        return dispatch.linear(x, weight, None)

    def oracle(i: int) -> object:
        product = reference.linear(x, plain[i % copies], None)
        if name == "gate_up":
            return reference.silu_mul(product)
        if name in ("o", "down"):
            return reference.add_rms_norm(product, residual, norm_O, EPS)
        return product

    op = {"gate_up": "linear_silu_mul", "o": "linear_add_rms_norm", "down": "linear_add_rms_norm"}.get(name, "linear")
    shape = f"{name} [{rows}, {inputs}] x {outputs}"
    return Case(
        op=op, shape=shape, ours=ours, reference=oracle, copies=copies, nbytes=nbytes, flop=rows * nbytes
    )  # fmt: skip


# ---------------------------------------------------------------- attention


def decode_attention(model: ModelConfig, batch: int, context: int) -> Case:
    """One query row of each sequence."""
    blocks_each = -(-context // BLOCK_TOKENS)
    nbytes = 4 * batch * context * model.num_kv_heads * model.head_dim
    layers = -(-COLD_BYTES // nbytes)
    cache = _cache(model, batch * blocks_each, layers)
    q_SND = _random(batch, model.num_heads, model.head_dim)
    tables = torch.randperm(batch * blocks_each, generator=_generator()).int().view(batch, blocks_each)
    lens_S = torch.full((batch,), context, dtype=torch.int32)
    form = AttentionForm(model.head_dim**-0.5)

    def with_ops(function: Callable[..., Tensor]) -> Call:
        return lambda i: function(q_SND, cache[:, i % layers, 0], cache[:, i % layers, 1], tables, lens_S, form)

    return Case(
        op="paged_decode_attention",
        shape=f"{batch} x {context} tokens",
        ours=with_ops(dispatch.paged_decode_attention),
        reference=with_ops(reference.paged_decode_attention),
        copies=layers,
        nbytes=nbytes,
        flop=4 * batch * context * model.num_heads * model.head_dim,
    )


def prefill_attention(model: ModelConfig, num_tokens: int, start: int) -> Case:
    """A chunk of a prompt; its KV was just written, and stays in the caches."""
    num_blocks = (start + num_tokens) // BLOCK_TOKENS
    cache = _cache(model, num_blocks, 1)
    q_TND = _random(num_tokens, model.num_heads, model.head_dim)
    table = torch.randperm(num_blocks, generator=_generator()).int()
    prefills = Prefills((PrefillChunk(slice(0, num_tokens), start, table),))
    form, out_TND = AttentionForm(model.head_dim**-0.5), torch.empty_like(q_TND)

    def with_ops(function: Callable[..., Tensor]) -> Call:
        return lambda _: function(q_TND, cache[:, 0, 0], cache[:, 0, 1], prefills, form, out_TND)

    pairs = num_tokens * start + num_tokens * (num_tokens + 1) / 2
    return Case(
        op="paged_prefill_attention",
        shape=f"{num_tokens} tokens from {start}",
        ours=with_ops(dispatch.paged_prefill_attention),
        reference=with_ops(reference.paged_prefill_attention),
        copies=8,
        flop=4 * pairs * model.num_heads * model.head_dim,
    )


# ---------------------------------------------------------------- short ops


def norm(model: ModelConfig, rows: int) -> Case:
    """Residual and norm."""
    x, residual, weight = _random(rows, model.hidden_size), _random(rows, model.hidden_size), _random(model.hidden_size)
    return _short(
        "add_rms_norm",
        f"[{rows}, {model.hidden_size}]",
        lambda _: dispatch.add_rms_norm(x, residual, weight, EPS),
        lambda _: reference.add_rms_norm(x, residual, weight, EPS),
    )


def activation(model: ModelConfig, rows: int) -> Case:
    """silu(gate) * up."""
    x = _random(rows, 2 * dense_features(model))
    return _short(
        "silu_mul",
        f"[{rows}, {2 * dense_features(model)}]",
        lambda _: dispatch.silu_mul(x),
        lambda _: reference.silu_mul(x),
    )


def rope_and_write(model: ModelConfig, rows: int) -> Case:
    """Rotate q and k, write k and v."""
    heads = model.num_heads + 2 * model.num_kv_heads
    cache = _cache(model, -(-rows // BLOCK_TOKENS), 1)
    qkv, cos_PD, sin_PD = _random(rows, heads * model.head_dim), _random(rows, model.head_dim), _random(rows, model.head_dim)  # fmt: skip  # noqa: E501
    positions_T = slots_T = torch.arange(rows)

    def with_ops(function: Callable[..., Tensor]) -> Call:
        layer = RopeWrite(None, None, EPS, cos_PD, sin_PD, cache[:, 0, 0], cache[:, 0, 1])
        return lambda _: function(qkv, positions_T, slots_T, layer)

    shape = f"[{rows}, {heads} x {model.head_dim}]"
    ours, oracle = with_ops(dispatch.qkv_rope_write), with_ops(reference.qkv_rope_write)
    return _short("qkv_rope_write", shape, ours, oracle)


def argmax(model: ModelConfig, rows: int) -> Case:
    """The greedy token of each row."""
    logits_TV = _random(rows, model.vocab_size)
    return _short(
        "argmax_rows",
        f"[{rows}, {model.vocab_size}]",
        lambda _: dispatch.argmax_rows(logits_TV, model.vocab_size),
        lambda _: reference.argmax_rows(logits_TV, model.vocab_size),
    )


def embedding(model: ModelConfig, rows: int) -> Case:
    """Rows of the embedding, far from each other."""
    table_VH = _random(model.vocab_size, model.hidden_size)
    ids_T = torch.randint(model.vocab_size, (rows,), generator=_generator())
    return _short(
        "embed",
        f"{rows} of [{model.vocab_size}, {model.hidden_size}]",
        lambda _: dispatch.embed(ids_T, table_VH),
        lambda _: reference.embed(ids_T, table_VH),
    )


def _short(op: str, shape: str, ours: Call, oracle: Call) -> Case:
    return Case(op=op, shape=shape, ours=ours, reference=oracle, copies=100)


# ---------------------------------------------------------------- operands


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=_generator()).bfloat16()


def _cache(model: ModelConfig, num_blocks: int, layers: int) -> Tensor:
    """[num_blocks, layers, 2, K, B, D], K then V, in the order in memory that `KvCache` has."""
    cache_L2NKBD = _random(layers, 2, num_blocks, model.num_kv_heads, BLOCK_TOKENS, model.head_dim)
    return cache_L2NKBD.permute(2, 0, 1, 3, 4, 5)
