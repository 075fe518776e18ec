"""The paged KV cache: one tensor, made once, owned by the model runner, and the arithmetic of its blocks.

A block holds `block_size` tokens of all layers. The block manager assigns blocks to sequences; here a
block is only an index. KV goes in and out through staging memory, in the slices that a worker of another width sends or
wants (`sharding.kv_routes`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from disagg.engine.checkpoint.model_config import ModelConfig
from disagg.engine.kv_transfer.transport import UNKEYED, Checksum
from disagg.engine.runner.model.device_inputs import Mark
from disagg.engine.runner.model.host_staging import GatheredPart, HostStaging
from disagg.engine.runner.model.kv_digests import DigestSums
from disagg.engine.sharding.kv_routes import heads_to_receive, heads_to_send
from disagg.engine.sharding.shards import WHOLE, Shard
from disagg.kernels.cpu.memory import HugePages, populate
from disagg.kernels.dispatch import gather_kv, scatter_kv
from disagg.proto.errors import ConfigError
from disagg.proto.messages import KvLayout


def kv_layout(config: ModelConfig, dtype: str) -> KvLayout:
    """The shape of one token's KV; `dtype` is a torch dtype name."""
    element_bytes = getattr(torch, dtype).itemsize
    return KvLayout.dense(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=dtype,
        bytes_per_token=config.num_kv_heads * config.kv_head_bytes(element_bytes),
    )


def count_blocks(
    layout: KvLayout,
    block_size: int,
    kv_cache_bytes: int,
    num_blocks: int | None,
    shard: Shard = WHOLE,
    draft: KvLayout | None = None,
) -> int:
    """`num_blocks` where it is given, else how many blocks, with the heads that the rank holds, fit into
    `kv_cache_bytes`, beside as many of a draft model.

    Raises:
        ConfigError: not even one block.
    """
    if num_blocks is not None:
        if num_blocks < 1:
            raise ConfigError(f"num_blocks must be at least 1, not {num_blocks}")
        return num_blocks
    head_bytes = layout.bytes_per_token // layout.groups[0].num_heads * block_size
    block_bytes = head_bytes * len(shard.kv_heads(layout.groups[0].num_heads))
    if draft is not None:
        block_bytes += draft.bytes_per_token * block_size
    if kv_cache_bytes < block_bytes:
        raise ConfigError(f"kv_cache_bytes is {kv_cache_bytes}; one block of this model takes {block_bytes}")
    return kv_cache_bytes // block_bytes


class KvCache:
    """`[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]`, K then V; of one rank of several, the heads
    that it holds. `layout` is the whole model's.

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
    ) -> None:
        """`host_staging`: the way to staging buffers that are not on `device`."""
        self._host_staging = host_staging
        self.layout = layout
        self.shard = shard
        self.num_blocks = num_blocks
        self.block_size = block_size
        (group,) = layout.groups
        num_heads = len(shard.kv_heads(group.num_heads))
        shape = (len(group.layers), 2, num_blocks, num_heads, block_size, group.key_dim)
        dtype: torch.dtype = getattr(torch, group.dtype)
        if device.type == "cpu":
            tensor_L2NKBD = HugePages().new(shape, dtype)
            populate(tensor_L2NKBD)
        else:
            tensor_L2NKBD = torch.zeros(shape, dtype=dtype, device=device)
        self.tensor_NL2KBD = tensor_L2NKBD.permute(2, 0, 1, 3, 4, 5)
        self._layers = tuple(
            (self.tensor_NL2KBD[:, layer, 0], self.tensor_NL2KBD[:, layer, 1]) for layer in range(len(group.layers))
        )

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """(K, V) of one layer, strided views `[num_blocks, num_kv_heads, block_size, head_dim]`."""
        return self._layers[index]

    @property
    def nbytes(self) -> int:
        """Memory of the cache."""
        return self.tensor_NL2KBD.numel() * self.tensor_NL2KBD.element_size()

    def gather_part(
        self, block_table: Sequence[int], start: int, end: int, out: Tensor, peer_tp: int, checksum: Checksum = UNKEYED
    ) -> list[int]:
        """Copy the slices of tokens [start, end) for a worker of `peer_tp` ranks into `out`, a flat uint8 tensor; the
        checksum of each slice."""
        part = self.start_gather(block_table, start, end, out, peer_tp, checksum)
        part.wait()
        return part.checksums()

    def start_gather(
        self,
        block_table: Sequence[int],
        start: int,
        end: int,
        out: Tensor,
        peer_tp: int,
        checksum: Checksum = UNKEYED,
        *,
        digests: bool = False,
    ) -> GatheredPart:
        """As `gather_part`; on a GPU the copy is only queued. Checksums of a buffer in host memory are digests if
        `digests`, which the device computes; those of a buffer on a GPU always are."""
        slices = heads_to_send(self.layout.groups[0].num_heads, self.shard, peer_tp)
        out = self._head_of(out, slices, start, end)
        staging = self._host_staging
        piece = None if staging is None else staging.piece(out.numel())
        filled = [staged for _, staged in self._staged(out if piece is None else piece.memory, slices, start, end)]
        for heads, staged in zip(slices, filled, strict=True):
            gather_kv(self._heads(heads), block_table, start, end, staged)
        sums = DigestSums.of(filled, checksum) if digests or out.is_cuda else None
        if staging is not None and piece is not None:
            mark, sums = staging.to_host(piece, out, sums)
        else:
            sums = None if sums is None else sums.to_host()
            mark = Mark(pinned=out.is_cuda, blocking=True)
            mark.set()
        arrived = [staged for _, staged in self._staged(out, slices, start, end)]
        return GatheredPart(arrived, sums, mark, checksum, self.tensor_NL2KBD.device)

    def scatter_part(
        self,
        block_table: Sequence[int],
        start: int,
        end: int,
        data: Tensor,
        peer_tp: int,
        checksum: Checksum | None = None,
    ) -> DigestSums | None:
        """Copy the slices of tokens [start, end) that a worker of `peer_tp` ranks sent from `data`, a flat uint8
        tensor. On a GPU the copy is only queued. With `checksum` the digests of the slices, of what arrived on the
        cache's device."""
        slices = heads_to_receive(self.layout.groups[0].num_heads, self.shard, peer_tp)
        data = self._head_of(data, slices, start, end)
        source = data if self._host_staging is None else self._host_staging.to_device(data)
        arrived = [staged for _, staged in self._staged(source, slices, start, end)]
        sums = None if checksum is None else DigestSums.of(arrived, checksum)
        for heads, staged in zip(slices, arrived, strict=True):
            scatter_kv(self._heads(heads), block_table, start, end, staged)
        return sums

    @property
    def _head_bytes_per_token(self) -> int:
        return self.layout.bytes_per_token // self.layout.groups[0].num_heads

    def _heads(self, heads: range) -> Tensor:
        return self.tensor_NL2KBD[:, :, :, heads.start : heads.stop]

    def _head_of(self, buffer: Tensor, slices: tuple[range, ...], start: int, end: int) -> Tensor:
        """What of a staging buffer the slices take."""
        nbytes = (end - start) * self._head_bytes_per_token * sum(map(len, slices))
        if buffer.numel() < nbytes:
            raise ValueError(f"tokens [{start}, {end}) take {nbytes} bytes; the buffer has {buffer.numel()}")
        return buffer[:nbytes]

    def _staged(
        self, buffer: Tensor, slices: tuple[range, ...], start: int, end: int
    ) -> Iterator[tuple[range, Tensor]]:
        """The heads of each slice and its bytes in a staging buffer, without a copy."""
        head_bytes = (end - start) * self._head_bytes_per_token
        first = 0
        for heads in slices:
            last = first + head_bytes * len(heads)
            yield heads, buffer[first:last]
            first = last
