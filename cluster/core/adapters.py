"""The adapters of a cluster: what the configuration names, and what operators add and remove. Pure.

    file     ──follow──> pending ──workers agree──> ready            the same path: as it is; gone from the file: gone
                            └─────a worker refuses──> failed ──after a while──> tried again
    operator ──add, once workers agree──> ready ──remove──> gone

A name stands for one content at a time, its fingerprint. While another path is checked, or refused, the content before
is served on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec

from disagg.proto.adapters import MAX_ADAPTERS, name_problem, path_problem
from disagg.proto.control import AdapterRecord, AddAdapter, ControlRefused, ServedAdapter
from disagg.proto.messages import Adapter


class Base(NamedTuple):
    """A served model, as far as adapters need to know it."""

    name: str
    """The name that requests use."""
    adapters: Mapping[str, str] | None = None
    """Adapters of the configuration: name -> path. None where it takes no adapters."""
    folder: str = ""
    """The folder of its adapters."""


Bases = Mapping[str, Base]
"""All models by key."""


class Adapters:
    """The registered adapters by name; other threads may read them. Owner: `cluster/control/adapters.py`.

    Args:
        records: what an earlier controller saved.
    """

    def __init__(self, records: Iterable[AdapterRecord] = ()) -> None:
        self._records = {record.name: record for record in records}

    @property
    def records(self) -> tuple[AdapterRecord, ...]:
        """All of them, by name."""
        return tuple(sorted(self._records.values(), key=lambda record: record.name))

    @property
    def served(self) -> tuple[ServedAdapter, ...]:
        """Those that requests may name."""
        return tuple(
            ServedAdapter(model=record.model, adapter=record.served, num_bytes=record.num_bytes)
            for record in self.records
            if record.served is not None
        )

    def get(self, name: str) -> AdapterRecord | None:
        """The adapter of that name."""
        return self._records.get(name)

    def follow(self, bases: Bases) -> bool:
        """Take what a configuration names, and drop what it does not name any more; those of operators stay while their
        model takes adapters. Returns whether anything changed."""
        before, records = self._records, dict(self._records)
        wanted = {name: (key, path) for key, base in bases.items() for name, path in (base.adapters or {}).items()}
        names = {base.name for base in bases.values()}
        for name, record in before.items():
            base = bases.get(record.model)
            is_possible = base is not None and base.adapters is not None and name not in names
            if not is_possible or (record.is_in_file and name not in wanted):
                del records[name]
        for name, (key, path) in wanted.items():
            known = records.get(name)
            if known is not None and known.model == key and known.path == path:
                records[name] = msgspec.structs.replace(known, is_in_file=True)
                continue
            records[name] = AdapterRecord(
                name=name,
                path=path,
                model=key,
                phase="pending",
                is_in_file=True,
                served=known.served if known is not None and known.model == key else None,
                num_bytes=known.num_bytes if known is not None else 0,
            )
        for name, record in records.items():
            folder = bases[record.model].folder
            if record.folder != folder:
                records[name] = msgspec.structs.replace(record, folder=folder, phase="pending")
        self._records = records
        return records != before

    def to_check(self, *, failed: bool) -> list[AdapterRecord]:
        """Those that workers must check; with those that were refused before if `failed`."""
        phases = ("pending", "failed") if failed else ("pending",)
        return [record for record in self.records if record.phase in phases]

    def ready(self, record: AdapterRecord, fingerprint: str, num_bytes: int) -> None:
        """Serve what workers found at the path of the record."""
        adapter = Adapter(name=record.name, path=record.path, fingerprint=fingerprint)
        self._put(msgspec.structs.replace(record, phase="ready", detail="", served=adapter, num_bytes=num_bytes))

    def failed(self, record: AdapterRecord, detail: str) -> None:
        """Note why workers refuse it."""
        self._put(msgspec.structs.replace(record, phase="failed", detail=detail))

    def remove(self, name: str) -> None:
        """Drop it."""
        self._records = {each: record for each, record in self._records.items() if each != name}

    def _put(self, record: AdapterRecord) -> None:
        self._records = {**self._records, record.name: record}

    def find_base(self, request: AddAdapter, bases: Bases) -> str | ControlRefused:
        """The key of the model that an adapter is to be added to, or why that is refused."""
        if problem := name_problem(request.name):
            return ControlRefused(field="name", message=f"the name of an adapter {problem}")
        if problem := path_problem(request.path):
            return ControlRefused(field="path", message=f"the path of an adapter {problem}; got {request.path[:256]!r}")
        if any(base.name == request.name for base in bases.values()):
            return ControlRefused(field="name", message=f"{request.name} is the name of a model")
        taking = [key for key, base in bases.items() if base.adapters is not None]
        if not taking:
            message = "no model of this cluster takes adapters: set adapters.folder in the configuration and apply it"
            return ControlRefused(field="base", message=message)
        if not request.base and len(taking) > 1:
            there = ", ".join(bases[key].name for key in taking)
            return ControlRefused(field="base", message=f"must be set, to one of {there}")
        key = next((key for key in taking if request.base in ("", bases[key].name)), None)
        if key is None:
            there = ", ".join(bases[key].name for key in taking)
            return ControlRefused(field="base", message=f"{request.base[:256]!r} takes no adapters; there is {there}")
        known = self._records.get(request.name)
        if known is None:
            if len(self._records) >= MAX_ADAPTERS:
                return ControlRefused(field="name", message=f"there are {MAX_ADAPTERS} adapters, the most of a cluster")
            return key
        if not request.replaces:
            return ControlRefused(field="name", message=f"the adapter {request.name!r} has already been loaded")
        if known.model != key:
            return ControlRefused(field="base", message=f"{request.name} is an adapter of {bases[known.model].name}")
        if known.is_in_file and known.path != request.path:
            message = f"the configuration has {known.path!r} for {request.name}: change it there, and apply it"
            return ControlRefused(field="path", message=message)
        return key

    def removal_refusal(self, name: str) -> ControlRefused | None:
        """Why an adapter cannot be removed, or None."""
        known = self._records.get(name)
        if known is None:
            message = f"the adapter {name[:256]!r} cannot be found"
            return ControlRefused(field="name", message=message, is_missing=True)
        if known.is_in_file:
            message = f"{name} is in the configuration: take it out of adapters.models there, and apply it"
            return ControlRefused(field="name", message=message)
        return None
