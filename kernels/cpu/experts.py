"""The call of `experts.cpp`. Rows, weights, biases and results are fp32, or bf16 (also with weights in int8 or
MXFP4)."""

from __future__ import annotations

import ctypes
from typing import Final

import torch
from torch import Tensor

from disagg.kernels.cpu.calls import Kernel, new_output
from disagg.kernels.cpu.linear import NativeExpertWeight, NativeWeight
from disagg.kernels.experts import Experts, Router, Shared

_FIELDS: Final = "iPqqqqPPPqqqqqqqfqqPPPPPPqffPPPPP"
_SCORES: Final = {"softmax": 0, "softmax_of_top": 1, "sigmoid": 2}
_GROUP_SCORES: Final = {"largest": 0, "two_largest": 1}
_GATES: Final = {"silu": 0, "gelu_tanh": 1, "clamped_swiglu": 2}


class MoeFfn:
    """The function of a library that computes a layer of experts. Stateless; any thread."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._call = Kernel(library, "disagg_moe_ffn", _FIELDS)
        self._scratch_bytes = library["disagg_moe_scratch"]
        self._scratch_bytes.restype, self._scratch_bytes.argtypes = ctypes.c_int64, [ctypes.c_int64] * 7

    def scratch_bytes(self, kind: int, num_rows: int, hidden: int, inner: int, router: Router, local: int) -> int:
        """Bytes of scratch memory of a call with packed weights of this kind, for `local` experts."""
        routing = router.routing
        found = self._scratch_bytes(kind, num_rows, hidden, inner, routing.num_experts, routing.top_k, local)
        return int(found)

    def __call__(self, x_TH: Tensor, router: Router, experts: Experts, shared: Shared | None) -> Tensor:
        """The result of the layer, [T, H]; weights are packed.

        Raises:
            ValueError: a tensor does not fit the weights.
        """
        gate_up, down, routing = experts.gate_up_L2IH, experts.down_LHI, router.routing
        assert isinstance(gate_up, NativeExpertWeight), "the weights are packed"
        assert isinstance(down, NativeExpertWeight), "the weights are packed"
        _check(x_TH, router, experts, shared)
        assert isinstance(router.weight_EH, NativeWeight), "the router is packed"
        (T, H), inner, local = x_TH.shape, down.in_features, gate_up.packed.shape[0]
        size = self.scratch_bytes(gate_up.kind, T, H, inner, router, local)
        scratch, out_TH = new_output((size,), torch.uint8), new_output((T, H), x_TH.dtype)
        activation = experts.activation
        self._call(
            gate_up.kind, x_TH.data_ptr(), x_TH.stride(0), T, H, inner,
            router.weight_EH.packed.data_ptr(), _pointer(router.bias_E), _pointer(router.choice_bias_E),
            routing.num_experts, routing.top_k, _SCORES[routing.score], routing.groups, routing.top_groups,
            _GROUP_SCORES[routing.group_score], int(routing.renormalize), routing.scale, experts.first, local,
            gate_up.packed.data_ptr(), _pointer(gate_up.scale_EO), _pointer(experts.gate_up_bias_L2I),
            down.packed.data_ptr(), _pointer(down.scale_EO), _pointer(experts.down_bias_LH),
            _GATES[activation.kind], activation.alpha, activation.limit,
            0 if shared is None else shared.result_TH.data_ptr(), 0 if shared is None else _pointer(shared.gate_H),
            _pointer(router.counts_E), scratch.data_ptr(), out_TH.data_ptr(),
        )  # fmt: skip
        return out_TH


def _check(x_TH: Tensor, router: Router, experts: Experts, shared: Shared | None) -> None:
    """That each tensor has the shape and dtype that the kernel reads. Raises `ValueError`."""
    gate_up, down = experts.gate_up_L2IH, experts.down_LHI
    assert isinstance(gate_up, NativeExpertWeight)
    assert isinstance(down, NativeExpertWeight)
    dtype, (T, H), E = gate_up.dtype, x_TH.shape, router.routing.num_experts
    local, inner = gate_up.packed.shape[0], down.in_features
    if x_TH.dtype != dtype or gate_up.in_features != H or x_TH.stride(1) != 1:
        raise ValueError(
            f"x is {x_TH.dtype} {list(x_TH.shape)}; the experts take {dtype} rows of {gate_up.in_features}"
        )
    if gate_up.kind != down.kind or down.packed.shape[0] != local:
        raise ValueError("the two products of the experts are not of one form and number")
    if gate_up.out_features != 2 * inner or down.out_features != H:
        sizes = f"{gate_up.out_features} and {down.out_features} outputs"
        raise ValueError(f"the experts have {sizes}, not {2 * inner} and {H}")
    if not 0 <= experts.first <= E - local:
        raise ValueError(f"experts {experts.first} to {experts.first + local} are not among {E}")
    weight = router.weight_EH
    if not isinstance(weight, NativeWeight) or weight.dtype != torch.float32:
        raise ValueError("the router's weight is not packed in fp32")
    if (weight.out_features, weight.in_features) != (E, H):
        raise ValueError(f"the router is {weight.out_features} by {weight.in_features}, not {E} by {H}")
    for name, tensor, shape, wanted in (
        ("router bias", router.bias_E, (E,), torch.float32),
        ("choice bias", router.choice_bias_E, (E,), torch.float32),
        ("counters", router.counts_E, (E,), torch.int64),
        ("gate and up bias", experts.gate_up_bias_L2I, (local, 2 * inner), dtype),
        ("down bias", experts.down_bias_LH, (local, H), dtype),
        ("shared result", None if shared is None else shared.result_TH, (T, H), dtype),
        ("shared gate", None if shared is None else shared.gate_H, (H,), dtype),
    ):
        if tensor is not None and (tensor.shape != shape or tensor.dtype != wanted or not tensor.is_contiguous()):
            raise ValueError(f"{name} is {tensor.dtype} {list(tensor.shape)}, not {wanted} {list(shape)}")


def _pointer(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
