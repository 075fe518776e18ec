"""From safetensors files to the decoder's parameters.

`weight_targets.py` lists which tensor of the checkpoint fills which (slice of a) parameter; `load_parameters` checks
every header against it before it reads any data, then copies tensor by tensor out of the memory map, casting on the
way. Quantized tensors are dequantized in pieces on the way, or kept in few bits beside the parameters. Beyond the
parameters themselves no more than one tensor is held. Of what ranks share, each reads its own part, and of what another
stage has, headers only. Nothing is ever unpickled.
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
from torch import Tensor

from disagg.engine.checkpoint.checkpoint import read_model_config
from disagg.engine.checkpoint.families.registry import family_of
from disagg.engine.checkpoint.formats.gptq import Gptq
from disagg.engine.checkpoint.formats.reader import TensorReader
from disagg.engine.checkpoint.formats.stored import Entries, StoredTensor, check_type, stored_tensors
from disagg.engine.checkpoint.model_config import LatentConfig, ModelConfig
from disagg.engine.checkpoint.weight_headers import read_group_headers, read_headers
from disagg.engine.runner.encoder import check_encoder
from disagg.engine.runner.group_scales import GroupScales
from disagg.engine.runner.model.parameters import (
    LatentParameters,
    LayerParameters,
    ModelParameters,
    allocate_parameters,
    plain,
)
from disagg.engine.runner.weight_targets import EMBEDDING, LM_HEAD, Target, checkpoint_tensors
from disagg.engine.sharding.model_shards import rank_model, vocab_part
from disagg.engine.sharding.shards import WHOLE, Shard
from disagg.proto.errors import ConfigError

FLOAT_TYPES = ("F64", "F32", "BF16", "F16")


class _Advance(Protocol):
    def __call__(self, nbytes: int, /) -> None: ...


def load_parameters(
    folder: str | Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    shard: Shard = WHOLE,
    scales: GroupScales | None = None,
) -> ModelParameters:
    """The parameters of a checkpoint, or one rank's part of them, in `dtype` on `device`. `scales` is given those of
    weights that were dequantized, and the experts in MXFP4 that it keeps in place of their parameters.

    Raises:
        ConfigError: the model cannot be divided among the ranks; or a file or tensor is missing, cut short, of another
            shape or type than the configuration requires, or not part of the model.
    """
    local = rank_model(config, shard)
    entries = read_headers(folder)
    stored = _stored_by_own_name(entries, config)
    parameters = allocate_parameters(local, dtype, device, shard)
    targets = known = checkpoint_tensors(config, parameters, shard)
    if shard.stages > 1:
        known = _whole_targets(config)
    _check_stored(stored, known, config, Path(folder))
    total = sum(target.nbytes for target in targets.values())
    with TensorReader(stored, {**entries, **read_group_headers(folder)}) as reader, _progress_bar(total) as advance:
        _check_zeros(reader, stored, known, config)
        for name in stored:
            if name in targets:
                _fill(targets[name], name, reader, scales)
                advance(targets[name].nbytes)
        if EMBEDDING in targets and config.tied_embeddings and LM_HEAD in stored and not config.gives_vectors:
            _check_tied(reader, targets[EMBEDDING], stored[LM_HEAD])
    for layer, held in zip(local.layers, parameters.layers, strict=True):
        if layer.attention.latent is not None and held.latent is not None:
            _separate_pairs(layer.attention.latent, held, held.latent)
    num_padding_rows = local.vocab_size - len(vocab_part(config, shard))
    for vocabulary_VH in (parameters.embedding_VH, plain(parameters.lm_head_VH)):
        vocabulary_VH[local.vocab_size - num_padding_rows :] = 0
    return parameters


def _separate_pairs(latent: LatentConfig, held: LayerParameters, weights: LatentParameters) -> None:
    """Put the rows that are rotated together half a part apart, as all other models have them. Queries and keys are in
    the same order then, so that their products are those of the checkpoint's order."""
    if not latent.interleaved:
        return
    qkv_weight_QH, q_up_weight_PG = plain(held.qkv_weight_QH), weights.q_up_weight_PG
    queries = qkv_weight_QH[: -latent.cache_dim] if q_up_weight_PG is None else plain(q_up_weight_PG)
    heads = queries.view(-1, latent.query_dim, queries.shape[1])
    for rows in (heads[:, latent.key_dim :], qkv_weight_QH[None, -latent.rope_dim :]):
        rows.copy_(torch.cat((rows[:, ::2], rows[:, 1::2]), dim=1))


def check_weights(folder: str | Path) -> None:
    """Hold the weight files of a checkpoint against its config.json, without loading them.

    Raises:
        ConfigError: as `read_model_config` and `load_parameters` do; only values that are no numbers are not seen.
    """
    config = read_model_config(folder)
    if config.encoder is not None:
        check_encoder(str(folder), config)
        return
    entries = read_headers(folder)
    stored = _stored_by_own_name(entries, config)
    targets = _whole_targets(config)
    _check_stored(stored, targets, config, Path(folder))
    with TensorReader(stored, entries) as reader:
        reader.check()
        _check_zeros(reader, stored, targets, config)


def _whole_targets(config: ModelConfig) -> dict[str, Target]:
    """Of all tensors of the model, without memory."""
    return checkpoint_tensors(config, allocate_parameters(config, torch.bfloat16, torch.device("meta")))


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


_OF_LINEAR = ("_proj.bias", ".w1.bias", ".w2.bias", ".w3.bias")
"""Ends of the names of biases of linear layers, those of experts included."""


def _may_be_zeros(name: str, config: ModelConfig) -> bool:
    """Whether it is a bias that some files in GPTQ have for a layer that has none."""
    return isinstance(config.weight_format, Gptq) and name.endswith(_OF_LINEAR) and not _is_redundant(name, config)


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


def _fill(target: Target, name: str, reader: TensorReader, scales: GroupScales | None) -> None:
    if not target.nbytes:
        return
    for part, parameter in _parts(target):
        if scales is not None and scales.experts is not None and (kept := reader.mxfp4_pieces(name, part)) is not None:
            for place, weight in kept:
                scales.experts.put(parameter[place], weight)
            continue
        for place, piece in reader.pieces(name, part):
            wanted = parameter[place]
            wanted.copy_(piece.reshape(wanted.shape))
        if scales is not None and parameter.dim() == 2 and (groups := reader.groups(name, part)) is not None:
            scales.put(parameter, groups)


def _parts(target: Target) -> Iterator[tuple[list[range], Tensor]]:
    """The indices that this rank takes, of each dimension, and the slice of the parameter that they fill."""
    whole, start = [range(size) for size in target.shape], 0
    for number, indices in enumerate(target.parts or (whole[target.dim],)):
        part, parameter = [*whole[: target.dim], indices, *whole[target.dim + 1 :]], target.parameter
        if target.into:
            parameter = target.into[number]
        elif len(target.parts) > 1:
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
