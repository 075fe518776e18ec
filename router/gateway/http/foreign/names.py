"""What another API calls the fields that errors of the generator name. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from typing_extensions import override

from disagg.router.gateway.http.to_input import FieldNames

_TURN: Final = re.compile(r"chat\.messages\[(?P<index>\d+)\].*")
_STOP: Final = "stop"


@dataclass(frozen=True, slots=True)
class PlaceNames(FieldNames):
    """Names for conversations whose turns stand elsewhere than their number says."""

    stop_field: str = _STOP
    places: tuple[str, ...] = ()
    """Of each turn."""

    @override
    def name(self, field: str) -> str:
        found = _TURN.match(field)
        if found and int(found["index"]) < len(self.places):
            return self.places[int(found["index"])]
        if field.startswith("chat"):
            return self.prompt
        name = FieldNames.name(self, field)
        return self.stop_field + name.removeprefix(_STOP) if name.startswith("stop[") or name == _STOP else name
