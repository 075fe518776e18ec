"""Fields that the bodies of all APIs here have, what errors of the generator call them, and how what is not supported
is refused. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from typing_extensions import override

from disagg.gateway.openai.schema import ABSENT, Integer, T, decode_field
from disagg.gateway.openai.to_input import FieldNames, small_value
from disagg.gateway.requests.structured import MAX_SCHEMA_DEPTH, StructuredOutput
from disagg.gateway.requests.values import check_length, is_deeper
from disagg.proto.errors import InvalidRequestError
from disagg.proto.grammars import MAX_GRAMMAR_BYTES

_STOP: Final = "stop"


@dataclass(frozen=True, slots=True)
class OtherNames(FieldNames):
    """Field names for conversations whose turns consist of items or blocks: an error of any turn names the whole
    prompt."""

    stop_field: str = _STOP

    @override
    def name(self, field: str) -> str:
        if field.startswith("chat"):
            return self.prompt
        name = FieldNames.name(self, field)
        return self.stop_field + name.removeprefix(_STOP) if name == _STOP or name.startswith("stop[") else name


MAX_FORMAT_BYTES: Final = 2 * MAX_GRAMMAR_BYTES
"""Maximum bytes of the JSON around a schema: with escapes and other fields it is longer than the schema."""

_ANY: Final = msgspec.json.Decoder()
_LIST: Final = msgspec.json.Decoder(list[msgspec.Raw] | None)


class SamplingFields(msgspec.Struct, frozen=True, kw_only=True):
    """The sampling parameters of a body; `None` is the same as absent. Some are extensions of each API."""

    model: str | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Integer | None = None
    min_p: float | None = None
    seed: int | None = None
    min_tokens: Integer | None = None
    ignore_eos: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    cache_salt: str | None = None
    prompt_cache_key: str | None = None
    speculation: str | None = None


_SAMPLING: Final = tuple(
    name for name in SamplingFields.__struct_fields__ if name not in ("stream", "prompt_cache_key")
)


def sampling_of(body: SamplingFields) -> dict[str, Any]:
    """The parameters that are set, by their names in `GenerationInput`. Raises `InvalidRequestError` without a
    model."""
    if not body.model:
        raise InvalidRequestError("model", "must be set")
    found = {name: getattr(body, name) for name in _SAMPLING if getattr(body, name) is not None}
    return {**found, "session_id": body.prompt_cache_key or ""}


def refuse_unsupported(body: msgspec.Struct, harmless: Mapping[str, Sequence[object]]) -> None:
    """Raises `InvalidRequestError` if a field of `harmless` has any other value than those listed for it."""
    for name, values in harmless.items():
        if (given := small_value(getattr(body, name))) is not None and given not in values:
            raise InvalidRequestError(name, "this is not supported")


def read_bounded(raw: msgspec.Raw, decoder: msgspec.json.Decoder[T], field: str, max_bytes: int) -> T:
    """A field that was not read with its body. Raises `InvalidRequestError` naming it."""
    check_length(memoryview(raw).nbytes, field, max_bytes, "bytes of JSON")
    return decode_field(raw, decoder, field)


def read_list(raw: msgspec.Raw, field: str, max_bytes: int, max_items: int) -> list[msgspec.Raw]:
    """The items of a list, unread. Raises `InvalidRequestError` naming the field."""
    items = read_bounded(raw, _LIST, field, max_bytes) or []
    check_length(len(items), field, max_items)
    return items


def read_schema(raw: msgspec.Raw, field: str) -> StructuredOutput:
    """An answer by a JSON schema. Raises `InvalidRequestError` without one, and for one that is nested too deep."""
    if is_null(raw):
        raise InvalidRequestError(field, "must be set")
    if is_deeper(decode_field(raw, _ANY, field), MAX_SCHEMA_DEPTH):
        raise InvalidRequestError(field, f"at most {MAX_SCHEMA_DEPTH} levels of objects and arrays")
    return StructuredOutput("json_schema", bytes(raw).decode(), field)


def is_null(raw: msgspec.Raw) -> bool:
    """Whether a field is absent, or null."""
    return bytes(raw).strip() == bytes(ABSENT)
