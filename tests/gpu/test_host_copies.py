"""KV on its way through the host's memory while the engine's stream is busy: more copies than there are pieces, none of
them waited for, each with its own bytes and the digest of them."""

from __future__ import annotations

import pytest
import torch

from disagg.engine.kv_transfer.transports.digest import digest
from disagg.engine.runner.model import host_staging
from disagg.engine.runner.model.device_inputs import Mark
from disagg.engine.runner.model.host_staging import HostStaging
from disagg.engine.runner.model.kv_cache import KvCache
from disagg.proto.messages import ONE_RANK, KvLayout
from tests.support.secret import checksum as keyed

LAYOUT = KvLayout.dense(num_layers=4, num_kv_heads=2, head_dim=64, dtype="float32", bytes_per_token=4 * 2 * 2 * 64 * 4)
BLOCK_SIZE = 16
NUM_CHUNKS = 3 * host_staging.MAX_PIECES
CHUNK_TOKENS = 32
TABLE = [(7 * index) % (2 * NUM_CHUNKS) for index in range(2 * NUM_CHUNKS)]


def cache_on(device: torch.device) -> tuple[KvCache, HostStaging]:
    staging = HostStaging(device)
    return KvCache(LAYOUT, 2 * NUM_CHUNKS, BLOCK_SIZE, device, host_staging=staging), staging


def keep_busy(device: torch.device) -> None:
    """Milliseconds of work on the current stream."""
    if device.type == "cuda":
        x = torch.randn(4096, 4096, device=device)
        for _ in range(20):
            x = (x @ x).clamp_(-1.0, 1.0)


@pytest.mark.parametrize("digests", [True, False])
def test_copies_that_nobody_waits_for_keep_their_bytes_apart(device: torch.device, digests: bool) -> None:
    cache, staging = cache_on(device)
    cache.tensor_NL2KBD.normal_()
    plain = KvCache(LAYOUT, 2 * NUM_CHUNKS, BLOCK_SIZE, torch.device("cpu"))
    plain.tensor_NL2KBD.copy_(cache.tensor_NL2KBD)
    nbytes = CHUNK_TOKENS * LAYOUT.bytes_per_token
    buffers = [torch.from_numpy(staging.new_buffer(nbytes)) for _ in range(NUM_CHUNKS)]
    ranges = [(CHUNK_TOKENS * number, CHUNK_TOKENS * (number + 1)) for number in range(NUM_CHUNKS)]
    keep_busy(device)
    parts = [
        cache.start_gather(TABLE, start, end, out, ONE_RANK, keyed, digests=digests)
        for (start, end), out in zip(ranges, buffers, strict=True)
    ]
    cache.tensor_NL2KBD.zero_()  # behind what reads it
    for part, (start, end), out in zip(parts, ranges, buffers, strict=True):
        part.wait()
        wanted = torch.zeros(nbytes, dtype=torch.uint8)
        plain.gather_part(TABLE, start, end, wanted, ONE_RANK)
        assert torch.equal(out, wanted)
        assert part.checksum() == (digest(wanted, keyed) if digests else keyed(wanted))


def test_what_arrives_has_the_digest_of_what_left_and_a_buffer_is_read_when_its_event_is_done(
    device: torch.device,
) -> None:
    cache, staging = cache_on(device)
    nbytes = CHUNK_TOKENS * LAYOUT.bytes_per_token
    buffer = torch.from_numpy(staging.new_buffer(nbytes))
    content = (torch.arange(nbytes) * 2654435761 >> 7).to(torch.uint8)
    keep_busy(device)
    for start in (0, CHUNK_TOKENS):
        buffer.copy_(content)
        sums = cache.scatter_part(TABLE, start, start + CHUNK_TOKENS, buffer, ONE_RANK, keyed)
        assert sums is not None
        sums, mark = sums.to_host(), Mark(pinned=device.type == "cuda")
        mark.set()
        mark.wait()
        buffer.zero_()
        assert sums.digests(keyed) == [digest(content, keyed)]
    for start in (0, CHUNK_TOKENS):
        out = torch.from_numpy(staging.new_buffer(nbytes))
        cache.gather_part(TABLE, start, start + CHUNK_TOKENS, out, ONE_RANK)
        assert torch.equal(out, content)
