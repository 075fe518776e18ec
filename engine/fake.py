"""A model runner without a model: deterministic, cheap, and strict about its KV.

The "KV" of a token is (token id, position), written to pages through the block table as a real model would. The next
token is a hash of everything read back from the pages, so KV that is lost, stale, mixed up or in the wrong place gives
other tokens, and a test compares with `fake_generate`. Sampling parameters are ignored: it is always greedy.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

import numpy as np
import numpy.typing as npt

from disagg.engine.plan import Buffer, ScheduledSequence, StepPlan
from disagg.proto.messages import KvLayout

FAKE_FINGERPRINT = "fake"
DEFAULT_VOCAB_SIZE = 32_000

_BYTES_PER_TOKEN = 8
_UNWRITTEN = 0xFFFFFFFF
_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15

U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]


class FakeModelRunner:
    """A `ModelRunner` over numpy pages.

    Args:
        step_time_s: how long a step should take; with `sleep`, makes demos run at a believable pace.
        sleep: called with that time.

    Raises:
        ValueError: if `vocab_size` is not positive.
    """

    fingerprint = FAKE_FINGERPRINT

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        vocab_size: int = DEFAULT_VOCAB_SIZE,
        *,
        step_time_s: Callable[[StepPlan], float] | None = None,
        sleep: Callable[[float], None] | None = None,
    ) -> None:
        if vocab_size < 1:
            raise ValueError(f"vocab_size must be positive, not {vocab_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self.layout = KvLayout(num_layers=1, num_kv_heads=1, head_dim=1, dtype="fake", bytes_per_token=_BYTES_PER_TOKEN)
        self._step_time_s = step_time_s
        self._sleep = sleep
        self._pages: U32 = np.full((2, num_blocks, block_size), _UNWRITTEN, dtype=np.uint32)

    def run(self, plan: StepPlan) -> list[int]:
        """Write the scheduled tokens to the pages, all entries first; then sample."""
        for entry in plan.entries:
            self._write(entry)
        if self._step_time_s is not None and self._sleep is not None:
            self._sleep(self._step_time_s(plan))
        return [self._sample(entry) for entry in plan.entries if entry.samples]

    def new_staging(self, nbytes: int) -> Buffer:
        """A uint8 array."""
        return np.empty(nbytes, dtype=np.uint8)

    def gather(self, block_table: Seq[int], start: int, end: int, out: Buffer) -> None:
        """Copy tokens [start, end) into the first (end - start) * 8 bytes of `out`: all K (u32), then all V (u32).

        Raises:
            ValueError: if `out` is too small.
        """
        blocks, offsets = self._slots(block_table, start, end)
        self._payload(out, end - start)[...] = self._pages[:, blocks, offsets]

    def scatter(self, block_table: Seq[int], start: int, end: int, data: Buffer) -> None:
        """The reverse of `gather`.

        Raises:
            ValueError: if `data` is too small.
        """
        blocks, offsets = self._slots(block_table, start, end)
        self._pages[:, blocks, offsets] = self._payload(data, end - start)

    def _write(self, entry: ScheduledSequence) -> None:
        end = entry.start + entry.num_tokens
        blocks, offsets = self._slots(entry.sequence.block_table, entry.start, end)
        self._pages[0, blocks, offsets] = entry.sequence.token_ids[entry.start : end]
        self._pages[1, blocks, offsets] = np.arange(entry.start, end)

    def _sample(self, entry: ScheduledSequence) -> int:
        blocks, offsets = self._slots(entry.sequence.block_table, 0, entry.start + entry.num_tokens)
        token_ids, positions = self._pages[:, blocks, offsets]
        return _token_of(_digest(token_ids, positions), self.vocab_size)

    def _slots(
        self, block_table: Seq[int], start: int, end: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        first_block = start // self.block_size
        blocks = np.array(block_table[first_block : -(-end // self.block_size)], dtype=np.int64)
        slots = np.arange(start, end)
        return blocks[slots // self.block_size - first_block], slots % self.block_size

    def _payload(self, buffer: Buffer, num_tokens: int) -> U32:
        nbytes = num_tokens * _BYTES_PER_TOKEN
        if buffer.nbytes < nbytes:
            raise ValueError(f"{num_tokens} tokens of KV are {nbytes} bytes, the buffer has {buffer.nbytes}")
        words: U32 = buffer[:nbytes].view(np.uint32)
        return words.reshape(2, num_tokens)


def fake_generate(prompt_token_ids: Seq[int], num_tokens: int, vocab_size: int = DEFAULT_VOCAB_SIZE) -> list[int]:
    """The tokens that a `FakeModelRunner` must answer to a prompt, whoever computes it and however it is cut."""
    positions = np.arange(len(prompt_token_ids), dtype=np.uint32)
    digest = _digest(np.array(prompt_token_ids, dtype=np.uint32), positions)
    output: list[int] = []
    for position in range(len(prompt_token_ids), len(prompt_token_ids) + num_tokens):
        output.append(_token_of(digest, vocab_size))
        digest += _digest(np.array(output[-1:], dtype=np.uint32), np.array([position], dtype=np.uint32), position)
    return output


def _digest(token_ids: U32, positions: U32, first_index: int = 0) -> int:
    """The sum of one mixed word per token. The index at which a token was read is mixed in beside the position that was
    stored with it, so that exchanged slots show."""
    index = np.arange(first_index, first_index + len(token_ids), dtype=np.uint64)
    words = (token_ids.astype(np.uint64) << np.uint64(32)) | positions.astype(np.uint64)
    return int(_mix(words ^ _mix(index)).sum(dtype=np.uint64))


def _mix(words: U64) -> U64:
    """The finalizer of SplitMix64 (Steele, Lea, Flood 2014)."""
    words = words + np.uint64(_GOLDEN)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def _token_of(digest: int, vocab_size: int) -> int:
    return int(_mix(np.array([digest & _MASK], dtype=np.uint64))[0]) % vocab_size
