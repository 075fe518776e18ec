"""The membership as differences: the controller's list with its revisions, and a gateway's copy of it. Pure.

    update(members) ──> MembershipChange (revision n)     ──apply─> new: the copy is at n
    snapshot()      ──> Membership (revision n)           ──apply─> gap: n - 1 is missing here; request all of it

A difference follows the revision before it and no other one. So the bytes that a change costs do not depend on how many
workers there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from disagg.proto.control import Member, Membership, MembershipChange
from disagg.proto.ids import WorkerId

Applied = Literal["new", "old", "gap", "waiting"]
"""Result of a message. `gap`: the whole membership must be requested, once. `waiting`: that was requested already."""


class MembershipLog:
    """The controller's list of workers.

    Args:
        source: unique name of this list.
    """

    def __init__(self, source: str) -> None:
        self._source = source
        self._revision = 0
        self._members: dict[WorkerId, Member] = {}

    def update(self, members: Sequence[Member]) -> MembershipChange | None:
        """Set all workers; returns the change, None for none."""
        before, self._members = self._members, {member.info.worker_id: member for member in members}
        changed = tuple(member for worker_id, member in self._members.items() if before.get(worker_id) != member)
        removed = tuple(worker_id for worker_id in before if worker_id not in self._members)
        if not changed and not removed:
            return None
        self._revision += 1
        return MembershipChange(source=self._source, revision=self._revision, changed=changed, removed=removed)

    def snapshot(self) -> Membership:
        """All workers, as of the latest update."""
        return Membership(source=self._source, revision=self._revision, members=tuple(self._members.values()))


class MembershipCopy:
    """A gateway's copy of the membership, by one stream of messages. A new stream needs a new copy."""

    def __init__(self) -> None:
        self._source: str | None = None
        """Source of the list that this is a copy of; None before the first message."""
        self._revision = 0
        self._latest = 0
        """The highest revision of that source that was received."""
        self._members: dict[WorkerId, Member] = {}
        self._is_waiting = False

    @property
    def members(self) -> tuple[Member, ...]:
        """All workers of the copy."""
        return tuple(self._members.values())

    def apply(self, message: Membership | MembershipChange) -> Applied:
        """Apply a message. The members changed after `new` only. A full membership that is older than a change received
        before it is a `gap` too."""
        if isinstance(message, MembershipChange):
            return self._apply_change(message)
        is_known = message.source == self._source
        if is_known and message.revision < self._revision:
            return "old"
        self._source, self._revision = message.source, message.revision
        self._members = {member.info.worker_id: member for member in message.members}
        self._latest = max(self._latest, message.revision) if is_known else message.revision
        self._is_waiting = self._latest > self._revision
        return "gap" if self._is_waiting else "new"

    def _apply_change(self, change: MembershipChange) -> Applied:
        if change.source == self._source:
            if change.revision <= self._revision:
                return "old"
            self._latest = max(self._latest, change.revision)
        if change.source != self._source or change.revision != self._revision + 1:
            was_waiting, self._is_waiting = self._is_waiting, True
            return "waiting" if was_waiting else "gap"
        self._revision = change.revision
        for worker_id in change.removed:
            self._members.pop(worker_id, None)
        self._members |= {member.info.worker_id: member for member in change.changed}
        return "new"
