"""From a client's protobuf to what the router takes. Pure: nothing is read but the arguments.

    check_targets   the call's metadata                            -> Targets
    check_request   everything that can be seen before tokenizing  -> CheckedRequest
    fit_prompt      what needs the prompt's ids: the context        -> Sampling

An error names the field as the client wrote it, within GenerateRequest: `sampling.top_p`, `prompt.token_ids[3]`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from disagg.proto.errors import ContextLengthError, DeadlineError, InvalidRequestError, ModelNotFoundError
from disagg.proto.messages import Sampling
from disagg.router.gateway.chat_template import ChatTurn
from disagg.router.gateway.tokenizer import ModelInfo
from disagg.v1 import inference_pb2 as pb

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_STOP_IDS = 64
MAX_CHAT_MESSAGES = 4096
ROLES = ("system", "user", "assistant")
TTFT_METADATA = "x-slo-ttft-ms"
"""A client's target for the time to the first token, in milliseconds."""
TPOT_METADATA = "x-slo-tpot-ms"
"""A client's target for the mean time between output tokens, in milliseconds."""
_MAX_TARGET_MS = 86_400_000.0
_MAX_ECHOED_CHARS = 64
"""Of a client's wrong value, as repeated in the message."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What requests are checked against."""

    model: ModelInfo
    max_prompt_bytes: int


class Targets(NamedTuple):
    """What a client wants of the latencies of one request; `None` takes what the cluster is configured for."""

    ttft_s: float | None = None
    tpot_s: float | None = None


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """A text to be tokenized as it is."""

    text: str
    field = "prompt.text"

    @property
    def num_bytes(self) -> int:
        """Size, to tell small prompts from large ones."""
        return len(self.text.encode())


@dataclass(frozen=True, slots=True)
class IdsPrompt:
    """Token ids, used as they are."""

    token_ids: tuple[int, ...]
    field = "prompt.token_ids"

    @property
    def num_bytes(self) -> int:
        """Size, to tell small prompts from large ones."""
        return 4 * len(self.token_ids)


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Turns, to be rendered with the chat template."""

    turns: tuple[ChatTurn, ...]
    field = "chat.messages"

    @property
    def num_bytes(self) -> int:
        """Size, to tell small prompts from large ones."""
        return sum(len(turn.role.encode()) + len(turn.content.encode()) for turn in self.turns)


Prompt = TextPrompt | IdsPrompt | ChatPrompt


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedRequest:
    """A request in which nothing is wrong that can be seen before tokenizing."""

    prompt: Prompt
    sampling: Sampling
    """Complete but for `max_tokens` and `seed`, which `fit_prompt` fills in."""
    max_tokens: int | None
    """As the client asked."""
    seed: int | None
    """As the client asked."""
    stop: tuple[str, ...]
    """Stop strings; workers never see them."""


def check_request(request: pb.GenerateRequest, limits: Limits, time_left_s: float | None = None) -> CheckedRequest:
    """Check every field of `request`.

    Args:
        request: as it came in.
        limits: of the model and the gateway.
        time_left_s: until the deadline, `None` without one.

    Raises:
        DeadlineError: if no time is left.
        ModelNotFoundError: if the model is another one.
        ContextLengthError: if the prompt's ids alone are too many.
        InvalidRequestError: for any wrong field.
    """
    check_deadline(time_left_s)
    check_model(request.model, limits)
    prompt = _check_prompt(request, limits)
    stopping = request.stopping
    max_tokens = stopping.max_tokens if stopping.HasField("max_tokens") else None
    _check_token_range(max_tokens, stopping.min_tokens)
    _check_stop_ids(stopping.stop_token_ids, limits.model.vocab_size)
    _check_stop_strings(stopping.stop)
    return CheckedRequest(
        prompt=prompt,
        sampling=_check_sampling(request, limits.model),
        max_tokens=max_tokens,
        seed=request.sampling.seed if request.sampling.HasField("seed") else None,
        stop=tuple(dict.fromkeys(stopping.stop)),
    )


def fit_prompt(checked: CheckedRequest, prompt_token_ids: Sequence[int], limits: Limits, minted_seed: int) -> Sampling:
    """Check the tokenized prompt against the context, and complete the sampling parameters.

    Args:
        checked: what `check_request` gave.
        prompt_token_ids: the prompt, tokenized.
        limits: as for `check_request`.
        minted_seed: 64 random bits, used where the client gave no seed.

    Raises:
        ContextLengthError: if prompt and answer cannot fit the context.
        InvalidRequestError: if there is no token, or one that the model does not know.
    """
    field = checked.prompt.field
    if not prompt_token_ids:
        raise InvalidRequestError(field, "has no tokens")
    if max(prompt_token_ids) >= limits.model.vocab_size:
        raise InvalidRequestError(field, "has a token of the tokenizer that is not in the model's vocabulary")
    room = limits.model.max_model_len - len(prompt_token_ids)
    context = f"the prompt has {len(prompt_token_ids)} tokens and the context {limits.model.max_model_len}"
    if room < 1:
        raise ContextLengthError(field, f"{context}, which leaves no room for an answer")
    if checked.max_tokens is not None and checked.max_tokens > room:
        raise ContextLengthError("stopping.max_tokens", f"{context}, so at most {room}, not {checked.max_tokens}")
    if checked.sampling.min_tokens > room:
        raise ContextLengthError("stopping.min_tokens", f"{context}, so at most {room}")
    max_tokens = room if checked.max_tokens is None else checked.max_tokens
    seed = minted_seed if checked.seed is None else checked.seed
    return msgspec.structs.replace(checked.sampling, max_tokens=max_tokens, seed=seed)


def check_targets(metadata: Iterable[tuple[str, str | bytes]]) -> Targets:
    """The targets in a call's metadata; where a key comes twice the first one counts. Raises `InvalidRequestError` for
    a value that is no positive number of milliseconds."""
    found: dict[str, float] = {}
    for key, value in metadata:
        if key in (TTFT_METADATA, TPOT_METADATA) and key not in found:
            found[key] = _check_millis(key, value) / 1000
    return Targets(found.get(TTFT_METADATA), found.get(TPOT_METADATA))


def check_deadline(time_left_s: float | None) -> None:
    """Raises `DeadlineError` if there is a deadline and it passed."""
    if time_left_s is not None and time_left_s <= 0:
        raise DeadlineError("the deadline passed before the request could start")


def check_model(name: str, limits: Limits) -> None:
    """Raises `ModelNotFoundError` if `name` is not the served model."""
    if name != limits.model.name:
        raise ModelNotFoundError(name[:_MAX_ECHOED_CHARS], [limits.model.name])


def check_text(text: str, field: str, limits: Limits) -> TextPrompt:
    """A text prompt of a possible size. Raises `InvalidRequestError` naming `field`."""
    if not text:
        raise InvalidRequestError(field, "must not be empty")
    prompt = TextPrompt(text)
    _check_num_bytes(prompt, field, limits)
    return prompt


def check_chat(chat: pb.ChatMessages, limits: Limits) -> ChatPrompt:
    """Turns with known roles, of a possible size. Raises `InvalidRequestError`."""
    if not chat.messages:
        raise InvalidRequestError("chat.messages", "must not be empty")
    if len(chat.messages) > MAX_CHAT_MESSAGES:
        raise InvalidRequestError("chat.messages", f"at most {MAX_CHAT_MESSAGES}, not {len(chat.messages)}")
    for i, message in enumerate(chat.messages):
        if message.role not in ROLES:
            role = message.role[:_MAX_ECHOED_CHARS]
            raise InvalidRequestError(f"chat.messages[{i}].role", f"must be one of {', '.join(ROLES)}, not {role!r}")
    prompt = ChatPrompt(tuple(ChatTurn(message.role, message.content) for message in chat.messages))
    _check_num_bytes(prompt, "chat.messages", limits)
    return prompt


def check_ids(token_ids: Sequence[int], field: str, vocab_size: int) -> tuple[int, ...]:
    """Ids below `vocab_size`. Raises `InvalidRequestError` naming the first wrong one, as `field[i]`."""
    ids = tuple(token_ids)
    if ids and max(ids) >= vocab_size:
        i = next(i for i, token_id in enumerate(ids) if token_id >= vocab_size)
        raise InvalidRequestError(f"{field}[{i}]", f"must be below the vocabulary size {vocab_size}, not {ids[i]}")
    return ids


def _check_millis(field: str, value: str | bytes) -> float:
    try:
        millis = float(value)
    except ValueError:
        millis = math.nan
    if not 0 < millis <= _MAX_TARGET_MS:
        given = str(value)[:_MAX_ECHOED_CHARS]
        raise InvalidRequestError(field, f"must be a number of milliseconds in (0, {_MAX_TARGET_MS:g}], not {given!r}")
    return millis


def _check_prompt(request: pb.GenerateRequest, limits: Limits) -> Prompt:
    kind = request.WhichOneof("prompt")
    if kind == "text":
        return check_text(request.text, TextPrompt.field, limits)
    if kind == "token_ids":
        return _check_prompt_ids(request.token_ids.ids, limits.model)
    if kind == "chat":
        return check_chat(request.chat, limits)
    raise InvalidRequestError("prompt", "one of text, token_ids and chat must be set")


def _check_prompt_ids(token_ids: Sequence[int], model: ModelInfo) -> IdsPrompt:
    field = IdsPrompt.field
    if not token_ids:
        raise InvalidRequestError(field, "must not be empty")
    if len(token_ids) >= model.max_model_len:
        raise ContextLengthError(
            field, f"{len(token_ids)} tokens leave no room for an answer in a context of {model.max_model_len}"
        )
    return IdsPrompt(check_ids(token_ids, field, model.vocab_size))


def _check_num_bytes(prompt: TextPrompt | ChatPrompt, field: str, limits: Limits) -> None:
    if prompt.num_bytes > limits.max_prompt_bytes:
        raise InvalidRequestError(field, f"at most {limits.max_prompt_bytes} bytes, not {prompt.num_bytes}")


class _Range(NamedTuple):
    """`low` to `high`, both allowed unless `low_is_open`. NaN is in no range."""

    low: float
    high: float
    low_is_open: bool = False

    def __contains__(self, value: object) -> bool:
        assert isinstance(value, float)
        return (self.low < value if self.low_is_open else self.low <= value) and value <= self.high

    def __str__(self) -> str:
        return f"{'(' if self.low_is_open else '['}{self.low:g}, {self.high:g}]"


_RANGES = {
    "temperature": _Range(0, 100),
    "top_p": _Range(0, 1, low_is_open=True),
    "min_p": _Range(0, 1),
    "presence_penalty": _Range(-2, 2),
    "frequency_penalty": _Range(-2, 2),
    "repetition_penalty": _Range(0, 100, low_is_open=True),
}


def _check_sampling(request: pb.GenerateRequest, model: ModelInfo) -> Sampling:
    given = request.sampling
    values: dict[str, float] = {}
    for name, allowed in _RANGES.items():
        if given.HasField(name):
            value = getattr(given, name)
            if value not in allowed:
                raise InvalidRequestError(f"sampling.{name}", f"must be in {allowed}, not {value:g}")
            values[name] = value
    others = Sampling(
        top_k=_check_top_k(given.top_k, model.vocab_size),
        min_tokens=request.stopping.min_tokens,
        stop_token_ids=_merge_stop_ids(request.stopping, model),
    )
    return msgspec.structs.replace(others, **values)


def _check_top_k(top_k: int, vocab_size: int) -> int:
    """0 where it is off or keeps every token."""
    if top_k < -1:
        raise InvalidRequestError("sampling.top_k", f"must be at least 1, or 0 or -1 for off, not {top_k}")
    return top_k if 0 < top_k < vocab_size else 0


def _check_token_range(max_tokens: int | None, min_tokens: int) -> None:
    if max_tokens is None:
        return
    if max_tokens < 1:
        raise InvalidRequestError("stopping.max_tokens", "must be at least 1")
    if min_tokens > max_tokens:
        raise InvalidRequestError("stopping.min_tokens", f"must be at most max_tokens {max_tokens}, not {min_tokens}")


def _check_stop_ids(stop_token_ids: Sequence[int], vocab_size: int) -> None:
    field = "stopping.stop_token_ids"
    if len(stop_token_ids) > MAX_STOP_IDS:
        raise InvalidRequestError(field, f"at most {MAX_STOP_IDS}, not {len(stop_token_ids)}")
    check_ids(stop_token_ids, field, vocab_size)


def _merge_stop_ids(stopping: pb.StopConditions, model: ModelInfo) -> tuple[int, ...]:
    eos = () if stopping.ignore_eos else model.eos_token_ids
    return tuple(dict.fromkeys((*stopping.stop_token_ids, *eos)))


def _check_stop_strings(stop: Sequence[str]) -> None:
    if len(stop) > MAX_STOP_STRINGS:
        raise InvalidRequestError("stopping.stop", f"at most {MAX_STOP_STRINGS}, not {len(stop)}")
    for i, text in enumerate(stop):
        if not 1 <= len(text) <= MAX_STOP_CHARS:
            raise InvalidRequestError(
                f"stopping.stop[{i}]", f"must have 1 to {MAX_STOP_CHARS} characters, not {len(text)}"
            )
