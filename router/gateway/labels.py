"""The names of a request that travel in headers and metadata: ours, and the client's own. Pure.

x-disagg-request-id   ours, minted: what `explain` takes; of several answers, the first one's
x-request-id          the client's label: it comes back, and means nothing here
"""

from __future__ import annotations

import re
from typing import Final

REQUEST_ID: Final = "x-disagg-request-id"
LABEL: Final = "x-request-id"
MAX_LABEL_CHARS: Final = 256
_PRINTABLE: Final = re.compile(r"[ -~]+")


def read_label(given: str | None) -> str:
    """A label as it may be sent back: its first characters. Empty for none, and for one with anything but printable
    ASCII, which gRPC would refuse to send."""
    if given is None or not _PRINTABLE.fullmatch(given):
        return ""
    return given[:MAX_LABEL_CHARS]
