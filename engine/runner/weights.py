"""From safetensors files to the decoder's parameters.

`checkpoint_tensors` lists which tensor of the checkpoint fills which (slice of a) parameter; `load_parameters` checks
every header against it before it reads any data, then copies tensor by tensor out of the memory map, casting on the
way. Quantized tensors are dequantized in pieces on the way. Beyond the parameters themselves no more than one tensor is
held. Of what ranks share, each reads its own part. Nothing is ever unpickled.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from torch import Tensor

from disagg.engine.checkpoint.checkpoint import read_model_config
from disagg.engine.checkpoint.families.family import TensorNames
from disagg.engine.checkpoint.families.registry import family_of
from disagg.engine.checkpoint.formats.gptq import Gptq
from disagg.engine.checkpoint.formats.reader import TensorReader
from disagg.engine.checkpoint.formats.stored import Entries, StoredTensor, check_type, stored_tensors
from disagg.engine.checkpoint.model_config import DenseConfig, ExpertsConfig, LayerConfig, ModelConfig
from disagg.engine.checkpoint.weight_headers import read_headers
from disagg.engine.runner.model.parameters import (
    DenseParameters,
    ExpertsParameters,
    LayerParameters,
    ModelParameters,
    allocate_parameters,
    plain,
)
from disagg.engine.sharding.model_shards import rank_model, vocab_part
from disagg.engine.sharding.shards import WHOLE, Shard
from disagg.proto.errors import ConfigError

FLOAT_TYPES = ("F64", "F32", "BF16", "F16")
LM_HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"


class _Advance(Protocol):
    def __call__(self, nbytes: int, /) -> None: ...


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """What a tensor of the checkpoint fills."""

    shape: tuple[int, ...]
    """Shape of the whole tensor in the checkpoint."""
    parameter: Tensor
    """A (slice of a) parameter, not packed yet; it has the shape of `parts`, perhaps with a dim divided in two."""
    dim: int = 0
    """The dimension along which ranks share the tensor."""
    parts: tuple[range, ...] = ()
    """The indices along `dim` that this rank takes, in this order; empty for all."""

    @property
    def nbytes(self) -> int:
        """Bytes of the parameter."""
        return self.parameter.numel() * self.parameter.element_size()


def load_parameters(
    folder: str | Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    shard: Shard = WHOLE,
) -> ModelParameters:
    """The parameters of a checkpoint, or one rank's part of them, in `dtype` on `device`.

    Raises:
        ConfigError: the model cannot be divided among the ranks; or a file or tensor is missing, cut short, of another
            shape or type than the configuration requires, or not part of the model.
    """
    local = rank_model(config, shard)
    entries = read_headers(folder)
    stored = _stored_by_own_name(entries, config)
    parameters = allocate_parameters(local, dtype, device)
    targets = checkpoint_tensors(config, parameters, shard)
    _check_stored(stored, targets, config, Path(folder))
    total = sum(target.nbytes for target in targets.values())
    with TensorReader(stored, entries) as reader, _progress_bar(total) as advance:
        _check_zeros(reader, stored, targets, config)
        for name in stored:
            if name in targets:
                _fill(targets[name], name, reader)
                advance(targets[name].nbytes)
        if config.tied_embeddings and LM_HEAD in stored:
            _check_tied(reader, targets[EMBEDDING], stored[LM_HEAD])
    num_padding_rows = local.vocab_size - len(vocab_part(config, shard))
    for vocabulary_VH in (parameters.embedding_VH, plain(parameters.lm_head_VH)):
        vocabulary_VH[local.vocab_size - num_padding_rows :] = 0
    return parameters


def check_weights(folder: str | Path) -> None:
    """Hold the weight files of a checkpoint against its config.json, without loading them.

    Raises:
        ConfigError: as `read_model_config` and `load_parameters` do; only values that are no numbers are not seen.
    """
    config = read_model_config(folder)
    entries = read_headers(folder)
    stored = _stored_by_own_name(entries, config)
    targets = checkpoint_tensors(config, allocate_parameters(config, torch.bfloat16, torch.device("meta")))
    _check_stored(stored, targets, config, Path(folder))
    with TensorReader(stored, entries) as reader:
        reader.check()
        _check_zeros(reader, stored, targets, config)


def checkpoint_tensors(config: ModelConfig, parameters: ModelParameters, shard: Shard = WHOLE) -> dict[str, Target]:
    """Checkpoint name -> what it fills of a rank's parameters, which are not packed yet."""
    vocabulary, num_ids = vocab_part(config, shard), config.vocab_size
    targets = {
        EMBEDDING: _rows(parameters.embedding_VH[: len(vocabulary)], num_ids, vocabulary),
        "model.norm.weight": _whole(parameters.final_norm_H),
    }
    if not config.tied_embeddings:
        targets[LM_HEAD] = _rows(plain(parameters.lm_head_VH)[: len(vocabulary)], num_ids, vocabulary)
    names = family_of(config.architecture).names
    for index, (layer, held) in enumerate(zip(config.layers, parameters.layers, strict=True)):
        for name, target in _layer_tensors(config, names, layer, held, shard).items():
            targets[f"model.layers.{index}.{name}"] = target
    return targets


def _layer_tensors(
    config: ModelConfig, names: TensorNames, layer: LayerConfig, held: LayerParameters, shard: Shard
) -> dict[str, Target]:
    """Biases of the row-parallel layers are whole on every rank; the decoder adds them once."""
    heads, kv_heads = shard.part(config.num_heads), shard.kv_heads(config.num_kv_heads)
    single = (
        (f"{names.input_norm}.weight", held.input_norm_H),
        (f"{names.attention_out_norm}.weight", held.attention_out_norm_H),
        (f"{names.ffn_norm}.weight", held.ffn_norm_H),
        (f"{names.ffn_out_norm}.weight", held.ffn_out_norm_H),
        (f"{names.o}.bias", held.o_bias_H),
    )
    targets = {name: _whole(tensor) for name, tensor in single if tensor is not None}
    attention, num_columns = _times(heads, config.head_dim), config.num_heads * config.head_dim
    targets[f"{names.o}.weight"] = _columns(plain(held.o_weight_HA), num_columns, attention)
    kv, num_kv = _times(kv_heads, config.head_dim), config.num_kv_heads * config.head_dim
    qkv_rows = ((num_columns, attention), (num_kv, kv), (num_kv, kv))
    targets |= _fused(plain(held.qkv_weight_QH), names.qkv, "weight", qkv_rows)
    targets |= _fused(held.qkv_bias_Q, names.qkv, "bias", qkv_rows)
    for name, norm, rows in ((names.q_norm, held.q_norm_D, qkv_rows[0]), (names.k_norm, held.k_norm_D, qkv_rows[1])):
        if norm is not None:
            is_whole = layer.attention.qk_norm == "whole"
            targets[f"{name}.weight"] = _rows(norm, *rows) if is_whole else _whole(norm)
    if held.sinks_N is not None:
        targets[names.sinks] = _rows(held.sinks_N, config.num_heads, heads)
    if isinstance(layer.ffn, ExpertsConfig):
        assert isinstance(held.ffn, ExpertsParameters), "both are of one layer"
        return targets | _expert_tensors(names, layer.ffn, held.ffn, shard)
    assert isinstance(held.ffn, DenseParameters), "both are of one layer"
    return targets | _dense_tensors(names, layer.ffn, held.ffn, shard)


def _dense_tensors(names: TensorNames, ffn: DenseConfig, held: DenseParameters, shard: Shard) -> dict[str, Target]:
    inner = shard.part(ffn.intermediate_size)
    targets = {f"{names.down}.weight": _columns(plain(held.down_weight_HI), ffn.intermediate_size, inner)}
    if held.down_bias_H is not None:
        targets[f"{names.down}.bias"] = _whole(held.down_bias_H)
    rows = ((ffn.intermediate_size, inner),) * 2
    targets |= _fused(plain(held.gate_up_weight_2IH), names.gate_up, "weight", rows)
    return targets | _fused(held.gate_up_bias_2I, names.gate_up, "bias", rows)


def _expert_tensors(names: TensorNames, ffn: ExpertsConfig, held: ExpertsParameters, shard: Shard) -> dict[str, Target]:
    single = {
        f"{names.router}.weight": plain(held.router_weight_EH),
        f"{names.router}.bias": held.router_bias_E,
        names.choice_bias: held.choice_bias_E,
        f"{names.shared_gate}.weight": held.shared_gate_1H,
    }
    targets = {name: _whole(tensor) for name, tensor in single.items() if tensor is not None}
    if held.shared_gate_up_weight_2SH is not None and held.shared_down_weight_HS is not None:
        part, count = shard.part(ffn.shared_size), ffn.shared_size
        gate_up = (f"{names.shared}.gate_proj", f"{names.shared}.up_proj")
        targets |= _fused(plain(held.shared_gate_up_weight_2SH), gate_up, "weight", ((count, part),) * 2)
        targets[f"{names.shared}.down_proj.weight"] = _columns(plain(held.shared_down_weight_HS), count, part)
    experts, inner = range(ffn.routing.num_experts), range(ffn.intermediate_size)
    if ffn.whole_experts:
        experts = shard.part(len(experts))
    else:
        inner = shard.part(len(inner))
    stored = _one_tensor if names.experts_are_one else _each_expert
    return targets | stored(names, ffn, held, experts, inner)


def _each_expert(
    names: TensorNames, ffn: ExpertsConfig, held: ExpertsParameters, experts: range, inner: range
) -> dict[str, Target]:
    """Each expert has tensors of its own. Of those that another rank has, nothing is read."""
    gate_up_L2IH, down_LHI = plain(held.gate_up_weight_L2IH), plain(held.down_weight_LHI)
    gate, up, down = names.of_expert
    targets = {}
    for expert in range(ffn.routing.num_experts):
        prefix, is_here = f"{names.experts}.{expert}", expert in experts
        index, part = (experts.index(expert), inner) if is_here else (0, range(0))
        for name, tensor_IH in zip((gate, up), gate_up_L2IH[index].chunk(2), strict=True):
            targets[f"{prefix}.{name}.weight"] = _rows(tensor_IH[: len(part)], ffn.intermediate_size, part)
        down_HI = down_LHI[index][:, : len(part)]
        targets[f"{prefix}.{down}.weight"] = _columns(down_HI, ffn.intermediate_size, part)
    return targets


def _one_tensor(
    names: TensorNames, ffn: ExpertsConfig, held: ExpertsParameters, experts: range, inner: range
) -> dict[str, Target]:
    """All experts are one tensor, inputs before outputs, gate and up of one feature after the other."""
    total, features = ffn.routing.num_experts, ffn.intermediate_size
    gate_up_L2IH, down_LHI = plain(held.gate_up_weight_L2IH), plain(held.down_weight_LHI)
    L, H, I = down_LHI.shape  # noqa: E741 - the shape letters of the name
    gate_up, down = f"{names.experts}.gate_up_proj", f"{names.experts}.down_proj"

    def target(shape: tuple[int, ...], parameter: Tensor, dim: int, part: range) -> Target:
        """Ranks share the experts, or along `dim` their features."""
        if len(experts) < total:
            return Target(shape, parameter, 0, (experts,))
        return Target(shape, parameter, dim, () if len(part) == shape[dim] else (part,))

    pairs = _times(inner, 2)
    gate_up_LHI2 = gate_up_L2IH.view(L, 2, I, H).permute(0, 3, 2, 1)
    targets = {
        gate_up: target((total, H, 2 * features), gate_up_LHI2, 2, pairs),
        down: target((total, features, H), down_LHI.transpose(1, 2), 1, inner),
    }
    if held.gate_up_bias_L2I is not None and held.down_bias_LH is not None:
        bias_LI2 = held.gate_up_bias_L2I.view(L, 2, I).transpose(1, 2)
        targets[f"{gate_up}_bias"] = target((total, 2 * features), bias_LI2, 1, pairs)
        targets[f"{down}_bias"] = target((total, H), held.down_bias_LH, 1, range(H))
    return targets


def _fused(
    fused: Tensor | None, names: tuple[str, ...], suffix: str, rows: tuple[tuple[int, range], ...]
) -> dict[str, Target]:
    """A parameter that holds several tensors one below the other, which may be one tensor of the checkpoint, too.
    `rows`: how many rows each has, and which of them are wanted."""
    if fused is None:
        return {}
    if len(names) == 1:
        ends = tuple(itertools.accumulate((count for count, _ in rows), initial=0))
        parts = tuple(range(end + part.start, end + part.stop) for end, (_, part) in zip(ends, rows, strict=False))
        is_all = len(fused) == ends[-1]
        return {f"{names[0]}.{suffix}": Target((ends[-1], *fused.shape[1:]), fused, 0, () if is_all else parts)}
    pieces = torch.split(fused, [len(part) for _, part in rows])
    return {
        f"{name}.{suffix}": _rows(piece, count, part)
        for name, piece, (count, part) in zip(names, pieces, rows, strict=True)
    }


def _whole(parameter: Tensor) -> Target:
    return Target(tuple(parameter.shape), parameter)


def _rows(parameter: Tensor, count: int, part: range) -> Target:
    return Target((count, *parameter.shape[1:]), parameter, 0, () if len(part) == count else (part,))


def _columns(parameter: Tensor, count: int, part: range) -> Target:
    return Target((parameter.shape[0], count), parameter, 1, () if len(part) == count else (part,))


def _times(part: range, size: int) -> range:
    """The elements of consecutive things of `size` elements each."""
    return range(part.start * size, part.stop * size)


def _stored_by_own_name(entries: Entries, config: ModelConfig) -> dict[str, StoredTensor]:
    """The tensors of the files by the names that the engine has for them; those of other parts of the model, such as an
    encoder of images, are left out."""
    names, stored = family_of(config.architecture).names, dict[str, StoredTensor]()
    for name, tensor in stored_tensors(entries, config.weight_format).items():
        own = names.logical(name)
        if own in stored:
            raise ConfigError(f"{tensor.entry.file}: tensor {tensor.name} is {own}, as is {stored[own].name}")
        if own is not None:
            stored[own] = tensor
    return stored


def _check_stored(
    stored: dict[str, StoredTensor], targets: dict[str, Target], config: ModelConfig, folder: Path
) -> None:
    for name, tensor in stored.items():
        if name in targets:
            _check_tensor(name, tensor, targets[name])
        elif not _is_redundant(name, config) and not _may_be_zeros(name, config):
            raise ConfigError(
                f"{tensor.entry.file}: tensor {tensor.name} is not part of {config.architecture} as config.json has it"
            )
    if missing := [name for name in targets if name not in stored]:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ConfigError(f"{folder}: the weights lack {', '.join(missing[:3])}{more}")


def _check_tensor(name: str, tensor: StoredTensor, target: Target) -> None:
    if tensor.quantized is None:
        name = tensor.name  # as the file has it
    if tensor.shape != target.shape:
        raise ConfigError(
            f"{tensor.entry.file}: tensor {name} has shape {list(tensor.shape)}; "
            f"config.json requires {list(target.shape)}"
        )
    if tensor.quantized is None:
        check_type(tensor.entry, name, FLOAT_TYPES)


def _is_redundant(name: str, config: ModelConfig) -> bool:
    """Tensors that repeat others: old Llama checkpoints stored the rope frequencies, some store a tied head. And those
    of layers that predict further tokens."""
    if name.startswith(tuple(f"model.layers.{config.num_layers + extra}." for extra in range(config.num_extra_layers))):
        return True
    return name.endswith(".rotary_emb.inv_freq") or (name == LM_HEAD and config.tied_embeddings)


def _may_be_zeros(name: str, config: ModelConfig) -> bool:
    """Whether it is a bias that some files in GPTQ have for a layer that has none."""
    return isinstance(config.weight_format, Gptq) and name.endswith("_proj.bias") and not _is_redundant(name, config)


def _check_zeros(
    reader: TensorReader, stored: dict[str, StoredTensor], targets: dict[str, Target], config: ModelConfig
) -> None:
    for name, tensor in stored.items():
        if name in targets or not _may_be_zeros(name, config):
            continue
        for _, values in reader.pieces(name, [range(size) for size in tensor.shape]):
            if bool(values.any()):
                raise ConfigError(
                    f"{tensor.entry.file}: tensor {tensor.name} is not zero, but not part of {config.architecture} "
                    "as config.json has it"
                )


def _fill(target: Target, name: str, reader: TensorReader) -> None:
    if not target.nbytes:
        return
    for part, parameter in _parts(target):
        for place, piece in reader.pieces(name, part):
            wanted = parameter[place]
            wanted.copy_(piece.reshape(wanted.shape))


def _parts(target: Target) -> Iterator[tuple[list[range], Tensor]]:
    """The indices that this rank takes, of each dimension, and the slice of the parameter that they fill."""
    whole, start = [range(size) for size in target.shape], 0
    for indices in target.parts or (whole[target.dim],):
        part, parameter = [*whole[: target.dim], indices, *whole[target.dim + 1 :]], target.parameter
        if len(target.parts) > 1:
            parameter = parameter.narrow(target.dim, start, len(indices))
        yield part, parameter
        start += len(indices)


def _check_tied(reader: TensorReader, embedding: Target, head: StoredTensor) -> None:
    """A stored head beside tied embeddings must be the embedding; which one counts would be a guess otherwise."""
    is_same = head.shape == embedding.shape and all(
        torch.equal(piece.to(parameter), parameter[place])
        for part, parameter in _parts(embedding)
        for place, piece in reader.pieces(LM_HEAD, part)
    )
    if not is_same:
        raise ConfigError(f"{head.entry.file}: {LM_HEAD} differs from {EMBEDDING}, but `tie_word_embeddings` is true")


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
