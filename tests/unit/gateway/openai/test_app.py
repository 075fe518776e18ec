"""The application without a socket: routes, answers, errors, keys, and clients that leave."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from disagg.gateway.auth.auth import Caller, RefusedError
from disagg.gateway.http.sites import Sites
from disagg.gateway.requests.request import Targets
from disagg.gateway.text.tokenizer import ServedModel, fake_model
from disagg.proto.errors import OverloadedError, UnavailableError
from disagg.proto.messages import Load, TokenLogprobs
from disagg.proto.token_ids import unpack_token_ids
from disagg.router.api import ClusterView, Completion, TokenBatch, WorkerView
from tests.support.gateway import MAX_MODEL_LEN, MODEL_NAME, VOCAB_SIZE, FakeRouter, Wait
from tests.support.http_app import CHAT, CREATED, MAX_BODY_BYTES, TEXT, AsgiCall, TestApp, error_of, events_of
from tests.support.router import worker_info

GENERATE = ("/v1/chat/completions", "/v1/completions")
CHAT_BODY = json.dumps({**CHAT, "stream": True}).encode()


class OneKey:
    """An `Authenticator` that knows one key."""

    takes_certificates = False

    def tenants(self) -> tuple[str, ...]:
        return ("tenant",)

    def authenticate(self, authorization: str | None, certificate: str = "") -> Caller:
        if authorization != "Bearer secret":
            raise RefusedError("unknown")
        return Caller("tenant", False)

    def find(self, tenant: str, credential: str | None) -> Caller:
        return Caller("tenant", False)


@pytest.fixture
def app(model: ServedModel) -> TestApp:
    return TestApp(model)


def ids(app: TestApp, text: str) -> list[int]:
    return app.model.tokenizer.encode_text(text, special=False)


def script(app: TestApp, *texts: str, reason: Any = "stop", cached: int = 0) -> None:
    app.router.script = lambda _: [*(ids(app, text) for text in texts), Completion(reason, 0, cached)]


# ---------------------------------------------------------------- answers


async def test_every_response_forbids_guessing_its_type(app: TestApp) -> None:
    script(app, "hel", "lo")
    sent = [
        await app.chat(),
        await app.chat(stream=True),
        await app.client.get("/livez"),
        await app.client.get("/none"),
    ]
    assert [response.status_code for response in sent] == [200, 200, 200, 404]
    assert [response.headers.get_list("x-content-type-options") for response in sent] == [["nosniff"]] * 4


async def test_a_chat(app: TestApp) -> None:
    script(app, "hel", "lo", cached=3)
    response = await app.chat(temperature=0, max_tokens=9)
    num_tokens = len(ids(app, "hel")) + len(ids(app, "lo"))
    assert response.status_code == 200
    assert response.json() == {
        "id": "chatcmpl-r0",
        "object": "chat.completion",
        "created": 1_700_000_100,
        "model": MODEL_NAME,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "hello", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": (prompt := app.router.submitted[0][0].num_prompt_tokens),
            "completion_tokens": num_tokens,
            "total_tokens": prompt + num_tokens,
            "prompt_tokens_details": {"cached_tokens": 3},
        },
    }
    routed = app.router.submitted[0][0]
    assert (routed.sampling.temperature, routed.sampling.max_tokens) == (0.0, 9)
    assert app.model.tokenizer.backend.decode(unpack_token_ids(routed.prompt_token_ids), skip_special_tokens=False) == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert app.outcomes() == {"ok": 1}


async def test_a_chat_stream(app: TestApp) -> None:
    script(app, "hello", " there")
    response = await app.chat(stream=True)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = events_of(response)
    assert events[-1] == "[DONE]"
    assert [event["choices"][0]["delta"] for event in events[:-1]] == [
        {"role": "assistant", "content": "hello"},
        {"content": " there"},
        {},
    ]
    assert [event["choices"][0]["finish_reason"] for event in events[:-1]] == [None, None, "stop"]


@pytest.mark.parametrize("prompt", ["a", [75], ["a", "b"], [[75, 76], [77]]])
async def test_the_forms_of_prompts(app: TestApp, prompt: Any) -> None:
    app.router.script = lambda routed: [unpack_token_ids(routed.prompt_token_ids)[-1:]]
    response = await app.text(prompt=prompt, n=2)
    choices = response.json()["choices"]
    several = isinstance(prompt, list) and not isinstance(prompt[0], int)
    texts = [
        one if isinstance(one, str) else app.model.tokenizer.decode(one[-1:])
        for one in (prompt if several else [prompt])
    ]
    assert [choice["index"] for choice in choices] == list(range(2 * len(texts)))
    assert [choice["text"] for choice in choices] == [text[-1] for text in texts for _ in range(2)]
    sent = [routed for routed, _ in app.router.submitted]
    assert len({routed.request_id for routed in sent}) == 2 * len(texts)
    expected = sum({routed.prompt_token_ids: routed.num_prompt_tokens for routed in sent}.values())
    assert response.json()["usage"]["prompt_tokens"] == expected


async def test_echo_of_texts_and_ids(app: TestApp) -> None:
    script(app, "!")
    hello = ids(app, "hello")
    whole = (await app.text(prompt=["one ", "two "], echo=True)).json()
    assert [choice["text"] for choice in whole["choices"]] == ["one !", "two !"]
    events = events_of(await app.text(prompt=hello, echo=True, stream=True))
    assert events[0]["choices"][0]["text"] == "hello!"


async def test_logprobs_of_both_kinds(app: TestApp) -> None:
    (a,) = ids(app, "a")
    app.router.script = lambda _: [TokenBatch([a], [TokenLogprobs(-1.0, (a,), (-1.0,))])]
    chat = (await app.chat(logprobs=True, top_logprobs=1)).json()["choices"][0]["logprobs"]
    one = {"token": "a", "logprob": -1.0, "bytes": [97]}
    assert chat == {"content": [{**one, "top_logprobs": [one]}]}
    text = events_of(await app.text(logprobs=1, stream=True))[0]["choices"][0]["logprobs"]
    assert text == {"tokens": ["a"], "token_logprobs": [-1.0], "top_logprobs": [{"a": -1.0}], "text_offset": [0]}
    assert [routed.sampling.logprobs for routed, _ in app.router.submitted] == [1, 1]


async def test_a_stop_string_across_deltas_ends_the_answer(app: TestApp) -> None:
    app.router.script = lambda _: [ids(app, "one E"), ids(app, "ND two"), Wait()]
    response = await app.chat(stop="END")
    assert response.json()["choices"][0]["message"]["content"] == "one "
    assert response.json()["choices"][0]["finish_reason"] == "stop"
    assert app.router.handles[0].num_cancels == 1


async def test_characters_are_never_split(app: TestApp) -> None:
    smile = ids(app, "🙂")
    app.router.script = lambda _: [smile[:2], smile[2:]]
    events = events_of(await app.chat(stream=True))
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in events[:-1]) == "🙂"


# ---------------------------------------------------------------- headers


async def test_ids_labels_and_traces(app: TestApp) -> None:
    trace = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"
    response = await app.chat(headers={"x-request-id": "mine" * 100, "traceparent": trace})
    assert response.headers["x-request-id"] == ("mine" * 100)[:256]
    assert response.headers["x-disagg-request-id"] == "r0"
    assert response.headers["traceparent"] == f"00-{'a' * 32}-0000000000000011-01"
    assert app.router.submitted[0][0].trace_parent == response.headers["traceparent"]
    plain = await app.chat()
    assert plain.headers["x-request-id"] == plain.headers["x-disagg-request-id"] == "r1"
    assert "traceparent" not in plain.headers


@pytest.mark.parametrize("label", ["caf\u00e9", "a\tb"])
async def test_a_label_that_grpc_could_not_send_back_is_none(app: TestApp, label: str) -> None:
    response = await app.client.post(
        "/v1/chat/completions", json=CHAT, headers=[(b"x-request-id", label.encode("latin-1"))]
    )
    assert response.headers["x-request-id"] == "r0"


async def test_deadline_and_targets(app: TestApp) -> None:
    headers = {"x-request-timeout-ms": "2500", "x-slo-ttft-ms": "200", "x-slo-tpot-ms": "50"}
    await app.chat(headers=headers)
    routed = app.router.submitted[0][0]
    assert routed.deadline == 1002.5
    assert Targets(routed.ttft_slo_s, routed.tpot_slo_s) == Targets(0.2, 0.05)


@pytest.mark.parametrize(
    ("fields", "in_session"),
    [
        ({}, False),
        ({"headers": {"x-session-id": "a"}}, True),
        ({"headers": {"x-session-id": "a" * 256}}, True),
        ({"headers": {"x-session-id": ""}}, False),
        ({"prompt_cache_key": "a"}, True),
        ({"prompt_cache_key": "é" * 256}, True),
        ({"prompt_cache_key": ""}, False),
        ({"prompt_cache_key": None}, False),
    ],
)
async def test_a_session_is_named_by_a_header_or_a_field(
    app: TestApp, fields: dict[str, Any], in_session: bool
) -> None:
    assert (await app.chat(**fields)).status_code == 200
    assert app.router.submitted[0][0].in_session == in_session


async def test_the_name_of_a_session_is_bounded(app: TestApp) -> None:
    long = await app.chat(headers={"x-session-id": "a" * 257})
    assert error_of(long) == (400, "x-session-id", "invalid_value")
    assert long.json()["error"]["message"] == "x-session-id: at most 256 characters, not 257"


@pytest.mark.parametrize("header", ["x-request-timeout-ms", "x-slo-ttft-ms"])
@pytest.mark.parametrize("value", ["", "0", "-1", "nan", "soon", "1e99"])
async def test_wrong_times_in_headers(app: TestApp, header: str, value: str) -> None:
    assert error_of(await app.chat(headers={header: value})) == (400, header, "invalid_value")


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"top_p": -0.1}, "top_p"),
        ({"temperature": -1}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 10**30}, "max_completion_tokens"),
        ({"seed": -(1 << 63) - 1}, "seed"),
        ({"seed": 1 << 64}, "seed"),
        ({"n": 129}, "n"),
        ({"stop": ["a", ""]}, "stop[1]"),
        ({"stop": ""}, "stop"),
        ({"stop_token_ids": [VOCAB_SIZE]}, "stop_token_ids[0]"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]}, "messages"),
        ({"cache_salt": "s" * 257}, "cache_salt"),
        ({"prompt_cache_key": "s" * 257}, "prompt_cache_key"),
        ({"prompt_cache_key": 5}, "prompt_cache_key"),
        ({"n": "x"}, "n"),
    ],
)
async def test_a_wrong_field_of_a_chat_is_named(app: TestApp, fields: dict[str, Any], param: str) -> None:
    assert error_of(await app.chat(**fields))[:2] == (400, param)
    assert app.router.submitted == []
    assert sum(app.outcomes().values()) == 1


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": [1, VOCAB_SIZE]}, "prompt[1]"),
        ({"prompt": [1, -1]}, "prompt[1]"),
        ({"prompt": [[1], [2, 10**30]]}, "prompt[1][1]"),
        ({"prompt": [10**30], "echo": True}, "prompt[0]"),
        ({"logprobs": 21}, "logprobs"),
        ({"logit_bias": {str(VOCAB_SIZE): 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias[5]"),
    ],
)
async def test_a_wrong_field_of_a_completion_is_named(app: TestApp, fields: dict[str, Any], param: str) -> None:
    assert error_of(await app.text(**fields, stream=True))[:2] == (400, param)
    assert app.router.submitted == []


async def test_an_empty_prompt_is_what_the_model_begins_a_text_with(app: TestApp) -> None:
    assert (await app.text(prompt=["", "a"])).status_code == 200
    assert unpack_token_ids(app.router.submitted[0][0].prompt_token_ids) == [0]
    assert (await app.client.post("/tokenize", json={"prompt": ""})).json()["tokens"] == [0]
    bare = {"prompt": "", "add_special_tokens": False}
    assert (await app.client.post("/tokenize", json=bare)).json()["tokens"] == []


async def test_an_empty_prompt_of_a_model_that_begins_with_nothing() -> None:
    app = TestApp(fake_model(MODEL_NAME, 64))
    assert error_of(await app.text(prompt="")) == (400, "prompt", "invalid_value")


async def test_the_likeliest_token_alone(app: TestApp) -> None:
    """`top_p` of 0, as OpenAI's API has it; the sampler keeps the tokens before the sum exceeds it."""
    assert (await app.text(top_p=0)).status_code == 200
    assert app.router.submitted[0][0].sampling.top_p == pytest.approx(1e-6)


async def test_a_prompt_that_does_not_fit(app: TestApp) -> None:
    too_long = await app.text(prompt=[5] * MAX_MODEL_LEN)
    assert error_of(too_long) == (400, "prompt", "context_length_exceeded")
    too_much = await app.chat(max_tokens=MAX_MODEL_LEN)
    assert error_of(too_much) == (400, "max_tokens", "context_length_exceeded")


@pytest.mark.parametrize("path", GENERATE)
@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"model": "\xff"}', b'{"model": "\\udfff"}', b"[" * 9000])
async def test_what_is_no_request_is_refused(app: TestApp, path: str, body: bytes) -> None:
    response = await app.client.post(path, content=body)
    assert error_of(response) == (400, "body", "invalid_value")


async def test_a_large_body_is_refused_by_its_length_and_by_its_bytes(app: TestApp) -> None:
    body = b"x" * (MAX_BODY_BYTES + 1)

    async def pieces() -> Any:
        for begin in range(0, len(body), 1000):
            yield body[begin : begin + 1000]

    for content in (body, pieces()):
        response = await app.client.post("/v1/completions", content=content)
        assert error_of(response) == (400, "body", "invalid_value")
    call = AsgiCall(app.app, "/v1/completions", None, {"content-length": str(MAX_BODY_BYTES + 1)})
    await call.task
    assert call.sent[0]["status"] == 400


async def test_another_model_is_not_here(app: TestApp) -> None:
    assert error_of(await app.chat(model="gpt-5")) == (404, "model", "model_not_found")


async def test_a_refusal_says_when_to_come_back(model: ServedModel) -> None:
    app = TestApp(model, FakeRouter(refusal=OverloadedError("the queue is full", 0.5)))
    for response in (await app.chat(stream=True), await app.text()):
        assert error_of(response) == (429, None, "slow_down")
        assert (response.headers["retry-after-ms"], response.headers["retry-after"]) == ("500", "1")
    assert app.outcomes() == {"slow_down": 2}


async def test_an_error_before_the_first_token_has_its_status(app: TestApp) -> None:
    app.router.script = lambda _: [UnavailableError("no worker", "no_prefill_capacity")]
    response = await app.chat(stream=True)
    assert error_of(response) == (503, None, "no_prefill_capacity")
    assert response.headers["retry-after-ms"] == "1000"


async def test_an_error_in_a_stream_is_its_last_event(app: TestApp) -> None:
    app.router.script = lambda _: [ids(app, "hello"), UnavailableError("lost", "kv_transfer_failed")]
    response = await app.chat(stream=True, stream_options={"include_usage": True})
    events = events_of(response)
    assert response.status_code == 200
    assert [event["choices"][0]["delta"]["content"] for event in events[:-1]] == ["hello"]
    message = "the answer broke off, and the server could not continue it by itself; try again"
    error = {"message": message, "type": "server_error", "param": None, "code": "kv_transfer_failed"}
    assert events[-1] == {"error": error}
    assert app.outcomes() == {"kv_transfer_failed": 1}


async def test_a_fault_of_ours_tells_nothing(app: TestApp, caplog: pytest.LogCaptureFixture) -> None:
    app.router.script = lambda _: [RuntimeError("a secret")]
    response = await app.chat()
    assert error_of(response) == (500, None, "server_error")
    assert response.headers["x-should-retry"] == "false"
    assert "secret" not in response.text
    assert "request r0: failed by a bug; the client gets an internal error" in caplog.text
    assert app.outcomes() == {"server_error": 1}


async def test_one_of_several_prompts_fails_all(app: TestApp) -> None:
    app.router.script = lambda routed: [Wait()] if routed.request_id == "r0" else [UnavailableError("lost")]
    assert error_of(await app.text(prompt=["a", "b"]))[0] == 503
    assert [handle.num_cancels for handle in app.router.handles] == [1, 1]


# ---------------------------------------------------------------- clients that leave


@pytest.mark.parametrize("steps", [[Wait()], [[75], Wait()]])
async def test_a_client_that_leaves_cancels(app: TestApp, steps: list[Any]) -> None:
    app.router.script = lambda _: steps
    call = AsgiCall(app.app, GENERATE[0], CHAT_BODY)
    await app.router.arrived.wait()
    await app.router.handles[0].waiting.wait()
    call.leave()
    await call.task
    assert app.router.handles[0].num_cancels == 1
    assert b"[DONE]" not in call.body
    assert app.outcomes() == {"cancelled": 1}


async def test_a_client_that_leaves_before_its_body_is_whole(app: TestApp) -> None:
    call = AsgiCall(app.app, GENERATE[0], None)
    call.incoming.put_nowait({"type": "http.request", "body": b"{", "more_body": True})
    call.leave()
    await call.task
    assert app.router.submitted == []
    assert app.outcomes() == {"cancelled": 1}


async def test_a_server_that_stops_ends_streams_with_an_error(app: TestApp) -> None:
    app.router.script = lambda _: [[75], Wait()]
    call = AsgiCall(app.app, GENERATE[0], CHAT_BODY)
    await app.router.arrived.wait()
    await app.router.handles[0].waiting.wait()
    app.app.stopping = True
    call.task.cancel()
    await call.task
    assert events_of(call.body)[-1]["error"]["code"] == "gateway_stopping"
    assert app.router.handles[0].num_cancels == 1


async def test_a_whole_answer_that_has_begun_is_cut_off_and_nothing_put_behind(app: TestApp) -> None:
    app.router.script = lambda _: [[75] * 100]
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)
        if message["type"] == "http.response.body":
            app.app.stopping = True
            raise asyncio.CancelledError  # the server stops while the client does not read

    body = iter([{"type": "http.request", "body": json.dumps(TEXT).encode()}])

    async def receive() -> dict[str, Any]:
        if (message := next(body, None)) is None:
            await asyncio.Event().wait()
        assert message is not None
        return message

    await app.app(
        {
            "type": "http",
            "method": "POST",
            "path": "/v1/completions",
            "headers": [(b"content-type", b"application/json")],
        },
        receive,
        send,
    )
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]


async def test_a_foreign_cancel_goes_through(app: TestApp) -> None:
    app.router.script = lambda _: [Wait()]
    call = AsgiCall(app.app, GENERATE[0], CHAT_BODY)
    await app.router.arrived.wait()
    call.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call.task
    assert app.router.handles[0].num_cancels == 1


# ---------------------------------------------------------------- everything else


def cluster_of(*worker_ids: str) -> ClusterView:
    return ClusterView(tuple(WorkerView(worker_info(worker_id), Load()) for worker_id in worker_ids), 0, 0)


async def test_models(app: TestApp) -> None:
    entry = {
        "id": MODEL_NAME,
        "object": "model",
        "created": CREATED,
        "owned_by": "disagg",
        "root": MODEL_NAME,
        "parent": None,
        "max_model_len": MAX_MODEL_LEN,
    }
    assert (await app.client.get("/v1/models")).json() == {"object": "list", "data": [entry]}
    assert (await app.client.get(f"/v1/models/{MODEL_NAME}")).json() == entry
    assert error_of(await app.client.get("/v1/models/a/b")) == (404, "model", "model_not_found")


@pytest.mark.parametrize("path", ["/health", "/ping"])
async def test_health_asks_for_a_worker_that_decodes(app: TestApp, path: str) -> None:
    for cluster, status in [(cluster_of(), 503), (cluster_of("p0"), 503), (cluster_of("p0", "d0"), 200)]:
        app.router.cluster = cluster
        assert (await app.client.get(path)).status_code == status
    assert (await app.client.get("/livez")).status_code == 200


async def test_probes_of_a_gateway_that_drains(app: TestApp) -> None:
    app.router.cluster = cluster_of("d0")
    ready = await app.client.get("/readyz")
    assert (ready.status_code, ready.json(), "connection" in ready.headers) == (200, {"status": "ready"}, False)
    app.readiness.begin_drain()
    ready = await app.client.get("/readyz")
    assert (ready.status_code, ready.json(), ready.headers["connection"]) == (503, {"status": "draining"}, "close")
    assert (await app.client.get("/health")).json() == {"status": "draining", "decode_workers": 1}
    assert (await app.client.get("/livez")).status_code == 200
    assert error_of(await app.chat()) == (503, None, "gateway_stopping")
    assert app.outcomes() == {"gateway_stopping": 1.0}


async def test_metrics_and_version(app: TestApp) -> None:
    await app.chat()
    shown = await app.client.get("/metrics")
    assert 'disagg_calls_total{outcome="ok",protocol="http"} 1.0' in shown.text
    assert shown.headers["content-type"].startswith("text/plain")
    assert (await app.client.head("/metrics")).status_code == 200
    assert (await app.client.get("/version")).json().keys() == {"version"}


async def test_tokens_of_texts_and_chats(app: TestApp) -> None:
    with_start = app.model.tokenizer.encode_text("hello")
    response = await app.client.post("/tokenize", json={"model": MODEL_NAME, "prompt": "hello"})
    assert response.json() == {"count": len(with_start), "max_model_len": MAX_MODEL_LEN, "tokens": with_start}
    bare = await app.client.post(
        "/tokenize", json={"prompt": "hello", "add_special_tokens": False, "return_token_strs": True}
    )
    assert (bare.json()["tokens"], bare.json()["token_strs"]) == (with_start[1:], ["hello"])
    chat = (await app.client.post("/tokenize", json={"messages": CHAT["messages"]})).json()
    await app.chat()
    assert chat["tokens"] == unpack_token_ids(app.router.submitted[0][0].prompt_token_ids)
    text = await app.client.post("/detokenize", json={"model": MODEL_NAME, "tokens": with_start})
    assert text.json() == {"prompt": "hello"}


async def test_lists_of_ids_have_a_limit(app: TestApp, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("disagg.gateway.answers.generator.MAX_LISTED_IDS", 1)
    text, most = "q" * 100, MAX_MODEL_LEN
    num_tokens = len(app.model.tokenizer.encode_text(text))
    assert (await app.client.post("/tokenize", json={"prompt": text})).json()["count"] == num_tokens
    for body in ({"prompt": text * 2}, {"prompt": text * 3, "add_special_tokens": False}):
        assert error_of(await app.client.post("/tokenize", json=body))[:2] == (400, "prompt")
    chat = {"messages": [{"role": "user", "content": text * 2}]}
    assert error_of(await app.client.post("/tokenize", json=chat))[:2] == (400, "messages")
    assert (await app.client.post("/detokenize", json={"tokens": [5] * most})).status_code == 200
    refused = await app.client.post("/detokenize", json={"tokens": [5] * (most + 1)})
    assert error_of(refused) == (400, "tokens", "invalid_value")


async def test_a_long_list_is_written_in_pieces(app: TestApp, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("disagg.gateway.openai.shell.information._VALUES_A_PIECE", 3)
    body: dict[str, Any] = {"prompt": 'q"\u00e9' * 5, "return_token_strs": True}
    answer = (await app.client.post("/tokenize", json=body)).json()
    assert answer["tokens"] == app.model.tokenizer.encode_text(body["prompt"])
    assert len(answer["token_strs"]) == answer["count"] == len(answer["tokens"])


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, "prompt"),
        ("/tokenize", {"prompt": "a" * 4097}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": [{"role": "x", "content": "a"}]}, "messages[0].role"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [5, VOCAB_SIZE]}, "tokens[1]"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": [10**30]}, "tokens[0]"),
    ],
)
async def test_wrong_tokens(app: TestApp, path: str, body: dict[str, Any], param: str) -> None:
    assert error_of(await app.client.post(path, json=body)) == (400, param, "invalid_value")


async def test_paths_and_methods_that_are_not_there(app: TestApp) -> None:
    assert error_of(await app.client.get("/v2/models")) == (404, None, "unknown_url")
    assert error_of(await app.client.get("/" + "a" * 5000)) == (404, None, "unknown_url")
    wrong = await app.client.get("/v1/completions")
    assert error_of(wrong) == (405, None, "method_not_allowed")
    assert wrong.headers["allow"] == "POST"
    assert (await app.client.post("/metrics")).headers["allow"] == "GET, HEAD"


async def test_every_path_but_two_needs_a_key(model: ServedModel) -> None:
    app = TestApp(model, authenticator=OneKey())
    paths = ["/v1/models", "/health", "/ping", "/metrics", "/version", "/nowhere", "/livez/x", "/", "/v1/completions"]
    for path in paths:
        response = await app.client.get(path)
        assert error_of(response) == (401, None, "authentication_error")
        assert response.headers["www-authenticate"] == "Bearer"
    assert error_of(await app.chat(headers={"authorization": "Bearer other"}))[0] == 401
    assert app.router.submitted == []
    assert (await app.client.get("/livez")).status_code == 200
    assert (await app.client.get("/readyz")).status_code == 503
    assert (await app.chat(headers={"authorization": "Bearer secret"})).status_code == 200


async def test_cached_prefixes_are_the_callers_own(model: ServedModel) -> None:
    salted, plain = TestApp(model, authenticator=OneKey()), TestApp(model)
    await salted.chat(headers={"authorization": "Bearer secret"})
    await plain.chat()
    await plain.chat(cache_salt="x")
    roots = {routed.root_hash for app in (salted, plain) for routed, _ in app.router.submitted}
    assert len(roots) == 3


async def test_pages_of_other_sites_reach_nothing_but_probes(model: ServedModel) -> None:
    it = TestApp(model, sites=Sites(checks_host=True, checks_origin=True))
    for headers in ({"origin": "https://evil.example"}, {"host": "evil.example"}):
        refused = await it.chat(headers={"host": "127.0.0.1:8471", **headers})
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "foreign_site")
        assert (await it.client.get("/v1/models", headers=headers)).status_code == 403
        assert (await it.client.get("/livez", headers=headers)).status_code == 200
    assert it.router.submitted == []


async def test_a_body_that_a_page_could_send_without_asking_is_refused(model: ServedModel) -> None:
    it = TestApp(model)
    body = b'{"model": "tiny", "prompt": "hi"}'
    refused = await it.client.post("/v1/completions", content=body, headers={"content-type": "text/plain"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (415, "unsupported_media_type")
    assert it.router.submitted == []
