"""What the client makes of its arguments and of failed calls, without a connection; with one, see tests/integration."""

from __future__ import annotations

import inspect
from typing import Any, cast

import grpc
import pytest
from grpc_status import rpc_status

from disagg.client import (
    Answer,
    AsyncClient,
    Client,
    Delta,
    Finished,
    Options,
    Prompt,
    Targets,
    TokenLogprob,
    Usage,
    error_of,
    make_request,
)
from disagg.client.calls import Calls, Flow, Metadata, Pause
from disagg.client.credentials import Credentials
from disagg.client.resuming import MIN_PAUSE_S
from disagg.client.wire import answer_of, delta_of, target_metadata
from disagg.gateway.status import to_rpc_status
from disagg.proto.errors import (
    ContextLengthError,
    DeadlineError,
    DisaggError,
    InternalError,
    InvalidRequestError,
    ModelNotFoundError,
    OverloadedError,
    RequestCancelledError,
    RequestNotFoundError,
    UnavailableError,
)
from disagg.v1 import inference_pb2 as pb


def make(prompt: Prompt, **options: Any) -> pb.GenerateRequest:
    return make_request(prompt, cast(Options, options))


def test_the_three_prompts() -> None:
    assert make("hi") == pb.GenerateRequest(text="hi")
    assert make([1, 2]) == pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 2]))
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    chat = pb.ChatMessages(messages=[pb.ChatMessage(**turn) for turn in turns])
    assert make(turns) == pb.GenerateRequest(chat=chat)


def test_an_empty_prompt_is_left_to_the_server() -> None:
    assert make("").WhichOneof("prompt") == "text"
    assert make([]).WhichOneof("prompt") == "token_ids"


def test_options_go_where_they_belong() -> None:
    request = make(
        "x",
        temperature=0.0,
        top_p=0.5,
        top_k=3,
        min_p=0.25,
        seed=2**64 - 1,
        presence_penalty=1.0,
        frequency_penalty=-1.0,
        repetition_penalty=2.0,
        logit_bias={3: -1.5},
        logprobs=0,
        max_tokens=5,
        min_tokens=1,
        ignore_eos=True,
        stop_token_ids=[7],
        stop=["a", "b"],
        n=2,
        cache_salt="s",
        speculation="off",
    )
    assert request.sampling == pb.SamplingParams(
        temperature=0.0,
        top_p=0.5,
        top_k=3,
        min_p=0.25,
        seed=2**64 - 1,
        presence_penalty=1.0,
        frequency_penalty=-1.0,
        repetition_penalty=2.0,
        logit_bias={3: -1.5},
        logprobs=0,
    )
    assert request.stopping == pb.StopConditions(
        max_tokens=5, min_tokens=1, ignore_eos=True, stop_token_ids=[7], stop=["a", "b"]
    )
    assert request.sampling.HasField("temperature")
    assert request.sampling.HasField("logprobs")
    assert (request.n, request.cache_salt, request.speculation) == (2, "s", "off")


def test_what_an_answer_must_be() -> None:
    schema = {"type": "object", "required": ["a"]}
    of_schema = pb.StructuredOutput(json_schema='{"type": "object", "required": ["a"]}')
    assert make("x", json_schema=schema).structured == of_schema
    assert make("x", json_schema=of_schema.json_schema).structured == of_schema
    assert make("x", json_object=True).structured == pb.StructuredOutput(json_object=True)
    assert make("x", regex="a+").structured == pb.StructuredOutput(regex="a+")
    assert make("x", grammar="start: /a/").structured == pb.StructuredOutput(grammar="start: /a/")
    expected = pb.StructuredOutput(choice=pb.Choices(texts=["yes", "no"]))
    assert make("x", choice=["yes", "no"]).structured == expected
    with pytest.raises(ValueError, match="an answer follows one of regex and choice, not several"):
        make("x", regex="a", choice=["b"])


def test_what_is_left_out_is_unset() -> None:
    request = make("x")
    assert not request.HasField("sampling")
    assert not request.HasField("stopping")
    assert not request.HasField("n")


def test_one_stop_string_may_stand_alone() -> None:
    assert list(make("x", stop="ab").stopping.stop) == ["ab"]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"temprature": 1.0}, TypeError, "no option 'temprature'; there are temperature, top_p"),
        ({"max_tokens": -1}, ValueError, "^max_tokens: .*out of range"),
        ({"max_tokens": "5"}, TypeError, "^max_tokens: .*int"),
        ({"seed": 2**64}, ValueError, "^seed: .*out of range"),
        ({"stop": ["\udcff"]}, ValueError, "^stop: .*surrogates not allowed"),
        ({"logit_bias": {-1: 1.0}}, ValueError, "^logit_bias: .*out of range"),
        ({"logit_bias": {1: "x"}}, TypeError, "^logit_bias: "),
        ({"n": -1}, ValueError, "^n: .*out of range"),
        ({"cache_salt": 5}, TypeError, "^cache_salt: "),
        ({"text": "x"}, TypeError, "no option 'text'"),
        ({"stop_token_ids": [-1]}, ValueError, "^stop_token_ids: .*out of range"),
    ],
)
def test_wrong_options(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make("x", **options)


@pytest.mark.parametrize(
    ("targets", "metadata"),
    [
        (None, ()),
        (Targets(), ()),
        (Targets(ttft_ms=250), (("x-slo-ttft-ms", "250.0"),)),
        (Targets(ttft_ms=0.5, tpot_ms=40.25), (("x-slo-ttft-ms", "0.5"), ("x-slo-tpot-ms", "40.25"))),
    ],
)
def test_targets_are_metadata(targets: Targets | None, metadata: tuple[tuple[str, str], ...]) -> None:
    assert target_metadata(targets) == metadata


def test_a_message_with_an_unknown_key() -> None:
    with pytest.raises(ValueError, match="name"):
        make([{"role": "user", "name": "x"}])


WRITTEN_LOGPROBS = [pb.TokenLogprob(logprob=-0.5, top=[pb.TopLogprob(token_id=7, logprob=-0.25)])]
LOGPROBS = (TokenLogprob(-0.5, ((7, -0.25),)),)
WRITTEN_END = pb.Finished(
    reason=pb.FINISH_REASON_STOP, usage=pb.Usage(prompt_tokens=3, cached_tokens=2, completion_tokens=1), request_id="r"
)


def test_what_a_stream_brings() -> None:
    delta = pb.TokenDelta(first_index=4, token_ids=[5], text="a", logprobs=WRITTEN_LOGPROBS, answer_index=1)
    assert delta_of(pb.GenerateResponse(delta=delta)) == Delta("a", (5,), None, LOGPROBS, 1)
    finished = pb.Finished(reason=pb.FINISH_REASON_LENGTH, request_id="r2", answer_index=2)
    assert delta_of(pb.GenerateResponse(finished=finished)) == Delta(
        "", (), Finished("length", Usage(0, 0, 0), "r2"), (), 2
    )


def test_a_whole_answer() -> None:
    response = pb.GenerateOnceResponse(text="a", token_ids=[5], finished=WRITTEN_END, logprobs=WRITTEN_LOGPROBS)
    assert answer_of(response) == Answer("a", (5,), "stop", Usage(3, 2, 1), "r", LOGPROBS)


class FailedCall(grpc.RpcError):
    """As gRPC raises it."""

    def __init__(
        self,
        code: grpc.StatusCode,
        details: str,
        trailing: tuple[tuple[str, Any], ...] = (),
        initial: tuple[tuple[str, Any], ...] = (),
    ) -> None:
        self._code, self._details, self._trailing, self._initial = code, details, trailing, initial

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details

    def trailing_metadata(self) -> Any:
        return self._trailing

    def initial_metadata(self) -> Any:
        return self._initial


def failed(error: DisaggError) -> FailedCall:
    status = rpc_status.to_status(to_rpc_status(error, "r1"))
    return FailedCall(status.code, status.details, status.trailing_metadata)


@pytest.mark.parametrize(
    "error",
    [
        InvalidRequestError("sampling.top_p", "is wrong"),
        ContextLengthError("prompt.text", "is long"),
        ModelNotFoundError("m", ["n"]),
        RequestNotFoundError("no such request"),
        DeadlineError("late"),
        RequestCancelledError("gone"),
        OverloadedError("full", 0.25),
        UnavailableError("lost", "kv_transfer_failed"),
        InternalError("oops"),
    ],
)
def test_an_error_arrives_as_it_was_raised(error: DisaggError) -> None:
    """All but the detail, which is for operators."""
    found = error_of(failed(error))
    assert type(found) is type(error)
    assert (found.message, str(found), found.code, found.grpc_code, found.http_status) == (
        error.message,
        error.message,
        error.code,
        error.grpc_code,
        error.http_status,
    )
    for name in ("field", "retry_after_s"):
        assert getattr(found, name, None) == getattr(error, name, None)


def test_an_error_without_a_class_keeps_its_code() -> None:
    error = DisaggError("no such tenant")
    error.grpc_code, error.code = "NOT_FOUND", "tenant_not_found"
    found = error_of(failed(error))
    assert (type(found), found.code, found.grpc_code) == (DisaggError, "tenant_not_found", "NOT_FOUND")


@pytest.mark.parametrize(
    ("code", "kind", "reason"),
    [
        (grpc.StatusCode.UNAVAILABLE, UnavailableError, "unreachable"),
        (grpc.StatusCode.DEADLINE_EXCEEDED, DeadlineError, "timeout"),
        (grpc.StatusCode.CANCELLED, RequestCancelledError, "cancelled"),
        (grpc.StatusCode.INTERNAL, InternalError, "server_error"),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, DisaggError, "resource_exhausted"),
        (grpc.StatusCode.INVALID_ARGUMENT, DisaggError, "invalid_argument"),
        (grpc.StatusCode.UNIMPLEMENTED, DisaggError, "unimplemented"),
        (grpc.StatusCode.NOT_FOUND, DisaggError, "not_found"),
    ],
)
@pytest.mark.parametrize("trailing", [(), (("grpc-status-details-bin", b"\xff\xff"),)], ids=["without", "broken"])
def test_a_status_that_is_not_ours(
    code: grpc.StatusCode, kind: type[DisaggError], reason: str, trailing: tuple[tuple[str, Any], ...]
) -> None:
    found = error_of(FailedCall(code, "", trailing))
    assert (type(found), found.code, found.grpc_code, found.message) == (kind, reason, code.name, code.name)


# ---------------------------------------------------------------- the calls of both clients


class PlayedStub:
    """Notes the calls that are begun, and answers them from a list."""

    def __init__(self, *responses: Any) -> None:
        self.responses = list(responses)
        self.begun: list[tuple[Any, float | None, Metadata]] = []

    def call(self, request: Any, timeout: float | None, metadata: Metadata) -> Any:
        self.begun.append((request, timeout, metadata))
        response = self.responses.pop(0)
        if isinstance(response, Exception):
            raise response
        return response

    def unary_unary(self, *_: object, **__: object) -> Any:
        return self.call

    unary_stream = unary_unary


class Clock:
    """A clock that only pauses move."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def finish(flow: Flow[Any], clock: Clock | None = None) -> Any:
    """Make the calls of a flow as the clients do; a pause moves the clock."""
    try:
        step = next(flow)
        while True:
            try:
                if isinstance(step, Pause):
                    assert clock is not None
                    clock.now += step.seconds
                    response = None
                else:
                    response = step.begin()
            except FailedCall as error:
                failure = error_of(error)
                failure.__cause__ = error
                step = flow.throw(failure)
            else:
                step = flow.send(response)
    except StopIteration as end:
        return end.value


MODELS = pb.ListModelsResponse(models=[pb.Model(name="first")])
KEY = (("authorization", "Bearer k"),)


def test_the_only_model_is_asked_for_once_and_within_the_deadline() -> None:
    once = pb.GenerateOnceResponse(text="a", finished=WRITTEN_END)
    stub = PlayedStub(MODELS, once, pb.TokenizeResponse(token_ids=[3, 4]), once)
    calls = Calls(stub, Credentials(api_key="k"), clock=Clock())
    assert finish(calls.generate("x", {}, None, 2.5, Targets(ttft_ms=9))).text == "a"
    assert finish(calls.tokenize("y", None)) == [3, 4]
    assert finish(calls.generate("z", {"n": 2}, "second", None, None)).request_id == "r"
    assert stub.begun == [
        (pb.ListModelsRequest(), 2.5, KEY),
        (
            pb.GenerateOnceRequest(request=pb.GenerateRequest(model="first", text="x")),
            2.5,
            (*KEY, ("x-slo-ttft-ms", "9.0")),
        ),
        (pb.TokenizeRequest(model="first", text="y"), None, KEY),
        (pb.GenerateOnceRequest(request=pb.GenerateRequest(model="second", text="z", n=2)), None, KEY),
    ]


def test_one_of_several_models_must_be_named() -> None:
    several = pb.ListModelsResponse(models=[pb.Model(name="first"), pb.Model(name="second")])
    calls = Calls(PlayedStub(several), Credentials(api_key="k"))
    with pytest.raises(InvalidRequestError, match=r"^model: must be set, to one of first, second$"):
        finish(calls.generate("x", {}, None, None, None))


def test_a_stream_s_prompt_is_checked_before_its_first_call() -> None:
    calls = Calls(PlayedStub(), Credentials(api_key=""))
    with pytest.raises(TypeError, match="no option 'x'"):
        calls.stream("x", cast(Options, {"x": 1}), "m", None, None)


def lost(*, was_taken: bool) -> FailedCall:
    """The failure of a call whose connection broke."""
    initial = (("x-disagg-request-id", "r"),) if was_taken else ()
    return FailedCall(grpc.StatusCode.UNAVAILABLE, "socket closed", initial=initial)


def test_an_answer_whose_gateway_died_is_asked_for_again_in_the_time_that_is_left() -> None:
    once = pb.GenerateOnceResponse(text="a", finished=WRITTEN_END)
    clock = Clock()
    stub = PlayedStub(lost(was_taken=True), lost(was_taken=False), once)
    calls = Calls(stub, Credentials(api_key=""), clock=clock)
    assert finish(calls.generate("x", {}, "m", 2.0, None), clock).text == "a"
    request = pb.GenerateOnceRequest(request=pb.GenerateRequest(model="m", text="x"))
    assert [(asked, round(left_s or 0, 6)) for asked, left_s, _ in stub.begun] == [
        (request, 2.0),
        (request, 1.95),
        (request, 1.85),
    ]


def test_an_answer_that_no_gateway_took_is_not_asked_for_again() -> None:
    stub = PlayedStub(lost(was_taken=False))
    with pytest.raises(UnavailableError, match="socket closed"):
        finish(Calls(stub, Credentials(api_key="")).generate("x", {}, "m", None, None))
    assert len(stub.begun) == 1


def brought(first_index: int, *token_ids: int) -> pb.GenerateResponse:
    return pb.GenerateResponse(delta=pb.TokenDelta(first_index=first_index, token_ids=token_ids, text="t"))


def test_a_stream_s_attempts_share_its_deadline_and_continue_one_another() -> None:
    clock = Clock()
    stub = PlayedStub(None, None)
    calls = Calls(stub, Credentials(api_key=""), clock=clock)
    answer = finish(calls.stream([1], {"seed": 7}, "m", 1.0, None))
    answer.begin()
    assert answer.take(brought(0, 5)) == Delta("t", (5,))
    assert answer.pause_s(lost(was_taken=True)) == MIN_PAUSE_S
    clock.now += 0.25
    answer.begin()
    assert answer.take(pb.GenerateResponse(finished=WRITTEN_END)).finished.request_id == "r"
    assert answer.pause_s(lost(was_taken=True)) is None  # the answer was complete
    first = pb.GenerateRequest(model="m", token_ids=pb.TokenIds(ids=[1]), sampling=pb.SamplingParams(seed=7))
    second = pb.GenerateRequest()
    second.CopyFrom(first)
    second.resume.token_ids.extend([5])
    assert stub.begun == [(first, 1.0, ()), (second, 0.75, ())]


def test_a_stream_whose_gateway_refuses_ends_with_its_error() -> None:
    answer = finish(Calls(PlayedStub(), Credentials(api_key="")).stream([1], {}, "m", 1.0, None))
    with pytest.raises(InternalError, match="oops"):
        answer.pause_s(failed(InternalError("oops")))


def test_a_gateway_without_a_model() -> None:
    calls = Calls(PlayedStub(pb.ListModelsResponse()), Credentials(api_key=""))
    with pytest.raises(UnavailableError, match="the gateway serves no model"):
        finish(calls.detokenize([1], None))


def test_both_clients_have_the_same_methods_and_arguments() -> None:
    def methods(kind: type) -> dict[str, list[inspect.Parameter]]:
        return {
            name: list(inspect.signature(method).parameters.values())
            for name, method in inspect.getmembers(kind, inspect.isfunction)
            if not name.startswith("_") or name == "__init__"
        }

    assert methods(Client) == methods(AsyncClient)
