"""The paged KV cache: one tensor, made once, owned by the model runner, and the arithmetic of its blocks.

A block holds `block_size` tokens of all layers, so that it moves between workers as one piece. Which block belongs to
whom is the block manager's business; here a block is only an index.
"""

from __future__ import annotations

import torch
from torch import Tensor

from disagg.engine.checkpoint import ModelConfig
from disagg.proto.errors import ConfigError
from disagg.proto.messages import KvLayout


def kv_layout(config: ModelConfig, dtype: str) -> KvLayout:
    """The shape of one token's KV; `dtype` is a torch dtype name."""
    element_bytes = getattr(torch, dtype).itemsize
    return KvLayout(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=dtype,
        bytes_per_token=2 * config.num_layers * config.num_kv_heads * config.head_dim * element_bytes,
    )


def count_blocks(layout: KvLayout, block_size: int, kv_cache_bytes: int, num_blocks: int | None) -> int:
    """`num_blocks` where it is given, else how many blocks fit into `kv_cache_bytes`.

    Raises:
        ConfigError: not even one block.
    """
    if num_blocks is not None:
        if num_blocks < 1:
            raise ConfigError(f"num_blocks must be at least 1, not {num_blocks}")
        return num_blocks
    block_bytes = layout.bytes_per_token * block_size
    if kv_cache_bytes < block_bytes:
        raise ConfigError(f"kv_cache_bytes is {kv_cache_bytes}; one block of this model takes {block_bytes}")
    return kv_cache_bytes // block_bytes


def blocks_for_tokens(num_tokens: int, block_size: int) -> int:
    """Blocks that hold `num_tokens` tokens."""
    return -(-num_tokens // block_size)


class KvCache:
    """`[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]`, K then V.

    Contents are undefined until written.
    """

    def __init__(self, layout: KvLayout, num_blocks: int, block_size: int, device: torch.device) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.block_size = block_size
        shape = (num_blocks, layout.num_layers, 2, layout.num_kv_heads, block_size, layout.head_dim)
        self.tensor_NL2KBD = torch.empty(shape, dtype=getattr(torch, layout.dtype), device=device)
        self._layers = tuple(
            (self.tensor_NL2KBD[:, layer, 0], self.tensor_NL2KBD[:, layer, 1]) for layer in range(layout.num_layers)
        )

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """(K, V) of one layer, strided views `[num_blocks, num_kv_heads, block_size, head_dim]`."""
        return self._layers[index]

    @property
    def nbytes(self) -> int:
        """Memory of the cache."""
        return self.tensor_NL2KBD.numel() * self.tensor_NL2KBD.element_size()

    def token_bytes(self, num_tokens: int) -> int:
        """Bytes of the KV of `num_tokens` tokens, all layers."""
        return num_tokens * self.layout.bytes_per_token
