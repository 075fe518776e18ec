"""The operations of the HTTP API."""

from __future__ import annotations

import dataclasses
from typing import Any, Final

from disagg.gateway.batches.schema import DEFAULT_BATCHES, MAX_BATCHES, MAX_FILES, PURPOSE, BatchBody
from disagg.gateway.http.errors import ErrorBody
from disagg.gateway.openai.chunks import LAST_DATA as DONE
from disagg.gateway.openai.resume import HEADER as RESUME_HEADER
from disagg.gateway.openai.schema import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    EmbeddingBody,
    LoadAdapterBody,
    RerankBody,
    ScoreBody,
    TokenizeBody,
    UnloadAdapterBody,
)
from disagg.gateway.openapi import examples
from disagg.gateway.openapi.answers import cluster, messages, openai, responses
from disagg.gateway.openapi.fields import CountTokensBody
from disagg.gateway.openapi.operation import Operation, Parameter
from disagg.gateway.other_apis.messages.schema import MAX_MODELS, MessagesBody
from disagg.gateway.other_apis.responses.schema import ResponsesBody
from disagg.gateway.requests.headers import LABEL, TIMEOUT
from disagg.gateway.requests.validate import TPOT_METADATA, TTFT_METADATA
from disagg.gateway.usage.counts import DEFAULT_DAYS, MAX_DAYS, MAX_ROWS

_NUMBER: Final = {"type": "number", "exclusiveMinimum": 0}
_TIMES: Final = (
    Parameter(
        name=TIMEOUT,
        place="header",
        schema=_NUMBER,
        description="How long the complete answer may take, in milliseconds.",
    ),
    Parameter(name=TTFT_METADATA, place="header", schema=_NUMBER, description="Target of the TTFT, in milliseconds."),
    Parameter(name=TPOT_METADATA, place="header", schema=_NUMBER, description="Target of the TPOT, in milliseconds."),
    Parameter(
        name=LABEL, place="header", schema={"type": "string"}, description="The client's label, which is sent back."
    ),
)
_RESUMED: Final = Parameter(
    name=RESUME_HEADER,
    place="header",
    schema={"type": "string"},
    description="`0` for a stream whose events have ids; then the id of the last event, to continue the stream.",
)


def _generation(path: str, name: str, summary: str, **more: Any) -> Operation:
    return Operation(method="POST", path=path, name=name, tag="generation", summary=summary, **more)


def _vectors(path: str, name: str, summary: str, **more: Any) -> Operation:
    parameters = tuple(each for each in _TIMES if each.name in (TIMEOUT, LABEL))
    return Operation(method="POST", path=path, name=name, tag="vectors", summary=summary, parameters=parameters, **more)


def _get(path: str, name: str, tag: str, summary: str, answer: Any, **more: Any) -> Operation:
    return Operation(method="GET", path=path, name=name, tag=tag, summary=summary, answer=answer, **more)


def _count(name: str, most: int, default: int, description: str) -> Parameter:
    schema = {"type": "integer", "minimum": 1, "maximum": most, "default": default}
    return Parameter(name=name, place="query", schema=schema, description=description)


def _text(name: str, description: str) -> Parameter:
    return Parameter(name=name, place="query", schema={"type": "string"}, description=description)


CHAT: Final = _generation(
    "/v1/chat/completions",
    "createChatCompletion",
    "Answer a chat.",
    body=ChatBody,
    examples=examples.CHAT,
    answer=openai.ChatCompletion,
    events=openai.ChatCompletionChunk,
    last_data=DONE,
    parameters=(*_TIMES, _RESUMED),
)
COMPLETION: Final = _generation(
    "/v1/completions",
    "createCompletion",
    "Continue a text, several texts, or token ids.",
    body=CompletionBody,
    examples=examples.COMPLETION,
    answer=openai.TextCompletion,
    events=openai.TextCompletionChunk,
    last_data=DONE,
    parameters=(*_TIMES, _RESUMED),
)
RESPONSE: Final = _generation(
    "/v1/responses",
    "createResponse",
    "Answer as OpenAI's responses, without state.",
    body=ResponsesBody,
    examples=examples.RESPONSE,
    answer=responses.Response,
    events=responses.ResponseEvent,
    parameters=_TIMES,
)
MESSAGE: Final = _generation(
    "/v1/messages",
    "createMessage",
    "Answer as Anthropic's messages.",
    body=MessagesBody,
    examples=examples.MESSAGE,
    answer=messages.AnthropicMessage,
    events=messages.MessageEvent,
    errors=messages.AnthropicError,
    parameters=_TIMES,
)
COUNT_TOKENS: Final = _generation(
    "/v1/messages/count_tokens",
    "countMessageTokens",
    "Count the tokens of a conversation.",
    body=CountTokensBody,
    examples=examples.COUNT_TOKENS,
    answer=messages.InputTokens,
    errors=messages.AnthropicError,
)
_ANTHROPIC: Final = Parameter(
    name="anthropic-version",
    place="header",
    schema={"type": "string"},
    description="With it, answers and errors have the form of Anthropic's API.",
)
_BOTH_ERRORS: Final = (ErrorBody, messages.AnthropicError)
MODELS: Final = _get(
    "/v1/models",
    "listModels",
    "models",
    "List the models of the key.",
    (openai.ModelList, messages.AnthropicModelPage),
    errors=_BOTH_ERRORS,
    parameters=(
        _ANTHROPIC,
        _count("limit", MAX_MODELS, 20, "Maximum number of models, in Anthropic's form."),
        _text("after_id", "Id of a model, in Anthropic's form."),
        _text("before_id", "Id of a model, in Anthropic's form."),
    ),
)
MODEL: Final = _get(
    "/v1/models/{model:path}",
    "getModel",
    "models",
    "Show a model.",
    (openai.Model, messages.AnthropicModel),
    errors=_BOTH_ERRORS,
    parameters=(_ANTHROPIC,),
)
TOKENIZER: Final = _get(
    "/tokenizer_info",
    "getTokenizer",
    "models",
    "What a client needs to use the tokenizer from afar.",
    openai.TokenizerInfo,
    parameters=(_text("model", "Name of a model; may be left out where one is served."),),
)
EMBEDDINGS: Final = _vectors(
    "/v1/embeddings",
    "createEmbedding",
    "The vector of a text, of several, or of token ids.",
    body=EmbeddingBody,
    examples=examples.EMBEDDINGS,
    answer=openai.EmbeddingList,
)
RERANK: Final = _vectors(
    "/v1/rerank",
    "rerank",
    "Order documents by their relevance to a query.",
    body=RerankBody,
    examples=examples.RERANK,
    answer=openai.Reranked,
)
SHORT_RERANK: Final = dataclasses.replace(RERANK, path="/rerank", name="rerankShort", summary="The same as /v1/rerank.")
SCORE: Final = _vectors(
    "/v1/score",
    "score",
    "The similarity, or relevance, of each pair of texts.",
    body=ScoreBody,
    examples=examples.SCORE,
    answer=openai.ScoreList,
)
SHORT_SCORE: Final = dataclasses.replace(SCORE, path="/score", name="scoreShort", summary="The same as /v1/score.")
TOKENIZE: Final = Operation(
    method="POST",
    path="/tokenize",
    name="tokenize",
    tag="models",
    summary="The token ids of a text or of a conversation.",
    body=TokenizeBody,
    examples=examples.TOKENIZE,
    answer=openai.Tokens,
)
DETOKENIZE: Final = Operation(
    method="POST",
    path="/detokenize",
    name="detokenize",
    tag="models",
    summary="The text of token ids.",
    body=DetokenizeBody,
    examples=examples.DETOKENIZE,
    answer=openai.Text,
)

LOAD_ADAPTER: Final = Operation(
    method="POST",
    path="/v1/load_lora_adapter",
    name="loadAdapter",
    tag="models",
    summary="Serve a LoRA adapter as a model; for admins.",
    body=LoadAdapterBody,
    examples=examples.LOAD_ADAPTER,
    content_type="text/plain",
)
UNLOAD_ADAPTER: Final = Operation(
    method="POST",
    path="/v1/unload_lora_adapter",
    name="unloadAdapter",
    tag="models",
    summary="Serve a LoRA adapter no more; for admins.",
    body=UnloadAdapterBody,
    examples=examples.UNLOAD_ADAPTER,
    content_type="text/plain",
)

HEALTH: Final = _get(
    "/health",
    "health",
    "probes",
    "Whether some worker can serve.",
    cluster.Health,
    other_answers={503: (cluster.Health, ErrorBody)},
)
PING: Final = _get(
    "/ping", "ping", "probes", "The same as /health.", cluster.Health, other_answers={503: (cluster.Health, ErrorBody)}
)
LIVE: Final = _get("/livez", "livez", "probes", "Whether the process answers.", cluster.Alive, is_open=True)
READY: Final = _get(
    "/readyz",
    "readyz",
    "probes",
    "Whether new requests should be sent here.",
    cluster.State,
    other_answers={503: (cluster.State, ErrorBody)},
    is_open=True,
)
METRICS: Final = Operation(
    method="GET",
    path="/metrics",
    name="metrics",
    tag="probes",
    summary="Metrics in Prometheus's format, or in that of OpenMetrics.",
    content_type="text/plain",
    other_content_types=("application/openmetrics-text",),
)
VERSION: Final = _get("/version", "version", "probes", "The version.", cluster.Version)
USAGE: Final = _get(
    "/v1/usage",
    "listUsage",
    "usage",
    "What a key used by day and model.",
    cluster.UsagePage,
    parameters=(
        _count("days", MAX_DAYS, DEFAULT_DAYS, "Number of days up to today."),
        _count("limit", MAX_ROWS, 1000, "Maximum number of rows."),
        _text("key", "Name of a tenant; an admin may name any."),
    ),
)

FILES: Final = _get(
    "/v1/files",
    "listFiles",
    "batches",
    "List the files of the tenant.",
    cluster.FilePage,
    parameters=(_count("limit", MAX_FILES, MAX_FILES, "Maximum number of files."), _text("after", "Id of a file.")),
)
UPLOAD: Final = Operation(
    method="POST",
    path="/v1/files",
    name="createFile",
    tag="batches",
    summary="Upload the input of a batch.",
    form={
        "type": "object",
        "properties": {
            "file": {"type": "string", "contentMediaType": "application/octet-stream"},
            "purpose": {"enum": [PURPOSE]},
        },
        "required": ["file", "purpose"],
    },
    answer=cluster.StoredFile,
)
FILE: Final = _get("/v1/files/{file}", "getFile", "batches", "Show a file.", cluster.StoredFile)
DELETE_FILE: Final = Operation(
    method="DELETE",
    path="/v1/files/{file}",
    name="deleteFile",
    tag="batches",
    summary="Delete a file.",
    answer=cluster.DeletedFile,
)
FILE_CONTENT: Final = _get(
    "/v1/files/{file}/content",
    "downloadFile",
    "batches",
    "The content of a file.",
    None,
    content_type="application/octet-stream",
)
BATCHES: Final = _get(
    "/v1/batches",
    "listBatches",
    "batches",
    "List the batches of the tenant.",
    cluster.BatchPage,
    parameters=(
        _count("limit", MAX_BATCHES, DEFAULT_BATCHES, "Maximum number of batches."),
        _text("after", "Id of a batch."),
    ),
)
CREATE_BATCH: Final = Operation(
    method="POST",
    path="/v1/batches",
    name="createBatch",
    tag="batches",
    summary="Run the requests of a file.",
    body=BatchBody,
    answer=cluster.StoredBatch,
)
BATCH: Final = _get("/v1/batches/{batch}", "getBatch", "batches", "Show a batch.", cluster.StoredBatch)
CANCEL_BATCH: Final = Operation(
    method="POST",
    path="/v1/batches/{batch}/cancel",
    name="cancelBatch",
    tag="batches",
    summary="End a batch; answers so far are kept.",
    answer=cluster.StoredBatch,
)

STATE: Final = _get(
    "/ui/state",
    "getState",
    "page",
    "The cluster as the page shows it.",
    cluster.ClusterState,
    parameters=(
        _text("after", "Seconds since 1970: the history begins after them."),
        _text("id", "A part of the id of the requests that are listed."),
        _text("model", "Name of the model of the requests that are listed."),
        _text("state", "State of the requests that are listed."),
        _text("worker", "A part of the id of a worker of the requests that are listed."),
    ),
)
REQUEST: Final = _get(
    "/ui/requests/{request_id}", "explainRequest", "page", "The life of a recent request.", dict[str, Any]
)
PAGE_USAGE: Final = _get("/ui/usage", "getPageUsage", "page", "Usage as the page shows it.", cluster.ShownUsage)
DOCUMENT: Final = _get("/openapi.json", "getDocument", "document", "This document.", dict[str, Any])
DOCS: Final = _get("/docs", "getDocs", "document", "The operations as a web page.", None, content_type="text/html")


def page_file(path: str, content_type: str) -> Operation:
    """The operation of a file of the page: it is the same for everybody, and so needs no key."""
    name = "getPage" if path == "/" else f"getPageFile_{path.rsplit('/', 1)[-1].replace('.', '_')}"
    return _get(
        path,
        name,
        "page",
        "A file of the page.",
        None,
        content_type=content_type,
        is_open=True,
        other_answers={304: None},
    )
