"""Every field of every request, with every kind of value: each is answered, and the gateway goes on as it was.

    python -m tests.acceptance.bad_input --fields 0 [--seed 1] [--json FILE]  all of them; another number takes a sample

Other generated input is certainly wrong and must be refused. This is what a type and a size make of each place in a
body, in a message, in a query or in a header: a number of 31 digits, a list of thousands, nothing at all. Some of it is
allowed. What comes back is an answer or an error of the client's; never one of the server's, and never nothing. The
gateway has keys with limits, counts usage and records its router's events, because what is refused late may be used
early; its recording and its process must go on.
"""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import quote

import grpc
import grpc.aio
import msgspec
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from disagg.cluster.config.cluster_config import ClusterConfig, parse_config
from disagg.cluster.hosts.processes import ProcessCluster
from disagg.gateway.batches.schema import BatchBody
from disagg.gateway.openai.schema import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from disagg.gateway.other_apis.messages.schema import MessagesBody
from disagg.gateway.other_apis.responses.schema import ResponsesBody
from disagg.v1 import inference_pb2 as pb
from tests.acceptance.bad_input import generated_http
from tests.acceptance.bad_input.generated import Outcomes
from tests.support.inference_stub import channel as channel_to
from tests.support.pace import in_flight

KEY: Final = "key-of-fields-0123456789"
MAX_MODEL_LEN: Final = 1024
TIMEOUT_S: Final = 30.0
AT_ONCE: Final = 8
_MANY: Final = 3000
_RAW: Final = "%raw%"
"""In place of a value that is no JSON."""
_SERVER_FAULTS: Final = (
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.DATA_LOSS,
    grpc.StatusCode.DEADLINE_EXCEEDED,
)


def _deep(depth: int) -> object:
    value: object = 0
    for _ in range(depth):
        value = [value]
    return value


_INTEGERS: Final = (0, 1, -1, 2**31, 2**32, 2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 2**64, 10**30, -(10**30))
_VALUES: Final[Mapping[str, object]] = {
    **{f"integer {value}": value for value in _INTEGERS},
    **{f"number {value}": value for value in (0.0, -0.0, 0.5, 1e-320, 1e30, 1e308, -1e308)},
    **{f"text {name}": text for name, text in (("empty", ""), ("digit", "1"), ("long", "x" * 20_000), ("zero", "\0"))},
    "text of Unicode": "\u00e9\U0001f600\u202e",
    "null": None,
    "true": True,
    "false": False,
    "no list": [],
    "no object": {},
    "list of numbers": [2**64],
    "list of nulls": [None],
    "many numbers": [1] * _MANY,
    "many texts": ["x"] * _MANY,
    "many objects": [{}] * _MANY,
    "many keys": {str(number): number for number in range(_MANY)},
    "object of numbers": {"a": 10**30},
    "deep": _deep(60),
    "very deep": _deep(900),
}
_NO_JSON: Final = ("NaN", "Infinity", "-Infinity", "1e999", "9" * 5000, r'"\ud800"', "[" * 20_000)
_TEXTS: Final = ("", "0", "-1", "1.5", "x", str(2**63), str(2**64), "9" * 400, "NaN", "%00", "\u00e9", "a" * 2000)
_PARAMETERS: Final = {"type": "object", "properties": {"a": {"type": "integer"}}}
_TOOL: Final = {"name": "f", "description": "d", "parameters": _PARAMETERS}
_HELLO: Final = {"role": "user", "content": [{"type": "text", "text": "hello"}]}
_SCHEMA: Final = {"type": "object", "properties": {"a": {"type": "integer", "minimum": 1, "maximum": 5}}}


class Route(NamedTuple):
    """A path with bodies that have most of what may be in one, and the type of all."""

    path: str
    kind: type[msgspec.Struct]
    bodies: tuple[dict[str, Any], ...]


def _routes(model: str) -> list[Route]:
    named = {"model": model}
    sampling = {"temperature": 0.5, "top_p": 0.5, "top_k": 5, "min_p": 0.1, "seed": 1, "min_tokens": 1}
    chat = {**named, "messages": [_HELLO], "max_tokens": 2}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
    turns = [_HELLO, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "c", "content": "1"}]
    text = {**named, "prompt": ["hello", "there"], "max_tokens": 2, "n": 2, "logit_bias": {"5": 1.5}, "stop": ["x"]}
    return [
        Route(
            "/v1/chat/completions",
            ChatBody,
            (
                {**chat, **sampling, "stream": True, "stream_options": {}, "logprobs": True, "top_logprobs": 2},
                {**chat, "messages": turns, "tools": [{"type": "function", "function": _TOOL}], "tool_choice": "auto"},
                {**chat, "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": _SCHEMA}}},
            ),
        ),
        Route(
            "/v1/completions", CompletionBody, ({**text, **sampling}, {**text, "prompt": [[1, 2], [3]], "best_of": 3})
        ),
        Route(
            "/v1/responses",
            ResponsesBody,
            (
                {
                    **named,
                    "input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}],
                    "max_output_tokens": 2,
                    "tools": [{"type": "function", **_TOOL}],
                    "metadata": {"a": "b"},
                },
                {**named, "input": "hi", "text": {"format": {"type": "json_schema", "name": "s", "schema": _SCHEMA}}},
            ),
        ),
        Route(
            "/v1/messages",
            MessagesBody,
            (
                {
                    **named,
                    "messages": [_HELLO],
                    "max_tokens": 2,
                    "system": [{"type": "text", "text": "s"}],
                    "tools": [{"name": "f", "input_schema": _PARAMETERS}],
                    "tool_choice": {"type": "auto"},
                    "thinking": {"type": "enabled", "budget_tokens": 5},
                },
            ),
        ),
        Route("/v1/messages/count_tokens", MessagesBody, ({**named, "messages": [_HELLO]},)),
        Route("/tokenize", TokenizeBody, ({**named, "prompt": "hello"}, {**named, "messages": [_HELLO]})),
        Route("/detokenize", DetokenizeBody, ({**named, "tokens": [1, 2]},)),
        Route(
            "/v1/batches",
            BatchBody,
            ({"input_file_id": "file-x", "endpoint": "/v1/completions", "completion_window": "24h", "metadata": {}},),
        ),
    ]


class Try(NamedTuple):
    """One request over HTTP, or one call over gRPC."""

    kind: str
    where: str
    """The place and its value, for the report."""
    raw: bytes
    method: str = ""
    """Of gRPC."""


# ---------------------------------------------------------------- HTTP


def http_tries(model: str) -> Iterator[Try]:
    """All of them."""
    for route in _routes(model):
        for body in route.bodies:
            known = {field.encode_name for field in msgspec.structs.fields(route.kind)}
            places = [*_places(body), *((name,) for name in sorted(known - set(body)))]
            for place in places:
                yield from _at(route.path, body, place)
    yield from _queries()
    yield from _headers(model)


def _places(value: object, at: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    items: Iterator[tuple[str | int, object]] = iter(())
    if isinstance(value, dict):
        items = iter(value.items())
    elif isinstance(value, list):
        items = iter(enumerate(value))
    for key, inner in items:
        yield (*at, key)
        yield from _places(inner, (*at, key))


def _at(path: str, body: dict[str, Any], place: tuple[str | int, ...]) -> Iterator[Try]:
    """The body with each value at a place."""
    where = f"{path} {'.'.join(map(str, place))}"
    for name, value in _VALUES.items():
        yield Try(path, f"{where}: {name}", _post(path, json.dumps(_with(body, place, value)).encode()))
    marked = json.dumps(_with(body, place, _RAW))
    for text in _NO_JSON:
        yield Try(path, f"{where}: {text[:20]}", _post(path, marked.replace(f'"{_RAW}"', text).encode()))


def _with(body: Any, place: tuple[str | int, ...], value: object) -> Any:
    if not place:
        return value
    first, *rest = place
    if isinstance(body, list):
        return [_with(item, tuple(rest), value) if i == first else item for i, item in enumerate(body)]
    inner = body.get(first) if rest else None
    return {**body, first: _with(inner, tuple(rest), value)}


def _queries() -> Iterator[Try]:
    names = {"/v1/usage": ("days", "limit", "key"), "/v1/files": ("limit", "after"), "/v1/batches": ("limit", "after")}
    for path, fields in {**names, "/v1/models/x": ("y",)}.items():
        for name in fields:
            for text in _TEXTS:
                yield Try("query", f"{path}?{name}={text[:20]}", _get(f"{path}?{name}={quote(text, safe='%')}"))
    for path in ("/v1/files/", "/v1/batches/", "/v1/models/", "/ui/requests/"):
        for text in _TEXTS:
            yield Try("path", f"{path}{text[:20]}", _get(f"{path}{quote(text, safe='%')}"))


def _headers(model: str) -> Iterator[Try]:
    names = ("x-slo-ttft-ms", "x-slo-tpot-ms", "x-request-timeout-ms", "last-event-id", "x-request-id", "traceparent")
    values = (*_TEXTS, "7.0.1.", f"{'f' * 16}.999999999.999999999.", "0.0.0.0123456789abcdef", "1e300", "inf")
    body = {"model": model, "prompt": "hello", "max_tokens": 2, "seed": 7, "stream": True}
    for name in (*names, "content-type", "accept", "origin", "host"):
        for text in values:
            if text.isascii() and "\0" not in text:
                raw = _post("/v1/completions", json.dumps(body).encode(), f"{name}: {text}")
                yield Try("header", f"{name}: {text[:30]}", raw)


def _post(path: str, body: bytes, *headers: str) -> bytes:
    return generated_http.post(path, body, f"authorization: Bearer {KEY}", *headers)


def _get(path: str) -> bytes:
    lines = [f"GET {path} HTTP/1.1", "host: localhost", f"authorization: Bearer {KEY}", "connection: close", "", ""]
    return "\r\n".join(lines).encode("ascii")


# ---------------------------------------------------------------- gRPC

_LIMITS: Final = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), -1, 0, 1, 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), -1, 0, 1, 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 1, 2**31, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 1, 2**63, 2**64 - 1),
    FieldDescriptor.CPPTYPE_FLOAT: (0.0, -1.0, 3e38, -3e38, float("nan"), float("inf"), float("-inf"), 1e-45),
    FieldDescriptor.CPPTYPE_DOUBLE: (0.0, -1.0, 1e308, -1e308, float("nan"), float("inf"), float("-inf"), 5e-324),
    FieldDescriptor.CPPTYPE_STRING: ("", "1", "x" * 20_000, "\0", "\u00e9\U0001f600", "[" * 5000, '{"enum":[1e999]}'),
    FieldDescriptor.CPPTYPE_BOOL: (False, True),
    FieldDescriptor.CPPTYPE_ENUM: (0, 1, 99),
}
"""Values of a field by its type."""


def grpc_tries(model: str) -> Iterator[Try]:
    """All of them: of calls that change nothing."""
    stopping = pb.StopConditions(max_tokens=2)
    prompts = ({"text": "hello"}, {"token_ids": pb.TokenIds(ids=[1, 2])}, {"chat": _chat()})
    asked = [pb.GenerateRequest(model=model, stopping=stopping, **prompt) for prompt in prompts]
    calls: list[tuple[str, Message]] = [("InferenceService/Generate", request) for request in asked]
    calls += [
        ("InferenceService/GenerateOnce", pb.GenerateOnceRequest(request=asked[0])),
        ("InferenceService/Tokenize", pb.TokenizeRequest(model=model, text="hello")),
        ("InferenceService/Tokenize", pb.TokenizeRequest(model=model, chat=_chat())),
        ("InferenceService/Detokenize", pb.DetokenizeRequest(model=model, token_ids=[1, 2])),
        ("AdminService/ListRequests", pb.ListRequestsRequest()),
        ("AdminService/ExplainRequest", pb.ExplainRequestRequest(request_id="x")),
        ("AdminService/GetUsage", pb.GetUsageRequest()),
    ]
    for method, request in calls:
        for where, changed in _changed(request):
            yield Try(method, where, changed.SerializeToString(), f"/disagg.v1.{method}")


def _chat() -> pb.ChatMessages:
    return pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="hello")])


def _changed(request: Message) -> Iterator[tuple[str, Message]]:
    """The message with each value in each field, also of the messages in it."""
    for change, where in _changes(type(request).DESCRIPTOR, lambda message: message, ""):
        changed = type(request)()
        changed.CopyFrom(request)
        change(changed)
        yield where, changed


def _changes(descriptor: Any, find: Callable[[Any], Any], at: str) -> Iterator[tuple[Callable[[Message], None], str]]:
    for field in descriptor.fields:
        where = f"{at}{field.name}"
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            for key, bias in ((2**32 - 1, 1.0), (0, float("nan")), (1, 3e38)):
                yield _set_entry(find, field.name, key, bias), f"{where}[{key}]={bias}"
        elif field.message_type is not None and field.is_repeated:
            yield _extend(find, field.name, [field.message_type._concrete_class()] * _MANY), f"{where}: many"
        elif field.message_type is not None:
            yield from _changes(field.message_type, _inner(find, field.name), f"{where}.")
        elif field.is_repeated:
            for value in _LIMITS[field.cpp_type]:
                for count in (1, _MANY):
                    yield _extend(find, field.name, [value] * count), f"{where}: {count} x {str(value)[:20]}"
        else:
            for value in _LIMITS[field.cpp_type]:
                yield _assign(find, field.name, value), f"{where}={str(value)[:20]}"


def _inner(find: Callable[[Any], Any], name: str) -> Callable[[Any], Any]:
    return lambda message: getattr(find(message), name)


def _assign(find: Callable[[Any], Any], name: str, value: object) -> Callable[[Message], None]:
    return lambda message: setattr(find(message), name, value)


def _extend(find: Callable[[Any], Any], name: str, values: list[Any]) -> Callable[[Message], None]:
    return lambda message: getattr(find(message), name).extend(values)


def _set_entry(find: Callable[[Any], Any], name: str, key: int, value: float) -> Callable[[Message], None]:
    return lambda message: getattr(find(message), name).update({key: value})


# ---------------------------------------------------------------- a cluster


def configuration(folder: Path) -> ClusterConfig:
    """A gateway with keys, limits, usage, batches and a recording, whose files are in `folder`."""
    keys = folder / "keys.yaml"
    keys.touch(mode=0o600)
    limits = "{requests_per_minute: 100000000, tokens_per_minute: 1000000000}"
    keys.write_text(f"- {{tenant: a, key: {KEY}, admin: true, limits: {limits}}}\n", encoding="utf-8")
    return parse_config(
        {
            "model": {"path": "fake", "max_model_len": MAX_MODEL_LEN},
            "gateway": {
                "port": 0,
                "http_port": 0,
                "api_keys": str(keys),
                "record_events": {"folder": str(folder / "events"), "max_bytes": 1 << 30},
                "usage": {"folder": str(folder / "usage")},
                "batches": {"folder": str(folder / "batches")},
            },
            "pools": {"prefill": {"num_blocks": 512}, "decode": {"num_blocks": 512}},
        }
    )


def sweep(seed: int, count: int) -> Outcomes:
    """Try all, or `count` of them drawn by `seed`, at a cluster of its own."""
    with tempfile.TemporaryDirectory(prefix="disagg-fields-") as folder:
        logs = Path(folder, "logs")
        with ProcessCluster(configuration(Path(folder)), log_dir=logs) as cluster:
            outcomes = asyncio.run(try_all(cluster, Path(folder), seed, count))
        for file in logs.iterdir():
            if "Traceback" in file.read_text(errors="replace"):
                outcomes.find("afterwards", f"{file.name} has a traceback")
        for name in cluster.killed:
            outcomes.find("afterwards", f"{name} had to be killed")
    return outcomes


async def try_all(cluster: ProcessCluster, folder: Path, seed: int, count: int) -> Outcomes:
    """As `sweep`, at a cluster that runs with `configuration`."""
    outcomes, dice, model = Outcomes(), random.Random(seed), "fake"
    processes = {name: cluster.pid(name) for name in ("gateway", "prefill-0", "decode-0")}
    tries = [*http_tries(model), *grpc_tries(model)]
    if count:
        tries = dice.sample(tries, min(count, len(tries)))
    async with channel_to(cluster.address) as channel:

        async def one(each: Try) -> None:
            protocol = "grpc" if each.method else "http"
            answer, problem = await (_call(channel, each) if each.method else _ask(cluster.http_address, each))
            outcomes.note(protocol, each.kind, answer, problem and f"{problem} to {each.where}")

        await in_flight(one, iter(tries), AT_ONCE)
    for name, pid in processes.items():
        if cluster.pid(name) != pid:
            outcomes.find("afterwards", f"{name} ended and was started again")
    before = _recorded(folder)
    body = {"model": model, "prompt": "hello", "max_tokens": 2, "ignore_eos": True}
    good = Try("good", "a good request", _post("/v1/completions", json.dumps(body).encode()))
    if (found := await _ask(cluster.http_address, good)) != ("200", None):
        outcomes.find("afterwards", f"{found} to a good request")
    for _ in range(50):
        await asyncio.sleep(0.1)
        if _recorded(folder) > before:
            return outcomes
    outcomes.find("afterwards", "the recording has ended")
    return outcomes


def _recorded(folder: Path) -> int:
    return sum(file.stat().st_size for file in (folder / "events").rglob("*.events"))


async def _ask(address: str, each: Try) -> tuple[str, str | None]:
    try:
        reply = await generated_http.exchange(address, each.raw, TIMEOUT_S)
    except (TimeoutError, ValueError) as error:
        return "nothing", f"no answer ({error})"
    if reply.status is None:
        return "closed", "the connection was closed without a status"
    if reply.status >= 500:
        return str(reply.status), f"status {reply.status}: {reply.body[:200]!r}"
    return str(reply.status), None


async def _call(channel: grpc.aio.Channel, each: Try) -> tuple[str, str | None]:
    metadata = (("authorization", f"Bearer {KEY}"),)
    try:
        async for _ in channel.unary_stream(each.method, None, None)(each.raw, metadata=metadata, timeout=TIMEOUT_S):
            pass
    except grpc.aio.AioRpcError as error:
        fault = f"{error.code().name}: {error.details()}" if error.code() in _SERVER_FAULTS else None
        return error.code().name, fault
    return "OK", None
