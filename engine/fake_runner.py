"""A model runner without a model: deterministic, cheap, and strict about its KV.

The "KV" of a token is (token id, position), written to pages through the block table as a real model would. The next
token is a hash of everything read back from the pages, so KV that is lost, stale, mixed up or in the wrong place gives
other tokens, and a test compares with `fake_generate`.

What follows the greedy token g in a vocabulary of V: token t has the logarithm of a probability

    -1 - min((t - g) mod V, 50) - (g mod 64) / 64          exact in binary; not a distribution, but less than one

(`fake_logprobs`). `logit_bias` is added to it, so that 100 forces a token and -100 bans it; the rest of the sampling
parameters is ignored: it is always greedy.

With windows (`windows`) each is a cache group of its own, with pages of its own, and the hash covers what is read back
of the last tokens from those, too: a block that is given back too early, is resumed without, or is not sent, gives
other tokens.

With several KV heads each stores the same, shifted by its number, so that exchanged heads show, and so does each of
several layers. A rank of several holds its heads only, and a stage its layers; it reads back only those. Each cache
group has `num_layers` layers, which alternate: those of two groups are numbers 0, 2, .. and 1, 3, ...
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from itertools import pairwise

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from disagg.engine.adapters.folder import check_config
from disagg.engine.batch_arrays import BatchArrays, BatchBuilder
from disagg.engine.cache_groups import LayerKv, layout_of
from disagg.engine.config import AdapterOptions
from disagg.engine.kv_transfer.transport import UNKEYED, Checksum
from disagg.engine.plan import (
    Buffer,
    ComputedStep,
    LoadedAdapter,
    QueuedStep,
    ScheduledSequence,
    StepPlan,
    StepQueue,
    StepResult,
    WarmUp,
)
from disagg.engine.randomness import first_outputs
from disagg.engine.rank_kv import RankKv
from disagg.engine.sharding.kv_routes import LocalSlice, check_shape, slices_to_receive, slices_to_send, stage_places
from disagg.engine.sharding.shards import WHOLE, Shard
from disagg.proto.ids import AttemptKey
from disagg.proto.messages import Adapter, ParallelShape, Pooling, TokenLogprobs
from disagg.proto.splitmix import splitmix64

FAKE_FINGERPRINT = "fake"
DEFAULT_VOCAB_SIZE = 32_000
FAKE_HIDDEN_SIZE = 16
"""Numbers of a vector of a pooled request."""

_LARGEST_RANK = 50
_LARGEST_ADAPTER = 64 << 20
_HEAD_BYTES_PER_TOKEN = 8
_HEAD_SHIFT = 0x9E3779B1
_LAYER_SHIFT = 0x85EBCA77
_UNWRITTEN = 0xFFFFFFFF
_HALF_WORD = np.uint64(32)
_WINDOW_FACTOR = 0x9E3779B97F4A7C15
"""Tells the digests of the cache groups apart."""

I64 = npt.NDArray[np.int64]
U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]


class FakeModelRunner(RankKv):
    """A `ModelRunner`, and structurally a `parallel.interfaces.ShardRunner`, over numpy pages.

    Args:
        step_time_s: how long a step should take; with `sleep`, makes demos run at a believable pace.
        sleep: called with that time.
        num_kv_heads: of the whole model.
        num_layers: of each cache group of the whole model.
        stage_ends: as in `ParallelShape`; by default stages of equally many layers of each group.
        windows: of each cache group beside the first, its window in tokens and its number of blocks.
        shard: which rank it is; its pages hold that rank's heads of its stage's layers.
        adapters: folder of adapters, whose fingerprints change what is written and what follows.

    Raises:
        ValueError: if `vocab_size`, `num_kv_heads` or `num_layers` is not positive, the heads cannot be divided among
            the ranks, or a stage has no layer, or the first stage none of some group, which rank 0 has to read back.
    """

    fingerprint = FAKE_FINGERPRINT
    arithmetic = "fake"
    step_queue: StepQueue | None = None
    checksum: Checksum = UNKEYED
    capture_sizes: tuple[int, ...] = ()

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        vocab_size: int = DEFAULT_VOCAB_SIZE,
        *,
        step_time_s: Callable[[StepPlan], float] | None = None,
        sleep: Callable[[float], None] | None = None,
        num_kv_heads: int = 1,
        num_layers: int = 1,
        stage_ends: Seq[int] = (),
        windows: Seq[tuple[int, int]] = (),
        shard: Shard = WHOLE,
        adapters: AdapterOptions | None = None,
    ) -> None:
        if vocab_size < 1:
            raise ValueError(f"vocab_size must be positive, not {vocab_size}")
        if num_kv_heads < 1:
            raise ValueError(f"num_kv_heads must be positive, not {num_kv_heads}")
        if num_layers < 1:
            raise ValueError(f"num_layers must be positive, not {num_layers}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self.shard = shard
        self.warm_up = WarmUp()
        self.windows = tuple(window for window, _ in windows)
        self.window_blocks = tuple(pool for _, pool in windows)
        head = LayerKv(0, num_kv_heads, 1, 1)
        layers = [head, *(head._replace(window=window) for window in self.windows)] * num_layers
        self.layout = layout_of(layers, "fake", _HEAD_BYTES_PER_TOKEN / 2)
        if shard.stages > 1 and not stage_ends:
            every = [num_layers * (stage + 1) // shard.stages for stage in range(shard.stages)]
            stage_ends = [each * len(self.layout.groups) for each in every]
        self.shape = ParallelShape(tp=shard.size, stage_ends=tuple(stage_ends))
        check_shape(self.shape, self.layout, "the fake model")
        places = [stage_places(group, self.shape)[shard.stage] for group in self.layout.groups]
        if shard.is_first and not all(places):
            raise ValueError("the first stage of the fake model has no layer of some cache group")
        self._step_time_s = step_time_s
        self._sleep = sleep
        self._batches = BatchBuilder(block_size, max_model_len, len(self.windows), has_adapters=adapters is not None)
        self._adapters = adapters
        self._words_S: U32 = np.zeros(1 + (0 if adapters is None else adapters.max_loaded), dtype=np.uint32)
        """Of the adapter in each slot a number that is added to each word; the last one is the base model's, 0."""
        heads = shard.kv_heads(num_kv_heads)
        self._num_heads = len(heads)
        self._shifts_H1: list[U32] = [
            np.array([_shift(layer, head) for layer in held for head in heads], dtype=np.uint32)[:, None]
            for held in places
        ]
        """What each head of each layer of a group adds to its words."""
        self._group_pages: list[U32] = [
            np.full((2, len(shift_H1), pool, block_size), _UNWRITTEN, dtype=np.uint32)
            for shift_H1, pool in zip(self._shifts_H1, (num_blocks, *self.window_blocks), strict=True)
        ]
        """Pages of each cache group. Heads of a layer follow each other, and so do the layers of this stage."""
        self._pages_2HNB = self._group_pages[0]

    @override
    def run(self, plan: StepPlan) -> StepResult:
        """Write the scheduled tokens to the pages, all entries first; then sample."""
        for entry in plan.entries:
            end = entry.start + entry.num_tokens
            known = entry.drafts[-1:] or entry.sequence.token_ids[entry.start : end]
            positions = np.arange(entry.start, end, dtype=np.uint32)
            token_ids = np.array(known, dtype=np.uint32) + self._words_S[entry.sequence.adapter_slot]
            for group in range(len(self._group_pages)):
                blocks, offsets = self._slots(entry.sequence.table_of(group), entry.start, end)
                self._write(group, blocks, offsets, token_ids, positions)
        if self._step_time_s is not None and self._sleep is not None:
            self._sleep(self._step_time_s(plan))
        output_ids: list[int] = []
        logprobs: dict[int, TokenLogprobs] = {}
        for place, entry in enumerate(entry for entry in plan.entries if entry.samples):
            sampling = entry.sequence.spec.sampling
            greedy_id = self._next_greedy(entry)
            output_ids.append(_with_bias(greedy_id, sampling.logit_bias, self.vocab_size))
            if sampling.logprobs >= 0:
                logprobs[place] = fake_logprobs(greedy_id, sampling.logprobs, self.vocab_size, output_ids[place])
        vectors = self._vectors(plan) if plan.pools else {}
        return StepResult(output_ids, logprobs, prompt_logprobs=self._prompt_logprobs(plan), vectors=vectors)

    def _vectors(self, plan: StepPlan) -> dict[AttemptKey, bytes]:
        """The vectors of the pooled requests whose prompts end with this step."""
        found: dict[AttemptKey, bytes] = {}
        for entry in plan.entries:
            pooling = entry.sequence.spec.pooling
            if entry.samples and pooling is not None:
                found[entry.sequence.key] = _vector_of(self._digest(entry), pooling)
        return found

    def _prompt_logprobs(self, plan: StepPlan) -> dict[AttemptKey, list[TokenLogprobs]]:
        """As of a model whose greedy token at a position is the token there."""
        found: dict[AttemptKey, list[TokenLogprobs]] = {}
        for entry in plan.entries:
            sequence, num_top = entry.sequence, entry.sequence.spec.sampling.prompt_logprobs
            if sequence.gathers_prompt:
                ids = sequence.token_ids[entry.start : min(entry.end + 1, sequence.num_prompt_tokens)]
                found[sequence.key] = [
                    fake_logprobs(before, num_top, self.vocab_size, token) for before, token in pairwise(ids)
                ]
        return found

    # ------------------------------------------------------------ one rank of several

    def join(self, collective: object, num_blocks: int) -> None:
        """Only the number of blocks counts: there is nothing to exchange."""
        self.num_blocks = num_blocks

    def arrays(self, plan: StepPlan) -> BatchArrays:
        """What a real rank would get of the plan, token ids included."""
        return self._batches.arrays(plan)

    def step(self, plan: StepPlan, arrays: BatchArrays) -> StepResult:
        """Like `run`: the plan has all that the pages need."""
        return self.run(plan)

    def launch(self, plan: StepPlan, arrays: BatchArrays) -> QueuedStep:
        """Like `step`: there is nothing to wait for."""
        return ComputedStep(self.step(plan, arrays))

    def compute(self, arrays: BatchArrays) -> None:
        """Write the tokens to this rank's pages."""
        token_ids, positions = arrays.token_ids_T.astype(np.uint32), arrays.positions_T.astype(np.uint32)
        if arrays.adapter_slots_T is not None:
            token_ids += self._words_S[arrays.adapter_slots_T]
        for group, slots_T in enumerate((arrays.slot_mapping_T, *(each.slot_mapping_T for each in arrays.windows))):
            blocks, offsets = np.divmod(slots_T, self.block_size)
            self._write(group, blocks, offsets, token_ids, positions)

    # ------------------------------------------------------------ adapters

    @override
    def read_adapter(self, adapter: Adapter) -> LoadedAdapter:
        """Of any model."""
        assert self._adapters is not None, "there is a folder of adapters"
        folder, most = self._adapters.folder, _LARGEST_ADAPTER
        found = check_config(folder, adapter.path, self._adapters.max_rank, most, adapter.fingerprint)
        return LoadedAdapter(fingerprint=found[0], num_bytes=found[1], content=found[0])

    @override
    def put_adapter(self, slot: int, loaded: LoadedAdapter) -> None:
        """What was there is gone."""
        self._words_S[slot] = adapter_word(loaded.content)

    # ------------------------------------------------------------ KV in and out

    @override
    def new_staging(self, nbytes: int) -> Buffer:
        """An uninitialized uint8 array."""
        return np.empty(nbytes, dtype=np.uint8)

    def capture(self, num_seqs: int) -> str:
        """There is nothing to capture."""
        return ""

    def drop_captures(self) -> None:
        """Does nothing: there are no captures."""

    @override
    def gather_part(
        self, block_table: Seq[int], start: int, end: int, out: Buffer, peer: ParallelShape, group: int = 0
    ) -> list[int]:
        """Copies of each layer all K (u32), then all V (u32), of each head."""
        blocks, offsets = self._slots(block_table, start, end)
        slices = slices_to_send(self.layout.groups[group], self.shape, self.shard, peer)
        checksums: list[int] = []
        for each, words_L2HT in _payloads(out, slices, end - start):
            words_L2HT[...] = self._pages_of(group, each)[..., blocks, offsets]
            checksums.append(self.checksum(words_L2HT.view(np.uint8).reshape(-1)))
        return checksums

    @override
    def scatter_part(
        self, block_table: Seq[int], start: int, end: int, data: Buffer, peer: ParallelShape, group: int = 0
    ) -> None:
        blocks, offsets = self._slots(block_table, start, end)
        slices = slices_to_receive(self.layout.groups[group], self.shape, self.shard, peer)
        for each, words_L2HT in _payloads(data, slices, end - start):
            self._pages_of(group, each)[..., blocks, offsets] = words_L2HT

    def _pages_of(self, group: int, held: LocalSlice) -> U32:
        """A view of the pages of some heads of some layers, [layer][k|v][head][block][offset]."""
        layers, heads = held
        pages_2HNB = self._group_pages[group]
        pages_2LHNB = pages_2HNB.reshape(2, -1, self._num_heads, *pages_2HNB.shape[2:])
        return pages_2LHNB[:, layers.start : layers.stop, heads.start : heads.stop].swapaxes(0, 1)

    def _write(self, group: int, blocks: I64, offsets: I64, token_ids: U32, positions: U32) -> None:
        pages_2HNB, shift_H1 = self._group_pages[group], self._shifts_H1[group]
        pages_2HNB[0][:, blocks, offsets] = token_ids + shift_H1
        pages_2HNB[1][:, blocks, offsets] = positions + shift_H1

    def _next_greedy(self, entry: ScheduledSequence) -> int:
        return _token_of(self._digest(entry), self.vocab_size)

    def _digest(self, entry: ScheduledSequence) -> int:
        """The vector of all tokens up to the end of an entry, as they are in the pages."""
        num_tokens = entry.start + entry.num_tokens
        word = self._words_S[entry.sequence.adapter_slot]
        digest = self._digest_of_group(0, entry.sequence.block_table, 0, num_tokens, word) + int(word)
        for group, window in enumerate(self.windows, start=1):
            first = max(0, num_tokens - window)
            seen = self._digest_of_group(group, entry.sequence.table_of(group), first, num_tokens, word)
            digest += _WINDOW_FACTOR**group * seen
        return digest

    def _digest_of_group(self, group: int, block_table: Seq[int], start: int, end: int, word: np.uint32) -> int:
        first_block = start // self.block_size
        blocks = block_table[first_block : -(-end // self.block_size)]
        pages_2HMB = self._group_pages[group].take(blocks, axis=2)
        first, last = start - first_block * self.block_size, end - first_block * self.block_size
        shift_H1 = self._shifts_H1[group]
        words_2HT = pages_2HMB.reshape(2, len(shift_H1), -1)[:, :, first:last] - shift_H1
        # Heads and layers that agree, as they should, count once.
        return sum(set(_digests(words_2HT[0] - word, words_2HT[1], start).tolist()))

    def _slots(self, block_table: Seq[int], start: int, end: int) -> tuple[I64, I64]:
        first_block = start // self.block_size
        blocks = np.array(block_table[first_block : -(-end // self.block_size)], dtype=np.int64)
        slots = np.arange(start, end)
        return blocks[slots // self.block_size - first_block], slots % self.block_size


def adapter_word(fingerprint: str) -> int:
    """The number of 32 bits by which an adapter changes words and digests; 0 for none."""
    return zlib.crc32(fingerprint.encode()) if fingerprint else 0


def _shift(layer: int, head: int) -> int:
    """What a head of a layer, by its place in the cache group, adds to its words."""
    return (layer * _LAYER_SHIFT + head * _HEAD_SHIFT) % (1 << 32)


def _payloads(buffer: Buffer, slices: tuple[LocalSlice, ...], num_tokens: int) -> Iterator[tuple[LocalSlice, U32]]:
    """Each slice and its words [layer][k|v][head][token] in the buffer."""
    nbytes = num_tokens * _HEAD_BYTES_PER_TOKEN * sum([each.num_elements for each in slices])
    if buffer.nbytes < nbytes:
        raise ValueError(f"{num_tokens} tokens of KV are {nbytes} bytes, the buffer has {buffer.nbytes}")
    words: U32 = buffer[:nbytes].view(np.uint32)
    first = 0
    for each in slices:
        count = 2 * each.num_elements * num_tokens
        yield each, words[first : first + count].reshape(len(each.layers), 2, len(each.heads), num_tokens)
        first += count


def fake_generate(
    prompt_token_ids: Seq[int],
    num_tokens: int,
    vocab_size: int = DEFAULT_VOCAB_SIZE,
    logit_bias: Seq[tuple[int, float]] = (),
    windows: Seq[int] = (),
    adapter: str = "",
) -> list[int]:
    """The tokens that a `FakeModelRunner` with these windows must answer to a prompt, whoever computes it and however
    it is cut. `adapter`: fingerprint of its adapter, if it has one."""
    words = [_digest_of_one(token_id, position) for position, token_id in enumerate(prompt_token_ids)]
    digests = [sum(words), *(sum(words[max(0, len(words) - window) :]) for window in windows)]
    output: list[int] = []
    for position in range(len(prompt_token_ids), len(prompt_token_ids) + num_tokens):
        digest = adapter_word(adapter) + sum([_WINDOW_FACTOR**group * each for group, each in enumerate(digests)])
        output.append(_with_bias(_token_of(digest, vocab_size), logit_bias, vocab_size))
        words.append(_digest_of_one(output[-1], position))
        digests[0] += words[-1]
        for group, window in enumerate(windows, start=1):
            digests[group] += words[-1] - (words[position - window] if position >= window else 0)
    return output


def fake_vector(prompt_token_ids: Seq[int], pooling: Pooling) -> list[float]:
    """The vector that a `FakeModelRunner` without windows must give a prompt."""
    digest = sum(_digest_of_one(token_id, position) for position, token_id in enumerate(prompt_token_ids))
    vector: list[float] = np.frombuffer(_vector_of(digest, pooling), dtype="<f4").tolist()
    return vector


def fake_logprobs(
    greedy_id: int, num_top: int, vocab_size: int = DEFAULT_VOCAB_SIZE, token_id: int | None = None
) -> TokenLogprobs:
    """The log-probability that a `FakeModelRunner` must give `token_id` (by default of the greedy token), where
    `greedy_id` is its greedy token. The likeliest are the greedy one and those that follow it, modulo the
    vocabulary."""
    top_ids = tuple((greedy_id + rank) % vocab_size for rank in range(min(num_top, vocab_size)))
    return TokenLogprobs(
        _logprob(greedy_id if token_id is None else token_id, greedy_id, vocab_size),
        top_ids,
        tuple(_logprob(top_id, greedy_id, vocab_size) for top_id in top_ids),
    )


def _vector_of(digest: int, pooling: Pooling) -> bytes:
    """Numbers between -1 and 1; of a score one number between 0 and 1."""
    num_values = 1 if pooling.kind == "score" else pooling.dimensions or FAKE_HIDDEN_SIZE
    words = np.array([splitmix64(digest, index) for index in range(num_values)], dtype=np.uint64)
    shares = (words >> np.uint64(11)).astype(np.float64) / 2.0**53
    if pooling.kind == "score":
        return shares.astype("<f4").tobytes()
    vector = 2.0 * shares - 1.0
    if pooling.normalize:
        vector /= np.linalg.norm(vector)
    return vector.astype("<f4").tobytes()


def _logprob(token_id: int, greedy_id: int, vocab_size: int) -> float:
    return -1.0 - min((token_id - greedy_id) % vocab_size, _LARGEST_RANK) - greedy_id % 64 / 64


def _with_bias(greedy_id: int, logit_bias: Seq[tuple[int, float]], vocab_size: int) -> int:
    """The likeliest token after the bias: one that has a bias, or the first one that has none."""
    if not logit_bias:
        return greedy_id
    bias: dict[int, float] = {}
    for token_id, value in logit_bias:
        bias[token_id] = bias.get(token_id, 0.0) + value
    chain = ((greedy_id + rank) % vocab_size for rank in range(vocab_size))
    first = next((token_id for token_id in chain if token_id not in bias), greedy_id)
    return max(
        [first, *sorted(bias)], key=lambda token_id: _logprob(token_id, greedy_id, vocab_size) + bias.get(token_id, 0.0)
    )


def _digests(token_ids_HT: U32, positions_HT: U32, start: int) -> U64:
    """Of each head the sum of one mixed word per token, from token `start` on. The index at which a token was read is
    mixed in beside the position that was stored with it, so that exchanged slots show."""
    words_HT = token_ids_HT.astype(np.uint64)
    words_HT <<= _HALF_WORD
    words_HT |= positions_HT
    words_HT ^= _mixed_indices(start + words_HT.shape[1])[start:]
    sums_H: U64 = first_outputs(words_HT).sum(axis=1, dtype=np.uint64)
    return sums_H


def _digest_of_one(token_id: int, position: int) -> int:
    """What one more token at its place adds to a digest, modulo 2^64."""
    return splitmix64((token_id << 32 | position) ^ splitmix64(position, 0), 0)


def _mixed_indices(count: int) -> U64:
    """The mixed words of the indices 0 to `count - 1`; a view of a table."""
    size = 1024
    while size < count:
        size *= 2
    return _table_of_mixed_indices(size)[:count]


@functools.cache
def _table_of_mixed_indices(size: int) -> U64:
    return first_outputs(np.arange(size, dtype=np.uint64))


def _token_of(digest: int, vocab_size: int) -> int:
    return splitmix64(digest, 0) % vocab_size
