"""Tenants whose KV was to be dropped, for the workers that did not run then. Pure.

    disagg forget ──> noted under the next number ──> told to each worker that registers, unless it was ready since
                         └── older than `MAX_AGE_S`, or the one noted first of more than `MAX_NOTES` ──> gone

A worker that is told twice drops what it kept of the tenant since: that is computed again. So it counts as told only
when it was ready after that.
"""

from __future__ import annotations

import msgspec

from disagg.proto.ids import WorkerId

MAX_NOTES = 256
MAX_AGE_S = 90 * 86_400.0
"""Age after which a note is dropped, in seconds."""


class Note(msgspec.Struct, frozen=True, kw_only=True):
    """One tenant."""

    number: int
    tenant_tag: bytes
    at_s: float
    """When its KV was to be dropped, in seconds since the epoch."""


class Forgotten(msgspec.Struct, frozen=True, kw_only=True):
    """The notes, which are part of the desired state."""

    notes: tuple[Note, ...] = ()
    """Tenants that were forgotten, by number."""
    latest: int = 0
    """Number of the latest note."""
    told: dict[WorkerId, int] = {}
    """Number of the latest note when each worker was ready last; 0 for others."""

    def noted(self, tenant_tag: bytes, at_s: float) -> Forgotten:
        """With one more note; an earlier one of the same tenant is gone."""
        number = self.latest + 1
        kept = [note for note in self.notes if note.tenant_tag != tenant_tag and not is_old(note, at_s)]
        notes = (*kept, Note(number=number, tenant_tag=tenant_tag, at_s=at_s))[-MAX_NOTES:]
        return msgspec.structs.replace(self, notes=notes, latest=number)

    def due(self, worker_id: WorkerId) -> tuple[Note, ...]:
        """What a worker that registers has to be told."""
        told = self.told.get(worker_id, 0)
        return tuple(note for note in self.notes if note.number > told)

    def was_ready(self, worker_id: WorkerId) -> Forgotten:
        """With a worker that was told all notes."""
        if not self.due(worker_id):
            return self
        return msgspec.structs.replace(self, told={**self.told, worker_id: self.latest})


def is_old(note: Note, now_s: float) -> bool:
    """Whether a note is to be dropped. `now_s`: seconds since the epoch."""
    return now_s > note.at_s + MAX_AGE_S
