"""What happened to one request of a recording: its events and the decisions about it, with their times, and each
placement as `disagg explain` shows it. Pure.

    entry, commands ──add──> a moment, where either concerns the request; tokens in a row are one
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from disagg.cli import explain
from disagg.cli.replay.wording import command_text, entry_text
from disagg.client import Explanation
from disagg.gateway.operators.admin_answers import explanation, explanation_json
from disagg.proto.ids import RequestId
from disagg.proto.messages import StepUpdate
from disagg.router.recording.entries import Entry, Handled
from disagg.router.recording.replay import Replayed
from disagg.router.requests.events import (
    CancelOn,
    CancelRequest,
    Command,
    Dispatch,
    Emit,
    Event,
    Fail,
    Finish,
    FromWorker,
    Submit,
)
from disagg.router.requests.router_core import RouterCore


@dataclass(slots=True)
class Moment:
    """One event, or several successive ones that brought only tokens."""

    now: float
    """Time on the router's clock."""
    event: str
    """Type of the event."""
    text: str
    decisions: list[str]
    placement: Explanation | None = None
    """Placement with all options that were compared, if the request was placed here."""
    last: float = 0.0
    """Time of the last event, if the moment stands for several."""
    tokens_of: str = ""
    """Id of the worker, if the events brought only tokens."""
    num_tokens: int = 0
    num_events: int = 1


@dataclass(slots=True)
class Story:
    """The moments of one request."""

    request_id: RequestId
    clock_to_epoch_s: float
    moments: list[Moment] = field(default_factory=list)
    arrival: float | None = None
    whole: Explanation | None = None
    """Explanation as `disagg explain` shows it, at the end of the recording or of the request."""

    def add(self, entry: Entry, replayed: Replayed, core: RouterCore) -> None:
        """Add the next entry, which `core` has just handled."""
        if not isinstance(entry, Handled):
            return
        commands = [command for command in replayed.commands if _is_about(command, self.request_id)]
        if not commands and not _concerns(entry.event, self.request_id):
            return
        if self.arrival is None and isinstance(entry.event, Submit):
            self.arrival = entry.event.arrival
        moment = self._moment(entry, commands)
        trace = core.trace(self.request_id)
        if trace is not None and (any(isinstance(command, Dispatch | Finish | Fail) for command in commands)):
            self.whole = explanation(trace, self.clock_to_epoch_s)
            if any(isinstance(command, Dispatch) for command in commands):
                moment.placement = self.whole
        before = self.moments[-1] if self.moments else None
        if moment.tokens_of and before is not None and before.tokens_of == moment.tokens_of:
            before.last, before.num_events = moment.now, before.num_events + 1
            before.num_tokens += moment.num_tokens
        else:
            self.moments.append(moment)

    def finish(self, core: RouterCore) -> None:
        """Note that the recording has ended."""
        trace = core.trace(self.request_id)
        if trace is not None:
            self.whole = explanation(trace, self.clock_to_epoch_s)

    def _moment(self, entry: Handled, commands: Sequence[Command]) -> Moment:
        event = entry.event
        text = entry_text(entry, self.request_id)
        moment = Moment(
            entry.now, type(event).__name__, text, [command_text(each) for each in commands], last=entry.now
        )
        if isinstance(event, FromWorker) and all(isinstance(command, Emit) for command in commands):
            num_tokens, has_more = _tokens_and_more(event.update, self.request_id)
            if not has_more:
                moment.tokens_of, moment.num_tokens = event.worker_id, num_tokens
        return moment


def drawn(story: Story, *, ascii_only: bool = False) -> Group:
    """The story for a terminal."""
    began = datetime.fromtimestamp(_zero(story) + story.clock_to_epoch_s, UTC)
    parts: list[RenderableType] = [Text(f"{story.request_id} came at {began:%Y-%m-%d %H:%M:%S.%f} UTC"), Text()]
    for moment in story.moments:
        line = Table.grid(padding=(0, 2, 0, 0))
        line.add_column(width=12, justify="right", style="dim")
        line.add_column(overflow="fold")
        line.add_row(Text(f"{_ms(story, moment.now):+.1f} ms"), Text(_text(story, moment)))
        for decision in moment.decisions if moment.num_events == 1 else ():
            line.add_row("", Text(f"-> {decision}", style="bold"))
        parts.append(line)
        if moment.placement is not None:
            parts += [Padding(part, (0, 0, 0, 14)) for part in explain.why(moment.placement)]
    if story.whole is not None:
        parts += [Text(), explain.report(story.whole, ascii_only=ascii_only, shows_options=False)]
    return Group(*parts)


def to_dict(story: Story) -> dict[str, Any]:
    """The story for programs."""
    return {
        "request_id": story.request_id,
        "moments": [dict(_fields(story, moment)) for moment in story.moments],
        "explanation": None if story.whole is None else explanation_json(story.whole),
    }


def _fields(story: Story, moment: Moment) -> Iterator[tuple[str, Any]]:
    yield "at_ms", _ms(story, moment.now)
    if moment.num_events > 1:
        yield "until_ms", _ms(story, moment.last)
    yield "event", moment.event
    yield "text", _text(story, moment)
    yield "decisions", moment.decisions if moment.num_events == 1 else []
    if moment.placement is not None:
        yield "placement", explanation_json(moment.placement)


def _ms(story: Story, now: float) -> float:
    """Milliseconds since the request's arrival."""
    return (now - _zero(story)) * 1000


def _zero(story: Story) -> float:
    """Time of the request's arrival; if it was only cancelled, or is unknown to the core, that of the first event about
    it."""
    return story.moments[0].now if story.arrival is None else story.arrival


def _text(story: Story, moment: Moment) -> str:
    if moment.num_events == 1:
        return moment.text
    until = f"until {_ms(story, moment.last):+.1f} ms"
    return f"{moment.tokens_of}: {moment.num_tokens} tokens in {moment.num_events} steps, {until}"


def _is_about(command: Command, request_id: RequestId) -> bool:
    match command:
        case Dispatch(message=message):
            return message.spec.request_id == request_id
        case CancelOn(key=key):
            return key.request_id == request_id
        case Emit() | Finish() | Fail():
            return command.request_id == request_id
        case _:
            return False


def _concerns(event: Event, request_id: RequestId) -> bool:
    match event:
        case Submit(request=request):
            return request.request_id == request_id
        case CancelRequest():
            return event.request_id == request_id
        case FromWorker(update=update):
            num_tokens, has_more = _tokens_and_more(update, request_id)
            return num_tokens > 0 or has_more
        case _:
            return False


def _tokens_and_more(update: StepUpdate, request_id: RequestId) -> tuple[int, bool]:
    """Number of tokens of the request, and whether there is anything else about it."""
    num_tokens = sum(len(each.token_ids) for each in update.tokens if each.request_id == request_id)
    ids = (
        *(each.request_id for each in update.prefilled),
        *(each.request_id for each in update.handed_over),
        *(each.request_id for each in update.ends),
    )
    return num_tokens, request_id in ids
