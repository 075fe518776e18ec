"""The slots of LoRA adapters beside the weights of a rank, and what is read from a folder to be put into one.

Slots are allocated at start; an empty one has rank 0 everywhere. A slot is overwritten in place, where captured steps
read it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from disagg.engine.adapters.folder import LARGEST, AdapterError, AdapterFolder, Fingerprint, open_adapter, read_tensors
from disagg.engine.adapters.modules import Module, ProductName, largest_file, modules_of, product_sizes
from disagg.engine.checkpoint.families.registry import family_of
from disagg.engine.checkpoint.model_config import ModelConfig
from disagg.engine.checkpoint.weight_headers import TensorEntry
from disagg.engine.config import AdapterOptions
from disagg.engine.plan import LoadedAdapter
from disagg.engine.sharding.shards import Shard
from disagg.engine.sharding.stages import stage_layers
from disagg.kernels.lora import Lora, allocate_lora
from disagg.proto.errors import ConfigError
from disagg.proto.messages import Adapter

LayerLoras = dict[ProductName, Lora]
"""The slots beside the products of a layer."""

_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@dataclass(slots=True)
class _Part:
    """What a rank has of one module: A [rank, inputs] and B [rank, outputs]."""

    module: Module
    a_RI: Tensor | None = None
    b_RO: Tensor | None = None


@dataclass(frozen=True, slots=True)
class _Content:
    rank: int
    scale: float
    parts: tuple[_Part, ...]


class AdapterSlots:
    """Owner: the model runner. `config` is the whole model's.

    Raises:
        ConfigError: no module of the model can be changed by an adapter.
    """

    def __init__(
        self, config: ModelConfig, shard: Shard, options: AdapterOptions, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._config = config
        self._options = options
        self._dtype = dtype
        self._modules = modules_of(config, shard)
        if not self._modules:
            raise ConfigError(f"adapters: {config.architecture} has no module that one can change")
        self._max_bytes = largest_file(config, options.max_rank)
        self._held = stage_layers(config, shard)
        self.layers: tuple[LayerLoras, ...] = tuple(
            {
                product: allocate_lora(options.max_loaded, options.max_rank, inputs, tuple(outputs), dtype, device)
                for product, (inputs, outputs) in product_sizes(config, config.layers[number], shard).items()
            }
            for number in self._held
        )
        """Of each layer that the rank has."""

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return sum(lora.nbytes for layer in self.layers for lora in layer.values())

    def read(self, adapter: Adapter) -> LoadedAdapter:
        """Read this rank's part. Any thread.

        Raises:
            AdapterError: as of `ModelRunner.read_adapter`.
        """
        folder = open_adapter(self._options.folder, adapter.path, self._options.max_rank, self._max_bytes)
        parts, places = self._places(folder)
        fingerprint = Fingerprint(folder.config)
        for name, entry, data in read_tensors(folder):
            fingerprint.add(name, entry, data)
            part, is_a = places[name]
            module = part.module
            if module.layer not in self._held:
                continue  # another stage has it, and looks at its numbers
            numbers = _numbers(name, entry, data, self._dtype)
            if is_a:
                part.a_RI = numbers[:, module.rank_inputs.start : module.rank_inputs.stop].contiguous()
            else:
                part.b_RO = numbers[module.rank_outputs.start : module.rank_outputs.stop].T.contiguous()
        held = tuple(part for part in parts if part.module.layer in self._held)
        content = _Content(folder.config.rank, folder.config.scale, held)
        num_bytes = sum(
            (part.module.inputs + part.module.outputs) * folder.config.rank * self._dtype.itemsize for part in parts
        )
        return LoadedAdapter(fingerprint=fingerprint.check(adapter.fingerprint), num_bytes=num_bytes, content=content)

    def put(self, slot: int, content: Any) -> None:
        """Write what was read into a slot."""
        assert isinstance(content, _Content)
        for layer in self.layers:
            for lora in layer.values():
                lora.ranks_SP[slot] = 0
        for part in content.parts:
            module = part.module
            lora = self.layers[self._held.index(module.layer)][module.product]
            assert part.a_RI is not None
            assert part.b_RO is not None
            start = sum(lora.columns[: module.part])
            lora.a_SPRI[slot, module.part, : content.rank].copy_(part.a_RI)
            lora.b_SRO[slot, : content.rank, start : start + lora.columns[module.part]].copy_(part.b_RO)
            lora.scales_SP[slot, module.part] = content.scale
            lora.ranks_SP[slot, module.part] = content.rank

    def _places(self, folder: AdapterFolder) -> tuple[tuple[_Part, ...], dict[str, tuple[_Part, bool]]]:
        """The parts to fill, and of each tensor its part and whether it is A."""
        names = family_of(self._config.architecture).names
        parts: dict[str, _Part] = {}
        places: dict[str, tuple[_Part, bool]] = {}
        entries = {id(entry): name for name, entry in folder.names.items()}
        for stored, pair in folder.pairs.items():
            a_name, b_name = entries[id(pair.a)], entries[id(pair.b)]
            logical = names.logical(f"{stored}.weight")
            own = None if logical is None else logical.removesuffix(".weight")
            module = None if own is None else self._modules.get(own)
            if own is None or module is None:
                what = "adapters of experts are not supported" if "expert" in stored else "it has no such module"
                raise AdapterError("content", f"tensor {a_name} maps to nothing of {self._config.architecture}: {what}")
            if own in parts:
                raise AdapterError("content", f"tensor {a_name}: another one is {own}, too")
            for name, entry, dim, size in ((a_name, pair.a, 1, module.inputs), (b_name, pair.b, 0, module.outputs)):
                if entry.shape[dim] != size:
                    raise AdapterError(
                        "content",
                        f"tensor {name} has shape {list(entry.shape)}; the base model has {size} in place of "
                        f"{entry.shape[dim]}",
                    )
            part = parts[own] = _Part(module)
            places[a_name], places[b_name] = (part, True), (part, False)
        return tuple(parts.values()), places


def _numbers(name: str, entry: TensorEntry, data: bytearray, dtype: torch.dtype) -> Tensor:
    """The numbers of a tensor in the model's dtype.

    Raises:
        AdapterError: some are not finite, or not in that dtype, or larger than `LARGEST`.
    """
    numbers = torch.frombuffer(data, dtype=_DTYPES[entry.dtype]).view(entry.shape).to(dtype)
    if not bool(torch.isfinite(numbers).all()):
        raise AdapterError("content", f"tensor {name} has numbers that are not finite")
    if float(numbers.abs().amax()) > LARGEST:
        raise AdapterError("content", f"tensor {name} has numbers above {LARGEST:.0f}")
    return numbers
