from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.proto.errors import (
    ContextLengthError,
    DeadlineError,
    DisaggError,
    InvalidRequestError,
    ModelNotFoundError,
)
from disagg.proto.messages import Sampling
from disagg.router.gateway.chat_template import ChatTurn
from disagg.router.gateway.validate import (
    MAX_CHAT_MESSAGES,
    ChatPrompt,
    CheckedRequest,
    IdsPrompt,
    Limits,
    Targets,
    TextPrompt,
    check_request,
    check_targets,
    fit_prompt,
)
from disagg.v1 import inference_pb2 as pb
from tests.support.gateway import EOS, IM_END, MAX_MODEL_LEN, MODEL_NAME, VOCAB_SIZE

NAN, INF = math.nan, math.inf
SEED = 2**64 - 1


def request(
    sampling: dict[str, Any] | None = None, stopping: dict[str, Any] | None = None, **prompt: Any
) -> pb.GenerateRequest:
    """A good request, but for what is given."""
    return pb.GenerateRequest(
        model=MODEL_NAME,
        sampling=pb.SamplingParams(**(sampling or {})),
        stopping=pb.StopConditions(**(stopping or {})),
        **(prompt or {"text": "hello"}),
    )


def ids(*token_ids: int) -> pb.TokenIds:
    return pb.TokenIds(ids=token_ids)


def chat(*turns: tuple[str, str]) -> pb.ChatMessages:
    return pb.ChatMessages(messages=[pb.ChatMessage(role=role, content=content) for role, content in turns])


WRONG: list[tuple[pb.GenerateRequest, str]] = [
    *((request({"temperature": v}), "sampling.temperature") for v in (NAN, INF, -INF, -0.1, 100.5)),
    *((request({"top_p": v}), "sampling.top_p") for v in (NAN, INF, 0.0, -0.5, 1.001)),
    *((request({"top_k": v}), "sampling.top_k") for v in (-2, -(2**31))),
    *((request({"min_p": v}), "sampling.min_p") for v in (NAN, -0.1, 1.1)),
    *((request({"presence_penalty": v}), "sampling.presence_penalty") for v in (NAN, -2.1, 2.1)),
    *((request({"frequency_penalty": v}), "sampling.frequency_penalty") for v in (NAN, -2.1, INF)),
    *((request({"repetition_penalty": v}), "sampling.repetition_penalty") for v in (NAN, 0.0, -1.0, 101.0)),
    (request(stopping={"max_tokens": 0}), "stopping.max_tokens"),
    (request(stopping={"max_tokens": 3, "min_tokens": 4}), "stopping.min_tokens"),
    (request(stopping={"stop_token_ids": [0, 1, VOCAB_SIZE]}), "stopping.stop_token_ids[2]"),
    (request(stopping={"stop_token_ids": [1] * 65}), "stopping.stop_token_ids"),
    (request(stopping={"stop": [""]}), "stopping.stop[0]"),
    (request(stopping={"stop": ["a", "x" * 257]}), "stopping.stop[1]"),
    (request(stopping={"stop": ["a"] * 17}), "stopping.stop"),
    (request(text=""), "prompt.text"),
    (request(text="x" * 4097), "prompt.text"),
    (request(text="é" * 2049), "prompt.text"),
    (pb.GenerateRequest(model=MODEL_NAME), "prompt"),
    (request(token_ids=ids()), "prompt.token_ids"),
    (request(token_ids=ids(0, 1, 2, VOCAB_SIZE)), "prompt.token_ids[3]"),
    (request(token_ids=ids(2**32 - 1)), "prompt.token_ids[0]"),
    (request(chat=chat()), "chat.messages"),
    (request(chat=chat(("user", "hi"), ("tool", "x"))), "chat.messages[1].role"),
    (request(chat=chat(("", "hi"))), "chat.messages[0].role"),
    (request(chat=chat(("User", "hi"))), "chat.messages[0].role"),
    (request(chat=chat(("user", "x" * 4093))), "chat.messages"),
    (request(chat=chat(*[("user", "")] * (MAX_CHAT_MESSAGES + 1))), "chat.messages"),
]


@pytest.mark.parametrize(("wrong", "field"), WRONG, ids=[f"{i}-{field}" for i, (_, field) in enumerate(WRONG)])
def test_a_wrong_field_is_named(limits: Limits, wrong: pb.GenerateRequest, field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check_request(wrong, limits)
    assert caught.value.field == field
    assert caught.value.message.startswith(f"{field}: ")
    assert caught.value.grpc_code == "INVALID_ARGUMENT"
    assert caught.value.code == "invalid_value"


RIGHT: list[pb.GenerateRequest] = [
    *(request({"temperature": v}) for v in (0.0, 100.0)),
    *(request({"top_p": v}) for v in (1e-6, 1.0)),
    *(request({"min_p": v}) for v in (0.0, 1.0)),
    *(request({"presence_penalty": v, "frequency_penalty": -v}) for v in (-2.0, 2.0)),
    *(request({"repetition_penalty": v}) for v in (0.01, 100.0)),
    *(request({"top_k": v}) for v in (-1, 0, 1, 2**31 - 1)),
    *(request({"seed": v}) for v in (0, 2**64 - 1)),
    request(stopping={"max_tokens": 1, "min_tokens": 1}),
    request(stopping={"stop_token_ids": [VOCAB_SIZE - 1] * 64, "stop": ["x" * 256] * 16}),
    request(text="x" * 4096),
    request(chat=chat(("user", "x" * 4092))),
    request(token_ids=ids(VOCAB_SIZE - 1)),
    request(token_ids=ids(*[0] * (MAX_MODEL_LEN - 1))),
]


@pytest.mark.parametrize("right", RIGHT)
def test_the_ends_of_every_range_are_allowed(limits: Limits, right: pb.GenerateRequest) -> None:
    assert check_request(right, limits).prompt.num_bytes > 0


def test_an_unknown_model(limits: Limits) -> None:
    for name in ("", "other", "TINY"):
        with pytest.raises(ModelNotFoundError, match="there is tiny") as caught:
            check_request(pb.GenerateRequest(model=name, text="x"), limits)
        assert caught.value.grpc_code == "NOT_FOUND"


def test_a_long_wrong_value_is_not_repeated_whole(limits: Limits) -> None:
    for wrong in (pb.GenerateRequest(model="x" * 10_000, text="x"), request(chat=chat(("r" * 10_000, "x")))):
        with pytest.raises(DisaggError) as caught:
            check_request(wrong, limits)
        assert len(caught.value.message) < 200


@pytest.mark.parametrize("time_left_s", [0.0, -1.0])
def test_no_time_left(limits: Limits, time_left_s: float) -> None:
    with pytest.raises(DeadlineError):
        check_request(request(), limits, time_left_s)
    assert check_request(request(), limits, 0.001).max_tokens is None


def test_ids_beyond_the_context_are_refused_before_they_are_read(limits: Limits) -> None:
    with pytest.raises(ContextLengthError) as caught:
        check_request(request(token_ids=ids(*[2**32 - 1] * MAX_MODEL_LEN)), limits)
    assert caught.value.field == "prompt.token_ids"
    assert caught.value.code == "context_length_exceeded"


def test_the_prompt_forms(limits: Limits) -> None:
    assert check_request(request(text="hé"), limits).prompt == TextPrompt("hé")
    assert check_request(request(token_ids=ids(5, 6)), limits).prompt == IdsPrompt((5, 6))
    turns = chat(("system", "s"), ("user", ""))
    assert check_request(request(chat=turns), limits).prompt == ChatPrompt(
        (ChatTurn("system", "s"), ChatTurn("user", ""))
    )


def fit(limits: Limits, wanted: pb.GenerateRequest, num_prompt_tokens: int = 10) -> Sampling:
    return fit_prompt(check_request(wanted, limits), [7] * num_prompt_tokens, limits, minted_seed=99)


def test_unset_fields_take_the_defaults(limits: Limits) -> None:
    expected = Sampling(
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        min_p=0.0,
        seed=99,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        repetition_penalty=1.0,
        stop_token_ids=(IM_END, EOS),
        max_tokens=MAX_MODEL_LEN - 10,
        min_tokens=0,
    )
    assert fit(limits, pb.GenerateRequest(model=MODEL_NAME, text="hello")) == expected


def test_set_fields_are_taken_also_where_they_are_zero(limits: Limits) -> None:
    wanted = request(
        {"temperature": 0.0, "top_p": 0.5, "top_k": 7, "min_p": 0.25, "seed": 0, "presence_penalty": -1.0}
        | {"frequency_penalty": 1.5, "repetition_penalty": 2.0},
        {"max_tokens": 5, "min_tokens": 2, "stop_token_ids": [9, EOS, 9], "stop": ["b", "a", "b"]},
    )
    expected = Sampling(
        temperature=0.0,
        top_p=0.5,
        top_k=7,
        min_p=0.25,
        seed=0,
        presence_penalty=-1.0,
        frequency_penalty=1.5,
        repetition_penalty=2.0,
        stop_token_ids=(9, EOS, IM_END),
        max_tokens=5,
        min_tokens=2,
    )
    assert fit(limits, wanted) == expected
    assert check_request(wanted, limits).stop == ("b", "a")


@pytest.mark.parametrize(("top_k", "expected"), [(-1, 0), (0, 0), (1, 1), (VOCAB_SIZE - 1, VOCAB_SIZE - 1)])
def test_top_k(limits: Limits, top_k: int, expected: int) -> None:
    assert fit(limits, request({"top_k": top_k})).top_k == expected
    assert fit(limits, request({"top_k": VOCAB_SIZE})).top_k == 0


def test_ignore_eos_leaves_the_clients_stop_ids(limits: Limits) -> None:
    assert fit(limits, request(stopping={"ignore_eos": True})).stop_token_ids == ()
    assert fit(limits, request(stopping={"ignore_eos": True, "stop_token_ids": [4]})).stop_token_ids == (4,)


def test_the_largest_seed(limits: Limits) -> None:
    assert fit(limits, request({"seed": SEED})).seed == SEED


def test_the_context(limits: Limits) -> None:
    assert fit(limits, request(), MAX_MODEL_LEN - 1).max_tokens == 1
    assert fit(limits, request(stopping={"max_tokens": MAX_MODEL_LEN - 10})).max_tokens == MAX_MODEL_LEN - 10


@pytest.mark.parametrize(
    ("wanted", "num_prompt_tokens", "field"),
    [
        (request(), MAX_MODEL_LEN, "prompt.text"),
        (request(chat=chat(("user", "x"))), MAX_MODEL_LEN + 1, "chat.messages"),
        (request(stopping={"max_tokens": MAX_MODEL_LEN - 9}), 10, "stopping.max_tokens"),
        (request(stopping={"max_tokens": 2**32 - 1}), 10, "stopping.max_tokens"),
        (request(stopping={"min_tokens": MAX_MODEL_LEN - 9}), 10, "stopping.min_tokens"),
    ],
)
def test_what_does_not_fit_the_context(
    limits: Limits, wanted: pb.GenerateRequest, num_prompt_tokens: int, field: str
) -> None:
    with pytest.raises(ContextLengthError) as caught:
        fit(limits, wanted, num_prompt_tokens)
    assert caught.value.field == field


@pytest.mark.parametrize("token_ids", [[], [0, VOCAB_SIZE]])
def test_a_text_without_tokens_or_with_unknown_ones(limits: Limits, token_ids: list[int]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        fit_prompt(check_request(request(), limits), token_ids, limits, 0)
    assert (caught.value.field, caught.value.code) == ("prompt.text", "invalid_value")


U32, FLOATS, TEXT = st.integers(0, 2**32 - 1), st.floats(width=32), st.text(max_size=12)
FEW = st.integers(0, VOCAB_SIZE + 1)
PROMPTS: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.just({}),
    st.builds(lambda text: {"text": text}, TEXT),
    st.builds(lambda some: {"token_ids": ids(*some)}, st.lists(FEW, max_size=MAX_MODEL_LEN + 2)),
    st.builds(
        lambda turns: {"chat": chat(*turns)},
        st.lists(st.tuples(st.sampled_from(["system", "user", "assistant", "x"]), TEXT), max_size=4),
    ),
)
ANY_SAMPLING = st.fixed_dictionaries(
    {},
    optional=dict.fromkeys(("temperature", "top_p", "min_p"), FLOATS)
    | dict.fromkeys(("presence_penalty", "frequency_penalty", "repetition_penalty"), FLOATS)
    | {"top_k": st.integers(-(2**31), 2**31 - 1), "seed": st.integers(0, 2**64 - 1)},
)
ANY_STOPPING = st.fixed_dictionaries(
    {},
    optional={
        "max_tokens": st.one_of(U32, st.integers(0, 8)),
        "min_tokens": st.one_of(U32, st.integers(0, 8)),
        "ignore_eos": st.booleans(),
        "stop_token_ids": st.lists(FEW, max_size=66),
        "stop": st.lists(TEXT, max_size=18),
    },
)


@given(
    model=st.sampled_from([MODEL_NAME, "x"]),
    prompt=PROMPTS,
    sampling=ANY_SAMPLING,
    stopping=ANY_STOPPING,
    num_prompt_tokens=st.integers(0, MAX_MODEL_LEN + 2),
)
def test_any_input_is_refused_by_name_or_within_all_limits(
    limits: Limits,
    model: str,
    prompt: dict[str, Any],
    sampling: dict[str, Any],
    stopping: dict[str, Any],
    num_prompt_tokens: int,
) -> None:
    wanted = pb.GenerateRequest(
        model=model, sampling=pb.SamplingParams(**sampling), stopping=pb.StopConditions(**stopping), **prompt
    )
    try:
        checked = check_request(wanted, limits)
        fitted = fit_prompt(checked, [1] * num_prompt_tokens, limits, 3)
    except (InvalidRequestError, ModelNotFoundError):
        return
    assert_within_limits(checked, fitted, num_prompt_tokens)


def assert_within_limits(checked: CheckedRequest, fitted: Sampling, num_prompt_tokens: int) -> None:
    assert 0 <= fitted.temperature <= 100
    assert 0 < fitted.top_p <= 1
    assert 0 <= fitted.top_k < VOCAB_SIZE
    assert 0 <= fitted.min_p <= 1
    assert -2 <= fitted.presence_penalty <= 2
    assert -2 <= fitted.frequency_penalty <= 2
    assert 0 < fitted.repetition_penalty <= 100
    assert 0 <= fitted.seed < 2**64
    assert 0 <= fitted.min_tokens <= fitted.max_tokens
    assert 1 <= fitted.max_tokens <= MAX_MODEL_LEN - num_prompt_tokens
    assert all(token_id < VOCAB_SIZE for token_id in fitted.stop_token_ids)
    assert len(checked.stop) <= 16


# ---------------------------------------------------------------- targets


def test_targets_come_from_the_metadata() -> None:
    assert check_targets([]) == Targets(None, None)
    metadata = [("x-slo-ttft-ms", "250"), ("user-agent", "x"), ("x-slo-tpot-ms", "12.5"), ("x-slo-ttft-ms", "9")]
    assert check_targets(metadata) == Targets(0.25, 0.0125)
    assert check_targets([("x-slo-tpot-ms", b"1e3")]) == Targets(None, 1.0)


@pytest.mark.parametrize("key", ["x-slo-ttft-ms", "x-slo-tpot-ms"])
@pytest.mark.parametrize("value", ["", "soon", "0", "-1", "nan", "inf", "86400001", b"\xff"])
def test_a_wrong_target_is_named(key: str, value: str | bytes) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check_targets([(key, value)])
    assert caught.value.field == key
    assert caught.value.message.startswith(f"{key}: must be a number of milliseconds in (0, 8.64e+07], not ")
