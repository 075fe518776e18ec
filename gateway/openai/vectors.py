"""Embeddings, reranks and scores: bodies to prompts, and vectors to answers, in the forms of OpenAI and vLLM. Pure.

    embeddings   a prompt a text                      the vector of each
    rerank       query and documents                  a score of each document, best first
    score        texts 1:1, 1:N or N:N                a score of each pair

A reranker scores a pair by one prompt with both; of an embedding model the score is the cosine of two vectors.
"""

from __future__ import annotations

import base64
import math
import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from typing_extensions import override

from disagg.gateway.openai.schema import EmbeddingBody, RerankBody, ScoreBody
from disagg.gateway.openai.to_input import NEVER, FieldNames, refuse_unsupported
from disagg.gateway.requests.part_counts import Cooperative
from disagg.gateway.requests.request import ChatPrompt, GenerationInput, IdsPrompt, Prompt, TextPrompt
from disagg.gateway.requests.values import check_int
from disagg.gateway.text.chat_template import ChatTurn
from disagg.gateway.text.pooling import RERANK_INSTRUCTION, PoolingInfo
from disagg.proto.errors import InvalidRequestError
from disagg.proto.messages import Pooling

MAX_TEXTS: Final = 2048
"""Most texts of a call; of OpenAI, too."""
MAX_NUMBERS: Final = 1 << 20
"""Most numbers of all vectors of a call: up to 25 MB as text."""
FORMATS: Final = ("float", "base64")
HARMLESS_IN_EMBEDDINGS: Final[Mapping[str, tuple[Any, ...]]] = {
    "messages": NEVER,
    "add_special_tokens": (None, True),
    "truncation_side": (None, "left"),
    "embed_dtype": (None, "float32"),
    "endianness": (None, "native", "little"),
}
HARMLESS_IN_PAIRS: Final[Mapping[str, tuple[Any, ...]]] = {
    "truncation_side": (None, "left"),
    "use_activation": (None, True),
    "activation": (None, True),
    "max_tokens_per_doc": NEVER,
    "max_chunks_per_doc": NEVER,
    "rank_fields": (None, ["text"]),
}
"""Fields that are not supported, with the values that mean nothing."""
NORMALIZING: Final = ("normalize", "use_activation")
"""Fields of embeddings that may only say what the model does anyway."""
_JSON: Final = msgspec.json.Encoder()
_OTHER_DIMENSIONS: Final = "the model does not support other dimensions than its own {own}: it was not trained for them"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Prompts of which vectors are wanted, alike but for their texts."""

    prompts: tuple[Prompt, ...]
    names: tuple[FieldNames, ...]
    """One for each prompt."""
    pairs: tuple[tuple[int, int], ...] = ()
    """Places of the two vectors of each score that is a cosine."""

    def inputs(self, model: str, pooling: Pooling, truncate_prompt_tokens: int | None) -> tuple[GenerationInput, ...]:
        """The prompts as inputs of a generator."""
        return tuple(
            GenerationInput(
                model=model,
                prompt=prompt,
                temperature=0.0,
                truncate_prompt_tokens=truncate_prompt_tokens,
                pooling=pooling,
            )
            for prompt in self.prompts
        )


class _PairNames(FieldNames):
    """Of a chat that is made of a pair of texts: a client knows nothing of its messages."""

    @override
    def name(self, field: str) -> str:
        return self.prompt if field.startswith("chat") else FieldNames.name(self, field)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs:
    """Pairs of texts to score, as a body has them."""

    model: str | None
    firsts: tuple[str, ...]
    """One, or as many as `seconds`."""
    seconds: tuple[str, ...]
    first_field: str
    """Field of the only text, or of the list of texts with `[]` behind it."""
    second_field: str
    truncate_prompt_tokens: int | None
    instruction: str


# ---------------------------------------------------------------- bodies


def read_embeddings(body: EmbeddingBody) -> Cooperative[Wanted]:
    """The prompts of a body. Yields between pieces of work. Raises `InvalidRequestError`."""
    yield from ()
    given = body.input
    refuse_unsupported(body, HARMLESS_IN_EMBEDDINGS)
    _check_format(body.encoding_format)
    if isinstance(given, str):
        prompts: list[Prompt] = [TextPrompt(given)]
        fields = ["input"]
    elif not given:
        raise InvalidRequestError("input", "must not be empty")
    elif type(given[0]) is int:
        _check_alike(given, "input")
        prompts, fields = [IdsPrompt(tuple(given))], ["input"]  # type: ignore[arg-type]  # all are ints
    else:
        _check_number(len(given), "input")
        _check_alike(given, "input")
        prompts = [TextPrompt(item) if isinstance(item, str) else IdsPrompt(tuple(item)) for item in given]  # type: ignore[arg-type]
        fields = [f"input[{number}]" for number in range(len(prompts))]
    for prompt, field in zip(prompts, fields, strict=True):
        if isinstance(prompt, TextPrompt) and not prompt.text:
            raise InvalidRequestError(field, "must not be empty")
    return Wanted(prompts=tuple(prompts), names=_names(fields))


def read_rerank(body: RerankBody) -> Cooperative[Pairs]:
    """The query with each document. Yields between pieces of work. Raises `InvalidRequestError`."""
    yield from ()
    refuse_unsupported(body, HARMLESS_IN_PAIRS)
    if not body.documents:
        raise InvalidRequestError("documents", "must not be empty")
    _check_number(len(body.documents), "documents")
    if body.top_n is not None:
        check_int(body.top_n, "top_n", 0, (1 << 31) - 1)
    documents = tuple(item if isinstance(item, str) else item.text for item in body.documents)
    return _pairs(
        body.model, (body.query,), documents, "query", "documents[]", body.truncate_prompt_tokens, body.instruction
    )


def read_score(body: ScoreBody) -> Cooperative[Pairs]:
    """The pairs of a body. Yields between pieces of work. Raises `InvalidRequestError`."""
    yield from ()
    refuse_unsupported(body, HARMLESS_IN_PAIRS)
    firsts = (body.text_1,) if isinstance(body.text_1, str) else tuple(body.text_1)
    seconds = (body.text_2,) if isinstance(body.text_2, str) else tuple(body.text_2)
    for texts, field in ((firsts, "text_1"), (seconds, "text_2")):
        if not texts:
            raise InvalidRequestError(field, "must not be empty")
        _check_number(len(texts), field)
    if len(firsts) not in (1, len(seconds)):
        raise InvalidRequestError(
            "text_1", f"Input lengths must be either 1:1, 1:N or N:N, not {len(firsts)}:{len(seconds)}"
        )
    first_field = "text_1" if isinstance(body.text_1, str) else "text_1[]"
    second_field = "text_2" if isinstance(body.text_2, str) else "text_2[]"
    return _pairs(body.model, firsts, seconds, first_field, second_field, body.truncate_prompt_tokens, body.instruction)


def _pairs(
    model: str | None,
    firsts: tuple[str, ...],
    seconds: tuple[str, ...],
    first_field: str,
    second_field: str,
    truncate_prompt_tokens: int | None,
    instruction: str | None,
) -> Pairs:
    found = Pairs(
        model=model,
        firsts=firsts,
        seconds=seconds,
        first_field=first_field,
        second_field=second_field,
        truncate_prompt_tokens=truncate_prompt_tokens,
        instruction=RERANK_INSTRUCTION if instruction is None else instruction,
    )
    for texts, field in ((firsts, first_field), (seconds, second_field)):
        for number, text in enumerate(texts):
            if not text:
                raise InvalidRequestError(_item(field, number), "must not be empty")
    return found


def check_normalizing(body: EmbeddingBody, info: PoolingInfo) -> None:
    """Raises `InvalidRequestError` for a body that wants vectors of another length than the model's."""
    refuse_unsupported(body, dict.fromkeys(NORMALIZING, (None, info.normalize)))


def pooling_of(info: PoolingInfo, dimensions: int | None = None, *, num_texts: int = 1) -> Pooling:
    """What a worker needs to know. Raises `InvalidRequestError` for dimensions that the model does not have, or too
    many of all texts."""
    if dimensions is not None:
        check_int(dimensions, "dimensions", 1, info.hidden_size)
        if dimensions != info.hidden_size and not info.has_any_dimensions and dimensions not in info.dimensions:
            raise InvalidRequestError("dimensions", _other_dimensions(info))
    num_numbers = num_texts * (dimensions or info.hidden_size)
    if num_numbers > MAX_NUMBERS:
        raise InvalidRequestError(
            "input",
            f"the vectors would have {num_numbers} numbers, at most {MAX_NUMBERS} in one call: send fewer texts",
        )
    return Pooling(kind=info.kind, dimensions=dimensions or 0, normalize=info.normalize, score_ids=info.score_ids)


def _other_dimensions(info: PoolingInfo) -> str:
    if info.dimensions:
        return f"must be one of {', '.join(map(str, info.dimensions))}, for which the model was trained"
    return _OTHER_DIMENSIONS.format(own=info.hidden_size)


def wanted_pairs(pairs: Pairs, info: PoolingInfo) -> Wanted:
    """The prompts by which a model scores pairs. Raises `InvalidRequestError`."""
    count = len(pairs.seconds)
    if info.kind == "score":
        if pairs.truncate_prompt_tokens is not None:
            raise InvalidRequestError(
                "truncate_prompt_tokens", "is not supported for this model: it would cut off its instruction"
            )
        firsts = pairs.firsts * count if len(pairs.firsts) == 1 else pairs.firsts
        prompts = tuple(
            ChatPrompt((ChatTurn("system", pairs.instruction), ChatTurn("user", first), ChatTurn("assistant", second)))
            for first, second in zip(firsts, pairs.seconds, strict=True)
        )
        fields = [_item(pairs.second_field, number) for number in range(count)]
        return Wanted(prompts=prompts, names=tuple(_PairNames(field, "logprobs") for field in fields))
    num_firsts = len(pairs.firsts)
    fields = [_item(pairs.first_field, number) for number in range(num_firsts)]
    fields += [_item(pairs.second_field, number) for number in range(count)]
    return Wanted(
        prompts=tuple(TextPrompt(text) for text in (*pairs.firsts, *pairs.seconds)),
        names=_names(fields),
        pairs=tuple((number if num_firsts > 1 else 0, num_firsts + number) for number in range(count)),
    )


def _item(field: str, number: int) -> str:
    return f"{field[:-2]}[{number}]" if field.endswith("[]") else field


def _names(fields: Sequence[str]) -> tuple[FieldNames, ...]:
    return tuple(FieldNames(field, "logprobs") for field in fields)


def _check_format(name: str | None) -> None:
    if name is not None and name not in FORMATS:
        raise InvalidRequestError("encoding_format", f"must be one of {', '.join(FORMATS)}, not {name[:64]!r}")


def _check_number(count: int, field: str) -> None:
    if count > MAX_TEXTS:
        raise InvalidRequestError(field, f"at most {MAX_TEXTS} texts in one call, not {count}")


def _check_alike(given: Sequence[Any], field: str) -> None:
    kind = type(given[0])
    if set(map(type, given)) != {kind}:
        odd = next(number for number, item in enumerate(given) if type(item) is not kind)
        raise InvalidRequestError(f"{field}[{odd}]", "all of a list must be texts, token ids, or lists of token ids")


# ---------------------------------------------------------------- answers


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """What stands in every answer."""

    call_id: str
    created: int
    model: str
    num_prompt_tokens: int


def embeddings_json(head: Head, vectors: Sequence[bytes], encoding_format: str) -> Cooperative[bytes]:
    """The answer to embeddings. Yields between pieces of work."""
    parts: list[bytes] = []
    for number, vector in enumerate(vectors):
        if number:
            yield
        if encoding_format == "base64":
            shown = b'"%b"' % base64.b64encode(vector)
        else:
            shown = _JSON.encode(_numbers(vector).tolist())
        parts.append(b'{"object":"embedding","index":%d,"embedding":%b}' % (number, shown))
    return b'{"id":%b,"object":"list","created":%d,"model":%b,"data":[%b],"usage":%b}' % (
        *(_JSON.encode(head.call_id), head.created, _JSON.encode(head.model), b",".join(parts)),
        _usage(head),
    )


def scores_of(wanted: Wanted, vectors: Sequence[bytes]) -> Cooperative[list[float]]:
    """A score of each pair. Yields between pieces of work."""
    if not wanted.pairs:
        return [_numbers(vector)[0] for vector in vectors]
    numbers: list[array[float]] = []
    lengths: list[float] = []
    for vector in vectors:
        yield
        numbers.append(_numbers(vector))
        lengths.append(math.hypot(*numbers[-1]))
    scores: list[float] = []
    for first, second in wanted.pairs:
        yield
        distance = math.dist(numbers[first], numbers[second])
        scores.append(_cosine(lengths[first], lengths[second], distance))
    return scores


def score_json(head: Head, scores: Sequence[float]) -> bytes:
    """The answer to scores."""
    data = [{"index": number, "object": "score", "score": score} for number, score in enumerate(scores)]
    return _JSON.encode(
        {
            "id": head.call_id,
            "object": "list",
            "created": head.created,
            "model": head.model,
            "data": data,
            "usage": msgspec.Raw(_usage(head)),
        }
    )


def rerank_json(head: Head, body: RerankBody, texts: Sequence[str], scores: Sequence[float]) -> bytes:
    """The answer to a rerank: the likeliest documents first, among equals in their order."""
    order = sorted(range(len(scores)), key=lambda number: -scores[number])
    results: list[dict[str, Any]] = []
    for number in order[: body.top_n or len(order)]:
        document = {} if body.return_documents is False else {"document": {"text": texts[number]}}
        results.append({"index": number, **document, "relevance_score": scores[number]})
    usage = {"prompt_tokens": head.num_prompt_tokens, "total_tokens": head.num_prompt_tokens}
    return _JSON.encode({"id": head.call_id, "model": head.model, "usage": usage, "results": results})


def _usage(head: Head) -> bytes:
    return b'{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":0}' % (
        head.num_prompt_tokens,
        head.num_prompt_tokens,
    )


def _numbers(vector: bytes) -> array[float]:
    """The fp32 numbers of a vector, which are little-endian."""
    numbers = array("f", vector)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


def _cosine(first: float, second: float, distance: float) -> float:
    """Of two vectors by their lengths and their distance, which take a fraction of the time of a product of
    vectors; 0 where one has no length."""
    if not first or not second:
        return 0.0
    return (first / second + second / first - distance / first * (distance / second)) / 2
