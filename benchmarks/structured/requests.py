"""Requests with schemas to a real cluster, by HTTP: are the answers valid, and what do new and hostile schemas cost?"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx
import jsonschema

from benchmarks.structured.suite import Case

MODEL = "smollm"
PROMPT = "Answer with a short JSON value."
HOSTILE: dict[str, dict[str, Any]] = {
    "product of allOf and anyOf": {
        "allOf": [{"anyOf": [{"properties": {f"p{i}_{j}": {"type": "string"}}} for j in range(4)]} for i in range(12)]
    },
    "a schema that is itself": {"$ref": "#"},
    "overlapping patterns": {"type": "object", "patternProperties": {f"^.*{i}.*$": {} for i in range(300)}},
    "large multipleOf": {"type": "integer", "multipleOf": 999_999_937, "minimum": -(10**18), "maximum": 10**18},
    "70 KiB of choices": {"enum": [f"value {i} of many" for i in range(3000)]},
    "deep nesting": json.loads('{"items":' * 100 + "{}" + "}" * 100),
    "many ranges": {
        "type": "object",
        "properties": {f"p{i}": {"type": "integer", "maximum": 7 * i} for i in range(700)},
    },
    "nested repeats": {"type": "string", "pattern": "^(a{1000}){1000}$"},
}


def wire(schema: Any, max_tokens: int, **fields: Any) -> dict[str, Any]:
    """The body of a chat request; the schema as `json_schema`, where there is one."""
    messages = [{"role": "user", "content": PROMPT}]
    body: dict[str, Any] = {"model": MODEL, "messages": messages, "max_tokens": max_tokens, **fields}
    if schema is not None:
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    return body


async def ask(client: httpx.AsyncClient, body: dict[str, Any]) -> tuple[int, Any]:
    """Status and JSON of the answer."""
    reply = await client.post("/v1/chat/completions", json=body)
    return reply.status_code, reply.json()


# ---------------------------------------------------------------- validity


async def answers(
    client: httpx.AsyncClient, cases: Sequence[Case], width: int, sampling: dict[str, Any], max_tokens: int
) -> list[dict[str, Any]]:
    """A row for each case; `width` of them at a time."""
    gate = asyncio.Semaphore(width)

    async def one(case: Case) -> dict[str, Any]:
        async with gate:
            status, reply = await ask(client, wire(case.schema, max_tokens, **sampling))
        return {"feature": case.feature, "case": case.name, "width": width, **sampling, **verdict(case, status, reply)}

    return list(await asyncio.gather(*map(one, cases)))


def verdict(case: Case, status: int, reply: Any) -> dict[str, Any]:
    """`outcome`: refused, length, valid or invalid (the answer is added), or error."""
    if status == 400:
        return {"outcome": "refused", "detail": reply["error"]["message"][:200]}
    if status != 200:
        return {"outcome": "error", "detail": str(reply)[:200]}
    choice = reply["choices"][0]
    if choice["finish_reason"] != "stop":
        return {"outcome": str(choice["finish_reason"])}
    text = choice["message"]["content"]
    try:
        jsonschema.Draft202012Validator(case.schema).validate(json.loads(text))
    except Exception as error:  # of the validator, of JSON, or of a reference that leads nowhere
        return {"outcome": "invalid", "detail": f"{type(error).__name__}: {str(error)[:100]}", "answer": text[:200]}
    return {"outcome": "valid"}


# ---------------------------------------------------------------- delays


def new_schema(number: int) -> dict[str, Any]:
    """A schema of 2 KiB, unlike any other."""
    names = [f"field_{number}_{i}" for i in range(22)]
    kinds: list[dict[str, Any]] = [
        {"type": "string", "maxLength": 20},
        {"type": "integer", "minimum": 0, "maximum": 1000},
        {"type": "array", "items": {"type": "number"}, "maxItems": 4},
        {"enum": ["red", "green", "blue"]},
    ]
    properties = {name: kinds[i % len(kinds)] for i, name in enumerate(names)}
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


async def first_token_ms(client: httpx.AsyncClient, schema: Any) -> float:
    """From the request to the first piece of text or the first role, whichever has a token."""
    began = time.perf_counter()
    async for _ in _pieces(client, wire(schema, 1, temperature=0.0, stream=True)):
        return (time.perf_counter() - began) * 1e3
    raise RuntimeError("no token came")


async def _pieces(client: httpx.AsyncClient, body: dict[str, Any]) -> AsyncIterator[str]:
    async with client.stream("POST", "/v1/chat/completions", json=body) as reply:
        if reply.status_code != 200:
            raise RuntimeError(f"status {reply.status_code}: {(await reply.aread()).decode()[:300]}")
        async for line in reply.aiter_lines():
            if not line.startswith("data: {"):
                continue
            choices = json.loads(line[6:]).get("choices") or [{}]
            if choices[0].get("delta", {}).get("content") or choices[0].get("finish_reason"):
                yield line


async def delays(client: httpx.AsyncClient, pairs: int) -> list[dict[str, float]]:
    """First tokens without a schema and with a new one, in turns."""
    rows = []
    for number in range(pairs):
        found: dict[bool, float] = {}
        for structured in (False, True) if number % 2 == 0 else (True, False):
            found[structured] = await first_token_ms(client, new_schema(number) if structured else None)
        rows.append({"plain_ms": found[False], "new_schema_ms": found[True]})
    return rows


# ---------------------------------------------------------------- hostile schemas


async def hostile(client: httpx.AsyncClient, repeats: int) -> tuple[list[dict[str, Any]], list[float], list[float]]:
    """A row for each refusal; the gaps of a stream, in milliseconds, while nothing else is sent, and beside them."""
    alone = await _gaps(client)
    stream = asyncio.ensure_future(_gaps(client))
    await asyncio.sleep(0.3)
    rows = []
    for repeat in range(repeats):
        for name, schema in HOSTILE.items():
            began = time.perf_counter()
            # A comment makes it another schema each time: verdicts are kept.
            status, reply = await ask(client, wire({**schema, "$comment": str(repeat)}, 1))
            elapsed_ms = (time.perf_counter() - began) * 1e3
            detail = reply["error"]["message"][:120] if status == 400 else ""
            rows.append({"schema": name, "status": status, "ms": elapsed_ms, "detail": detail})
    return rows, alone, await stream


async def _gaps(client: httpx.AsyncClient) -> list[float]:
    body = wire(None, 400, temperature=0.0, stream=True, ignore_eos=True)
    gaps, last = [], 0.0
    async for _ in _pieces(client, body):
        now = time.perf_counter()
        if last:
            gaps.append((now - last) * 1e3)
        last = now
    return gaps
