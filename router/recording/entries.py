"""The entries of a recording: every call of the router core that changes its state, in order, with its time.

    Header     the configuration, and how the router's clock relates to the time of day     once, at the beginning
    Handled    an event and a digest of the commands that came out                          one for each event
    Admitted, Refunded       calls charged to tenants
    ChargedElsewhere         what the gateway's other routers charged to tenants
    Ended      why nothing follows

The core's decisions depend on nothing else: it has no clock, and its draws are functions of counters.

A recording holds no token ids. Where the core takes a token, `HIDDEN` stands for it, unless it is one of the request's
stop ids; prompts are zeros of the same length; logprobs are zeros; `logit_bias` and `root_hash` are empty (with the
latter guesses of the first block could be tested though it had a secret `cache_salt`; later blocks have the hash before
theirs beside them). What the core computes from token ids, the hashes of an answer's blocks, is recorded instead
(`Handled.hashed`). So a replay gives the same commands but for these fields, which the core only passes on, and the
digest leaves them out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Final, Literal

import msgspec

from disagg.proto.ids import BlockHash, GatewayId, RequestId
from disagg.proto.messages import Sampling, StepUpdate, TokenLogprobs, TokenOut
from disagg.proto.token_ids import PackedTokenIds
from disagg.router.api import CallDemand, RateCharge
from disagg.router.config import RouterConfig
from disagg.router.requests.events import Command, Dispatch, Emit, Event, Fail, Finish, FromWorker, Submit

HIDDEN: Final = (1 << 32) - 1
"""Placeholder for a token id. It is larger than any id of a vocabulary, so that it is never a stop id."""
DIGEST_BYTES: Final = 8

EndReason = Literal["stopped", "full", "too_slow", "failed"]
"""Why a recording ended. `stopped`: with the router; `full`: at the limit of bytes; `too_slow`: too many bytes waited
to be written; `failed`: an entry could not be made."""


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """The first record of a file."""

    config: RouterConfig
    gateway_id: GatewayId
    disagg: str
    """Version of the `disagg` package."""
    python: str
    """Version of the interpreter; sums of floats may differ between versions."""
    clock: float
    """The router's clock when the recording began."""
    epoch_s: float
    """The same moment in seconds since the epoch."""


class Handled(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """A call of `RouterCore.handle`."""

    now: float
    event: Event
    num_commands: int = 0
    digest: bytes = b""
    """Digest of the commands, or of the exception that was raised; empty if there was neither."""
    hashed: tuple[tuple[BlockHash, ...], ...] = ()
    """The result of each call of the core's `hash_blocks`."""


class Admitted(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """A call of `RouterCore.admit`."""

    now: float
    call: CallDemand
    digest: bytes = b""
    """Digest of the error; empty if there was none."""


class Refunded(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """A call of `RouterCore.refund`."""

    now: float
    tenant: str
    num_tokens: int
    num_answers: int


class Ended(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """The last record, with the reason of the end; missing if the process was killed."""

    reason: EndReason


class ChargedElsewhere(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """A call of `RouterCore.charged_elsewhere`."""

    now: float
    charges: tuple[RateCharge, ...]


Entry = Handled | Admitted | Refunded | Ended | ChargedElsewhere

_encoder = msgspec.msgpack.Encoder()
_decoder: Final[msgspec.msgpack.Decoder[Entry]] = msgspec.msgpack.Decoder(Entry)
_header_decoder: Final = msgspec.msgpack.Decoder(Header)


def encode(entry: Entry | Header) -> bytes:
    """The entry as msgpack. Raises `TypeError` or `ValueError` if it cannot be recorded."""
    return _encoder.encode(entry)


def decode(data: bytes | memoryview) -> Entry:
    """The entry of a record. Raises `msgspec.MsgspecError`."""
    return _decoder.decode(data)


def decode_header(data: bytes | memoryview) -> Header:
    """The header of a recording. Raises `msgspec.MsgspecError`, or `ConfigError` for a configuration out of bounds."""
    return _header_decoder.decode(data)


# ---------------------------------------------------------------- digests


def digest(commands: Sequence[Command]) -> bytes:
    """Digest of all commands, without what a recording does not hold. Empty without commands."""
    return _digest([_outline(command) for command in commands]) if commands else b""


def digest_of_error(error: Exception | None) -> bytes:
    """Digest of the error's type and its attributes. Empty without an error."""
    return b"" if error is None else _digest([type(error).__name__, str(error), vars(error)])


def _digest(value: object) -> bytes:
    return hashlib.blake2b(_encoder.encode(value), digest_size=DIGEST_BYTES).digest()


def _outline(command: Command) -> Sequence[Any]:
    match command:
        case Emit(request_id=request_id, batch=batch):
            return "Emit", request_id, len(batch.token_ids), len(batch.logprobs)
        case Dispatch(worker_id=worker_id, message=message):
            spec = message.spec
            num_emitted = len(spec.emitted_token_ids)
            prompt, sampling = _zeros(spec.prompt_token_ids), _hide(spec.sampling)
            hidden = msgspec.structs.replace(
                spec, prompt_token_ids=prompt, emitted_token_ids=(), sampling=sampling, root_hash=_NO_HASH
            )
            fetch = () if message.fetch is None else (message.fetch,)
            return "Dispatch", worker_id, num_emitted, hidden, message.decode_peer, message.pair_timeout_s, *fetch
        case Fail(request_id=request_id, error=error):
            return "Fail", request_id, type(error).__name__, str(error), vars(error)
        case _:
            return type(command).__name__, *msgspec.structs.astuple(command)


# ---------------------------------------------------------------- without token ids

_HIDDEN_LOGPROBS = TokenLogprobs(0.0)
_NO_HASH = BlockHash(b"")


class TokenHider:
    """Replaces the token ids of events. Holds the stop ids of the requests in flight."""

    def __init__(self) -> None:
        self._stop_ids: dict[RequestId, tuple[int, ...]] = {}

    def hide(self, event: Event) -> Event:
        """The event with its token ids replaced, as it is recorded."""
        match event:
            case FromWorker(worker_id=worker_id, incarnation=incarnation, update=update):
                return FromWorker(worker_id, incarnation, self._hide_update(update)) if update.tokens else event
            case Submit(request=request, arrival=arrival):
                prompt, sampling = _zeros(request.prompt_token_ids), _hide(request.sampling)
                resumed = (HIDDEN,) * len(request.resumed_token_ids)
                hidden = msgspec.structs.replace(
                    request,
                    prompt_token_ids=prompt,
                    sampling=sampling,
                    root_hash=_NO_HASH,
                    resumed_token_ids=resumed,
                )
                return Submit(hidden, arrival)
            case _:
                return event

    def follow(self, event: Event, commands: Sequence[Command]) -> None:
        """Note the begin and the end of requests, by an event that the core handled and its commands."""
        if isinstance(event, Submit):
            self._stop_ids[event.request.request_id] = event.request.sampling.stop_token_ids
        for command in commands:
            if isinstance(command, Finish | Fail):
                self._stop_ids.pop(command.request_id, None)

    def _hide_update(self, update: StepUpdate) -> StepUpdate:
        tokens = tuple([self._hide_tokens(each) for each in update.tokens])
        return msgspec.structs.replace(update, tokens=tokens)

    def _hide_tokens(self, out: TokenOut) -> TokenOut:
        stop_ids = self._stop_ids.get(out.request_id, ())
        token_ids = tuple([each if each in stop_ids else HIDDEN for each in out.token_ids])
        logprobs = (_HIDDEN_LOGPROBS,) * len(out.logprobs)
        return TokenOut(out.request_id, out.attempt, out.first_index, token_ids, logprobs)


def _zeros(packed: PackedTokenIds) -> PackedTokenIds:
    return PackedTokenIds(bytes(len(packed)))


def _hide(sampling: Sampling) -> Sampling:
    return msgspec.structs.replace(sampling, logit_bias=()) if sampling.logit_bias else sampling
