"""How a layer of experts chooses among them, as values: Mixtral, Qwen, gpt-oss, DeepSeek, GLM and MiniMax are some.
Without torch.

    logits   of a row: the router's product in fp32, plus the router's bias where it has one
    scores   `softmax` of all logits, `sigmoid` of each, or the logits themselves (`softmax_of_top`)
    choice   the `top_k` largest of the scores plus the choice bias, within the `top_groups` best groups of experts;
             without a bias a softmax is chosen from by its logits, which are in the same order
    weights  the scores of the chosen experts, without the choice bias, all fp32: `softmax_of_top` takes their softmax,
             `renormalize` divides them by their sum (plus 1e-20), then they are multiplied by `scale`

Of equal values the lowest expert is chosen, and of equal groups the first. A row with a logit that is NaN has experts 0
to k - 1, with weights of NaN. Chosen experts are in ascending order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

MAX_EXPERTS: Final = 1024
MAX_TOP_K: Final = 64
SMALLEST_SUM: Final = 1e-20
"""Addend of the sum by which weights are divided."""

Score = Literal["softmax", "softmax_of_top", "sigmoid"]
GroupScore = Literal["largest", "two_largest"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Routing:
    """The choice of experts of a layer.

    Raises:
        ValueError: the numbers contradict each other; the message begins with the field.
    """

    num_experts: int
    top_k: int
    """Experts of a row."""
    score: Score = "softmax"
    renormalize: bool = False
    scale: float = 1.0
    groups: int = 1
    """Number of groups of consecutive experts."""
    top_groups: int = 1
    """Groups that a row may choose from."""
    group_score: GroupScore = "largest"
    """Score of a group: its largest value for the choice, or the sum of its two largest."""

    def __post_init__(self) -> None:
        if not 1 <= self.num_experts <= MAX_EXPERTS:
            raise ValueError(f"num_experts: must be 1 to {MAX_EXPERTS}, not {self.num_experts}")
        if not 1 <= self.top_k <= min(self.num_experts, MAX_TOP_K):
            most = min(self.num_experts, MAX_TOP_K)
            raise ValueError(f"top_k: must be 1 to {most} with {self.num_experts} experts, not {self.top_k}")
        if self.groups < 1 or self.num_experts % self.groups:
            raise ValueError(f"groups: {self.groups} do not divide {self.num_experts} experts")
        if not 1 <= self.top_groups <= self.groups:
            raise ValueError(f"top_groups: must be 1 to {self.groups}, not {self.top_groups}")
        if self.top_k > self.top_groups * self.group_size:
            raise ValueError(
                f"top_groups: {self.top_groups} x {self.group_size} experts of a group are fewer than the {self.top_k} "
                f"of a row (top_k)"
            )
        if self.groups > 1 and self.group_score == "two_largest" and self.group_size < 2:
            raise ValueError(f"groups: {self.groups} groups of one expert have no two largest scores")

    @property
    def group_size(self) -> int:
        """Experts of a group."""
        return self.num_experts // self.groups

    def distinct_experts(self, num_rows: float) -> float:
        """Number of experts that a step of so many rows is expected to read, if rows choose independently and alike:
        E * (1 - (1 - k / E)^rows)."""
        missed: float = (1.0 - self.top_k / self.num_experts) ** num_rows
        return self.num_experts * (1.0 - missed)


@dataclass(frozen=True, kw_only=True, slots=True)
class GatedActivation:
    """What stands between the two products of an expert.

    `silu` and `gelu_tanh`: of gate, times up. `clamped_swiglu`, gpt-oss's: gate is at most `limit`, up within `limit`
    on both sides; gate * sigmoid(alpha * gate) * (up + 1).
    """

    kind: Literal["silu", "gelu_tanh", "clamped_swiglu"] = "silu"
    alpha: float = 1.702
    limit: float = 7.0


SILU: Final = GatedActivation()


def scratch_bytes(routing: Routing, num_rows: int, hidden: int, inner: int, element_bytes: int) -> int:
    """The most scratch memory that `moe_ffn` of so many rows takes at any level of processors: each of `num_rows *
    top_k` rows once as input (and result) of the first product, in up to four bytes a number, once as its output, and
    once as input of the second."""
    placed = num_rows * routing.top_k + min(routing.num_experts, num_rows * routing.top_k)
    padding = 4 * _ROW_PADDING
    wide = max(placed * (4 * hidden + padding), 4 * num_rows * hidden)
    row = 2 * inner * element_bytes + 4 * inner + padding
    numbers = 4 * (num_rows * (routing.num_experts + 3 * routing.top_k) + placed + 4 * routing.num_experts)
    return wide + placed * row + numbers + _ALIGNMENTS


_ROW_PADDING: Final = 48
"""The most numbers by which a row is longer than its inputs, as products want it."""
_ALIGNMENTS: Final = 1024
