from __future__ import annotations

import pytest

from disagg.gateway.requests.request import ChatPrompt, GenerationInput, IdsPrompt, Prompt, TextPrompt
from disagg.gateway.requests.structured import StructuredOutput
from disagg.gateway.rpc.protobuf import read_request, read_turns
from disagg.gateway.text.chat_template import ChatTurn
from disagg.gateway.text.tokenizer import ModelInfo
from disagg.proto.errors import InvalidRequestError
from disagg.v1 import inference_pb2 as pb
from tests.support.reports import in_one_go

CHAT = pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="hi"), pb.ChatMessage(role="robot", content="")])
MODEL = ModelInfo(name="tiny", max_model_len=64, vocab_size=100, eos_token_ids=(2,))
TURNS = (ChatTurn("user", "hi"), ChatTurn("robot", ""))


def test_what_is_unset_stays_unset() -> None:
    assert in_one_go(read_request(pb.GenerateRequest(), MODEL)) == GenerationInput(model="", prompt=None)


@pytest.mark.parametrize(
    ("request_", "prompt"),
    [
        (pb.GenerateRequest(text=""), TextPrompt("")),
        (pb.GenerateRequest(text="é"), TextPrompt("é")),
        (pb.GenerateRequest(token_ids=pb.TokenIds()), IdsPrompt(())),
        (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[3, 2**32 - 1])), IdsPrompt((3, 2**32 - 1))),
        (pb.GenerateRequest(chat=pb.ChatMessages()), ChatPrompt(())),
        (pb.GenerateRequest(chat=CHAT), ChatPrompt(TURNS)),
    ],
)
def test_the_prompts(request_: pb.GenerateRequest, prompt: Prompt) -> None:
    assert in_one_go(read_request(request_, MODEL)).prompt == prompt


def test_every_field_is_read() -> None:
    request = pb.GenerateRequest(
        model="m",
        text="x",
        sampling=pb.SamplingParams(
            temperature=0.0,
            top_p=0.5,
            top_k=-1,
            min_p=0.25,
            seed=2**64 - 1,
            presence_penalty=1.0,
            frequency_penalty=-1.0,
            repetition_penalty=2.0,
            logit_bias={5: -1.5, 0: 2.0},
            logprobs=0,
        ),
        stopping=pb.StopConditions(
            max_tokens=0, min_tokens=0, ignore_eos=True, stop_token_ids=[7, 7], stop=["a", "a", ""]
        ),
        n=0,
        cache_salt="s",
        session_id="c",
        resume=pb.Resume(token_ids=[4], model_version="v"),
        structured=pb.StructuredOutput(regex="a+"),
        truncate_prompt_tokens=-1,
        split_reasoning=True,
        speculation="off",
    )
    read = in_one_go(read_request(request, MODEL))
    assert read == GenerationInput(
        model="m",
        prompt=TextPrompt("x"),
        temperature=0.0,
        top_p=0.5,
        top_k=-1,
        min_p=0.25,
        seed=2**64 - 1,
        presence_penalty=1.0,
        frequency_penalty=-1.0,
        repetition_penalty=2.0,
        logit_bias={5: -1.5, 0: 2.0},
        logprobs=0,
        max_tokens=0,
        min_tokens=0,
        ignore_eos=True,
        stop_token_ids=(7, 7),
        stop=("a", "a", ""),
        n=0,
        cache_salt="s",
        session_id="c",
        resumed=(4,),
        model_version="v",
        structured=StructuredOutput("regex", "a+", "structured.regex"),
        truncate_prompt_tokens=-1,
        split_reasoning=True,
        speculation="off",
    )
    unset = GenerationInput(model="", prompt=None)
    assert [name for name in GenerationInput.__slots__ if getattr(read, name) == getattr(unset, name)] == [
        "prompt_logprobs",
        "functions",
        "pooling",
    ]


def test_no_field_of_the_protobuf_is_left_out() -> None:
    """What is added there must be read here, and have the name that it has there."""
    names = {"model", "prompt", "n", "cache_salt", "resumed", "model_version", "structured"}
    names |= {"truncate_prompt_tokens", "split_reasoning", "speculation", "session_id"}
    names |= {"prompt_logprobs", "functions", "pooling"}  # over HTTP only
    for message in (pb.SamplingParams, pb.StopConditions):
        names |= {field.name for field in message.DESCRIPTOR.fields}
    assert names == set(GenerationInput.__slots__)


def test_turns() -> None:
    assert in_one_go(read_turns(CHAT)) == TURNS


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1] * 64)), "prompt.token_ids"),
        (pb.GenerateRequest(chat=pb.ChatMessages(messages=[pb.ChatMessage()] * 4097)), "chat.messages"),
        (pb.GenerateRequest(stopping=pb.StopConditions(stop=["a"] * 17)), "stopping.stop"),
        (pb.GenerateRequest(stopping=pb.StopConditions(stop_token_ids=[1] * 65)), "stopping.stop_token_ids"),
        (
            pb.GenerateRequest(sampling=pb.SamplingParams(logit_bias=dict.fromkeys(range(1025), 0.0))),
            "sampling.logit_bias",
        ),
    ],
)
def test_a_list_that_is_too_long_is_refused_before_it_is_copied(request_: pb.GenerateRequest, field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        in_one_go(read_request(request_, MODEL))
    assert caught.value.field == field


def test_what_is_resumed() -> None:
    request = pb.GenerateRequest(resume=pb.Resume(token_ids=[5, 2**32 - 1]))
    assert in_one_go(read_request(request, MODEL)).resumed == (5, 2**32 - 1)
    assert in_one_go(read_request(pb.GenerateRequest(resume=pb.Resume()), MODEL)).resumed == ()
    request.resume.token_ids.extend([0] * MODEL.max_model_len)
    with pytest.raises(InvalidRequestError, match=r"resume\.token_ids: at most 64 tokens, not 66"):
        in_one_go(read_request(request, MODEL))
