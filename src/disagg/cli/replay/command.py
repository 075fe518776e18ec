"""`disagg replay`: gives a recording to a router core of this version, and says whether it decides the same.

Exit status 0 when it does, 1 when it does not, 2 when the file is no recording or is damaged.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from disagg.cli.replay.story import Story, drawn, to_dict
from disagg.cli.replay.wording import command_text, entry_text, error_text
from disagg.cli.request_ids import find
from disagg.proto.errors import ConfigError
from disagg.proto.ids import RequestId
from disagg.router.recording.entries import EndReason, Entry, Handled, Header
from disagg.router.recording.recording_file import RecordingError, RecordingReader
from disagg.router.recording.replay import Replay, Replayed
from disagg.router.requests.events import Fail, Finish, Submit

_ENDS: Final[dict[EndReason | None, str]] = {
    "stopped": "the gateway stopped",
    "full": "the limit of bytes was reached",
    "too_slow": "the disk was too slow",
    "failed": "an event could not be recorded; see the gateway's log",
    None: "cut off: the gateway was killed, or still records",
}
SHOWN_COMMANDS: Final = 8
"""Largest number of commands shown for an event that the replay decided otherwise."""


@dataclass(slots=True)
class Outcome:
    """Result of a replay."""

    header: Header
    num_entries: int = 0
    """Number of entries that were replayed."""
    num_commands: int = 0
    events: Counter[str] = field(default_factory=Counter)
    """Number of events by type."""
    outcomes: Counter[str] = field(default_factory=Counter)
    """Number of ended requests by outcome."""
    num_requests: int = 0
    span_s: float = 0.0
    ended: EndReason | None = None
    difference: tuple[Entry, Replayed] | None = None
    """The first entry whose replay differs."""
    damage: str = ""
    """Reason why the file cannot be read further; empty if it can."""

    @property
    def exit_status(self) -> int:
        """Exit status of the command."""
        return 2 if self.damage else int(self.difference is not None)


def run_replay(file: Path, request_id: str | None, console: Console, *, as_json: bool) -> int:
    """Replay a recording, print the result, and on demand the story of one request. Returns the exit status.

    Raises:
        ConfigError: if the file cannot be read, is no recording, or has no such request.
    """
    try:
        with file.open("rb") as opened, _silent_router():
            whole_id = None if request_id is None else _whole_id(RecordingReader(opened), request_id)
            opened.seek(0)
            reader = RecordingReader(opened)
            header = reader.header
            story = None if whole_id is None else Story(RequestId(whole_id), header.epoch_s - header.clock)
            outcome = replay(reader, story)
    except (OSError, RecordingError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{file}: {reason}") from None
    if story is not None and not story.moments:
        raise ConfigError(f"{file}: there is no request {request_id} in it")
    if as_json:
        found = summary_dict(outcome)
        console.print_json(data=found if story is None else {**found, "request": to_dict(story)})
    else:
        if story is not None:
            console.print(drawn(story, ascii_only=console.options.ascii_only))
            console.print()
        console.print(summary(file, outcome))
    return outcome.exit_status


def _whole_id(reader: RecordingReader, request_id: str) -> str:
    """The id of the recording that begins with `request_id`; `request_id` itself if there is none. Raises `ConfigError`
    if there are several."""
    ids: list[str] = []
    with suppress(RecordingError):  # what comes after the damage is not replayed either
        ids += _ids(reader)
    return find(request_id, ids) or request_id


def _ids(reader: RecordingReader) -> Iterator[str]:
    for entry in reader.entries():
        if isinstance(entry, Handled) and isinstance(entry.event, Submit):
            yield entry.event.request.request_id


def replay(reader: RecordingReader, story: Story | None) -> Outcome:
    """Replay up to the end of the recording or the first difference."""
    outcome, replayer = Outcome(reader.header), Replay(reader.header)
    try:
        for entry in reader.entries():
            replayed = replayer.apply(entry)
            _count(outcome, entry, replayed)
            if not replayed.is_same:
                outcome.difference = entry, replayed
                break
            if story is not None:
                story.add(entry, replayed, replayer.core)
    except RecordingError as error:
        outcome.damage = str(error)
    outcome.ended = reader.ended
    if story is not None:
        story.finish(replayer.core)
    return outcome


def _count(outcome: Outcome, entry: Entry, replayed: Replayed) -> None:
    outcome.num_entries += 1
    outcome.num_commands += len(replayed.commands)
    outcome.span_s = _time_of(outcome.header, entry)
    name = type(entry.event).__name__ if isinstance(entry, Handled) else type(entry).__name__
    outcome.events[name] += 1
    outcome.num_requests += isinstance(entry, Handled) and isinstance(entry.event, Submit)
    for command in replayed.commands:
        match command:
            case Finish(completion=done):
                outcome.outcomes[done.reason] += 1
            case Fail(error=error):
                outcome.outcomes[error.code] += 1


def _time_of(header: Header, entry: Entry) -> float:
    """Time of an entry in seconds since the recording began."""
    return getattr(entry, "now", header.clock) - header.clock


def summary(file: Path, outcome: Outcome) -> Table:
    """Table of the result, for a terminal."""
    header = outcome.header
    began = datetime.fromtimestamp(header.epoch_s, UTC)
    by = f"{header.gateway_id}, disagg {header.disagg}, Python {header.python}"
    facts = {
        "recording": f"{file}",
        "began": f"{began:%Y-%m-%d %H:%M:%S} UTC, by {by}",
        "span": f"{outcome.span_s:.1f} s; {'' if outcome.damage or outcome.difference else _ENDS[outcome.ended]}",
        "events": f"{outcome.num_entries}: {_counts(outcome.events)}",
        "requests": f"{outcome.num_requests}: {_counts(outcome.outcomes) or 'none ended'}",
        "replay": verdict(outcome),
        "damage": outcome.damage,
    }
    made = Table.grid(padding=(0, 2))
    made.add_column(style="dim")
    made.add_column(overflow="fold")
    for name, value in facts.items():
        if value:
            made.add_row(name, Text(value.removesuffix("; ")))
    for line in difference_lines(outcome):
        made.add_row("", Text(line))
    return made


def verdict(outcome: Outcome) -> str:
    """Verdict as one line of text."""
    if outcome.difference is None:
        return f"identical: {outcome.num_commands} commands"
    entry, _ = outcome.difference
    at_s = _time_of(outcome.header, entry)
    return f"differs at event {outcome.num_entries}, {at_s:.3f} s after the beginning: {entry_text(entry)}"


def difference_lines(outcome: Outcome) -> list[str]:
    """Lines about what the replay decided instead; empty without a difference."""
    if outcome.difference is None:
        return []
    entry, replayed = outcome.difference
    num_recorded = entry.num_commands if isinstance(entry, Handled) else 0
    made = [command_text(command) for command in replayed.commands[:SHOWN_COMMANDS]]
    if replayed.error is not None:
        made.append(error_text(replayed.error))
    return [f"commands recorded: {num_recorded}; the replay has {len(replayed.commands)}, not the same:"] + [
        f"-> {line}" for line in made or ["nothing"]
    ]


def summary_dict(outcome: Outcome) -> dict[str, Any]:
    """Result as plain values, for programs."""
    header = outcome.header
    return {
        "gateway_id": header.gateway_id,
        "disagg": header.disagg,
        "python": header.python,
        "began_at": header.epoch_s,
        "span_s": outcome.span_s,
        "ended": outcome.ended,
        "events": dict(outcome.events),
        "num_events": outcome.num_entries,
        "num_commands": outcome.num_commands,
        "num_requests": outcome.num_requests,
        "outcomes": dict(outcome.outcomes),
        "identical": outcome.difference is None,
        "difference": [verdict(outcome), *difference_lines(outcome)] if outcome.difference else [],
        "damage": outcome.damage,
    }


def _counts(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.most_common())


@contextmanager
def _silent_router() -> Iterator[None]:
    """Silence the core's warnings, which are about a cluster that no longer exists."""
    router = logging.getLogger("disagg.router")
    before = router.level
    router.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        router.setLevel(before)
