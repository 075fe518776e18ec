"""How experts are chosen, from fields of config.json whose names differ from family to family."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from disagg.engine.checkpoint.json_fields import JsonFields
from disagg.kernels.routing import Routing


def read_routing(
    fields: JsonFields, experts_field: str, names: Mapping[str, str] | None = None, **values: Any
) -> Routing:
    """The routing of `num_experts_per_tok` out of `experts_field` experts; `names` are fields of config.json by those
    of `Routing`, for errors.

    Raises:
        ConfigError: naming the field of config.json and its value, where they contradict each other.
    """
    for name in ("output_router_logits", "router_aux_loss_coef", "router_jitter_noise"):
        fields.value(name)  # of training
    named = {"num_experts": experts_field, "top_k": "num_experts_per_tok", **(names or {})}
    num_experts, top_k = fields.integer(experts_field), fields.integer("num_experts_per_tok")
    try:
        return Routing(num_experts=num_experts, top_k=top_k, **values)
    except ValueError as error:
        name, _, problem = str(error).partition(": ")
        raise fields.error(f"`{named.get(name, name)}`: {problem}") from None


def count_of_experts(fields: JsonFields) -> str:
    """The field that has the number of experts, which transformers 5 writes under another name."""
    return "num_local_experts" if fields.has("num_local_experts") else "num_experts"
