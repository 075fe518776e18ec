"""What both ends of a fetch decide about a prefix beside its hand-over. Pure; workers and the simulator use it."""

from __future__ import annotations

import msgspec

from disagg.engine.kv_transfer.commands import ReceiveOver
from disagg.proto.block_hash import HASH_BLOCK_TOKENS
from disagg.proto.handover import Failure
from disagg.proto.messages import FetchOutcome, SequenceSpec
from disagg.proto.token_ids import TOKEN_ID_BYTES, PackedTokenIds

MAX_SERVED = 2
"""Fetches that a worker serves at a time: each takes time of its engine, which its own sequences wait for."""


def held_part(spec: SequenceSpec, num_tokens: int) -> SequenceSpec:
    """The first `num_tokens` tokens of a prefix, which are whole blocks: what its source holds and offers."""
    return msgspec.structs.replace(
        spec,
        prompt_token_ids=PackedTokenIds(spec.prompt_token_ids[: num_tokens * TOKEN_ID_BYTES]),
        block_hashes=spec.block_hashes[: num_tokens // HASH_BLOCK_TOKENS],
    )


def outcome_of(over: ReceiveOver) -> FetchOutcome:
    """The outcome of a fetch whose hand-over is decided."""
    if over.cause is None:
        return "done"
    match over.cause.failure:
        case Failure.REFUSED:  # the worker that fetches has no blocks for it
            return "refused"
        case Failure.DEADLINE:  # that of the source
            return "late"
        case _:
            return "failed"
