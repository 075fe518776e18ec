"""What another API calls the fields that errors of the generator name. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from typing_extensions import override

from disagg.gateway.openai.to_input import FieldNames

_STOP: Final = "stop"


@dataclass(frozen=True, slots=True)
class OtherNames(FieldNames):
    """Field names for conversations whose turns consist of items or blocks: an error of any turn names the whole
    prompt."""

    stop_field: str = _STOP

    @override
    def name(self, field: str) -> str:
        if field.startswith("chat"):
            return self.prompt
        name = FieldNames.name(self, field)
        return self.stop_field + name.removeprefix(_STOP) if name == _STOP or name.startswith("stop[") else name
