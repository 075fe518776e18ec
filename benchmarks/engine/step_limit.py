"""The least time that a step of the model can take on a machine with known ceilings. Pure arithmetic.

    works = decode_works(model, batch, context) -> limit_s(works, ceilings)         one after the other
                                                -> overlapped_limit_s(works, ceilings)  everything at once

A work is what one kind of op reads from memory and computes in a whole step. `limit_s` adds up, over the works, the
longer one of both times: an op reads while it computes, but waits for the op before it. `overlapped_limit_s` takes the
sums first, as if the weights of one op could be read while another one computes; it is never longer.

Counted are weights, the KV that is read and written, and the products of both. Activations stay in the caches, and the
rows of the embedding are few.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.engine.ceilings import Ceilings
from disagg.engine.checkpoint.model_config import DenseConfig, ModelConfig

KV_ELEMENT_BYTES = 2
"""bf16."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """One kind of op, all layers together."""

    name: str
    nbytes: float
    """Read from memory, or written to it."""
    flop: float

    def least_s(self, ceilings: Ceilings) -> float:
        """The longer one of reading and computing."""
        return max(self.nbytes / (ceilings.read_gb_s * 1e9), self.flop / (ceilings.gemm_gflop_s * 1e9))


def decode_works(model: ModelConfig, batch: int, context: float, weight_bytes: float = 2.0) -> list[Work]:
    """A step that gives each of `batch` sequences one token, where a token attends to `context` tokens, its own
    included. `weight_bytes` is the size of a weight."""
    return _works(model, rows=batch, logit_rows=batch, attended=batch * context, kv_rows=batch * context,
                  weight_bytes=weight_bytes)  # fmt: skip


def prefill_works(
    model: ModelConfig, num_tokens: int, weight_bytes: float = 2.0, *, num_prompts: int = 1
) -> list[Work]:
    """A step that computes prompts of `num_tokens` tokens from their beginning, and the logits of each one's last."""
    rows, attended = num_prompts * num_tokens, num_prompts * num_tokens * (num_tokens + 1) / 2
    return _works(model, rows=rows, logit_rows=num_prompts, attended=attended, kv_rows=rows,
                  weight_bytes=weight_bytes)  # fmt: skip


def limit_s(works: Sequence[Work], ceilings: Ceilings) -> float:
    """One op after the other."""
    return sum(work.least_s(ceilings) for work in works)


def overlapped_limit_s(works: Sequence[Work], ceilings: Ceilings) -> float:
    """All reading against all computing."""
    total = Work(name="all", nbytes=sum(work.nbytes for work in works), flop=sum(work.flop for work in works))
    return total.least_s(ceilings)


def dense_features(model: ModelConfig) -> int:
    """Features of the MLP of a model without experts."""
    ffn = model.layers[0].ffn
    assert isinstance(ffn, DenseConfig), "a model without experts"
    return ffn.intermediate_size


def layer_weights(model: ModelConfig) -> int:
    """Numbers in the matrices of one layer."""
    query, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    return model.hidden_size * (2 * query + 2 * kv + 3 * dense_features(model))


def _works(
    model: ModelConfig, *, rows: float, logit_rows: float, attended: float, kv_rows: float, weight_bytes: float
) -> list[Work]:
    """`attended` counts pairs of a query and a key, `kv_rows` the tokens whose KV is read, of all sequences."""
    layers, head = model.num_layers * layer_weights(model), model.vocab_size * model.hidden_size
    kv_token_bytes = 2 * model.num_layers * model.num_kv_heads * model.head_dim * KV_ELEMENT_BYTES
    per_pair = 4 * model.num_layers * model.num_heads * model.head_dim
    return [
        Work(name="layers", nbytes=layers * weight_bytes, flop=2.0 * rows * layers),
        Work(name="head", nbytes=head * weight_bytes, flop=2.0 * logit_rows * head),
        Work(name="attention", nbytes=(kv_rows + rows) * kv_token_bytes, flop=per_pair * attended),
    ]
