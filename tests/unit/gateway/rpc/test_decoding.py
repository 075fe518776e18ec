from __future__ import annotations

import pytest
from google.protobuf.message import Message

from disagg.gateway.rpc.shell.decoding import decode
from disagg.proto.errors import InvalidRequestError
from disagg.v1 import inference_pb2 as pb
from tests.support.gateway import make_turns

MAX_NUMBERS = 10_000


def broken(raw: bytes) -> bytes:
    """A message whose texts `XX` are no UTF-8."""
    assert b"XX" in raw
    return raw.replace(b"XX", b"\xff\xfe")


def chat(*turns: tuple[str, str]) -> pb.ChatMessages:
    return pb.ChatMessages(messages=[pb.ChatMessage(role=role, content=content) for role, content in turns])


async def test_what_is_a_message_is_read() -> None:
    request = pb.GenerateRequest(model="m", text="é", stopping=pb.StopConditions(stop=["ü"]))
    assert await decode(request.SerializeToString(), pb.GenerateRequest, make_turns(), MAX_NUMBERS) == request
    assert await decode(b"", pb.GenerateRequest, make_turns(), MAX_NUMBERS) == pb.GenerateRequest()


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (pb.GenerateRequest(model="m", text="XX"), "prompt.text"),
        (pb.GenerateRequest(model="XX", text="XX"), "model"),
        (pb.GenerateRequest(chat=chat(("user", "a"), ("user", "XX"))), "chat.messages[1].content"),
        (pb.GenerateRequest(chat=chat(("XX", "a"))), "chat.messages[0].role"),
        (pb.GenerateRequest(text="a", stopping=pb.StopConditions(stop=["a", "XX"])), "stopping.stop[1]"),
        (pb.GenerateOnceRequest(request=pb.GenerateRequest(text="XX")), "prompt.text"),
        (pb.TokenizeRequest(text="XX"), "text"),
        (pb.ExplainRequestRequest(request_id="XX"), "request_id"),
    ],
)
async def test_a_text_that_is_not_utf8_is_named(message: Message, field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        await decode(broken(message.SerializeToString()), type(message), make_turns(), MAX_NUMBERS)
    assert (caught.value.field, str(caught.value)) == (field, f"{field}: is not UTF-8")


@pytest.mark.parametrize("raw", [b"\xff\xff\xff", b"\x0a\x7fab", b"\x22\x02\x0a\x7f"])
async def test_what_is_no_message_is_said_to_be_none(raw: bytes) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        await decode(raw, pb.GenerateRequest, make_turns(), MAX_NUMBERS)
    assert str(caught.value) == "request: is no disagg.v1.GenerateRequest message"


async def test_fields_that_nobody_knows_are_passed_over() -> None:
    unknown = b"\xfa\x3f\x02\xff\xfe" + b"\x08\x01"  # field 1023; field 1 with another wire type
    broken_text = pb.GenerateRequest(text="XX").SerializeToString()
    with pytest.raises(InvalidRequestError, match=r"^prompt\.text: is not UTF-8$"):
        await decode(unknown + broken(broken_text), pb.GenerateRequest, make_turns(), MAX_NUMBERS)
    assert (await decode(unknown, pb.GenerateRequest, make_turns(), MAX_NUMBERS)).WhichOneof("prompt") is None
