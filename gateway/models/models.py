"""The models of one gateway, and the adapters of each, by the name that requests use.

A name that is missing or unknown is an error that names the field `model`, and those of the served models that the
caller's key is for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from disagg.gateway.answers.generator import Generator
from disagg.gateway.auth.auth import Caller
from disagg.gateway.auth.shell.rights import may_use, require_model
from disagg.gateway.requests.validate import MAX_ECHOED_CHARS
from disagg.proto.errors import InvalidRequestError, ModelNotFoundError

MAX_NAMED: Final = 32
"""Largest number of names that an error lists."""


class Models:
    """The generators by model name; at least one while requests come. Names are unique; models may come and go."""

    def __init__(self, generators: Sequence[Generator] = ()) -> None:
        self._by_name = {generator.model.info.name: generator for generator in generators}
        self._adapters: dict[str, Generator] = {}

    @property
    def generators(self) -> tuple[Generator, ...]:
        """Generators of all models, without their adapters, in the order in which they were added."""
        return tuple(self._by_name.values())

    @property
    def names(self) -> list[str]:
        """Names of the models that requests may use, without their adapters, in the order in which they were added."""
        return list(self._by_name)

    @property
    def adapters(self) -> Mapping[str, Generator]:
        """Generators of adapters by name."""
        return self._adapters

    def set_adapters(self, generators: Mapping[str, Generator]) -> None:
        """Let requests name these adapters from now on, and no others. A model's name is its own in any case."""
        self._adapters = dict(generators)

    def base_of(self, name: str) -> str:
        """The name of an adapter's base model; any other name is returned as it is."""
        found = None if name in self._by_name else self._adapters.get(name)
        return name if found is None else found.base_name

    def add(self, generator: Generator) -> None:
        """Let requests name this generator's model from now on."""
        self._by_name[generator.model.info.name] = generator

    def remove(self, generator: Generator) -> None:
        """Refuse further requests for this generator's model, unless another generator has its name. Running requests
        continue."""
        name = generator.model.info.name
        if self._by_name.get(name) is generator:
            del self._by_name[name]

    @property
    def only(self) -> Generator | None:
        """The generator if there is exactly one model, whatever adapters it has; else None."""
        return next(iter(self._by_name.values())) if len(self._by_name) == 1 else None

    def allowed(self, caller: Caller) -> list[Generator]:
        """Generators of the models and adapters that the caller may use, models first."""
        all_names = {
            **self._by_name,
            **{name: each for name, each in self._adapters.items() if name not in self._by_name},
        }
        return [generator for name, generator in all_names.items() if may_use(caller, name)]

    def find(self, caller: Caller, name: str | None) -> Generator:
        """The generator of a model or of an adapter.

        Args:
            name: as a request has it; None where it may be left out with one model, and was.

        Raises:
            ModelDeniedError: if the caller's key is not for it.
            ModelNotFoundError: if there is no such model.
            InvalidRequestError: if there are several and none is named.
        """
        if name is None and self.only is not None:
            name = self.only.model.info.name
        if not name and self.only is None:
            raise InvalidRequestError("model", f"must be set, to one of {', '.join(self._names(caller))}")
        name = name or ""
        require_model(caller, name)  # before an error tells which are served
        found = self._by_name.get(name) or self._adapters.get(name)
        if found is None:
            raise ModelNotFoundError(name[:MAX_ECHOED_CHARS], self._names(caller))
        return found

    def _names(self, caller: Caller) -> list[str]:
        names = [generator.model.info.name for generator in self.allowed(caller)]
        return names if len(names) <= MAX_NAMED else [*names[:MAX_NAMED], f"{len(names) - MAX_NAMED} more"]
