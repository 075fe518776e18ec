"""The model runner on torch: parameters, paged KV cache, decoder and sampler behind the `ModelRunner` protocol.

Made once per worker; only the engine thread calls it. `run` is `forward` (plan to logits) and sampling. `gather` and
`scatter` move KV between the cache and staging memory, between steps.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq

import numpy as np
import torch
from torch import Tensor

from disagg.engine.checkpoint import ModelConfig, model_fingerprint, read_model_config
from disagg.engine.config import WorkerConfig
from disagg.engine.kv_cache import KvCache, count_blocks, kv_layout
from disagg.engine.kv_transfer.checksum import checksum
from disagg.engine.logprobs import sampled_logprobs
from disagg.engine.model.batch import BatchBuilder
from disagg.engine.model.decoder import Decoder
from disagg.engine.model.parameters import pack_parameters
from disagg.engine.model.rope import RopeTable
from disagg.engine.plan import Buffer, ScheduledSequence, StepPlan, StepResult
from disagg.engine.request import stand_in
from disagg.engine.sampler import Sampler
from disagg.engine.weights import load_parameters
from disagg.kernels.dispatch import describe, gather_kv, scatter_kv, set_num_threads
from disagg.proto.errors import ConfigError

logger = logging.getLogger(__name__)

WARM_UP_TOKENS = 8


class TorchModelRunner:
    """The model with its paged KV cache. Owner: the engine thread.

    Construction reads the checkpoint, sets the number of threads for the whole process, and allocates the cache.

    Raises:
        ConfigError: the checkpoint, the device, the cache size or `max_model_len` cannot work.
    """

    def __init__(self, config: WorkerConfig) -> None:
        set_num_threads(config.num_threads)
        self._device = _device(config.device)
        if self._device.type == "cpu":
            logger.info("worker %s computes with %s", config.worker_id, describe())  # builds them now if need be
        dtype: torch.dtype = getattr(torch, config.dtype)
        model = read_model_config(config.model_path)
        self.model_config = model
        self.block_size = config.block_size
        self.vocab_size = model.vocab_size
        self.tp = config.tp
        self.layout = kv_layout(model, config.dtype)
        self.num_blocks = count_blocks(self.layout, config.block_size, config.kv_cache_bytes, config.num_blocks)
        self.max_model_len = _max_model_len(model, config, self.num_blocks * config.block_size)
        self.fingerprint = model_fingerprint(config.model_path, config.dtype)
        self._cache = KvCache(self.layout, self.num_blocks, self.block_size, self._device)
        parameters = load_parameters(config.model_path, model, dtype, self._device)
        pack_parameters(parameters)
        rope = RopeTable(model, self.max_model_len, dtype, self._device)
        self._decoder = Decoder(model, parameters, rope, self._cache)
        self._batches = BatchBuilder(self.block_size, self.max_model_len, self._device)
        self._sampler = Sampler(model.vocab_size)

    def run(self, plan: StepPlan) -> StepResult:
        """Compute the plan and sample."""
        if not plan.entries:
            return StepResult([])
        logits_SV = self.forward(plan)
        sequences = [entry.sequence for entry in plan.entries if entry.samples]
        token_ids = self._sampler.sample(logits_SV, sequences) if sequences else []
        return StepResult(token_ids, sampled_logprobs(logits_SV, self.vocab_size, sequences, token_ids))

    def forward(self, plan: StepPlan) -> Tensor:
        """The logits of every entry with `samples`, [num_samples, vocab_size], in the model's dtype. KV is written.

        Token ids must be within the vocabulary: the engine core checked them.
        """
        return self._decoder.forward(self._batches.build(plan))

    def warm_up(self) -> None:
        """One prefill and one decode step on block 0, so that the first request does not pay for first uses.

        To be called before any sequence: it overwrites the first tokens of block 0.
        """
        num_tokens = min(WARM_UP_TOKENS, self.max_model_len - 1)
        if num_tokens < 1:
            return
        sequence = stand_in(num_tokens, 0, self.block_size)
        self.run(StepPlan(prefills=(ScheduledSequence(sequence, 0, num_tokens, True),)))
        sequence.token_ids.append(0)
        self.run(StepPlan(decodes=(ScheduledSequence(sequence, num_tokens, 1, True),)))

    def new_staging(self, nbytes: int) -> Buffer:
        """A flat staging buffer: a uint8 numpy array on CPU, a uint8 tensor on a GPU. Contents are undefined."""
        if self._device.type == "cpu":
            return np.empty(nbytes, dtype=np.uint8)
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def gather(self, block_table: Seq[int], start: int, end: int, out: Buffer, peer_tp: int = 1) -> int:
        """Copy the KV of tokens [start, end) into the head of `out`, canonical order [layer][k|v][head][token][dim];
        the checksum of the copy.

        Raises:
            ValueError: `out` is too small, or the table does not cover `end`.
        """
        staged = self._staged(out, start, end)
        gather_kv(self._cache.tensor_NL2KBD, block_table, start, end, staged)
        return checksum(staged)

    def scatter(self, block_table: Seq[int], start: int, end: int, data: Buffer, peer_tp: int = 1) -> None:
        """Copy the KV of tokens [start, end) from the head of `data`, canonical order, into the blocks.

        Raises:
            ValueError: `data` is too small, or the table does not cover `end`.
        """
        scatter_kv(self._cache.tensor_NL2KBD, block_table, start, end, self._staged(data, start, end))

    def _staged(self, buffer: Buffer, start: int, end: int) -> Tensor:
        """The bytes of tokens [start, end) in a staging buffer, without a copy."""
        nbytes = self._cache.token_bytes(end - start)
        tensor: Tensor = buffer if isinstance(buffer, Tensor) else torch.from_numpy(buffer)
        if tensor.numel() < nbytes:
            raise ValueError(f"tokens [{start}, {end}) take {nbytes} bytes; the buffer has {tensor.numel()}")
        return tensor[:nbytes]


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device {name!r} is not a torch device: {error}") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device {name!r}: this torch sees no CUDA device")
    return device


def _max_model_len(model: ModelConfig, config: WorkerConfig, cache_tokens: int) -> int:
    """What was asked for, if model and cache can hold it; without a wish, all that they can."""
    wanted = config.max_model_len
    if wanted is None:
        return min(model.max_exact_len, cache_tokens)
    if wanted < 1:
        raise ConfigError(f"max_model_len must be at least 1, not {wanted}")
    if wanted > model.max_exact_len:
        window = f" (its sliding window of {model.sliding_window} is not implemented)" if model.sliding_window else ""
        raise ConfigError(f"max_model_len {wanted} is more than the model's {model.max_exact_len}{window}")
    if wanted > cache_tokens:
        raise ConfigError(f"max_model_len {wanted} is more than the {cache_tokens} tokens of the KV cache")
    return wanted
