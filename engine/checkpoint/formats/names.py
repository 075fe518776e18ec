"""Modules by the patterns of `quantization_config`. Pure.

Patterns come with a checkpoint, which is untrusted: regular expressions are matched by RE2, in linear time.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

from disagg.engine.checkpoint.formats.config_fields import texts
from disagg.engine.checkpoint.json_fields import JsonFields

REGULAR = "re:"


@dataclass(frozen=True, slots=True)
class ModulePatterns:
    """Names as `modules_to_not_convert` has them: of a module, of one that contains it, or the end of its name. `*` is
    any text."""

    patterns: tuple[str, ...] = ()

    def __contains__(self, module: object) -> bool:
        return any(
            str(module).endswith(pattern)
            or fnmatchcase(str(module), pattern)
            or fnmatchcase(str(module), f"{pattern}.*")
            for pattern in self.patterns
        )


@dataclass(frozen=True, slots=True)
class ModuleTargets:
    """Names as compressed-tensors has them: of a module, or `re:` and an expression that its name begins with."""

    targets: tuple[str, ...] = ()

    def __contains__(self, module: object) -> bool:
        return any(_matches(target, str(module)) for target in self.targets)


def module_patterns(fields: JsonFields, *names: str) -> ModulePatterns:
    """The patterns of the first of these fields that is present.

    Raises:
        ConfigError: it is no list of names.
    """
    for name in names:
        if fields.has(name):
            return ModulePatterns(texts(fields, name))
    return ModulePatterns()


def module_targets(fields: JsonFields, name: str) -> ModuleTargets:
    """The targets of a field; none without it.

    Raises:
        ConfigError: it is no list of names, or an expression cannot be read.
    """
    import re2

    targets = texts(fields, name) if fields.has(name) else ()
    for target in targets:
        if target.startswith(REGULAR):
            try:
                re2.compile(target.removeprefix(REGULAR))
            except re2.error as error:
                raise fields.error(f"`{name}`: {target!r} is no regular expression: {error}") from error
    return ModuleTargets(targets)


def _matches(target: str, module: str) -> bool:
    import re2

    if target.startswith(REGULAR):
        return re2.match(target.removeprefix(REGULAR), module) is not None
    return target == module
