"""The paged KV cache: a tensor of each cache group, made once, owned by the model runner, and the arithmetic of its
blocks.

A block holds `block_size` tokens of all layers of a group. The block manager assigns blocks to sequences; here a
block is only an index. KV goes in and out through staging memory, in the slices that a worker of another shape sends or
wants (`sharding.kv_routes`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from disagg.engine.cache_groups import (
    SCALE_BYTES,
    PoolLimits,
    check_kv_dtype,
    head_block_bytes,
    model_layout,
    most_blocks,
    rank_block_bytes,
    window_pools,
)
from disagg.engine.checkpoint.model_config import ModelConfig
from disagg.engine.kv_transfer.transport import UNKEYED, Checksum
from disagg.engine.runner.model.device_inputs import Mark
from disagg.engine.runner.model.host_staging import GatheredPart, HostStaging
from disagg.engine.runner.model.kv_digests import DigestSums
from disagg.engine.sharding.kv_routes import LocalSlice, slices_to_receive, slices_to_send, stage_places
from disagg.engine.sharding.shards import WHOLE, Shard
from disagg.engine.sharding.stages import stage_ranges
from disagg.kernels.cpu.memory import HugePages, populate
from disagg.kernels.dispatch import gather_kv, scatter_kv
from disagg.proto.errors import ConfigError
from disagg.proto.messages import BufferSize, CacheGroup, KvLayout, ParallelShape

_ONE = PoolLimits(max_num_seqs=1, token_budget=1)


def kv_layout(config: ModelConfig, dtype: str, *, keeps_all: bool = False) -> KvLayout:
    """What is kept of the KV of a sequence; `dtype` is a torch dtype name, of which int8 has a scale in each row.
    `keeps_all`: also what has left a window.

    Raises:
        ConfigError: as `layout_of` and `check_kv_dtype`.
    """
    check_kv_dtype(config, dtype)
    return model_layout(config, dtype, getattr(torch, dtype).itemsize, keeps_all=keeps_all)


def count_blocks(
    layout: KvLayout,
    block_size: int,
    kv_cache_bytes: int,
    num_blocks: int | None,
    shard: Shard = WHOLE,
    draft: KvLayout | None = None,
    limits: PoolLimits = _ONE,
    stage_ends: Sequence[int] = (),
) -> int:
    """`num_blocks` where it is given, else how many blocks of the first cache group, with the heads and the layers that
    the rank holds, fit into `kv_cache_bytes`, beside as many of a draft model and the pools of windows
    (`window_pools`). The ranks of a worker take the smallest number of any. `stage_ends`: as of `ParallelShape`.

    Raises:
        ConfigError: not even one block.
    """
    if num_blocks is not None:
        if num_blocks < 1:
            raise ConfigError(f"num_blocks must be at least 1, not {num_blocks}")
        return num_blocks
    layers = stage_ranges(stage_ends)[shard.stage] if stage_ends else None
    first, *others = [rank_block_bytes(group, block_size, shard, layers) for group in layout.groups]
    if draft is not None:
        first += draft.bytes_per_token * block_size
    found = most_blocks(layout, block_size, limits, kv_cache_bytes, (first, *others))
    if found < 1:
        pools = window_pools(layout, 1, block_size, limits)
        least = first + sum([pool * each for pool, each in zip(pools, others, strict=True)])
        beside = " with the windows of a sequence and a step" if others else ""
        raise ConfigError(f"kv_cache_bytes is {kv_cache_bytes}; one block of this model{beside} takes {least}")
    return found


class KvCache:
    """A tensor of each cache group, `[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]`, K then V; of one
    rank of several, the heads that it holds, and of one stage of several, its layers. `layout` is the whole model's.
    Where values are the first columns of the keys there is one plane in place of two. In 8 bits a row of `head_dim`
    numbers has its scale behind them.

    In memory the planes (K or V of a layer) come first and the blocks within them, so that what a layer reads of a
    sequence with neighbouring blocks lies in a row.

    The system gives it all of its pages here or, on a CPU, soon (`populate`), so that no transfer pays for the first
    use of one. On a CPU it is on huge pages: attention was a fifth faster so.
    """

    def __init__(
        self,
        layout: KvLayout,
        num_blocks: int,
        block_size: int,
        device: torch.device,
        shard: Shard = WHOLE,
        host_staging: HostStaging | None = None,
        window_blocks: Sequence[int] = (),
        *,
        stage_ends: Sequence[int] = (),
    ) -> None:
        """`host_staging`: the way to staging buffers that are not on `device`. `window_blocks`: blocks of each group
        beside the first. `stage_ends`: as in `ParallelShape`."""
        self._host_staging = host_staging
        self.layout = layout
        self.shard = shard
        self.shape = ParallelShape(tp=shard.size, stage_ends=tuple(stage_ends))
        places = [stage_places(group, self.shape)[shard.stage] for group in layout.groups]
        self.held = tuple(
            group.layers[held.start : held.stop] for group, held in zip(layout.groups, places, strict=True)
        )
        """Of each cache group, the model's layers that this stage has; axis 1 of the group's tensor."""
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._groups_NL2KBD = tuple(
            self._new_group(group, len(layers), pool, device)
            for group, layers, pool in zip(layout.groups, self.held, (num_blocks, *window_blocks), strict=True)
        )
        self.tensor_NL2KBD = self._groups_NL2KBD[0]
        """Of the first group."""
        self._layers: dict[int, tuple[int, Tensor, Tensor]] = {}
        for number, (group, held) in enumerate(zip(layout.groups, self._groups_NL2KBD, strict=True)):
            for place, layer in enumerate(self.held[number]):
                self._layers[layer] = number, *_planes(group, held[:, place])

    def _new_group(self, group: CacheGroup, num_layers: int, num_blocks: int, device: torch.device) -> Tensor:
        num_heads = len(self.shard.kv_heads(group.num_heads))
        planes = 2 if group.value_dim else 1
        row_size = group.key_dim + SCALE_BYTES.get(group.dtype, 0)
        shape = (num_layers, planes, num_blocks, num_heads, self.block_size, row_size)
        dtype: torch.dtype = getattr(torch, group.dtype)
        if device.type == "cpu":
            tensor_L2NKBD = HugePages().new(shape, dtype)
            populate(tensor_L2NKBD)
        else:
            tensor_L2NKBD = torch.zeros(shape, dtype=dtype, device=device)
        return tensor_L2NKBD.permute(2, 0, 1, 3, 4, 5)

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """(K, V) of one layer, strided views `[num_blocks, num_kv_heads, block_size, row size]`; V may be a view of
        K."""
        _, keys, values = self._layers[index]
        return keys, values

    def group_of(self, layer: int) -> int:
        """Number of the cache group of a layer."""
        return self._layers[layer][0]

    @property
    def buffers(self) -> tuple[BufferSize, ...]:
        """The tensor of each cache group that this stage has layers of."""
        return tuple(
            BufferSize(f"kv_window_{group.window}" if group.window else "kv", held.numel() * held.element_size())
            for group, held in zip(self.layout.groups, self._groups_NL2KBD, strict=True)
            if held.numel()
        )

    @property
    def nbytes(self) -> int:
        """Memory of the cache, all groups."""
        return sum([held.numel() * held.element_size() for held in self._groups_NL2KBD])

    def gather_part(
        self,
        block_table: Sequence[int],
        start: int,
        end: int,
        out: Tensor,
        peer: ParallelShape,
        checksum: Checksum = UNKEYED,
        *,
        group: int = 0,
    ) -> list[int]:
        """Copy the slices of tokens [start, end) of a cache group for a worker of the shape `peer` into `out`, a
        flat uint8 tensor; the checksum of each slice."""
        part = self.start_gather(block_table, start, end, out, peer, checksum, group=group)
        part.wait()
        return part.checksums()

    def start_gather(
        self,
        block_table: Sequence[int],
        start: int,
        end: int,
        out: Tensor,
        peer: ParallelShape,
        checksum: Checksum = UNKEYED,
        *,
        digests: bool = False,
        group: int = 0,
    ) -> GatheredPart:
        """As `gather_part`; on a GPU the copy is only queued. Checksums of a buffer in host memory are digests if
        `digests`, which the device computes; those of a buffer on a GPU always are."""
        slices = slices_to_send(self.layout.groups[group], self.shape, self.shard, peer)
        out = self._head_of(out, slices, start, end, group)
        staging = self._host_staging
        piece = None if staging is None else staging.piece(out.numel())
        filled = list(self._staged(out if piece is None else piece.memory, slices, end - start, group))
        for each, staged in zip(slices, filled, strict=True):
            gather_kv(self._held(group, each), block_table, start, end, staged)
        sums = DigestSums.of(filled, checksum) if digests or out.is_cuda else None
        if staging is not None and piece is not None:
            mark, sums = staging.to_host(piece, out, sums)
        else:
            sums = None if sums is None else sums.to_host()
            mark = Mark(pinned=out.is_cuda, blocking=True)
            mark.set()
        arrived = list(self._staged(out, slices, end - start, group))
        return GatheredPart(arrived, sums, mark, checksum, self.tensor_NL2KBD.device)

    def scatter_part(
        self,
        block_table: Sequence[int],
        start: int,
        end: int,
        data: Tensor,
        peer: ParallelShape,
        checksum: Checksum | None = None,
        *,
        group: int = 0,
    ) -> DigestSums | None:
        """Copy the slices of tokens [start, end) of a cache group that a worker of the shape `peer` sent from `data`,
        a flat uint8 tensor. On a GPU the copy is only queued. With `checksum` the digests of the slices, of what
        arrived on the cache's device."""
        slices = slices_to_receive(self.layout.groups[group], self.shape, self.shard, peer)
        data = self._head_of(data, slices, start, end, group)
        source = data if self._host_staging is None else self._host_staging.to_device(data)
        arrived = list(self._staged(source, slices, end - start, group))
        sums = None if checksum is None else DigestSums.of(arrived, checksum)
        for each, staged in zip(slices, arrived, strict=True):
            scatter_kv(self._held(group, each), block_table, start, end, staged)
        return sums

    def _held(self, group: int, held: LocalSlice) -> Tensor:
        layers, heads = held
        return self._groups_NL2KBD[group][:, layers.start : layers.stop, :, heads.start : heads.stop]

    def _head_of(self, buffer: Tensor, slices: tuple[LocalSlice, ...], start: int, end: int, group: int) -> Tensor:
        """What of a staging buffer the slices take."""
        nbytes = head_block_bytes(self.layout.groups[group], end - start) * sum([each.num_elements for each in slices])
        if buffer.numel() < nbytes:
            raise ValueError(f"tokens [{start}, {end}) take {nbytes} bytes; the buffer has {buffer.numel()}")
        return buffer[:nbytes]

    def _staged(self, buffer: Tensor, slices: tuple[LocalSlice, ...], num_tokens: int, group: int) -> Iterator[Tensor]:
        """The bytes of each slice in a staging buffer, without a copy."""
        element_bytes = head_block_bytes(self.layout.groups[group], num_tokens)
        first = 0
        for each in slices:
            last = first + element_bytes * each.num_elements
            yield buffer[first:last]
            first = last


def _planes(group: CacheGroup, held_N2KBD: Tensor) -> tuple[Tensor, Tensor]:
    keys = held_N2KBD[:, 0]
    return keys, held_N2KBD[:, 1] if group.value_dim else keys[..., : group.value_prefix]
