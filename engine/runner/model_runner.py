"""The model runner on torch: parameters, paged KV cache, decoder and sampler behind the `ModelRunner` protocol.

Made once per worker, or once per rank of a worker; only the engine thread calls it. A step is arrays (what to compute,
without torch, so that rank 0 can send it to the others), logits, and on rank 0 sampling. `gather` and `scatter` move KV
between the cache and staging memory, between steps.
"""

from __future__ import annotations

import gc
import hashlib
import logging
from collections.abc import Callable
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from disagg.engine.batch_arrays import BatchArrays, BatchBuilder, blocks_for_tokens
from disagg.engine.cache_groups import PoolLimits, window_pools
from disagg.engine.checkpoint.checkpoint import read_model_config
from disagg.engine.checkpoint.model_config import ModelConfig
from disagg.engine.checkpoint.vocabulary import check_draft_vocabulary
from disagg.engine.config import (
    WorkerConfig,
    check_attention,
    check_expert_parallelism,
    check_quantization,
    check_share_weights,
    check_speculation,
    device_defaults,
)
from disagg.engine.draft_row import DraftRow, sampled_row
from disagg.engine.kv_transfer.transport import UNKEYED, Checksum
from disagg.engine.parallel.interfaces import ShardRunner
from disagg.engine.plan import (
    NO_TOKEN,
    Buffer,
    Copying,
    LoadedAdapter,
    ModelRunner,
    QueuedStep,
    ScheduledSequence,
    StepPlan,
    StepQueue,
    StepResult,
    WarmUp,
)
from disagg.engine.request import Sequence, dummy_sequence
from disagg.engine.runner import cache_size
from disagg.engine.runner.adapters import AdapterSlots
from disagg.engine.runner.collectives import Alone, Collective
from disagg.engine.runner.device import torch_device
from disagg.engine.runner.expert_use import ExpertUse
from disagg.engine.runner.loaded_weights import load_weights, whole_weights
from disagg.engine.runner.logits import sampled_logprobs
from disagg.engine.runner.model.batch import to_batch
from disagg.engine.runner.model.decoder import Decoder, attention_spec
from disagg.engine.runner.model.device_draws import DeviceDraws
from disagg.engine.runner.model.device_inputs import Mark
from disagg.engine.runner.model.host_staging import HostStaging
from disagg.engine.runner.model.kv_cache import KvCache, count_blocks, kv_layout
from disagg.engine.runner.model.kv_digests import DigestSums
from disagg.engine.runner.model.replay import ReplayedDecoder, Scored
from disagg.engine.runner.model.rope import RopeTables
from disagg.engine.runner.model.stage import StageDecoder, StageOutput
from disagg.engine.runner.model.step_queue import DeviceStepQueue
from disagg.engine.runner.pooling import with_vectors
from disagg.engine.runner.prompt_rows import prompt_logprobs, rows_of
from disagg.engine.runner.sampler import Sampler, row_faults
from disagg.engine.runner.token_masks import TokenMasks
from disagg.engine.sharding.kv_routes import plan_pair
from disagg.engine.sharding.model_shards import rank_model, with_whole_experts
from disagg.engine.sharding.shards import WHOLE, Shard
from disagg.engine.sharding.stages import stage_ends
from disagg.engine.start_stages import OnStage, no_stages
from disagg.kernels.attention import AttentionProvider
from disagg.kernels.attention_choice import ProviderError, choose
from disagg.kernels.cuda_graph import bucket_sizes
from disagg.kernels.dispatch import arithmetic, describe, draws_on, set_num_threads
from disagg.kernels.prefill_work import MIN_PIECE_TOKENS
from disagg.proto.errors import ConfigError
from disagg.proto.messages import ONE_RANK, Adapter, BufferSize, KvLayout, ParallelShape

logger = logging.getLogger(__name__)

GPU_WARM_UP_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128)
"""Attention has tiles of fewer rows for shorter chunks, each a kernel of its own."""


class TorchModelRunner(ShardRunner):
    """The model with its paged KV cache, or one rank's part of both; a `parallel.interfaces.ShardRunner`. Owner: the
    engine thread.

    Construction reads the checkpoint, sets the number of threads for the whole process, and allocates the cache; one
    rank of several does that in `join`, when all ranks know how many blocks they have. `layout` and `fingerprint` are
    the whole model's, whatever the rank holds.

    Raises:
        ConfigError: the checkpoint, the device, the attention, the quantization, `share_weights`, the cache size,
            `max_model_len` or the number of ranks cannot work.
    """

    checksum: Checksum = UNKEYED

    def __init__(
        self, config: WorkerConfig, shard: Shard = WHOLE, on_stage: OnStage = no_stages, *, keeps_all: bool = False
    ) -> None:
        """`keeps_all`: as of `kv_layout`."""
        check_quantization(config.quantization, config.dtype, config.device, config.num_ranks, config.kv_cache_dtype)
        check_share_weights(config.share_weights, config.device, config.num_ranks)
        check_expert_parallelism(config.ep, config.tp)
        check_attention(config.attention, config.device)
        set_num_threads(config.num_threads)
        self._device = torch_device(config.device)
        if self._device.type == "cpu":
            on_stage("kernels")
            logger.info("worker %s: CPU kernels %s", config.worker_id, describe())  # compiles them if needed
        self._config = config
        self._dtype: torch.dtype = getattr(torch, config.dtype)
        model = read_model_config(config.model_path)
        if config.ep:
            model = with_whole_experts(model)
        self.model_config = model
        self.shard = shard
        rank_model(model, shard)  # refused before any weight is read, as is the attention
        # Of all layers, so that the ranks of all stages have the same.
        self._attention = _attention_of(config, rank_model(model, shard.in_stage), self._device)
        ends = stage_ends(model, shard.stages) if shard.stages > 1 else ()
        self.shape = ParallelShape(tp=shard.size, stage_ends=ends)
        self.arithmetic = _arithmetic(config, self._dtype, self._device, shard.size)
        self.block_size = config.block_size
        self.vocab_size = model.vocab_size
        self.expert_share = model.expert_share
        kv_dtype = _kv_dtype(config)
        self.layout = kv_layout(model, kv_dtype, keeps_all=keeps_all)
        self._draft_layout = _draft_layout(config, kv_dtype)
        cache_bytes = config.kv_cache_bytes
        if cache_bytes == "auto":
            cache_bytes = device_defaults(config.device).kv_cache_bytes
        is_measured = cache_bytes == "auto" and config.num_blocks is None
        self.max_model_len = _max_model_len(model, config, model.max_positions)  # refused before any weight is read
        if not is_measured:
            self._set_size(0 if cache_bytes == "auto" else cache_bytes)
        on_stage("weights")
        is_whole = shard.num_ranks == 1 and self._device.type == "cpu"
        loaded = whole_weights(config.weights, model) if is_whole else None
        if loaded is None:
            loaded = load_weights(config.weights, model, self._device, shard)
        self.fingerprint = _fingerprint(loaded.fingerprint, model, self.max_model_len)
        self._parameters = loaded.parameters
        self._adapters: AdapterSlots | None = None
        if config.adapters is not None:
            self._adapters = AdapterSlots(model, shard, config.adapters, self._dtype, self._device)
        self._host_staging = HostStaging.of(self._device, config.transport)
        self.digests = self._host_staging is not None and shard.num_ranks == 1
        self._staging_stream: Any = None
        """Memory that torch hands out on it has never been another kernel's, which might still be using it."""
        if self._device.type == "cuda":
            self._staging_stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        on_stage("kv_memory")
        self._computed = Mark(pinned=self._device.type == "cuda")
        self._draws: DeviceDraws | None = None
        if draws_on(self._device):
            self._draws = DeviceDraws(bucket_sizes(config.max_num_seqs)[-1], model.vocab_size, self._device)
        self._masks = self._token_masks() if shard.number == 0 else None
        self._sampler = Sampler(model.vocab_size, self._draws, self._masks)
        self._step_queue: DeviceStepQueue | None = None
        self.warm_up = _warm_up_of(self._device, shard, config)
        if is_measured:
            self._set_size(self._measured_cache_bytes())
        if shard.num_ranks == 1:
            self.join(None, self.num_blocks)

    def _token_masks(self) -> TokenMasks | None:
        """None where no grammar can be used: without a tokenizer, or without an end of sequence."""
        file = Path(self._config.model_path) / "tokenizer.json"
        if not self.model_config.eos_token_ids or not file.is_file():
            return None
        skips_forced = self._config.skip_forced
        return TokenMasks(file, self.vocab_size, self.model_config.eos_token_ids, skips_forced=skips_forced)

    def _set_size(self, cache_bytes: int) -> None:
        config = self._config
        self.num_blocks = count_blocks(
            self.layout,
            config.block_size,
            cache_bytes,
            config.num_blocks,
            self.shard,
            self._draft_layout,
            self._limits,
            self.shape.stage_ends,
        )
        self.window_blocks = self._window_blocks(self.num_blocks)
        self.max_model_len = _max_model_len(self.model_config, config, self.num_blocks * config.block_size)

    @property
    def _limits(self) -> PoolLimits:
        return PoolLimits(self._config.num_places, self._config.step_tokens)

    def _window_blocks(self, num_blocks: int) -> tuple[int, ...]:
        """Beside so many of the first cache group; equal on all ranks."""
        return window_pools(self.layout, num_blocks, self.block_size, self._limits)

    def _measured_cache_bytes(self) -> int:
        """Makes a small cache and what computes on it, measures as `cache_size` says, and drops both."""
        config = self._config
        plan = cache_size.full_step(config, self.max_model_len, len(self.layout.groups) - 1)
        num_blocks = blocks_for_tokens(plan.prefills[0].num_tokens, config.block_size)
        try:
            self._make(None if self.shard.num_ranks == 1 else Alone(self.shard), num_blocks)
            self.capture_steps()
            arrays = self.arrays(plan)
            if self.shard.number == 0:
                self.step(plan, arrays)
            else:
                self.compute(arrays)
        except torch.OutOfMemoryError as error:
            raise ConfigError(f"token_budget: a step of {config.token_budget} tokens does not fit: {error}") from error
        free, held = cache_size.free_bytes(self._device), self._cache.nbytes
        del self._cache, self._decoder, self._staged, self._replayed, self._batches
        self._step_queue = None
        gc.collect()
        cache_size.give_back(self._device)
        found = cache_size.cache_bytes(free, held)
        logger.info(
            "worker %s: %.1f GiB are free beside weights, captures and a full step; the KV cache takes %.1f GiB",
            config.worker_id,
            (free + held) / 2**30,
            found / 2**30,
        )
        return found

    @override
    def join(self, collective: Collective | None, num_blocks: int) -> None:
        assert 0 < num_blocks <= self.num_blocks
        self.max_model_len = _max_model_len(self.model_config, self._config, num_blocks * self.block_size)
        self.num_blocks, self.window_blocks = num_blocks, self._window_blocks(num_blocks)
        self._make(collective, num_blocks)

    def _make(self, collective: Collective | None, num_blocks: int) -> None:
        """The cache, and what computes on it."""
        pools = self._window_blocks(num_blocks)
        self._cache = KvCache(
            self.layout,
            num_blocks,
            self.block_size,
            self._device,
            self.shard,
            self._host_staging,
            pools,
            stage_ends=self.shape.stage_ends,
        )
        ropes = RopeTables(self.model_config, self.max_model_len, self._dtype, self._device)
        loras = None if self._adapters is None else self._adapters.layers
        self._decoder = Decoder(
            self.model_config, self._parameters, ropes, self._cache, collective, self._attention, loras
        )
        self._expert_use = ExpertUse(self._decoder.expert_counts)
        self._staged: StageDecoder | None = None
        self._replayed: ReplayedDecoder | None = None
        if collective is not None and self.shard.stages > 1:
            self._staged = StageDecoder(self._decoder, collective)
        elif collective is None or collective.captures:
            max_blocks = blocks_for_tokens(self.max_model_len, self.block_size)
            self._replayed = ReplayedDecoder(
                self._decoder,
                self.vocab_size,
                self._config.max_num_seqs,
                max_blocks,
                self._device,
                len(pools),
                has_adapters=self._adapters is not None,
            )
        self._batches = BatchBuilder(
            self.block_size, self.max_model_len, len(pools), has_adapters=self._adapters is not None
        )
        is_alone = collective is None  # else the other ranks have no sampled ids
        if is_alone and self._config.step_ahead and self._replayed is not None and self._draws is not None:
            self._step_queue = DeviceStepQueue(self._replayed, self._batches, self._draws, self._device)

    # ------------------------------------------------------------ steps

    @property
    @override
    def step_queue(self) -> StepQueue | None:
        """Where decode steps are captured on a GPU."""
        step_queue = self._step_queue
        return step_queue if step_queue is not None and step_queue.max_decodes else None

    @override
    def run(self, plan: StepPlan) -> StepResult:
        """Compute the plan and sample."""
        return self.step(plan, self.arrays(plan)) if plan.entries else StepResult([])

    @property
    @override
    def capture_sizes(self) -> tuple[int, ...]:
        """On a GPU every bucket size; a worker that only prefills has none."""
        if self._replayed is None or "decode" not in self._config.roles:
            return ()
        return self._replayed.start_sizes

    @override
    def capture_steps(self) -> None:
        for num_seqs in self.capture_sizes:
            if self.capture(num_seqs):
                return

    @override
    def capture(self, num_seqs: int) -> str:
        assert self._replayed is not None
        return self._replayed.capture(num_seqs)

    @override
    def drop_captures(self) -> None:
        if self._replayed is not None:
            self._replayed.drop()

    def forward(self, plan: StepPlan) -> Tensor:
        """The logits of every decode and of each other entry with `samples`, [rows, vocab_size], in the model's dtype;
        the caller's own. KV is written.

        Token ids must be within the vocabulary: the engine core checked them.
        """
        return self._score(self.arrays(plan)).logits_SV.clone()

    @override
    def arrays(self, plan: StepPlan) -> BatchArrays:
        return self._batches.arrays(plan)

    @override
    def step(self, plan: StepPlan, arrays: BatchArrays) -> StepResult:
        return self.launch(plan, arrays).result()

    @override
    def launch(self, plan: StepPlan, arrays: BatchArrays) -> QueuedStep:
        """A step of a model in one stage is computed at once."""
        sampled = [sampled_row(entry) for entry in plan.entries if entry.samples]
        if self._masks is not None:
            # Also where a prompt is not complete yet: its grammar is compiled while the chunks are computed.
            drafts = [row for row in sampled if isinstance(row, DraftRow)]
            self._masks.start([*dict.fromkeys(entry.sequence for entry in plan.entries), *drafts])
        if self._staged is None:
            result = self._result(plan, arrays, sampled, *self._computed_rows(arrays))
            return _Launched(lambda: result)
        output = self._staged.launch(arrays)
        return _Launched(lambda: self._result(plan, arrays, sampled, *_scored(output)))

    def _computed_rows(self, arrays: BatchArrays) -> tuple[Tensor | None, Scored]:
        """Rows behind the final norm, where they are wanted, and what is known of their logits."""
        if not arrays.wants_rows:
            return None, self._score(arrays)
        hidden_RH, logits_RV = self._hidden(arrays)
        return hidden_RH, Scored(logits_RV, None)

    def _hidden(self, arrays: BatchArrays) -> tuple[Tensor, Tensor]:
        if self._replayed is not None:
            return self._replayed.hidden(arrays, with_logits=arrays.wants_logits)
        return self._decoder.hidden(to_batch(arrays, self._decoder.attention), with_logits=arrays.wants_logits)

    def _result(
        self,
        plan: StepPlan,
        arrays: BatchArrays,
        sampled: list[Sequence | DraftRow],
        hidden_RH: Tensor | None,
        scored: Scored,
    ) -> StepResult:
        if arrays.wants_logits:
            result = self._sampled(plan, sampled, *scored)
        else:
            self._expert_use.note_step()
            result = StepResult([NO_TOKEN] * len(sampled))
        return result if hidden_RH is None else with_vectors(plan, result, hidden_RH, scored.logits_SV)

    def _sampled(
        self, plan: StepPlan, sampled: list[Sequence | DraftRow], logits_SV: Tensor, largest_S: Tensor | None
    ) -> StepResult:
        """What the rows give that sample, and those of prompts."""
        self._expert_use.note_step()
        rows = rows_of(plan)
        prompts = prompt_logprobs(logits_SV, self.vocab_size, rows.prompts) if rows.prompts else {}
        if rows.sampled is not None:
            logits_SV = logits_SV[rows.sampled]
            largest_S = None if largest_S is None else largest_S[rows.sampled]
        if not sampled:
            self._wait_computed()
            return StepResult([], prompt_logprobs=prompts)
        token_ids = self._sampler.sample(logits_SV, sampled, largest_S)
        logprobs = sampled_logprobs(logits_SV, self.vocab_size, sampled, token_ids)
        faults = row_faults(logits_SV, self.vocab_size, token_ids)
        forced = {} if self._masks is None else self._masks.take_forced(sampled, token_ids)
        return StepResult(token_ids, logprobs, faults, forced, prompts)

    @property
    @override
    def buffers(self) -> tuple[BufferSize, ...]:
        """Caches of the model, and the scratch memory of experts, with the sizes that this rank has."""
        model, config = rank_model(self.model_config, self.shard), self._config
        scratch = model.scratch_bytes(config.token_budget, self._dtype.itemsize)
        adapters = [] if self._adapters is None else [BufferSize("adapters", self._adapters.nbytes)]
        return (*self._cache.buffers, *([BufferSize("experts", scratch)] if scratch else []), *adapters)

    @override
    def read_adapter(self, adapter: Adapter) -> LoadedAdapter:
        assert self._adapters is not None, "there is a folder of adapters"
        return self._adapters.read(adapter)

    @override
    def put_adapter(self, slot: int, loaded: LoadedAdapter) -> None:
        assert self._adapters is not None, "there is a folder of adapters"
        self._adapters.put(slot, loaded.content)

    @property
    @override
    def expert_imbalance(self) -> tuple[float, ...]:
        """Of each layer with experts."""
        return self._expert_use.imbalance

    def _wait_computed(self) -> None:
        """Until the device has computed all that was launched: a chunk that samples nothing is waited for too, or its
        time would be that of its launches. The copy of its KV would wait for it anyhow."""
        self._computed.set()
        self._computed.wait()

    @override
    def compute(self, arrays: BatchArrays) -> None:
        if self._staged is not None:
            self._staged.compute(arrays)
            if self.shard.is_last:
                self._wait_computed()  # whoever waits for the step waits for its last stage
        elif arrays.wants_rows:
            self._hidden(arrays)
        elif self._replayed is not None:
            self._replayed.forward(arrays)
        else:
            self._decoder.forward(to_batch(arrays, self._decoder.attention))

    def _score(self, arrays: BatchArrays) -> Scored:
        if self._staged is not None:
            return _scored(self._staged.launch(arrays))[1]
        if self._replayed is not None:
            return self._replayed.forward(arrays)
        logits_SV = self._decoder.forward(to_batch(arrays, self._decoder.attention))
        assert logits_SV is not None, "rank 0 samples"
        return Scored(logits_SV, None)

    # ------------------------------------------------------------ KV in and out

    @override
    def new_staging(self, nbytes: int) -> Buffer:
        """A flat staging buffer: a uint8 numpy array in the host's memory, or a uint8 tensor on a GPU, for transports
        that move that. Contents are undefined."""
        if self._host_staging is not None:
            return self._host_staging.new_buffer(nbytes)
        if self._device.type == "cpu":
            return np.empty(nbytes, dtype=np.uint8)
        with torch.cuda.stream(self._staging_stream):
            return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    @override
    def start_gather(
        self,
        block_table: Seq[int],
        start: int,
        end: int,
        out: Buffer,
        peer: ParallelShape = ONE_RANK,
        *,
        digests: bool = False,
        group: int = 0,
    ) -> Copying | int:
        """As `gather`. On a device without waiting for it."""
        if self._device.type == "cpu" and self._host_staging is None:
            return self.gather(block_table, start, end, out, peer, group)
        return self._cache.start_gather(
            block_table, start, end, _as_tensor(out), peer, self.checksum, digests=digests, group=group
        )

    @override
    def start_scatter(
        self,
        block_table: Seq[int],
        start: int,
        end: int,
        data: Buffer,
        peer: ParallelShape = ONE_RANK,
        *,
        digests: bool = False,
        group: int = 0,
    ) -> Copying | None:
        checksum = self.checksum if digests else None
        sums = self._cache.scatter_part(block_table, start, end, _as_tensor(data), peer, checksum, group=group)
        if self._device.type == "cpu" and sums is None:
            return None
        return _Reading(data, sums, self.checksum, pinned=self._device.type == "cuda")

    @override
    def gather_part(
        self, block_table: Seq[int], start: int, end: int, out: Buffer, peer: ParallelShape, group: int = 0
    ) -> list[int]:
        return self._cache.gather_part(block_table, start, end, _as_tensor(out), peer, self.checksum, group=group)

    @override
    def scatter_part(
        self, block_table: Seq[int], start: int, end: int, data: Buffer, peer: ParallelShape, group: int = 0
    ) -> None:
        copying = TorchModelRunner.start_scatter(self, block_table, start, end, data, peer, group=group)
        if copying is not None:
            copying.wait()


class _Launched(QueuedStep):
    """A step that was launched; `finish` waits for what it gives."""

    def __init__(self, finish: Callable[[], StepResult]) -> None:
        self._finish = finish

    @override
    def result(self) -> StepResult:
        return self._finish()


def _scored(output: StageOutput) -> tuple[Tensor | None, Scored]:
    """Rows behind the final norm, where they are wanted, and what is known of their logits."""
    hidden_RH, logits_RV = output.wait()
    return hidden_RH, Scored(logits_RV, None)


class _Reading(Mark):
    """Behind all that was queued to read a buffer, which is kept for so long: torch knows of one stream only. `sums`:
    of the digests of its slices."""

    def __init__(self, data: Buffer, sums: DigestSums | None, checksum: Checksum, *, pinned: bool) -> None:
        super().__init__(pinned=pinned)
        self._data = data
        self._sums = None if sums is None else sums.to_host()
        self._checksum = checksum
        self.set()

    def checksum(self) -> int:
        """The digest of what arrived; only where that was asked for."""
        assert self._sums is not None
        return self._checksum.combined(self._sums.digests(self._checksum))


def warm_up(runner: ModelRunner) -> None:
    """Prefills and decode steps on the first blocks, so that the first requests do not pay for first uses: on a GPU
    also of the kernels that are compiled for chunks of other lengths, and for rows of other sampling parameters.

    To be called before any sequence: it overwrites the first tokens of the cache.
    """
    runner.capture_steps()
    for num_tokens in sorted({min(length, runner.max_model_len - 1) for length in runner.warm_up.chunks} - {0}):
        sequence = dummy_sequence(num_tokens + 1, 0, runner.block_size, runner.window_blocks)
        runner.run(StepPlan(prefills=(ScheduledSequence(sequence, 0, num_tokens, True),)))
        runner.run(_decode_of(sequence, num_tokens))
    if runner.max_model_len > 1:
        for num_seqs in runner.warm_up.batches[1:]:
            rows = [dummy_sequence(1, 0, runner.block_size, runner.window_blocks) for _ in range(num_seqs)]
            runner.run(StepPlan(decodes=tuple(ScheduledSequence(row, 0, 1, samples=True) for row in rows)))
        _warm_up_choices(runner)
    if runner.warm_up.suffix_of:
        length = min(runner.warm_up.suffix_of, runner.max_model_len)
        sequence = dummy_sequence(length, 0, runner.block_size, runner.window_blocks)
        runner.run(StepPlan(prefills=(ScheduledSequence(sequence, length - 1, 1, True),)))
    if runner.warm_up.copies:
        _warm_up_copies(runner)


def _warm_up_of(device: torch.device, shard: Shard, config: WorkerConfig) -> WarmUp:
    """On a GPU kernels are compiled for chunks of some lengths, and for a context that is split. Decode steps of every
    bucket are captured; ranks that could not capture compute them as well."""
    if device.type == "cpu":
        return WarmUp()
    decodes = shard.num_ranks > 1 and "decode" in config.roles
    batches = tuple(min(size, config.num_places) for size in bucket_sizes(config.num_places)) if decodes else (1,)
    return WarmUp(chunks=GPU_WARM_UP_TOKENS, batches=batches, suffix_of=4 * MIN_PIECE_TOKENS, copies=True)


def _warm_up_copies(runner: ModelRunner) -> None:
    """The KV of one token of block 0, out and back."""
    buffer = runner.new_staging(plan_pair(runner.layout, runner.shape, ONE_RANK).groups[0].token_bytes)
    runner.gather([0], 0, 1, buffer)
    runner.scatter([0], 0, 1, buffer)
    if runner.digests:
        for copying in (
            runner.start_gather([0], 0, 1, buffer, digests=True),
            runner.start_scatter([0], 0, 1, buffer, digests=True),
        ):
            assert not isinstance(copying, int | None), "copies with digests are a device's"
            copying.wait()


def _warm_up_choices(runner: ModelRunner) -> None:
    """One token of each kind of row where the host waits for it, and two drawn ones through the step queue."""
    for sampling in ({"logit_bias": ((0, 1.0),)}, {"temperature": 1.0}):
        sequence = dummy_sequence(1, 0, runner.block_size, runner.window_blocks, **sampling)
        runner.run(_decode_of(sequence, 0))
    if (step_queue := runner.step_queue) is not None:
        first = step_queue.enqueue(_decode_of(sequence, 0), None)
        step_queue.enqueue(_decode_of(sequence, 1), first).result()


def _decode_of(sequence: Sequence, start: int) -> StepPlan:
    return StepPlan(decodes=(ScheduledSequence(sequence, start, 1, samples=True),))


def _kv_dtype(config: WorkerConfig) -> str:
    """Torch's name of the dtype of the KV cache."""
    names = {"auto": config.dtype, "int8": "int8", "fp8": "float8_e4m3fn"}
    return names[config.kv_cache_dtype]


def _attention_of(config: WorkerConfig, model: ModelConfig, device: torch.device) -> AttentionProvider:
    """Who computes the attention of prompts on this rank, whose part of the model this is."""
    spec = attention_spec(
        model,
        device=str(device),
        dtype=config.dtype,
        kv_dtype=_kv_dtype(config),
        block_size=config.block_size,
    )
    try:
        choice = choose(config.attention, spec)
    except ProviderError as error:
        raise ConfigError(f"kernels.attention: {error}") from error
    if device.type == "cuda":
        logger.info("worker %s: attention of prompts by %s", config.worker_id, choice)
    return choice.provider


def _arithmetic(config: WorkerConfig, dtype: torch.dtype, device: torch.device, num_ranks: int) -> str:
    """Ranks add up their parts of a sum, in another order than one alone, and whole experts in yet another."""
    name = arithmetic(dtype, config.quantization, device)
    of_experts = " with whole experts" if config.ep else ""
    return name if num_ranks == 1 else f"{name}, {num_ranks} ranks{of_experts}"


def _draft_layout(config: WorkerConfig, kv_dtype: str) -> KvLayout | None:
    """KV of the draft model, if this worker has one, whose vocabulary is compared first."""
    draft, is_measured = config.speculation.model, config.kv_cache_bytes == "auto" and config.num_blocks is None
    check_speculation(
        config.speculation, config.device, config.num_ranks, cache_is_set=not is_measured, path="speculation."
    )
    if draft is None or "decode" not in config.roles:
        return None
    check_draft_vocabulary(config.model_path, draft, "speculation.model")
    return kv_layout(read_model_config(draft), kv_dtype, keeps_all=True)


def _as_tensor(buffer: Buffer) -> Tensor:
    """A staging buffer without a copy."""
    tensor: Tensor = buffer if isinstance(buffer, Tensor) else torch.from_numpy(buffer)
    return tensor


def _max_model_len(model: ModelConfig, config: WorkerConfig, cache_tokens: int) -> int:
    """The configured length, if model and cache can hold it; else all that they can."""
    wanted = config.max_model_len
    if wanted is None:
        return min(model.max_exact_len, cache_tokens)
    if wanted < 1:
        raise ConfigError(f"max_model_len must be at least 1, not {wanted}")
    if wanted > model.max_positions:
        raise ConfigError(f"max_model_len {wanted} is more than the model's {model.max_positions}")
    if wanted > cache_tokens:
        raise ConfigError(f"max_model_len {wanted} is more than the {cache_tokens} tokens of the KV cache")
    return wanted


def _fingerprint(fingerprint: str, model: ModelConfig, max_model_len: int) -> str:
    """The model's fingerprint, and another one where longrope takes its long factors: KV of both is not the same."""
    short_len = model.short_rope_len
    if short_len is None or max_model_len <= short_len:
        return fingerprint
    logger.info("longrope: long factors for all sequences, as max_model_len is more than %d", short_len)
    return hashlib.sha256(f"{fingerprint}, long".encode()).hexdigest()[:32]
