"""Examples of bodies, for readers of the document and for what generates requests from it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

Examples = Mapping[str, Mapping[str, Any]]

MODEL: Final = "smollm2-135m"
EMBEDDING_MODEL: Final = "qwen3-embedding-0.6b"
_TURNS: Final = [{"role": "user", "content": "What is the weather in Paris?"}]
_SCHEMA: Final = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
_NAMED: Final = {"name": "get_weather", "description": "The weather of a city."}

CHAT: Final[Examples] = {
    "a chat": {"model": MODEL, "messages": _TURNS, "max_completion_tokens": 16},
    "a stream": {
        "model": MODEL,
        "messages": _TURNS,
        "max_completion_tokens": 16,
        "stream": True,
        "stream_options": {"include_usage": True},
    },
    "a call of a function": {
        "model": MODEL,
        "messages": _TURNS,
        "tools": [{"type": "function", "function": {**_NAMED, "parameters": _SCHEMA}}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_completion_tokens": 64,
    },
    "an answer by a schema": {
        "model": MODEL,
        "messages": _TURNS,
        "response_format": {"type": "json_schema", "json_schema": {"name": "place", "schema": _SCHEMA}},
        "max_completion_tokens": 64,
    },
    "log-probabilities": {
        "model": MODEL,
        "messages": _TURNS,
        "max_completion_tokens": 4,
        "logprobs": True,
        "top_logprobs": 2,
    },
}
EMBEDDINGS: Final[Examples] = {
    "a text": {"model": EMBEDDING_MODEL, "input": "What is the capital of France?"},
    "several texts in base64": {
        "model": EMBEDDING_MODEL,
        "input": ["Paris", "Rome"],
        "encoding_format": "base64",
    },
}
RERANK: Final[Examples] = {
    "two documents": {
        "model": EMBEDDING_MODEL,
        "query": "What is the capital of France?",
        "documents": ["Paris is the capital of France.", "Apples are red."],
        "top_n": 1,
    }
}
SCORE: Final[Examples] = {
    "one text with two": {"model": EMBEDDING_MODEL, "text_1": "Paris", "text_2": ["France", "Italy"]}
}
COMPLETION: Final[Examples] = {
    "a text": {"model": MODEL, "prompt": "The capital of France is", "max_tokens": 8},
    "several texts": {"model": MODEL, "prompt": ["The capital of France is", "One, two,"], "max_tokens": 8, "n": 2},
    "a stream": {"model": MODEL, "prompt": "One, two,", "max_tokens": 8, "stream": True},
    "the log-probabilities of a prompt": {
        "model": MODEL,
        "prompt": "One, two,",
        "max_tokens": 1,
        "echo": True,
        "logprobs": 1,
    },
}
RESPONSE: Final[Examples] = {
    "a text": {"model": MODEL, "input": "What is the capital of France?", "max_output_tokens": 16},
    "a stream": {"model": MODEL, "input": _TURNS, "max_output_tokens": 16, "stream": True},
    "a call of a function": {
        "model": MODEL,
        "input": _TURNS,
        "tools": [{"type": "function", **_NAMED, "parameters": _SCHEMA}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_output_tokens": 64,
    },
}
MESSAGE: Final[Examples] = {
    "a message": {"model": MODEL, "messages": _TURNS, "max_tokens": 16},
    "a stream": {"model": MODEL, "messages": _TURNS, "max_tokens": 16, "stream": True},
    "a call of a tool": {
        "model": MODEL,
        "messages": _TURNS,
        "tools": [{**_NAMED, "input_schema": _SCHEMA}],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        "max_tokens": 64,
    },
}
COUNT_TOKENS: Final[Examples] = {"a conversation": {"model": MODEL, "messages": _TURNS}}
TOKENIZE: Final[Examples] = {
    "a text": {"model": MODEL, "prompt": "The capital of France is", "return_token_strs": True},
    "a conversation": {"model": MODEL, "messages": _TURNS},
}
DETOKENIZE: Final[Examples] = {"token ids": {"model": MODEL, "tokens": [1, 2, 3]}}
LOAD_ADAPTER: Final[Examples] = {"an adapter": {"lora_name": "sql", "lora_path": "sql-lora"}}
UNLOAD_ADAPTER: Final[Examples] = {"an adapter": {"lora_name": "sql"}}
