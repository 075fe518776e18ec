"""A decode step in plain torch ops, beside the engine's in the same run: what a careful model without kernels of its
own, block tables and captures takes. Its weights are the engine's, and its KV lies in the engine's cache, in a row for
each sequence.

Shapes: S sequences, H hidden size, N query heads, K KV heads, D head dim, T tokens of a sequence, P positions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from disagg.engine.runner.model.parameters import DenseParameters, LayerParameters, ModelParameters
from disagg.engine.runner.model.rope import RopeTables
from disagg.engine.runner.model_runner import TorchModelRunner

if TYPE_CHECKING:
    from benchmarks.gpu.model import TensorSizes


def is_plain(parameters: ModelParameters) -> bool:
    """Whether torch's own ops take all weights, which those of a CPU are packed for."""
    weights: list[Any] = [parameters.lm_head_VH]
    for layer in parameters.layers:
        assert isinstance(layer.ffn, DenseParameters), "a model without experts"
        weights += [layer.qkv_weight_QH, layer.o_weight_HA, layer.ffn.gate_up_weight_2IH, layer.ffn.down_weight_HI]
    return all(isinstance(weight, Tensor) for weight in weights)


class PlainStep:
    """Steps of `batch` sequences behind `context_len - 1` tokens each: every one computes the same position."""

    def __init__(
        self, shape: TensorSizes, parameters: ModelParameters, runner: TorchModelRunner, batch: int, context_len: int
    ) -> None:
        self._shape, self._parameters = shape, parameters
        self._head_dim = shape.hidden_size // shape.num_heads
        device = parameters.embedding_VH.device
        planes_L2NKBD = runner._cache.tensor_NL2KBD.permute(1, 2, 0, 3, 4, 5)
        size = batch, shape.num_kv_heads, context_len, self._head_dim
        numbers = batch * shape.num_kv_heads * context_len * self._head_dim
        self._kv = [
            [plane_NKBD.reshape(-1)[:numbers].view(size) for plane_NKBD in layer_2NKBD] for layer_2NKBD in planes_L2NKBD
        ]
        self._place = context_len - 1
        dtype = parameters.embedding_VH.dtype
        ropes = RopeTables(runner.model_config, context_len, dtype, device)
        rope = ropes.of(runner.model_config.layers[0].attention.rope)
        self._cos_D, self._sin_D = rope.cos_PR[self._place], rope.sin_PR[self._place]
        self._ids_S = torch.zeros(batch, dtype=torch.int64, device=device)

    @torch.inference_mode()
    def step(self) -> list[int]:
        """The greedy tokens, on the host."""
        parameters = self._parameters
        x_SH = F.embedding(self._ids_S, parameters.embedding_VH)
        for layer, (keys_SKTD, values_SKTD) in zip(parameters.layers, self._kv, strict=True):
            x_SH = x_SH + self._attended(layer, self._norm(x_SH, layer.input_norm_H), keys_SKTD, values_SKTD)
            assert isinstance(layer.ffn, DenseParameters), "a model without experts"
            gate_SI, up_SI = F.linear(self._norm(x_SH, layer.ffn_norm_H), layer.ffn.gate_up_weight_2IH).chunk(2, dim=-1)  # type: ignore[arg-type]
            x_SH = x_SH + F.linear(F.silu(gate_SI) * up_SI, layer.ffn.down_weight_HI)  # type: ignore[arg-type]
        logits_SV = F.linear(self._norm(x_SH, parameters.final_norm_H), parameters.lm_head_VH)  # type: ignore[arg-type]
        self._ids_S = logits_SV.argmax(-1)
        return list(self._ids_S.tolist())

    def _attended(self, layer: LayerParameters, x_SH: Tensor, keys_SKTD: Tensor, values_SKTD: Tensor) -> Tensor:
        shape, head_dim = self._shape, self._head_dim
        heads_SND = F.linear(x_SH, layer.qkv_weight_QH).view(len(x_SH), -1, head_dim)  # type: ignore[arg-type]
        first_k, first_v = shape.num_heads, shape.num_heads + shape.num_kv_heads
        q_SND, k_SKD, v_SKD = heads_SND[:, :first_k], heads_SND[:, first_k:first_v], heads_SND[:, first_v:]
        keys_SKTD[:, :, self._place] = self._turned(k_SKD)
        values_SKTD[:, :, self._place] = v_SKD
        attended_SN1D = F.scaled_dot_product_attention(
            self._turned(q_SND)[:, :, None], keys_SKTD, values_SKTD, enable_gqa=True
        )
        return F.linear(attended_SN1D.flatten(1), layer.o_weight_HA)  # type: ignore[arg-type]

    def _norm(self, x_SH: Tensor, weight_H: Tensor | None) -> Tensor:
        return F.rms_norm(x_SH, (x_SH.shape[-1],), weight_H, 1e-5)

    def _turned(self, x_SND: Tensor) -> Tensor:
        half = self._head_dim // 2
        rotated = torch.cat((-x_SND[..., half:], x_SND[..., :half]), dim=-1)
        return x_SND * self._cos_D + rotated * self._sin_D
