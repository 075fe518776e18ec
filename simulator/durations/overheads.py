"""Times other than those of steps and links, and how much processes on one machine slow each other down."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

Share = Annotated[float, msgspec.Meta(ge=0, le=0.9)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1.0)]


class Overheads(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Times other than those of steps and links, in seconds. With all of them 0 the processes cost nothing."""

    request_s: float = 0.0
    """Seconds until the gateway has routed a request: checks, tokenizing, hashing."""
    request_token_s: float = 0.0
    """Additional seconds until then for each token of the prompt."""
    message_s: float = 0.0
    """Seconds of one message between two processes: dispatch, update, report, control message of a hand-over."""
    token_s: float = 0.0
    """Seconds for each token of an update until the client has it."""
    step_s: float = 0.0
    """Seconds of a worker between two steps: planning, events."""
    copy_byte_s: float = 0.0
    """Seconds of a worker for each byte of KV that it copies between cache and staging or host memory; no step runs
    meanwhile."""
    pair_s: float = 0.0
    """Seconds until a pair of workers is formed for the first time."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if not getattr(self, name) >= 0.0:
                raise ValueError(f"{name}: expected a time of at least 0; got {getattr(self, name)}")


NO_OVERHEADS = Overheads()


class Sharing(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How much processes on one machine slow each other down.

    A step is delayed by a share of the time in which its neighbours compute meanwhile. The share depends on the kinds
    of both steps; a step with prompt tokens is a prefill. One worker is also delayed by the time that the gateway uses
    its core.
    """

    prefill_by_prefill: Share = 0.0
    prefill_by_decode: Share = 0.0
    decode_by_prefill: Share = 0.0
    decode_by_decode: Share = 0.0
    update_s: Seconds = 0.0
    """Seconds that the gateway, with everything else on its core, takes for a message of a worker."""
    token_s: Seconds = 0.0
    """Additional seconds for each token in the message."""

    def lost_s(self, kind: Literal["prefill", "decode"], beside_prefill_s: float, beside_decode_s: float) -> float:
        """Seconds of delay of a step, by the seconds of the others' steps meanwhile."""
        if kind == "prefill":
            return self.prefill_by_prefill * beside_prefill_s + self.prefill_by_decode * beside_decode_s
        return self.decode_by_prefill * beside_prefill_s + self.decode_by_decode * beside_decode_s
