"""From logits to one token per sequence.

Per row, in this order: logit bias; masks (stop ids until `min_tokens`, what a grammar does not allow), which no
bias can undo; repetition penalty over prompt and output ids; presence and frequency penalties over output ids;
temperature; then top-k, top-p and min-p,
each over what the one before left; then the draw. Greedy rows skip what follows the penalties.

The draw is an inverse CDF with one uniform number, a function of (seed, output index) only. Without filters tokens
stand in the order of their ids, and their weights are integers, the same on every device (`kernels/weights.py`). With
filters they are ranked by (probability descending, id ascending), so that a row's token does not depend on the batch,
the device's sort or the worker. In that order each filter keeps a prefix, and few draws leave the first `_NUM_RANKED`
tokens: the whole vocabulary is ranked only for those.

Shapes: S sequences, V vocabulary, R rows that are drawn, C ranked tokens of a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from disagg.engine.draft_row import SampledRow
from disagg.engine.plan import NO_TOKEN, RowFault
from disagg.engine.randomness import uniform
from disagg.engine.runner.logits import edited_logits, of_grammars
from disagg.engine.runner.model.device_draws import DeviceDraws
from disagg.engine.runner.token_masks import TokenMasks
from disagg.engine.sampling_rules import edits_logits, is_filtered, is_greedy, is_only_masked
from disagg.kernels.dispatch import argmax_rows, draw_unfiltered
from disagg.proto.messages import Sampling

_NUM_RANKED = 256


class Sampler:
    """Samples rows of logits. Stateless: what penalties count is kept by the sequences.

    Args:
        vocab_size: columns of the logits that are tokens.
        draws: what draws on the logits' device, where something does.
        masks: of grammars; without it a row with a grammar gets no token.
    """

    def __init__(self, vocab_size: int, draws: DeviceDraws | None = None, masks: TokenMasks | None = None) -> None:
        self._vocab_size = vocab_size
        self._draws = draws
        self._masks = masks

    def sample(self, logits_SV: Tensor, sequences: Seq[SampledRow], largest_S: Tensor | None = None) -> list[int]:
        """One token id per row; row i belongs to `sequences[i]`, which may be a sequence with drafts behind it. The
        logits (any float dtype) are not changed.
        `largest_S` is `argmax_rows` of them, where that is known.

        Columns past the vocabulary (padding) are ignored. `NO_TOKEN` for a row that holds NaN, +inf or nothing finite,
        as the model gave it or after its own bias, masks, penalties and temperature: no other row depends on it.
        ValueError when shapes do not fit.
        """
        if logits_SV.dim() != 2 or logits_SV.shape[0] != len(sequences) or logits_SV.shape[1] < self._vocab_size:
            raise ValueError(
                f"logits {list(logits_SV.shape)} for {len(sequences)} sequences and {self._vocab_size} tokens"
            )
        if not sequences:
            return []
        plain, edited, drawn = _by_kind(sequences)
        tokens = [0] * len(sequences)
        if plain or (edited and largest_S is not None):
            tokens = (argmax_rows(logits_SV, self._vocab_size) if largest_S is None else largest_S).tolist()
        if largest_S is not None:
            edited = self._still_to_mask(edited, sequences, tokens)
        for rows, choose in ((edited, self._choose_edited), (drawn, self._draw)):
            if rows:
                logits_RV = logits_SV if len(rows) == len(sequences) else logits_SV[rows]
                chosen = choose(logits_RV, [sequences[row] for row in rows])
                for row, token in zip(rows, chosen, strict=True):
                    tokens[row] = token
        return tokens

    def _still_to_mask(self, edited: list[int], sequences: Seq[SampledRow], largest: Seq[int]) -> list[int]:
        """Without the rows whose grammar allows what is the largest logit anyhow."""
        masks, only_masked = self._masks, [row for row in edited if is_only_masked(sequences[row])]
        if masks is None or not only_masked:
            return edited
        are_allowed = masks.allow([sequences[row] for row in only_masked], [largest[row] for row in only_masked])
        chosen = {row for row, is_allowed in zip(only_masked, are_allowed, strict=True) if is_allowed}
        return [row for row in edited if row not in chosen]

    @torch.inference_mode()
    def _choose_edited(self, logits_RV: Tensor, sequences: Seq[SampledRow]) -> list[int]:
        logits_RV = logits_RV[:, : self._vocab_size]
        if all(is_only_masked(sequence) for sequence in sequences):  # no other edit: the logits' own dtype will do
            edited_RV = of_grammars(logits_RV, sequences, self._masks)
        else:
            edited_RV = edited_logits(logits_RV, sequences, self._masks)
        chosen: list[int] = argmax_rows(edited_RV, self._vocab_size).tolist()
        return chosen

    @torch.inference_mode()
    def _draw(self, logits_RV: Tensor, sequences: Seq[SampledRow]) -> list[int]:
        edited_RV = edited_logits(logits_RV[:, : self._vocab_size], sequences, self._masks)
        if self._draws is None:
            return _draw_rows(edited_RV, sequences)
        chosen: list[int] = []
        for first in range(0, len(sequences), self._draws.max_rows):
            rows = slice(first, first + self._draws.max_rows)
            drawn_R = self._draws.draw(edited_RV[rows], sequences[rows], [0] * len(sequences[rows]))
            chosen += drawn_R.tolist()
        return chosen


def _by_kind(sequences: Seq[SampledRow]) -> tuple[list[int], list[int], list[int]]:
    """Rows that take the largest logit as it is, those that take it of edited logits, and those that are drawn."""
    plain: list[int] = []
    edited: list[int] = []
    drawn: list[int] = []
    for row, sequence in enumerate(sequences):
        if not is_greedy(sequence.spec.sampling):
            drawn.append(row)
        elif edits_logits(sequence):
            edited.append(row)
        else:
            plain.append(row)
    return plain, edited, drawn


# ---------------------------------------------------------------- the choice


def _draw_rows(logits_RV: Tensor, sequences: Seq[SampledRow]) -> list[int]:
    vocab_size = logits_RV.shape[1]
    tokens = [NO_TOKEN] * len(sequences)
    kinds: tuple[list[int], list[int]] = ([], [])
    for row, sequence in enumerate(sequences):
        kinds[is_filtered(sequence.spec.sampling, vocab_size)].append(row)
    for rows, draw in zip(kinds, (_draw_unfiltered, _draw_filtered), strict=True):
        if rows:
            part_RV = logits_RV if len(rows) == len(sequences) else logits_RV[rows]
            for row, token in zip(rows, draw(part_RV, [sequences[row] for row in rows]), strict=True):
                tokens[row] = token
    return tokens


def _temperatures(sequences: Seq[SampledRow], device: torch.device) -> Tensor:
    return torch.tensor([s.spec.sampling.temperature for s in sequences], dtype=torch.float32, device=device)


def _draw_unfiltered(logits_RV: Tensor, sequences: Seq[SampledRow]) -> list[int]:
    device = logits_RV.device
    uniform_R = [uniform(sequence.spec.sampling.seed, sequence.num_output_tokens) for sequence in sequences]
    drawn_R = draw_unfiltered(
        logits_RV,
        logits_RV.shape[1],
        _temperatures(sequences, device),
        torch.tensor(uniform_R, dtype=torch.float64, device=device),
    )
    tokens: list[int] = drawn_R.tolist()
    return tokens


def _draw_filtered(logits_RV: Tensor, sequences: Seq[SampledRow]) -> list[int]:
    vocab_size = logits_RV.shape[1]
    temperatures_R = _temperatures(sequences, logits_RV.device)
    scaled_RV = logits_RV / temperatures_R[:, None]
    top_R1 = scaled_RV.amax(dim=-1, keepdim=True)
    mass_R = (scaled_RV - top_R1).exp_().sum(dim=-1, dtype=torch.float64)
    is_good_R = torch.isfinite(mass_R).tolist()
    values_RC, ids_RC = scaled_RV.topk(min(_NUM_RANKED, vocab_size), dim=-1)
    masses, values, ids = mass_R.tolist(), values_RC.cpu().numpy(), ids_RC.cpu().numpy()
    chosen = []
    for row, sequence in enumerate(sequences):
        if not is_good_R[row]:
            chosen.append(NO_TOKEN)
            continue
        sampling = sequence.spec.sampling
        u = uniform(sampling.seed, sequence.num_output_tokens)
        token = _draw(_rank_top(values[row], ids[row], masses[row], vocab_size), sampling, u)
        if token is None:
            token = _draw(_rank_all(scaled_RV[row].cpu().numpy()), sampling, u)
            assert token is not None, "a full ranking always decides"
        chosen.append(token)
    return chosen


@dataclass(frozen=True, slots=True)
class _Ranking:
    """The first tokens of a row by (probability descending, id ascending)."""

    ids_C: NDArray[np.int64]
    weights_C: NDArray[np.float64]
    """Probabilities over the largest one."""
    mass: float
    """Sum of the weights of the whole vocabulary."""
    vocab_size: int

    @property
    def is_all(self) -> bool:
        """Whether every token is ranked."""
        return len(self.ids_C) == self.vocab_size


def _rank(values: NDArray[np.float32], ids: NDArray[np.int64]) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Sorted by value descending, then id ascending: as integer keys, which are all different."""
    bits = (values + np.float32(0.0)).view(np.uint32)  # + 0 makes -0 equal to 0
    ascending = np.where(bits >> 31, ~bits, bits | np.uint32(1 << 31))
    order = np.argsort((~ascending).astype(np.uint64) << np.uint64(32) | ids.astype(np.uint64))
    return values[order], ids[order]


def _rank_top(values_C: NDArray[np.float32], ids_C: NDArray[np.int64], mass: float, vocab_size: int) -> _Ranking:
    """From the largest values, in any order. Those equal to the smallest are left out: others may have it too."""
    if len(values_C) < vocab_size:
        sure = values_C > values_C.min()
        values_C, ids_C = values_C[sure], ids_C[sure]
    values_C, ids_C = _rank(values_C, ids_C)
    top = values_C[:1].astype(np.float64)
    return _Ranking(ids_C, np.exp(values_C.astype(np.float64) - top), mass, vocab_size)


def _rank_all(values_V: NDArray[np.float32]) -> _Ranking:
    values_V, ids_V = _rank(values_V, np.arange(len(values_V)))
    weights = np.exp(values_V.astype(np.float64) - np.float64(values_V[0]))
    return _Ranking(ids_V, weights, float(weights.sum()), len(ids_V))


def _draw(ranking: _Ranking, sampling: Sampling, u: float) -> int | None:
    """The token at `u` of the filtered distribution; None when more tokens must be ranked to know."""
    sums_C = np.cumsum(ranking.weights_C)
    kept = _num_kept(ranking, sums_C, sampling)
    if kept is None:
        return None
    at = int(np.searchsorted(sums_C[:kept], u * sums_C[kept - 1], side="right"))
    return int(ranking.ids_C[min(at, kept - 1)])


def _num_kept(ranking: _Ranking, sums_C: NDArray[np.float64], sampling: Sampling) -> int | None:
    """How many of the first tokens the filters, at least one, keep; None for more than are ranked."""
    known = len(sums_C)
    kept = known
    mass = ranking.mass
    cut = ranking.is_all
    if 0 < sampling.top_k < ranking.vocab_size:
        if sampling.top_k > known:
            return None
        kept, cut = sampling.top_k, True
        mass = float(sums_C[kept - 1])
    if sampling.top_p < 1.0:
        below = int(np.count_nonzero(sums_C[:kept] < sampling.top_p * mass))
        if below < kept:
            kept, cut = below + 1, True
    if sampling.min_p > 0.0:
        likely = int(np.count_nonzero(ranking.weights_C[:kept] >= sampling.min_p))
        if likely < kept:
            kept, cut = max(likely, 1), True
    return kept if cut else None


# ---------------------------------------------------------------- rows without a token


def row_faults(logits_SV: Tensor, vocab_size: int, token_ids: Seq[int]) -> Mapping[int, RowFault]:
    """Why the rows without a token have none, by row. `logits_SV` are the model's, before any edit."""
    rows = [row for row, token_id in enumerate(token_ids) if token_id == NO_TOKEN]
    if not rows:
        return {}
    of_model = argmax_rows(logits_SV[rows], vocab_size).tolist()
    return {row: "model" if largest == NO_TOKEN else "request" for row, largest in zip(rows, of_model, strict=True)}
