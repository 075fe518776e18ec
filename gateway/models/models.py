"""The models of one gateway, by the name that requests use.

A name that is missing or unknown is an error that names the field `model`, and those of the served models that the
caller's key is for.
"""

from __future__ import annotations

from collections.abc import Sequence

from disagg.gateway.answers.generator import Generator
from disagg.gateway.auth.auth import Caller
from disagg.gateway.auth.shell.rights import may_use, require_model
from disagg.gateway.requests.validate import MAX_ECHOED_CHARS
from disagg.proto.errors import InvalidRequestError, ModelNotFoundError


class Models:
    """The generators by model name; at least one while requests come. Names are unique; models may come and go."""

    def __init__(self, generators: Sequence[Generator] = ()) -> None:
        self._by_name = {generator.model.info.name: generator for generator in generators}

    @property
    def generators(self) -> tuple[Generator, ...]:
        """Generators of all models in the order in which they were added."""
        return tuple(self._by_name.values())

    @property
    def names(self) -> list[str]:
        """Names of the models that requests may use, in the order in which they were added."""
        return list(self._by_name)

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
        """The generator if there is exactly one model, else None."""
        return next(iter(self._by_name.values())) if len(self._by_name) == 1 else None

    def allowed(self, caller: Caller) -> list[Generator]:
        """Generators of the models that the caller may use."""
        return [generator for name, generator in self._by_name.items() if may_use(caller, name)]

    def find(self, caller: Caller, name: str | None) -> Generator:
        """The generator of a model.

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
        found = self._by_name.get(name)
        if found is None:
            raise ModelNotFoundError(name[:MAX_ECHOED_CHARS], self._names(caller))
        return found

    def _names(self, caller: Caller) -> list[str]:
        return [generator.model.info.name for generator in self.allowed(caller)]
