"""Which tokens a grammar allows next, for the rows of a step, computed on threads while the model computes the step.

The state of a sequence's grammar (`GrammarState`) is a function of its output tokens alone: wherever a sequence is made
anew (on D after P, for another attempt, after a migration) it starts from the compiled grammar and takes the tokens so
far; otherwise it takes what is new. A preempted sequence keeps it. Nothing of it is sent.

    TokenMasks.start(sequences) ──a thread──> state.words         (llguidance, without the interpreter's lock)
    model computes                             │
    edited_logits ── TokenMasks.wait ──────────┘
    take_forced(sampled) ──> tokens behind them

Behind a sampled token a grammar may force text, such as the name of a property: the library tokenizes it as the model's
tokenizer would, and its mask allows the first of these tokens only. So they are taken at once (`take_forced`), and are
those that steps of their own would sample.

Shapes: R rows, V vocabulary, W = ceil(V / 32) words of a bit mask.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from disagg.engine.draft_row import DraftRow, SampledRow, is_last_reached
from disagg.engine.plan import NO_TOKEN
from disagg.engine.sampling_rules import takes_forced
from disagg.proto.grammars import grammar_tokenizer, new_matcher

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

T = TypeVar("T")

logger = logging.getLogger(__name__)

_MAX_COMPILED = 64
"""Grammars that are kept compiled, the latest used ones."""
MAX_FORCED = 64
"""Tokens that are forced behind a sampled one. Each takes what is left of a forced text to be tokenized anew, which is
4 ms for 600 tokens: the tokens of a longer text are sampled until so many are left."""


class GrammarState:
    """State of the grammar of one sequence."""

    def __init__(self, matcher: LLMatcher | None) -> None:
        self.matcher = matcher
        """None where the grammar cannot be used (any further): nothing is allowed then, which ends the request."""
        self.num_taken = 0
        """Output tokens that the matcher has taken."""
        self.words: NDArray[np.int32] | None = None
        """The allowed tokens [W] behind `num_taken` of them, bit i % 32 of word i / 32 for token i."""
        self._looks_at = 0
        """Output tokens before which what is forced is longer than `MAX_FORCED`."""

    @classmethod
    def behind(cls, state: GrammarState, row: DraftRow) -> GrammarState:
        """That of a sequence whose state is `state`, with drafts behind it. Where these do not follow the grammar
        nothing is allowed: the token before the first such draft is another one, so the row counts for nothing."""
        drafts = list(row.drafts)
        is_allowed = state.matcher is not None and state.matcher.validate_tokens(drafts) == len(drafts)
        found = cls(state.matcher.deep_copy() if state.matcher is not None and is_allowed else None)
        found.num_taken = state.num_taken
        return found

    def advance(self, sequence: SampledRow) -> bool:
        """Take the new tokens. Returns whether a mask can be computed."""
        assert self.num_taken <= sequence.num_output_tokens
        new = sequence.token_ids[sequence.num_prompt_tokens + self.num_taken :]
        if new and self.matcher is not None:
            self._take(sequence, new)
        return self.matcher is not None

    def take_forced(self, row: SampledRow, token_id: int, end_id: int | None) -> tuple[int, ...]:
        """Take a token that was sampled behind the known ones, with the drafts before it, which are known now, and
        those that must follow it: `end_id` where that ends the answer."""
        forced: list[int] = []
        sequence, drafts = (row.sequence, row.drafts) if isinstance(row, DraftRow) else (row, ())
        most = min(MAX_FORCED, row.spec.sampling.max_tokens - row.num_output_tokens - 1)
        num_sampled = len(drafts) + 1
        if self.num_taken + num_sampled < self._looks_at or most < 1 or not self._take(sequence, [*drafts, token_id]):
            return ()
        while self.matcher is not None and len(forced) < most:
            if self.matcher.is_stopped():
                return tuple(forced) if end_id is None else (*forced, end_id)
            ahead = self.matcher.compute_ff_tokens()
            self._looks_at = self.num_taken + len(ahead) - MAX_FORCED
            if not ahead or len(ahead) > MAX_FORCED or not self._take(sequence, ahead[:1]):
                break
            forced.append(ahead[0])
        return tuple(forced)

    def _take(self, sequence: SampledRow, token_ids: list[int]) -> bool:
        self.words = None
        self.num_taken += len(token_ids)
        if self.matcher is not None and not self.matcher.consume_tokens(token_ids):
            logger.warning("%s: its tokens do not follow its grammar; ending it", sequence.key)
            self.matcher = None
        return self.matcher is not None


class TokenMasks:
    """Masks for one model. Owner: the engine thread; one more thread works between `start` and `wait`.

    Args:
        tokenizer_file: of the model; read on the first use, which takes most of a second: at the start of every worker
            it made all of them wait longer, for what few requests need.
        vocab_size: columns of the logits that are tokens.
        eos_token_ids: what ends an answer, which is allowed where the grammar is complete.
        skips_forced: whether `take_forced` finds any.
    """

    def __init__(
        self, tokenizer_file: Path, vocab_size: int, eos_token_ids: tuple[int, ...], *, skips_forced: bool = True
    ) -> None:
        self._file = tokenizer_file
        self._vocab_size = vocab_size
        self._num_words = -(-vocab_size // 32)
        self._eos = eos_token_ids
        self._skips_forced = skips_forced
        self._tokenizer: Future[LLTokenizer] | None = None
        self._executor: LLExecutor | None = None
        self._compiled: OrderedDict[bytes, LLMatcher] = OrderedDict()
        self._pending: Future[None] | None = None

    def start(self, sequences: Seq[SampledRow]) -> None:
        """Begin to compute the masks of the next tokens of those with a grammar; rows of drafts come behind their
        sequences."""
        rows = [sequence for sequence in sequences if sequence.spec.sampling.grammar]
        if rows:
            if self._tokenizer is None:
                self._tokenizer = _on_a_thread(self._load)
            self.wait()  # a step that failed left its masks behind
            self._pending = _on_a_thread(lambda: self._fill(rows))

    def wait(self) -> None:
        """Wait until the masks of the last `start` are computed."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def allowed(self, sequences: Seq[SampledRow]) -> NDArray[np.bool_]:
        """The tokens [R, V] that may come next in each; none where the grammar cannot be used."""
        bits_RV = np.unpackbits(self.packed(sequences), axis=1, count=self._vocab_size, bitorder="little")
        return bits_RV.view(np.bool_)

    def allow(self, sequences: Seq[SampledRow], token_ids: Seq[int]) -> list[bool]:
        """Of each whether this token may come next; `NO_TOKEN` may not."""
        ids_R = np.array(token_ids, dtype=np.int64)
        bytes_R = self.packed(sequences)[np.arange(len(ids_R)), ids_R // 8]
        allowed: list[bool] = ((bytes_R >> (ids_R % 8) & 1 == 1) & (ids_R >= 0)).tolist()
        return allowed

    def packed(self, sequences: Seq[SampledRow]) -> NDArray[np.uint8]:
        """The same as bits [R, 4 W]: bit i % 8 of byte i / 8 for token i."""
        self.wait()
        late = [sequence for sequence in sequences if not _is_current(sequence)]
        if late:
            self.start(late)
            self.wait()
        return np.stack([self._words(sequence) for sequence in sequences]).view(np.uint8)

    def take_forced(self, rows: Seq[SampledRow], token_ids: Seq[int]) -> Mapping[int, tuple[int, ...]]:
        """By place in `token_ids`, which were just sampled and are not appended yet: tokens that must follow. They are
        to be appended, too, as far as the answer goes. Of a sequence with drafts only the last row that gives a token
        counts."""
        found: dict[int, tuple[int, ...]] = {}
        if not self._skips_forced:
            return found
        for place, (row, token_id) in enumerate(zip(rows, token_ids, strict=True)):
            sequence = row.sequence if isinstance(row, DraftRow) else row
            state, stop_ids = sequence.grammar_state, row.spec.sampling.stop_token_ids
            if state is None or token_id == NO_TOKEN or token_id in stop_ids:
                continue
            if takes_forced(sequence) and is_last_reached(rows, token_ids, place):
                end_id = self._eos[0] if len(self._eos) == 1 and self._eos[0] in stop_ids else None
                if forced := state.take_forced(row, token_id, end_id):
                    found[place] = forced
        return found

    def _words(self, sequence: SampledRow) -> NDArray[np.int32]:
        state = sequence.grammar_state
        assert state is not None
        return np.zeros(self._num_words, dtype=np.int32) if state.words is None else state.words

    def _load(self) -> LLTokenizer:
        return grammar_tokenizer(
            self._file.read_text(encoding="utf-8"), self._vocab_size, self._eos, secrets.token_hex(8)
        )

    def _fill(self, sequences: Seq[SampledRow]) -> None:
        """Advance the grammars and fill the masks; runs on the thread."""
        rows: list[tuple[GrammarState, LLMatcher]] = []
        for sequence in sequences:
            if sequence.grammar_state is None:
                sequence.grammar_state = (
                    GrammarState.behind(sequence.sequence.grammar_state, sequence)
                    if isinstance(sequence, DraftRow)
                    else GrammarState(self._matcher(sequence))
                )
            state = sequence.grammar_state
            if state.advance(sequence) and state.words is None:
                assert state.matcher is not None
                rows.append((state, state.matcher))
        if not rows:
            return
        from llguidance import LLExecutor
        from llguidance.numpy import fill_next_token_bitmask_par

        if self._executor is None:
            self._executor = LLExecutor(num_threads=torch.get_num_threads())
        words_RW = np.zeros((len(rows), self._num_words), dtype=np.int32)
        fill_next_token_bitmask_par(self._executor, [(matcher, row) for row, (_, matcher) in enumerate(rows)], words_RW)
        for row, (state, matcher) in enumerate(rows):
            state.words = words_RW[row]
            if matcher.is_error():
                state.matcher = state.words = None

    def _matcher(self, sequence: SampledRow) -> LLMatcher | None:
        grammar = sequence.spec.sampling.grammar
        key = hashlib.sha256(grammar.encode()).digest()
        compiled = self._compiled.get(key)
        if compiled is None:
            assert self._tokenizer is not None
            try:
                compiled = new_matcher(self._tokenizer.result(), grammar)
            except (ValueError, OSError) as error:
                logger.warning("%s: its grammar cannot be used, ending it: %s", sequence.key, error)
                return None
            self._compiled[key] = compiled
            while len(self._compiled) > _MAX_COMPILED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(key)
        return compiled.deep_copy()


def _is_current(sequence: SampledRow) -> bool:
    """Whether the mask of its next token is computed."""
    state = sequence.grammar_state
    return state is not None and state.num_taken == sequence.num_output_tokens and state.words is not None


def _on_a_thread(work: Callable[[], T]) -> Future[T]:
    """What `work` gives, on a thread that ends with it: nobody has to close it, and to start it takes some 50 us. The
    interpreter waits for it at its end: native code that returns to one that is gone would crash."""
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:  # for who waits
            result.set_exception(error)

    threading.Thread(target=run, name="token-masks").start()
    return result
