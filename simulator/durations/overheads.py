"""What takes time besides steps and links, and what processes of one machine take from each other."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

Share = Annotated[float, msgspec.Meta(ge=0, le=0.9)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1.0)]


class Overheads(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What takes time besides steps and links, in seconds. All 0 is a cluster whose processes cost nothing."""

    request_s: float = 0.0
    """Until the gateway has routed a request: checks, tokenizing, hashing."""
    request_token_s: float = 0.0
    """The same for each token of its prompt."""
    message_s: float = 0.0
    """One message between two processes: dispatch, update, report, control message of a hand-over."""
    token_s: float = 0.0
    """Until a client has its tokens: for each token of the update that brought them."""
    step_s: float = 0.0
    """A worker's time between two steps: planning, events."""
    copy_byte_s: float = 0.0
    """A worker's time for each byte of KV that it copies between cache and staging or host memory, beside no step."""
    pair_s: float = 0.0
    """Until a pair of workers is formed that none was asked to form before."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if not getattr(self, name) >= 0.0:
                raise ValueError(f"{name}: expected a time of at least 0; got {getattr(self, name)}")


NO_OVERHEADS = Overheads()


class Sharing(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What processes of one machine take from each other.

    A step falls behind by these shares of the time in which a neighbour computes meanwhile, by the kinds of both; a
    step with prompt tokens is a prefill. And one worker falls behind by the time that the gateway takes of its core.
    """

    prefill_by_prefill: Share = 0.0
    prefill_by_decode: Share = 0.0
    decode_by_prefill: Share = 0.0
    decode_by_decode: Share = 0.0
    update_s: Seconds = 0.0
    """What the gateway, with whatever else runs on its core, takes for a message of a worker."""
    token_s: Seconds = 0.0
    """The same for each token in it."""

    def lost_s(self, kind: Literal["prefill", "decode"], beside_prefill_s: float, beside_decode_s: float) -> float:
        """Seconds by which a step is longer beside so much of the others' steps."""
        if kind == "prefill":
            return self.prefill_by_prefill * beside_prefill_s + self.prefill_by_decode * beside_decode_s
        return self.decode_by_prefill * beside_prefill_s + self.decode_by_decode * beside_decode_s
