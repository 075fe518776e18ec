"""Several messages in one frame of a stream: gRPC in Python takes far longer over a frame than over a message in it.

A frame is a msgpack array of one message or more, in their order. What a stream begins with has a frame of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, Any

import msgspec

from disagg.proto.messages import decoder, encode

FULL_FRAME_BYTES = 64 << 10
"""Size beyond which a frame takes no further message. A frame is larger only where its one message is."""


def frames(messages: Iterable[msgspec.Struct]) -> Iterator[bytes]:
    """All messages, in order, in as few frames as they fill."""
    encoded: list[msgspec.Raw] = []
    num_bytes = 0
    for message in messages:
        raw = encode(message)
        if encoded and num_bytes + len(raw) > FULL_FRAME_BYTES:
            yield msgspec.msgpack.encode(encoded)
            encoded, num_bytes = [], 0
        encoded.append(msgspec.Raw(raw))
        num_bytes += len(raw)
    if encoded:
        yield msgspec.msgpack.encode(encoded)


def frame_of(message: msgspec.Struct) -> bytes:
    """Encode one message as a frame of its own: the first frame of a stream."""
    (frame,) = frames([message])
    return frame


def frame_decoder(kind: Any) -> msgspec.msgpack.Decoder[list[Any]]:
    """A strict decoder of frames with messages of one closed union; raises `msgspec.MsgspecError` on anything else."""
    return decoder(Annotated[list[kind], msgspec.Meta(min_length=1)])
