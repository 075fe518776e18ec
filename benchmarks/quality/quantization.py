"""What weights of 8 and 4 bits, and KV of 8, cost in accuracy: the engine with each `quantization`, with
`kv_cache_dtype: int8` and in bf16, each against fp32, on text.

    python -m benchmarks.quality.quantization [--model smollm2-135m] [--tokens 512] [--json FILE] [TEXT ...]

Every token of the texts (by default pages of this repository) is predicted from those before it. Printed are the
perplexity, the mean Kullback-Leibler divergence from fp32 and from bf16 in nats, and how often the most likely token is
another than in fp32. `stored` are the codes of the model's own file (of the default model Q4_1), `q8_0` is `stored` of
the same weights after rounding to that format; `stored_sums` multiplies both as sums of codes.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import Tokenizer
from torch import Tensor

from disagg.cluster.models.catalog import resolve_model
from disagg.engine.batch_arrays import BatchBuilder
from disagg.engine.checkpoint.checkpoint import read_model_config
from disagg.engine.config import Dtype, Quantization
from disagg.engine.plan import ScheduledSequence, StepPlan
from disagg.engine.request import dummy_sequence
from disagg.engine.runner.group_scales import GroupScales
from disagg.engine.runner.model.batch import to_batch
from disagg.engine.runner.model.decoder import Decoder
from disagg.engine.runner.model.kv_cache import KvCache, kv_layout
from disagg.engine.runner.model.parameters import DenseParameters, ModelParameters, pack_parameters
from disagg.engine.runner.model.rope import RopeTables
from disagg.engine.runner.weights import load_parameters
from disagg.kernels.groups import GROUP, Groups
from disagg.kernels.quantize import STORED
from tests.support.reports import REPOSITORY, print_table, report, write_json

TEXTS = ("README.md", "docs/architecture.md", "docs/observability.md")
BLOCK_SIZE = 16


@dataclass(frozen=True)
class Form:
    """How weights and KV are held."""

    dtype: Dtype
    quantization: Quantization = "none"
    is_q8_0: bool = False
    """Whether weights are rounded to Q8_0 first."""
    kv_dtype: Dtype | Literal["int8"] | None = None
    """None is `dtype`."""


FORMS = {
    "fp32": Form("float32"),
    "bf16": Form("bfloat16"),
    "stored": Form("bfloat16", "stored"),
    "stored_sums": Form("bfloat16", "stored_sums"),
    "q8_0": Form("bfloat16", "stored", is_q8_0=True),
    "q8_0 sums": Form("bfloat16", "stored_sums", is_q8_0=True),
    "int8": Form("bfloat16", "int8"),
    "int4": Form("bfloat16", "int4"),
    "kv int8": Form("bfloat16", kv_dtype="int8"),
}


def round_to_q8_0(parameters: ModelParameters, scales: GroupScales) -> None:
    """Round the weights of a dense model to codes of 8 bits, whose scale is that of the largest number of a group, as
    in GGUF files; the embedding too, where it is the head."""
    weights = [parameters.lm_head_VH]
    for layer in parameters.layers:
        if not isinstance(layer.ffn, DenseParameters):
            raise ValueError("q8_0 is measured of dense models")
        weights += [layer.qkv_weight_QH, layer.o_weight_HA, layer.ffn.gate_up_weight_2IH, layer.ffn.down_weight_HI]
    for weight in weights:
        assert isinstance(weight, Tensor)
        values_OGK = torch.unflatten(weight.float(), 1, (-1, GROUP))
        scale_OG = (values_OGK.abs().amax(dim=2) / 127).half()
        groups = Groups(scale_OG, None, "none")
        scale_OG1 = torch.where(scale_OG == 0, torch.ones_like(scale_OG), scale_OG).float()[..., None]
        weight.copy_(groups.weight((values_OGK / scale_OG1).round_().clamp_(*groups.code_range)))
        scales.put(weight, groups)


class Scorer:
    """The engine's decoder, asked for the logits of every token of a text."""

    def __init__(self, folder: str, num_tokens: int, form: Form) -> None:
        num_blocks = -(-num_tokens // BLOCK_SIZE)
        model, dtype, device = read_model_config(folder), getattr(torch, form.dtype), torch.device("cpu")
        scales = GroupScales() if form.quantization in STORED and not form.is_q8_0 else None
        parameters = load_parameters(folder, model, dtype, device, scales=scales)
        if form.is_q8_0:
            scales = GroupScales()
            round_to_q8_0(parameters, scales)
        pack_parameters(parameters, form.quantization, scales)
        layout = kv_layout(model, form.kv_dtype or form.dtype, keeps_all=True)
        cache = KvCache(layout, num_blocks, BLOCK_SIZE, device)
        self._decoder = Decoder(model, parameters, RopeTables(model, num_tokens, dtype, device), cache)
        self._batches = BatchBuilder(BLOCK_SIZE, num_tokens)

    def log_probabilities(self, token_ids: Sequence[int]) -> Tensor:
        """[T, V] in fp32: of what follows each token."""
        sequence = dummy_sequence(len(token_ids), 0, BLOCK_SIZE)
        sequence.token_ids[:] = token_ids
        sequence.block_table[:] = range(-(-len(token_ids) // BLOCK_SIZE))
        plan = StepPlan(prefills=(ScheduledSequence(sequence, 0, len(token_ids), True),))
        batch = replace(to_batch(self._batches.arrays(plan), self._decoder.attention), sample_rows=None)
        logits_TV = self._decoder.forward(batch)
        assert logits_TV is not None
        return logits_TV.float().log_softmax(-1)


def divergence(exact: Sequence[Tensor], found: Sequence[Tensor]) -> float:
    """The mean divergence of all tokens, in nats."""
    each = [(true.exp() * (true - log)).sum(-1) for true, log in zip(exact, found, strict=True)]
    return float(torch.cat(each).mean())


def compare(exact: Sequence[Tensor], found: Sequence[Tensor], texts: Sequence[Sequence[int]]) -> dict[str, float]:
    """The three figures, over all texts."""
    pairs = list(zip(exact, found, texts, strict=True))
    losses = [-log[:-1].gather(1, torch.tensor(ids[1:])[:, None]) for _, log, ids in pairs]
    others = [(true.argmax(-1) != log.argmax(-1)).float() for true, log, _ in pairs]
    return {
        "perplexity": math.exp(float(torch.cat(losses).mean())),
        "divergence": divergence(exact, found),
        "other_top_token": float(torch.cat(others).mean()),
    }


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", nargs="*", type=Path, default=[REPOSITORY / name for name in TEXTS])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=512, help="of each text")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    folder = str(resolve_model(arguments.model))
    tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
    texts = [tokenizer.encode(text.read_text()).ids[: arguments.tokens] for text in arguments.texts]
    exact: list[Tensor] = []
    bf16: list[Tensor] = []
    rows: list[dict[str, Any]] = []
    for name, form in FORMS.items():
        scorer = Scorer(folder, arguments.tokens, form)
        found = [scorer.log_probabilities(ids) for ids in texts]
        exact = exact or found
        bf16 = found if name == "bf16" else bf16
        beside = {"from_bf16": divergence(bf16, found)} if bf16 else {}
        rows.append({"weights": name, "tokens": sum(map(len, texts)), **compare(exact, found, texts), **beside})
    print_table(
        "Accuracy of the engine against fp32",
        ("weights", "tokens", "perplexity", "over bf16", "KL (nats)", "KL from bf16", "other top token"),
        [
            [
                row["weights"], str(row["tokens"]), f"{row['perplexity']:.3f}",
                f"{row['perplexity'] / rows[1]['perplexity'] - 1:+.2%}", f"{row['divergence']:.5f}",
                f"{row['from_bf16']:.5f}" if "from_bf16" in row else "", f"{row['other_top_token']:.2%}",
            ]
            for row in rows
        ],
    )  # fmt: skip
    if arguments.json is not None:
        names = ("perplexity", "divergence", "from_bf16", "other_top_token")
        summary = {f"{row['weights']}_{name}": row[name] for row in rows[2:] for name in names}
        write_json(arguments.json, report(rows, summary))


if __name__ == "__main__":
    main()
