"""The packed weights of a model, from its checkpoint or as a template has loaded them for the workers that it forks.

    template   keep_weights(source) ──fork──> worker   whole_weights(source): the same memory, never written to

What is kept serves as long as the weight files are those that were read; a worker of a later start reads others itself.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch

from disagg.engine.checkpoint.checkpoint import model_fingerprint, read_model_config
from disagg.engine.checkpoint.model_config import ModelConfig
from disagg.engine.checkpoint.weight_headers import weight_file_times
from disagg.engine.config import WeightsSource
from disagg.engine.runner.group_scales import GroupScales
from disagg.engine.runner.model.parameters import ModelParameters, pack_parameters
from disagg.engine.runner.shared_weights import shared_parameters
from disagg.engine.runner.weights import load_parameters
from disagg.engine.sharding.shards import WHOLE, Shard
from disagg.kernels.dispatch import drop_packing_memory, set_num_threads
from disagg.kernels.quantize import STORED

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedWeights:
    """Weights of a model, or of one rank of it."""

    fingerprint: str
    """Fingerprint of the whole model, also for one rank."""
    parameters: ModelParameters


_kept: dict[tuple[WeightsSource, Any], LoadedWeights] = {}
"""Weights by source, and by the weight files as they were."""


def load_weights(
    source: WeightsSource, model: ModelConfig, device: torch.device, shard: Shard = WHOLE
) -> LoadedWeights:
    """Read and pack them. Raises as `load_parameters` and `pack_parameters` do."""
    computed = "none" if source.quantization == "stored" else source.quantization  # the same bits, so KV can be shared
    fingerprint = model_fingerprint(source.model_path, source.dtype, computed)
    dtype: torch.dtype = getattr(torch, source.dtype)

    def own_parameters() -> ModelParameters:
        is_exact = source.quantization == "stored"
        scales = GroupScales(keeps_experts=is_exact) if source.quantization in STORED else None
        parameters = load_parameters(source.model_path, model, dtype, device, shard, scales)
        pack_parameters(parameters, source.quantization, scales)
        return parameters

    is_shared = source.share_weights
    parameters = shared_parameters(source, model, fingerprint, own_parameters) if is_shared else own_parameters()
    return LoadedWeights(fingerprint, parameters)


def whole_weights(source: WeightsSource, model: ModelConfig) -> LoadedWeights | None:
    """Weights of the whole model that are kept in this process, for a CPU; None if there are none."""
    found = _kept.get((source, (model, weight_file_times(source.model_path)))) if _kept else None
    if found is not None:
        logger.info("weights are those of the template")
    return found


def keep_weights(source: WeightsSource) -> None:
    """Load them and keep them until this process ends, with one thread, and none that stays. Raises as `load_weights`
    does."""
    set_num_threads(1)
    model = read_model_config(source.model_path)
    if model.encoder is not None:
        return  # each worker reads its own
    key = source, (model, weight_file_times(source.model_path))  # before they are read
    _kept[key] = load_weights(source, model, torch.device("cpu"))
    drop_packing_memory()  # or memory of workers would come from a page that they share
