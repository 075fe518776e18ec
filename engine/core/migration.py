"""A sequence that moves to another worker while it decodes: what it is offered with, and what it grew by meanwhile.
Pure.

    S   Export ──> Exported(spec)  ...KV is copied while it decodes on...  Hold ──> Held(tokens) ──> Gather* ──> End
                                                                            └── it failed ──> Unhold
    D   Reserve ──> Reserved ──> Scatter* ──> Extend(tokens) ──> Scatter* ──> Join

The tokens whose KV is computed are all but the last one, so nothing is computed again: the last one is what a prefill
worker would have sampled. A sequence with forced tokens is held once they are computed.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import msgspec

from disagg.engine.blocks.kv_cache_manager import KVCacheManager
from disagg.engine.commands import Event, Exported, Held
from disagg.engine.core.scheduler import Scheduler
from disagg.engine.plan import StepPlan
from disagg.engine.request import Sequence, SequenceState
from disagg.proto.ids import AttemptKey, GatewayId
from disagg.proto.messages import SequenceSpec, Targets


def exported_spec(sequence: Sequence, now: float) -> SequenceSpec | None:
    """The spec with which a sequence goes on elsewhere; None where it does not decode."""
    if not sequence.is_decoding:
        return None
    computed = sequence.token_ids[sequence.num_prompt_tokens : sequence.num_computed_tokens]
    return msgspec.structs.replace(
        sequence.spec,
        emitted_token_ids=tuple(computed),
        block_hashes=tuple(sequence.block_hashes),
        timeout_s=None if sequence.deadline is None else max(0.0, sequence.deadline - now),
        targets=_targets(sequence, now),
    )


def _targets(sequence: Sequence, now: float) -> Targets | None:
    targets = sequence.spec.targets
    if targets is None:
        return None
    targets = targets.after(max(0.0, now - sequence.arrival))
    if targets.streamed_s is None and sequence.first_at is not None:
        targets = Targets(
            targets.ttft_s, targets.tpot_s, targets.age_s, max(0.0, now - sequence.first_at), targets.output_tokens
        )
    return targets


def extend(
    sequence: Sequence, token_ids: Seq[int], kv_cache: KVCacheManager, *, vocab_size: int, max_model_len: int
) -> str | None:
    """Append tokens that another worker sampled to a RESERVED sequence, and allocate all its blocks. Returns why that
    is impossible, or None."""
    if not all(0 <= token_id < vocab_size for token_id in token_ids):
        return "a token id is not in the vocabulary"
    num_tokens = sequence.num_tokens + len(token_ids)
    if num_tokens >= max_model_len:
        return f"{num_tokens} tokens and an answer do not fit into {max_model_len}"
    if sequence.num_output_tokens + len(token_ids) >= sequence.spec.sampling.max_tokens:
        return "the output is complete already"
    if not kv_cache.has_room(sequence, num_tokens):
        return "not enough free KV blocks"
    sequence.token_ids.extend(token_ids)
    sequence.num_given_tokens = num_tokens
    kv_cache.outgrown(sequence)
    kv_cache.extend(sequence, num_tokens)
    return None


class Moves:
    """Takes sequences out of the batch that move, and puts them back. Owner: the engine core."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._to_hold: dict[AttemptKey, int] = {}
        """Sequences that are in a step still, and what their peers know of them."""

    def export(self, key: AttemptKey, now: float) -> Exported:
        """Describe a sequence; see the command `Export`."""
        sequence = self._scheduler.sequences.get(key)
        if sequence is None:
            return Exported(key, GatewayId(""), None)
        return Exported(key, sequence.spec.gateway_id, exported_spec(sequence, now))

    def hold(self, key: AttemptKey, num_known: int, planned: StepPlan) -> list[Event]:
        """Take a sequence out of the batch, now or when its step is over; see the command `Hold`. `planned`: what will
        be run next."""
        sequence = self._scheduler.sequences.get(key)
        if sequence is None or not sequence.is_decoding:
            return [Held(key, ok=False)]
        sequence.is_leaving = True
        self._to_hold[key] = num_known
        return self.due(planned)

    def due(self, planned: StepPlan | None = None) -> list[Event]:
        """Hold those whose step is over, and of whose tokens but the last one is not computed."""
        events: list[Event] = []
        for key, num_known in list(self._to_hold.items()):
            sequence = self._scheduler.sequences.get(key)
            if sequence is not None and (
                sequence.num_launched_tokens
                or (planned is not None and _has(planned, sequence))
                or (sequence.is_decoding and sequence.num_uncomputed_tokens > 1)
            ):
                continue
            del self._to_hold[key]
            events.append(Held(key, ok=False) if sequence is None else self._held(sequence, num_known))
        return events

    def unhold(self, key: AttemptKey) -> None:
        """Put a held sequence back, or revoke its `hold`."""
        self._to_hold.pop(key, None)
        scheduler = self._scheduler
        sequence = scheduler.sequences.get(key)
        if sequence is None:
            return
        if sequence.is_leaving and sequence.state is SequenceState.HELD:
            scheduler.num_leaving -= 1
            sequence.state = SequenceState.RUNNING
            scheduler.running[key] = sequence
        sequence.is_leaving = False

    def forget(self, key: AttemptKey) -> None:
        """The sequence is over."""
        self._to_hold.pop(key, None)

    def check_integrity(self) -> list[str]:
        """Findings; empty when sound."""
        is_sound = self._to_hold.keys() <= self._scheduler.sequences.keys()
        return [] if is_sound else ["a sequence that ended is still to be held"]

    def _held(self, sequence: Sequence, num_known: int) -> Held:
        if not sequence.is_decoding:
            sequence.is_leaving = False
            return Held(sequence.key, ok=False)
        del self._scheduler.running[sequence.key]
        sequence.state, sequence.is_leaving = SequenceState.HELD, True
        self._scheduler.num_leaving += 1
        grown = tuple(sequence.token_ids[num_known : sequence.num_computed_tokens])
        return Held(sequence.key, True, grown, sequence.token_ids[-1], sequence.last_logprobs)


def _has(plan: StepPlan, sequence: Sequence) -> bool:
    return any(entry.sequence is sequence for entry in plan.entries)
