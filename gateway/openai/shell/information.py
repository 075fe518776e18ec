"""Everything of OpenAI's API and vLLM's but answers to prompts: models, tokens of a text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, TypeVar

import msgspec

from disagg.gateway.answers.generator import Generator
from disagg.gateway.auth.auth import CALLER
from disagg.gateway.event_loop.shell.turns import run_cooperatively
from disagg.gateway.http.query import read_query
from disagg.gateway.http.shell.exchange import BodyLimits, Exchange
from disagg.gateway.models.models import Models
from disagg.gateway.openai.logprobs import token_text
from disagg.gateway.openai.schema import ABSENT, DetokenizeBody, TokenizeBody, decoded
from disagg.gateway.openai.template_options import read_template_options
from disagg.gateway.openai.to_input import FieldNames, read_turns
from disagg.gateway.openai.tools import read_tools
from disagg.gateway.requests.part_counts import Cooperative
from disagg.gateway.requests.request import BYTES_PER_ID, ChatPrompt
from disagg.gateway.requests.validate import check_chat, check_text
from disagg.gateway.requests.values import check_ids, check_length
from disagg.proto.errors import InvalidRequestError
from disagg.proto.ids import RequestId

_TOKENIZE: Final = msgspec.json.Decoder(TokenizeBody)
_DETOKENIZE: Final = msgspec.json.Decoder(DetokenizeBody)
_NAMES: Final = FieldNames("messages", "logprobs")
_TEXT_NAMES: Final = FieldNames("prompt", "logprobs")
_VALUES_A_PIECE: Final = 16_384
"""Number of values of a long list that are written between two turns of the event loop."""

B = TypeVar("B")


class Information:
    """Handlers.

    Args:
        models: have the tokenizers.
        limits: of bodies.
        created: when the models began to be served, in seconds since 1970.
    """

    def __init__(self, models: Models, limits: BodyLimits, created: int) -> None:
        self._models = models
        self._limits = limits
        self.created = created

    async def models(self, exchange: Exchange, request_id: RequestId) -> None:
        """`GET /v1/models`."""
        allowed = self._models.allowed(CALLER.get())
        await exchange.respond_json({"object": "list", "data": [self._model(generator) for generator in allowed]})

    async def model(self, exchange: Exchange, request_id: RequestId) -> None:
        """`GET /v1/models/{model}`."""
        found = self._models.find(CALLER.get(), exchange.path_params["model"])
        await exchange.respond_json(self._model(found))

    async def tokenizer(self, exchange: Exchange, request_id: RequestId) -> None:
        """`GET /tokenizer_info?model=`: what a client needs to use the tokenizer from afar, as lm-eval's `remote`
        backend does."""
        found = self._models.find(CALLER.get(), read_query(exchange.scope).get("model")).model
        await exchange.respond_json(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "model_max_length": found.info.max_model_len,
                "bos_token": None,
                "eos_token": None,
                "pad_token": None,
                **found.special_tokens,
                "chat_template": found.chat_template,
            }
        )

    async def tokenize(self, exchange: Exchange, request_id: RequestId) -> None:
        """`POST /tokenize`."""
        body = await self._limits.read(exchange, lambda raw: decoded(raw, _TOKENIZE, _as_it_is))
        generator = self._models.find(CALLER.get(), body.model)
        token_ids = await _encode(generator, body)
        answer: dict[str, Any] = {
            "count": len(token_ids),
            "max_model_len": generator.model.info.max_model_len,
            "tokens": msgspec.Raw(await run_cooperatively(_list_json(token_ids))),
        }
        if body.return_token_strs:
            texts = await _token_texts(generator, token_ids)
            answer["token_strs"] = msgspec.Raw(await run_cooperatively(_list_json(texts)))
        await exchange.respond_json(answer)

    async def detokenize(self, exchange: Exchange, request_id: RequestId) -> None:
        """`POST /detokenize`."""
        body = await self._limits.read(exchange, lambda raw: decoded(raw, _DETOKENIZE, _as_it_is))
        generator = self._models.find(CALLER.get(), body.model)
        check_length(len(body.tokens), "tokens", generator.max_listed_ids)
        token_ids = check_ids(body.tokens, "tokens", generator.model.info.vocab_size)
        await exchange.respond_json({"prompt": await generator.detokenize(token_ids)})

    def _model(self, generator: Generator) -> dict[str, Any]:
        info = generator.model.info
        return {
            "id": info.name,
            "object": "model",
            "created": self.created,
            "owned_by": "disagg",
            "root": info.name if generator.adapter is None else generator.adapter.path,
            "parent": None if generator.adapter is None else generator.base_name,
            "max_model_len": info.max_model_len,
        }


async def _encode(generator: Generator, body: TokenizeBody) -> tuple[int, ...]:
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequestError("prompt", "one of prompt and messages must be set")
    if body.messages is not None:
        turns = await run_cooperatively(read_turns(body.messages))
        tools = read_tools(body.tools, ABSENT, None)
        options = read_template_options(body, turns)
        return await _encode_chat(generator, ChatPrompt(turns, tools.source if tools else "", options))
    prompt = check_text(body.prompt or "", "prompt", generator.limits)
    try:
        return await generator.tokenize(prompt, special=body.add_special_tokens is not False)
    except InvalidRequestError as error:
        raise _TEXT_NAMES.rename(error) from None


async def _token_texts(generator: Generator, token_ids: Sequence[int]) -> list[str]:
    """The text of each token; of many, made on a thread, as a long list would hold up all streams."""
    bytes_of = generator.model.tokenizer.token_bytes
    num_bytes = BYTES_PER_ID * len(token_ids)
    return await generator.offload(num_bytes, lambda: [token_text(bytes_of(one)) for one in token_ids])


async def _encode_chat(generator: Generator, prompt: ChatPrompt) -> tuple[int, ...]:
    try:
        checked = check_chat(prompt.turns, generator.limits, prompt.tools, prompt.options)
        return await generator.tokenize(checked)
    except InvalidRequestError as error:
        raise _NAMES.rename(error) from None


def _as_it_is(body: B) -> Cooperative[B]:
    yield from ()
    return body


def _list_json(values: Sequence[int] | Sequence[str]) -> Cooperative[bytes]:
    """A list as JSON. Yields between pieces of work."""
    parts: list[bytes] = []
    for begin in range(0, len(values), _VALUES_A_PIECE):
        if begin:
            yield
        parts.append(msgspec.json.encode(values[begin : begin + _VALUES_A_PIECE])[1:-1])
    return b"[%b]" % b",".join(parts)
