"""Decode steps that are captured once for each number of sequences and replayed.

A step whose rows are all decodes does the same whatever the tokens are: only what it reads differs. So its inputs have
a fixed place, the step's arrays are copied there, and the capture (`disagg.kernels.capture`) computes it again, without
Python between the ops. A step with prompts, or one of more sequences than there is place for, is computed by the
decoder directly: its shapes do not recur. On a CPU its ops are recorded first and then computed together
(`Capturer.compute`).

A step in which rows have adapters is another capture, with the ops for them; its other rows have the same bits.

The first step of S sequences is computed and captured at once; later ones are replayed. Where a capture fails,
because an op of the model cannot be captured, a warning is logged once, and from then on the decoder computes every
step op by op.

The ranks of a worker capture and replay together, on a GPU, where their exchanges are part of the graphs.

On a CPU there is a capture for each number of sequences. On a GPU there is one for each bucket size, to which a step is
padded (`device_inputs`), and all are made at start (`capture`): a capture waits for the whole device and needs
memory, neither of which should delay a request, and a model that cannot be captured is found before it serves.

The largest logit of each row is found in the same capture, where it costs no call of its own; of a step
that the decoder computes directly the sampler finds it.

Shapes: S decoding sequences, M blocks of a table, V vocabulary.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

import torch
from torch import Tensor

from disagg.engine.batch_arrays import BatchArrays
from disagg.engine.runner.model.batch import AdapterRows, Batch, WindowBatch, to_batch
from disagg.engine.runner.model.decoder import Decoder
from disagg.engine.runner.model.device_inputs import DeviceStepInputs, Pending
from disagg.kernels.capture import Captured, CaptureError, Capturer
from disagg.kernels.dispatch import argmax_rows, capturer

logger = logging.getLogger(__name__)


class StepInputs:
    """Where captured steps read: one place for steps of any number of sequences."""

    def __init__(self, max_num_seqs: int, max_blocks: int, device: torch.device, num_windows: int = 0) -> None:
        self._token_ids_S = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self._positions_S = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self._slot_mapping_S = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self._block_tables_SM = torch.zeros((max_num_seqs, max_blocks), dtype=torch.int32, device=device)
        self._context_lens_S = torch.zeros(max_num_seqs, dtype=torch.int32, device=device)
        self._adapter_slots_S = torch.full((max_num_seqs,), -1, dtype=torch.int32, device=device)
        self._adapter_slots = self._adapter_slots_S.numpy()
        self._token_ids = self._token_ids_S.numpy()
        self._positions = self._positions_S.numpy()
        self._slot_mapping = self._slot_mapping_S.numpy()
        self._block_tables = self._block_tables_SM.numpy()
        self._context_lens = self._context_lens_S.numpy()
        self._windows = tuple(
            WindowBatch(torch.zeros_like(self._slot_mapping_S), torch.zeros_like(self._block_tables_SM), None)
            for _ in range(num_windows)
        )
        self._window_arrays = tuple(
            (window.slot_mapping_T.numpy(), window.block_tables_SM.numpy()) for window in self._windows
        )

    def batch(self, num_seqs: int, *, has_adapters: bool = False) -> Batch:
        """The first rows; tables are of full width, whatever the sequences need. `has_adapters`: some of them may have
        an adapter."""
        slots_S = self._adapter_slots_S[:num_seqs]
        return Batch(
            token_ids_T=self._token_ids_S[:num_seqs],
            positions_T=self._positions_S[:num_seqs],
            slot_mapping_T=self._slot_mapping_S[:num_seqs],
            num_decodes=num_seqs,
            block_tables_SM=self._block_tables_SM[:num_seqs],
            context_lens_S=self._context_lens_S[:num_seqs],
            prefills=None,
            sample_rows=None,
            windows=tuple(
                WindowBatch(window.slot_mapping_T[:num_seqs], window.block_tables_SM[:num_seqs], None)
                for window in self._windows
            ),
            adapters=AdapterRows(slots_S, slots_S) if has_adapters else None,
        )

    def bucket(self, num_seqs: int) -> int | None:
        """Rows of the step that computes `num_seqs` sequences: as many; None where there is no place."""
        return num_seqs if num_seqs <= len(self._context_lens) else None

    def fill(self, arrays: BatchArrays) -> int:
        """Overwrite the first rows; what lies past a sequence's table is left as it was. How many rows to compute."""
        num_seqs, num_blocks = arrays.block_tables_SM.shape
        self._token_ids[:num_seqs] = arrays.token_ids_T
        self._positions[:num_seqs] = arrays.positions_T
        self._slot_mapping[:num_seqs] = arrays.slot_mapping_T
        self._block_tables[:num_seqs, :num_blocks] = arrays.block_tables_SM
        self._context_lens[:num_seqs] = arrays.context_lens_S
        if arrays.adapter_slots_T is not None:
            self._adapter_slots[:num_seqs] = arrays.adapter_slots_T
        for (slots, tables), window in zip(self._window_arrays, arrays.windows, strict=True):
            slots[:num_seqs] = window.slot_mapping_T
            tables[:num_seqs, :num_blocks] = window.block_tables_SM
        return int(num_seqs)


class Scored(NamedTuple):
    """What a step gives for each row that it samples. Good until the next step."""

    logits_SV: Tensor
    largest_S: Tensor | None
    """As of `argmax_rows`; None where it is not computed yet."""

    def first(self, num_rows: int) -> Scored:
        """Without the rows that only filled up a bucket."""
        if num_rows == len(self.logits_SV):
            return self
        return Scored(self.logits_SV[:num_rows], None if self.largest_S is None else self.largest_S[:num_rows])


class ReplayedDecoder:
    """A decoder whose decode steps are replayed, on all ranks or on none. Owner: the model runner."""

    def __init__(
        self,
        decoder: Decoder,
        vocab_size: int,
        max_num_seqs: int,
        max_blocks: int,
        device: torch.device,
        num_windows: int = 0,
        *,
        has_adapters: bool = False,
    ) -> None:
        self._decoder = decoder
        self._vocab_size = vocab_size
        self._has_adapters = has_adapters
        self._captured: dict[tuple[int, bool], Captured[Scored]] = {}
        """By number of rows, and whether some may have an adapter."""
        self._failed = ""
        """Reason why nothing is captured any more, or empty."""
        self._capturer: Capturer | None = None
        try:
            self._capturer = capturer(device)
        except CaptureError as error:
            logger.info("decode steps are not captured on this device, computing every step op by op: %s", error)
            return
        self._inputs: StepInputs | DeviceStepInputs
        if device.type == "cpu":
            self._inputs = StepInputs(max_num_seqs, max_blocks, device, num_windows)
        else:
            self._inputs = DeviceStepInputs(max_num_seqs, max_blocks, device, num_windows)

    @property
    def start_sizes(self) -> tuple[int, ...]:
        """What to capture at start: every bucket, the largest first, whose memory the others share. Nothing on a CPU,
        where a capture is the cost of one step."""
        if self._capturer is None or not isinstance(self._inputs, DeviceStepInputs):
            return ()
        return tuple(reversed(self._inputs.sizes))

    def capture(self, bucket: int) -> str:
        """Capture one of `start_sizes`; no KV is read or written. Why it failed, or an empty text: either way it was
        computed equally often, so that the ranks of a worker stay together."""
        capturer = self._capturer
        assert capturer is not None
        assert isinstance(self._inputs, DeviceStepInputs)
        for has_adapters in (False, True) if self._has_adapters else (False,):
            self._inputs.fill_padding(bucket)
            if self._failed:
                self._scored(self._inputs.batch(bucket, has_adapters=has_adapters))
            else:
                self._capture(capturer, bucket, has_adapters=has_adapters)
        return self._failed

    def drop(self) -> None:
        """Compute every step op by op from now on."""
        self._capturer = None
        self._captured.clear()

    @property
    def max_queued(self) -> int:
        """Sequences of the largest step that `queue` takes; 0 where steps cannot be queued."""
        if self._capturer is None or not isinstance(self._inputs, DeviceStepInputs):
            return 0
        return self._inputs.sizes[-1]

    def forward(self, arrays: BatchArrays) -> Scored:
        """Logits as of `Decoder.forward`, and with a captured step the largest of each row. Good until the next step.

        Raises:
            IndexError: a block, a slot or an id is outside (on a CPU).
        """
        num_seqs = arrays.num_decodes
        if self._capturer is None or arrays.prefills or not num_seqs or self._inputs.bucket(num_seqs) is None:
            return Scored(self._computed(to_batch(arrays, self._decoder.attention)), None)
        return self._replay(self._capturer, self._inputs.fill(arrays), arrays).first(num_seqs)

    def hidden(self, arrays: BatchArrays, *, with_logits: bool) -> tuple[Tensor, Tensor]:
        """As `Decoder.hidden`. Good until the next step."""
        batch, decoder = to_batch(arrays, self._decoder.attention), self._decoder
        if self._capturer is not None:
            try:
                return self._capturer.compute(
                    lambda: decoder.hidden(batch, with_logits=with_logits), ("hidden", with_logits, *_kind(batch))
                )
            except CaptureError as error:
                self._disable_capture(error)
        return decoder.hidden(batch, with_logits=with_logits)

    def queue(self, arrays: BatchArrays, pending: Pending | None) -> Scored:
        """A step of decodes, some tokens of which may be known on the device only. Nothing waits for the device."""
        assert self._capturer is not None
        assert isinstance(self._inputs, DeviceStepInputs)
        return self._replay(self._capturer, self._inputs.fill(arrays, pending), arrays).first(arrays.num_decodes)

    def _computed(self, batch: Batch) -> Tensor:
        """Logits of a step that is computed once."""
        if self._capturer is not None:
            try:
                return self._capturer.compute(lambda: _logits(self._decoder, batch), _kind(batch))
            except CaptureError as error:
                self._disable_capture(error)
        return _logits(self._decoder, batch)

    def _replay(self, capturer: Capturer, bucket: int, arrays: BatchArrays) -> Scored:
        has_adapters = arrays.adapter_slots_T is not None
        captured = self._captured.get((bucket, has_adapters))
        if captured is None:
            return self._capture(capturer, bucket, has_adapters=has_adapters)
        return captured.replay()

    def _capture(self, capturer: Capturer, num_seqs: int, *, has_adapters: bool) -> Scored:
        """Compute what the inputs hold, and keep how."""
        batch = self._inputs.batch(num_seqs, has_adapters=has_adapters)
        try:
            scored, self._captured[num_seqs, has_adapters] = capturer.capture(lambda: self._scored(batch))
        except CaptureError as error:
            self._disable_capture(error)
            return self._scored(batch)  # what was computed before it failed is computed again
        return scored

    def _disable_capture(self, error: CaptureError) -> None:
        logger.warning("decode steps cannot be captured, computing every step op by op from now on (slower): %s", error)
        self._failed = str(error)
        self.drop()

    def _scored(self, batch: Batch) -> Scored:
        logits_SV = _logits(self._decoder, batch)
        return Scored(logits_SV, argmax_rows(logits_SV, self._vocab_size) if logits_SV.numel() else None)


def _kind(batch: Batch) -> tuple[bool, bool, bool | None, bool]:
    """Steps of one kind take the same ops, whatever rows and chunks there are."""
    samples = None if batch.sample_rows is None else len(batch.sample_rows) > 0
    num_chunks = 0 if batch.prefills is None else len(batch.prefills.chunks)
    return batch.num_decodes > 0, num_chunks > 1, samples, batch.adapters is not None


def _logits(decoder: Decoder, batch: Batch) -> Tensor:
    """Of a rank that has none, no rows."""
    logits_SV = decoder.forward(batch)
    return torch.empty((0, 0)) if logits_SV is None else logits_SV
