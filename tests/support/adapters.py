"""Folders of LoRA adapters, the models that they make of a base, and cores that load them."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from disagg.engine.adapters.folder import CONFIG, PREFIX, TENSORS, AdapterError, check_config
from disagg.engine.commands import AdapterRead, Event
from disagg.engine.config import AdapterOptions
from disagg.engine.core.engine_core import EngineCore
from disagg.engine.plan import ModelRunner
from disagg.proto.block_hash import chain_hashes, root_hash
from disagg.proto.messages import Adapter, SequenceSpec
from tests.support.engine import assert_sound, run_until_idle

ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
MAX_RANK = 24


def options_of(folder: Path, max_loaded: int = 8) -> AdapterOptions:
    return AdapterOptions(folder=str(folder), max_loaded=max_loaded, max_rank=MAX_RANK)


def write_folder(place: Path, tensors: Mapping[str, Tensor], rank: int = 4, alpha: float = 8.0, **fields: Any) -> Path:
    """An adapter with these tensors; `fields` are further ones of its configuration, or others."""
    place.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "bias": "none", "use_dora": False, **fields}
    (place / CONFIG).write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, place / TENSORS)
    return place


def small_adapter(folder: Path, name: str, seed: int = 0) -> Adapter:
    """An adapter for the fake model, written to `folder`."""
    generator = torch.Generator().manual_seed(seed)
    module = f"{PREFIX}model.layers.0.self_attn.q_proj"
    tensors = {
        f"{module}.lora_A.weight": torch.randn(4, 8, generator=generator),
        f"{module}.lora_B.weight": torch.randn(8, 4, generator=generator),
    }
    write_folder(folder / name, tensors)
    fingerprint, _ = check_config(str(folder), name, MAX_RANK, 1 << 20)
    return Adapter(name=name, path=name, fingerprint=fingerprint)


def adapter_of(
    base: Path, folder: Path, name: str, modules: Sequence[str], rank: int, seed: int, *, rslora: bool = False
) -> Path:
    """Write an adapter of some modules in all layers of a checkpoint, strong enough to change each answer. Returns the
    checkpoint with the adapter merged into its weights."""
    weights = load_file(base / "model.safetensors")
    generator, alpha = torch.Generator().manual_seed(seed), 8.0 + seed
    scale = alpha / (math.sqrt(rank) if rslora else rank)
    tensors: dict[str, Tensor] = {}
    merged = dict(weights)
    for key, weight in weights.items():
        module = key.removesuffix(".weight")
        if module.endswith(tuple(modules)):
            a = torch.randn(rank, weight.shape[1], generator=generator) / 8
            b = torch.randn(weight.shape[0], rank, generator=generator) / 8
            tensors[f"{PREFIX}{module}.lora_A.weight"], tensors[f"{PREFIX}{module}.lora_B.weight"] = a, b
            merged[key] = (weight.double() + scale * (b.double() @ a.double())).float()
    assert tensors
    write_folder(folder / name, tensors, rank, alpha, use_rslora=rslora, target_modules=list(modules))
    whole = folder.parent / f"merged-{name}"
    shutil.copytree(base, whole)
    save_file(merged, whole / "model.safetensors", metadata={"format": "pt"})
    return whole


def with_adapter(spec: SequenceSpec, adapter: Adapter, base: str) -> SequenceSpec:
    """The spec with an adapter, and the hashes that the gateway would send for it."""
    root = root_hash(base, adapter=adapter.fingerprint)
    hashes = tuple(chain_hashes(root, spec.prompt_token_ids)) if spec.block_hashes else ()
    return msgspec.structs.replace(
        spec, adapter=adapter, block_hashes=hashes, root_hash=root if spec.root_hash else spec.root_hash
    )


class Orders:
    """Takes the orders of a core, to be carried out by `read`, as the worker's thread would."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.waiting: list[tuple[Adapter, int]] = []

    def order(self, adapter: Adapter, slot: int) -> None:
        """Keep an order."""
        self.waiting.append((adapter, slot))

    def read(self, core: EngineCore, now: float = 0.0) -> list[Event]:
        """Carry out the first order; what came of it."""
        adapter, slot = self.waiting.pop(0)
        try:
            command = AdapterRead(slot, self.runner.read_adapter(adapter))
        except AdapterError as error:
            command = AdapterRead(slot, None, "invalid" if error.fault == "content" else "refused", str(error))
        events = core.handle(command, now)
        assert_sound(core)
        return events

    def run(self, core: EngineCore) -> list[Event]:
        """Step and read until nothing is left to do."""
        events = run_until_idle(core)
        while self.waiting:
            events += self.read(core)
            events += run_until_idle(core)
        return events
