from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disagg.gateway.requests.request import ChatPrompt, GenerationInput, IdsPrompt, Prompt, Targets, TextPrompt
from disagg.gateway.requests.validate import (
    MAX_CHAT_MESSAGES,
    CheckedRequest,
    Limits,
    check_other_prompt,
    check_request,
    check_targets,
    fit_prompt,
)
from disagg.gateway.text.chat_template import ChatTurn
from disagg.gateway.text.tokenizer import ModelInfo, ServedModel
from disagg.proto.errors import (
    ContextLengthError,
    DeadlineError,
    DisaggError,
    InvalidRequestError,
    ModelNotFoundError,
)
from disagg.proto.messages import Sampling, decoder, encode
from disagg.v1 import inference_pb2 as pb
from tests.support.gateway import EOS, IM_END, MAX_MODEL_LEN, MODEL_NAME, VOCAB_SIZE
from tests.unit.gateway.requests.bad_requests import generation_inputs

NAN, INF = math.nan, math.inf
SEED = 2**64 - 1


HELLO = TextPrompt("hello")


def asked(prompt: Prompt | None = HELLO, **fields: Any) -> GenerationInput:
    """A good request, but for what is given."""
    return GenerationInput(**{"model": MODEL_NAME, "prompt": prompt} | fields)


def ids(*token_ids: int) -> IdsPrompt:
    return IdsPrompt(token_ids)


def chat(*turns: tuple[str, str]) -> ChatPrompt:
    return ChatPrompt(tuple(ChatTurn(*turn) for turn in turns))


HUGE = 10**5000
"""Python refuses to print it."""
LONE = "a\ud83d"
"""The first half of a surrogate pair, as JSON may bring it."""

WRONG: list[tuple[GenerationInput, str]] = [
    *((asked(temperature=v), "sampling.temperature") for v in (NAN, INF, -INF, -0.1, 100.5, HUGE, -HUGE)),
    *((asked(top_p=v), "sampling.top_p") for v in (NAN, INF, -0.5, 1.001)),
    *((asked(top_k=v), "sampling.top_k") for v in (-2, -(2**31), -HUGE)),
    *((asked(min_p=v), "sampling.min_p") for v in (NAN, -0.1, 1.1)),
    *((asked(presence_penalty=v), "sampling.presence_penalty") for v in (NAN, -2.1, 2.1)),
    *((asked(frequency_penalty=v), "sampling.frequency_penalty") for v in (NAN, -2.1, INF)),
    *(
        (asked(repetition_penalty=v), "sampling.repetition_penalty")
        for v in (NAN, 0.0, 1e-38, 0.0099, -1.0, 101.0, HUGE)
    ),
    *((asked(seed=v), "sampling.seed") for v in (-1, 2**64, HUGE)),
    *((asked(logprobs=v), "sampling.logprobs") for v in (-1, 21, HUGE)),
    *((asked(logit_bias={v: 1.0}), "sampling.logit_bias") for v in (-1, VOCAB_SIZE, HUGE)),
    *((asked(logit_bias={17: v}), "sampling.logit_bias[17]") for v in (NAN, INF, -100.5, 101, HUGE)),
    (asked(logit_bias=dict.fromkeys(range(1025), 0.0)), "sampling.logit_bias"),
    *((asked(max_tokens=v), "stopping.max_tokens") for v in (0, -1, -HUGE)),
    *((asked(min_tokens=v), "stopping.min_tokens") for v in (-1, -HUGE)),
    (asked(max_tokens=3, min_tokens=4), "stopping.min_tokens"),
    (asked(stop_token_ids=(0, 1, VOCAB_SIZE)), "stopping.stop_token_ids[2]"),
    (asked(stop_token_ids=(0, -1)), "stopping.stop_token_ids[1]"),
    (asked(stop_token_ids=(1,) * 65), "stopping.stop_token_ids"),
    (asked(stop=("",)), "stopping.stop[0]"),
    (asked(stop=("a", "x" * 257)), "stopping.stop[1]"),
    (asked(stop=("a", LONE)), "stopping.stop[1]"),
    (asked(stop=("a",) * 17), "stopping.stop"),
    *((asked(n=v), "n") for v in (0, -1, 129, HUGE)),
    (asked(session_id="x" * 257), "session_id"),
    *((asked(cache_salt=v), "cache_salt") for v in (LONE, "x" * 257, "é" * 129)),
    *((asked(speculation=v), "speculation") for v in ("", "on", "OFF", LONE)),
    *((asked(resumed=v, seed=1), "resume.token_ids[1]") for v in ((0, VOCAB_SIZE), (0, -1), (17, EOS, 17))),
    (asked(resumed=(0,) * 129, seed=1), "resume.token_ids"),
    (asked(resumed=(17,), seed=1, n=2), "resume"),
    (asked(resumed=(17,), seed=1, model_version="v"), "resume.model_version"),
    (asked(resumed=(17,), seed=1, model_version="0" * 17), "resume.model_version"),
    (asked(resumed=(17,)), "sampling.seed"),
    (asked(resumed=(), temperature=0.5), "sampling.seed"),
    (asked(None), "prompt"),
    (asked(TextPrompt("x" * 4097)), "prompt.text"),
    (asked(TextPrompt("é" * 2049)), "prompt.text"),
    (asked(TextPrompt(LONE)), "prompt.text"),
    (asked(ids()), "prompt.token_ids"),
    (asked(ids(0, 1, 2, VOCAB_SIZE)), "prompt.token_ids[3]"),
    (asked(ids(0, -1)), "prompt.token_ids[1]"),
    *((asked(ids(v)), "prompt.token_ids[0]") for v in (2**32 - 1, HUGE, -HUGE)),
    (asked(chat()), "chat.messages"),
    (asked(chat(("user", "hi"), ("tool", "x"))), "chat.messages[1].role"),
    (asked(chat(("", "hi"))), "chat.messages[0].role"),
    (asked(chat(("User", "hi"))), "chat.messages[0].role"),
    (asked(chat((LONE, "hi"))), "chat.messages[0].role"),
    (asked(chat(("user", "hi"), ("user", LONE))), "chat.messages[1].content"),
    (asked(chat(("user", "x" * 4093))), "chat.messages"),
    (asked(chat(*[("user", "")] * (MAX_CHAT_MESSAGES + 1))), "chat.messages"),
]


@pytest.mark.parametrize(("wrong", "field"), WRONG, ids=[f"{i}-{field}" for i, (_, field) in enumerate(WRONG)])
def test_a_wrong_field_is_named(limits: Limits, wrong: GenerationInput, field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check_request(wrong, limits)
    assert caught.value.field == field
    assert caught.value.message.startswith(f"{field}: ")
    assert caught.value.grpc_code == "INVALID_ARGUMENT"
    assert caught.value.code == "invalid_value"
    assert caught.value.message.isprintable()


def test_some_token_must_be_allowed_before_min_tokens() -> None:
    """Stop ids are masked until then; where they are the whole vocabulary nothing could be sampled."""
    tiny = Limits(ModelInfo(name=MODEL_NAME, vocab_size=4, max_model_len=64, eos_token_ids=(3,)), 64)
    with pytest.raises(InvalidRequestError, match="every token is a stop id") as caught:
        check_request(asked(min_tokens=1, stop_token_ids=(0, 1, 2, 2)), tiny)
    assert caught.value.field == "stopping.min_tokens"
    assert check_request(asked(stop_token_ids=(0, 1, 2)), tiny).sampling.stop_token_ids == (0, 1, 2, 3)
    assert check_request(asked(min_tokens=1, stop_token_ids=(0, 1)), tiny).sampling.min_tokens == 1
    open_ended = asked(min_tokens=1, stop_token_ids=(0, 1, 2), ignore_eos=True)
    assert check_request(open_ended, tiny).sampling.stop_token_ids == (0, 1, 2)


RIGHT: list[GenerationInput] = [
    *(asked(temperature=v) for v in (0.0, 100.0, 0, 100)),
    *(asked(top_p=v) for v in (0.0, 1e-60, 1e-6, 1.0)),
    *(asked(min_p=v) for v in (0.0, 1.0)),
    *(asked(presence_penalty=v, frequency_penalty=-v) for v in (-2.0, 2.0)),
    *(asked(repetition_penalty=v) for v in (0.01, 100.0)),
    *(asked(top_k=v) for v in (-1, 0, 1, 2**31 - 1, HUGE)),
    *(asked(seed=v) for v in (0, 2**64 - 1)),
    *(asked(logprobs=v) for v in (0, 20)),
    *(asked(logit_bias={0: v, VOCAB_SIZE - 1: -v}) for v in (-100.0, 100, 0.5)),
    *(asked(n=v) for v in (1, 128)),
    *(asked(cache_salt=v) for v in ("", "é" * 128)),
    asked(session_id="é" * 256),
    asked(max_tokens=1, min_tokens=1),
    asked(stop_token_ids=(VOCAB_SIZE - 1,) * 64, stop=("x" * 256,) * 16),
    asked(TextPrompt("x" * 4096)),
    asked(chat(("user", "x" * 4092))),
    asked(ids(VOCAB_SIZE - 1)),
    asked(ids(*[0] * (MAX_MODEL_LEN - 1))),
]


@pytest.mark.parametrize("right", RIGHT)
def test_the_ends_of_every_range_are_allowed(limits: Limits, right: GenerationInput) -> None:
    assert check_request(right, limits).prompt == right.prompt


def test_as_many_biases_as_are_allowed(limits: Limits) -> None:
    model = dataclasses.replace(limits.model, vocab_size=2000)
    checked = check_request(asked(logit_bias=dict.fromkeys(range(1024), 1.0)), Limits(model, 4096))
    assert checked.sampling.logit_bias == tuple((i, 1.0) for i in range(1024))


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf, 100.01, -1e300, 10**400])
def test_one_wrong_bias_among_many_is_named(limits: Limits, wrong: float) -> None:
    biases = {**dict.fromkeys(range(300), 1.0), 17: wrong}
    with pytest.raises(InvalidRequestError, match=r"^sampling\.logit_bias\[17\]: must be in \[-100, 100\], not "):
        check_request(asked(logit_bias=biases), limits)


def test_other_prompts_are_checked_and_all_else_is_kept(limits: Limits) -> None:
    first = check_request(asked(logit_bias={1: 1.0}, n=2), limits)
    other = check_other_prompt(first, asked(prompt=IdsPrompt((5, 6))), limits)
    assert other == dataclasses.replace(first, prompt=IdsPrompt((5, 6)))
    assert other.sampling is first.sampling
    with pytest.raises(InvalidRequestError, match=r"^prompt\.text: at most"):
        check_other_prompt(first, asked(prompt=TextPrompt("a" * 5000)), limits)


def test_an_unknown_model(limits: Limits) -> None:
    for name in ("", "other", "TINY", LONE):
        with pytest.raises(ModelNotFoundError, match="there is tiny") as caught:
            check_request(asked(model=name), limits)
        assert caught.value.grpc_code == "NOT_FOUND"
        assert caught.value.message.isprintable()


def test_a_long_wrong_value_is_not_repeated_whole(limits: Limits) -> None:
    for wrong in (asked(model="x" * 10_000), asked(chat(("r" * 10_000, "x"))), asked(seed=2**10_000)):
        with pytest.raises(DisaggError) as caught:
            check_request(wrong, limits)
        assert len(caught.value.message) < 200
    with pytest.raises(InvalidRequestError, match=r"not a number of 10001 bits$"):
        check_request(asked(seed=2**10_000), limits)


@pytest.mark.parametrize("time_left_s", [0.0, -1.0])
def test_no_time_left(limits: Limits, time_left_s: float) -> None:
    with pytest.raises(DeadlineError):
        check_request(asked(), limits, time_left_s)
    assert check_request(asked(), limits, 0.001).max_tokens is None


def test_ids_beyond_the_context_are_refused_before_they_are_read(limits: Limits) -> None:
    with pytest.raises(ContextLengthError) as caught:
        check_request(asked(ids(*[2**32 - 1] * MAX_MODEL_LEN)), limits)
    assert caught.value.field == "prompt.token_ids"
    assert caught.value.code == "context_length_exceeded"


@pytest.mark.parametrize("num_tokens", [MAX_MODEL_LEN, 2**64, 10**30])
def test_an_answer_that_no_context_holds_is_refused_before_the_prompt_is_tokenized(
    limits: Limits, num_tokens: int
) -> None:
    with pytest.raises(ContextLengthError) as caught:
        check_request(asked(max_tokens=num_tokens, min_tokens=num_tokens + 1), limits)
    assert caught.value.field == "stopping.max_tokens"
    assert caught.value.message.isprintable()


@pytest.mark.parametrize("prompt", [TextPrompt("hé"), ids(5, 6), chat(("system", "s"), ("user", ""))])
def test_the_prompt_forms(limits: Limits, prompt: Prompt) -> None:
    assert check_request(asked(prompt), limits).prompt == prompt


def fit(limits: Limits, wanted: GenerationInput, num_prompt_tokens: int = 10) -> Sampling:
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
        logit_bias=(),
        logprobs=-1,
    )
    assert fit(limits, asked()) == expected
    checked = check_request(asked(), limits)
    assert (checked.num_answers, checked.cache_salt, checked.stop) == (1, "", ())


def test_set_fields_are_taken_also_where_they_are_zero(limits: Limits) -> None:
    wanted = asked(
        temperature=0.0,
        top_p=0.5,
        top_k=7,
        min_p=0.25,
        seed=0,
        presence_penalty=-1.0,
        frequency_penalty=1.5,
        repetition_penalty=2.0,
        logit_bias={9: -1.0, 4: 2.5},
        logprobs=0,
        max_tokens=5,
        min_tokens=2,
        stop_token_ids=(9, EOS, 9),
        stop=("b", "a", "b"),
        n=3,
        cache_salt="s",
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
        logit_bias=((4, 2.5), (9, -1.0)),
        logprobs=0,
    )
    assert fit(limits, wanted) == expected
    checked = check_request(wanted, limits)
    assert (checked.num_answers, checked.cache_salt, checked.stop) == (3, "s", ("b", "a"))


def test_numbers_are_those_that_grpc_can_carry(limits: Limits) -> None:
    """So that a seed means the same whichever protocol brought it."""
    wanted = asked(temperature=0.7, logit_bias={5: 0.1})
    carried = pb.SamplingParams(temperature=0.7, logit_bias={5: 0.1})
    sampling = fit(limits, wanted)
    assert sampling.temperature == carried.temperature != 0.7
    assert sampling.logit_bias == ((5, carried.logit_bias[5]),)
    assert type(fit(limits, asked(temperature=1)).temperature) is float


@pytest.mark.parametrize(("top_k", "expected"), [(-1, 0), (0, 0), (1, 1), (VOCAB_SIZE - 1, VOCAB_SIZE - 1)])
def test_top_k(limits: Limits, top_k: int, expected: int) -> None:
    assert fit(limits, asked(top_k=top_k)).top_k == expected
    assert fit(limits, asked(top_k=VOCAB_SIZE)).top_k == 0


def test_ignore_eos_leaves_the_clients_stop_ids(limits: Limits) -> None:
    assert fit(limits, asked(ignore_eos=True)).stop_token_ids == ()
    assert fit(limits, asked(ignore_eos=True, stop_token_ids=(4,))).stop_token_ids == (4,)


def test_the_largest_seed(limits: Limits) -> None:
    assert fit(limits, asked(seed=SEED)).seed == SEED


def test_the_context(limits: Limits) -> None:
    assert fit(limits, asked(), MAX_MODEL_LEN - 1).max_tokens == 1
    assert fit(limits, asked(max_tokens=MAX_MODEL_LEN - 10)).max_tokens == MAX_MODEL_LEN - 10


@pytest.mark.parametrize(
    ("wanted", "num_prompt_tokens", "field", "why"),
    [
        (asked(), MAX_MODEL_LEN, "prompt.text", "the prompt is too long: 128 tokens > 127 maximum"),
        (asked(chat(("user", "x"))), MAX_MODEL_LEN + 1, "chat.messages", "the prompt is too long: 129 tokens > 127"),
        (asked(max_tokens=119), 10, "stopping.max_tokens", "you requested 129 tokens (10 in the prompt, 119 in the"),
        (asked(max_tokens=2**32 - 1), 10, "stopping.max_tokens", "you requested 4294967295 tokens in the completion."),
        (asked(max_tokens=HUGE), 10, "stopping.max_tokens", "you requested "),
        (asked(min_tokens=HUGE), 10, "stopping.min_tokens", "you requested "),
        (asked(min_tokens=119), 10, "stopping.min_tokens", "you requested 129 tokens (10 in the prompt, 119 in the"),
    ],
)
def test_what_does_not_fit_the_context(
    limits: Limits, wanted: GenerationInput, num_prompt_tokens: int, field: str, why: str
) -> None:
    with pytest.raises(ContextLengthError) as caught:
        fit(limits, wanted, num_prompt_tokens)
    assert caught.value.field == field
    assert caught.value.message.startswith(f"This model's maximum context length is 128 tokens. However, {why}")


def test_what_can_be_resumed(limits: Limits) -> None:
    assert check_request(asked(), limits).resumed == ()
    assert check_request(asked(resumed=(17, EOS), seed=1), limits).resumed == (17, EOS)
    assert check_request(asked(resumed=(17, EOS, 17), seed=1, ignore_eos=True), limits).resumed == (17, EOS, 17)
    assert check_request(asked(resumed=(17,), temperature=0.0), limits).resumed == (17,)


def test_no_more_is_resumed_than_the_answer_can_have(limits: Limits) -> None:
    checked = check_request(asked(resumed=(17,) * 5, seed=1, max_tokens=4), limits)
    with pytest.raises(InvalidRequestError, match=r"resume.token_ids: at most 4, as many as the answer, not 5"):
        fit_prompt(checked, [1, 2], limits, 0)


@pytest.mark.parametrize("token_ids", [[], [0, VOCAB_SIZE]])
def test_a_text_without_tokens_or_with_unknown_ones(limits: Limits, token_ids: list[int]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        fit_prompt(check_request(asked(), limits), token_ids, limits, 0)
    assert (caught.value.field, caught.value.code) == ("prompt.text", "invalid_value")


@settings(max_examples=100)
@given(data=st.data(), minted_seed=st.integers(0, 2**64 - 1))
def test_any_input_is_refused_by_name_or_within_all_limits(
    model: ServedModel, limits: Limits, data: st.DataObject, minted_seed: int
) -> None:
    wanted = data.draw(generation_inputs(limits))
    try:
        checked = check_request(wanted, limits)
        prompt_token_ids = tokenized(checked.prompt, model)
        fitted = fit_prompt(checked, prompt_token_ids, limits, minted_seed)
    except (ModelNotFoundError, InvalidRequestError) as error:
        assert_names_a_field(error)
    else:
        assert_within_limits(checked, fitted, len(prompt_token_ids))
        assert decoder(Sampling).decode(encode(fitted)) == fitted


def assert_names_a_field(error: ModelNotFoundError | InvalidRequestError) -> None:
    field = "model" if isinstance(error, ModelNotFoundError) else error.field
    assert field
    start = "This model's maximum context length is " if isinstance(error, ContextLengthError) else f"{field}: "
    assert error.message.startswith(start)
    assert len(error.message.encode()) < 400


def tokenized(prompt: Prompt, model: ServedModel) -> list[int]:
    match prompt:
        case TextPrompt(text):
            return model.tokenizer.encode_text(text)
        case IdsPrompt(token_ids):
            return list(token_ids)
        case ChatPrompt(turns):
            return model.tokenizer.encode_chat(turns)


def assert_within_limits(checked: CheckedRequest, fitted: Sampling, num_prompt_tokens: int) -> None:
    assert 0 <= fitted.temperature <= 100
    assert 0 < fitted.top_p <= 1
    assert 0 <= fitted.top_k < VOCAB_SIZE
    assert 0 <= fitted.min_p <= 1
    assert -2 <= fitted.presence_penalty <= 2
    assert -2 <= fitted.frequency_penalty <= 2
    assert 0.0099999 < fitted.repetition_penalty <= 100
    assert 0 <= fitted.seed < 2**64
    assert 0 <= fitted.min_tokens <= fitted.max_tokens
    assert 1 <= fitted.max_tokens <= MAX_MODEL_LEN - num_prompt_tokens
    assert all(token_id < VOCAB_SIZE for token_id in fitted.stop_token_ids)
    assert len(checked.stop) <= 16
    assert all(0 <= i < VOCAB_SIZE and -100 <= bias <= 100 for i, bias in fitted.logit_bias)
    assert -1 <= fitted.logprobs <= 20
    assert 1 <= checked.num_answers <= 128
    assert len(checked.cache_salt.encode()) <= 256


@pytest.mark.parametrize(("given", "expected"), [(None, True), ("auto", True), ("off", False)])
def test_drafts_may_be_computed_unless_they_are_off(limits: Limits, given: str | None, expected: bool) -> None:
    assert check_request(asked(speculation=given), limits).speculation is expected


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
    bound = "[0.1" if key == "x-slo-tpot-ms" else "(0"
    assert caught.value.message.startswith(f"{key}: must be a number of milliseconds in {bound}, 8.64e+07], not ")


def test_a_pace_that_no_model_has_is_refused() -> None:
    assert check_targets([("x-slo-tpot-ms", "0.1"), ("x-slo-ttft-ms", "0.001")]) == Targets(1e-6, 1e-4)
    for value in ("0.0999", "0.001", "1e-9"):
        with pytest.raises(InvalidRequestError, match=r"x-slo-tpot-ms: must be .* in \[0.1, 8.64e\+07\], not"):
            check_targets([("x-slo-tpot-ms", value)])
