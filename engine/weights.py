"""From safetensors files to the decoder's parameters.

`checkpoint_tensors` says which tensor of the checkpoint fills which (slice of a) parameter; `load_parameters` checks
every header against it before it reads any data, then copies tensor by tensor out of the memory map, casting on the
way. Beyond the parameters themselves no more than one tensor is held. Nothing is ever unpickled.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from safetensors import SafetensorError, safe_open
from torch import Tensor

from disagg.engine.checkpoint import ModelConfig, TensorEntry, read_header, weight_files
from disagg.engine.model.parameters import LayerParameters, ModelParameters, allocate_parameters, plain
from disagg.proto.errors import ConfigError

FLOAT_TYPES = ("F64", "F32", "BF16", "F16")
LM_HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"


class _Advance(Protocol):
    def __call__(self, nbytes: int, /) -> None: ...


def load_parameters(
    folder: str | Path, config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> ModelParameters:
    """The parameters of a checkpoint in `dtype` on `device`.

    Raises:
        ConfigError: a file or tensor is missing, cut short, of another shape or type than the configuration asks for,
            or not part of the model.
    """
    headers = {file: read_header(file) for file in weight_files(folder)}
    parameters = allocate_parameters(config, dtype, device)
    targets = checkpoint_tensors(config, parameters)
    _check_headers(headers, targets, config, Path(folder))
    total_bytes = sum(target.numel() * target.element_size() for target in targets.values())
    with _progress_bar(total_bytes) as advance:
        for file, header in headers.items():
            _load_file(file, [name for name in header if name in targets], targets, advance)
    if config.tied_embeddings:
        _check_tied(headers, parameters)
    return parameters


def checkpoint_tensors(config: ModelConfig, parameters: ModelParameters) -> dict[str, Tensor]:
    """Checkpoint name -> the parameter (not packed yet), or the slice of one, that it fills."""
    targets = {EMBEDDING: parameters.embedding_VH, "model.norm.weight": parameters.final_norm_H}
    if not config.tied_embeddings:
        targets[LM_HEAD] = plain(parameters.lm_head_VH)
    for index, layer in enumerate(parameters.layers):
        for name, target in _layer_tensors(config, layer).items():
            targets[f"model.layers.{index}.{name}"] = target
    return targets


def _layer_tensors(config: ModelConfig, layer: LayerParameters) -> dict[str, Tensor]:
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    fused: list[tuple[Tensor | None, list[str], list[int]]] = []
    for suffix, qkv, gate_up in (
        ("weight", plain(layer.qkv_weight_QH), plain(layer.gate_up_weight_2IH)),
        ("bias", layer.qkv_bias_Q, layer.gate_up_bias_2I),
    ):
        qkv_names = [f"self_attn.{part}_proj.{suffix}" for part in "qkv"]
        fused.append((qkv, qkv_names, [q_size, kv_size, kv_size]))
        fused.append((gate_up, [f"mlp.gate_proj.{suffix}", f"mlp.up_proj.{suffix}"], [config.intermediate_size] * 2))
    single = {
        "input_layernorm.weight": layer.input_norm_H,
        "post_attention_layernorm.weight": layer.post_norm_H,
        "self_attn.o_proj.weight": plain(layer.o_weight_HA),
        "self_attn.o_proj.bias": layer.o_bias_H,
        "self_attn.q_norm.weight": layer.q_norm_D,
        "self_attn.k_norm.weight": layer.k_norm_D,
        "mlp.down_proj.weight": plain(layer.down_weight_HI),
        "mlp.down_proj.bias": layer.down_bias_H,
    }
    targets = {name: target for name, target in single.items() if target is not None}
    for tensor, names, sizes in fused:
        if tensor is not None:
            targets.update(zip(names, torch.split(tensor, sizes), strict=True))
    return targets


def _check_headers(
    headers: dict[Path, dict[str, TensorEntry]], targets: dict[str, Tensor], config: ModelConfig, folder: Path
) -> None:
    seen: set[str] = set()
    for file, header in headers.items():
        for name, entry in header.items():
            if name in targets:
                _check_entry(file, name, entry, targets[name])
                seen.add(name)
            elif not _is_redundant(name, config):
                raise ConfigError(f"{file}: tensor {name} is not part of {config.architecture} as config.json has it")
    if missing := [name for name in targets if name not in seen]:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ConfigError(f"{folder}: the weights lack {', '.join(missing[:3])}{more}")


def _check_entry(file: Path, name: str, entry: TensorEntry, target: Tensor) -> None:
    if entry.shape != tuple(target.shape):
        raise ConfigError(
            f"{file}: tensor {name} has shape {list(entry.shape)}; config.json asks for {list(target.shape)}"
        )
    if entry.dtype not in FLOAT_TYPES:
        raise ConfigError(f"{file}: tensor {name} is {entry.dtype}; supported are {', '.join(FLOAT_TYPES)}")


def _is_redundant(name: str, config: ModelConfig) -> bool:
    """Tensors that repeat others: old Llama checkpoints stored the rope frequencies, some store a tied head."""
    return name.endswith(".rotary_emb.inv_freq") or (name == LM_HEAD and config.tied_embeddings)


def _load_file(file: Path, names: list[str], targets: dict[str, Tensor], advance: _Advance) -> None:
    try:
        with safe_open(str(file), framework="pt", device="cpu") as tensors:
            for name in names:
                target = targets[name]
                target.copy_(tensors.get_tensor(name))
                advance(target.numel() * target.element_size())
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{file}: cannot be read: {error}") from error


def _check_tied(headers: dict[Path, dict[str, TensorEntry]], parameters: ModelParameters) -> None:
    """A stored head beside tied embeddings must be the embedding; which one counts would be a guess otherwise."""
    for file, header in headers.items():
        if LM_HEAD in header:
            with safe_open(str(file), framework="pt", device="cpu") as tensors:
                head = tensors.get_tensor(LM_HEAD).to(parameters.embedding_VH)
            if not torch.equal(head, parameters.embedding_VH):
                raise ConfigError(f"{file}: {LM_HEAD} differs from {EMBEDDING}, but `tie_word_embeddings` is true")


@contextmanager
def _progress_bar(total_bytes: int) -> Iterator[_Advance]:
    """A bar on stderr where that is a terminal; elsewhere nothing."""
    if not sys.stderr.isatty():
        yield lambda nbytes: None
        return
    columns = (TextColumn("loading weights"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("weights", total=total_bytes)
        yield lambda nbytes: progress.advance(task, nbytes)
