"""Streams that a client can continue after its connection broke: events have ids, and `Last-Event-ID` names the last
one that came.

    Last-Event-ID: 0                     a new stream whose events have ids: without being asked for, they would break
                                         clients that take each event for one line
    id: <seed>.<tokens>.<characters>.<version>
                                         what the answer is drawn by, how much of it came with this event and before,
                                         and the version of the model that makes it

Any gateway of the cluster then answers the same request. It generates the answer again from its beginning, with the
same seed, and leaves out what the client has: an event id is too small for the tokens themselves, and gateways share no
state. A client that has the token ids continues sooner, over gRPC (`Resume`).
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Final

from disagg.gateway.requests.answer_events import Delta, Finish
from disagg.gateway.requests.sampling import MAX_SEED
from disagg.gateway.requests.values import shown
from disagg.proto.errors import InvalidRequestError

HEADER: Final = "last-event-id"
BEGINNING: Final = "0"
_FORM: Final = re.compile(r"([0-9a-f]{1,16})\.([0-9]{1,9})\.([0-9]{1,9})\.([0-9a-f]{16})?")

Events = AsyncGenerator[Delta | Finish, None]


@dataclass(slots=True)
class Position:
    """How much of an answer was written into a stream."""

    seed: int
    num_tokens: int = 0
    num_chars: int = 0
    model_version: str = ""

    def add(self, delta: Delta) -> bytes:
        """The line of the event that brings `delta`, the next one of the answer."""
        self.num_tokens = delta.first_index + len(delta.token_ids)
        self.num_chars += len(delta.reasoning) + len(delta.text)
        self.model_version = delta.model_version or self.model_version
        return b"id: %x.%d.%d.%s\n" % (self.seed, self.num_tokens, self.num_chars, self.model_version.encode())


def read_position(event_id: str, seed: int | None) -> Position:
    """The position behind the event of this id.

    Args:
        event_id: as the client sent it.
        seed: of its request.

    Raises:
        InvalidRequestError: if it is no id of ours, or one of a stream with another seed.
    """
    match = _FORM.fullmatch(event_id)
    if match is None:
        raise InvalidRequestError(HEADER, f"is no id of an event of this API: {shown(event_id)}")
    position = Position(int(match[1], 16), int(match[2]), int(match[3]), match[4] or "")
    assert position.seed <= MAX_SEED
    if seed is not None and seed != position.seed:
        raise InvalidRequestError(HEADER, f"is of a stream with seed {position.seed}, not {shown(seed)}")
    return position


async def rest_after(events: Events, had: Position, note: Callable[[int], None]) -> Events:
    """The events of one answer without the tokens and characters that the client has. Raises `InvalidRequestError` if
    the answer is shorter than that.

    Args:
        events: the answer, from its beginning on.
        had: what the client says that it has.
        note: called with how many tokens are left out. An event of which any text goes out is delivered as a whole,
            whatever was said of its tokens.
    """
    num_tokens, num_chars = had.num_tokens, had.num_chars
    seen_chars, is_noted = 0, False
    async with aclosing(events):
        async for event in events:
            if isinstance(event, Finish):
                if event.num_output_tokens < num_tokens or seen_chars < num_chars:
                    raise InvalidRequestError(
                        HEADER, f"the answer has {event.num_output_tokens} tokens and {seen_chars} characters only"
                    )
                yield event
                continue
            known_tokens = min(len(event.token_ids), max(0, num_tokens - event.first_index))
            known_chars = max(0, num_chars - seen_chars)
            seen_chars += len(event.reasoning) + len(event.text)
            reasoning = event.reasoning[known_chars:]
            text = event.text[max(0, known_chars - len(event.reasoning)) :]
            token_ids = event.token_ids[known_tokens:]
            has_all = seen_chars >= num_chars  # else the id is none of this answer, which its end will show
            if not is_noted:
                has_text = bool(text or reasoning)
                is_noted = has_text or bool(token_ids)
                note(event.first_index + (0 if has_text or (token_ids and not known_chars) else known_tokens))
            if has_all and (token_ids or text or reasoning):
                first_index = event.first_index + known_tokens
                yield replace(event, first_index=first_index, token_ids=token_ids, text=text, reasoning=reasoning)
