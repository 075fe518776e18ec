"""What Locust's web page takes, and from whom. Pure.

Locust answers every web site (`Access-Control-Allow-Origin: *`), and `/swarm` writes any option of the command line
that a form names, hidden ones too. A web page that the operator opens could so send the load, and the API key with it,
elsewhere, or overwrite a file. Therefore:

- a request must come from this page itself: its Host a name of this machine, its Origin the page's own;
- a form may change what the page shows. The gateway, the recording and the rest stay as on the command line;
- the page lies under a random path, which `disagg load run --web` prints (`--web-base-path`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any
from urllib.parse import urlsplit

LOOPBACK_NAMES = frozenset({"127.0.0.1", "::1", "localhost"})
_OWN_SITES = (None, "same-origin", "none")
"""Values of `Sec-Fetch-Site`: not a browser, the page itself, or an address that the operator typed."""
_WITHOUT_MEANING = frozenset({"user_count", "spawn_rate"})
"""Fields of Locust's own form that the open loop does not use."""
_FORMS = ("swarm", "stop", "reset")
"""Last parts of the paths that take a POST."""


def is_form(path: str) -> bool:
    """Whether a path of Locust's takes a POST here. Another one (`/user`) writes attributes of the user's class."""
    return path.rpartition("/")[2] in _FORMS


def foreign(host: str, origin: str | None, fetch_site: str | None, names: Collection[str]) -> str | None:
    """Why a request does not come from this page itself; None if it does.

    Args:
        host: its `Host`; any port, as the page may be reached through a forwarded one.
        origin: its `Origin`; browsers send one with every form and every request of a script to another site.
        fetch_site: its `Sec-Fetch-Site`.
        names: that this page is served under.
    """
    try:
        name = urlsplit(f"//{host}").hostname
    except ValueError:
        name = None
    if name not in names:
        return "Host is not a name of this page"
    if origin is not None and origin not in (f"http://{host}", f"https://{host}"):
        return "Origin is another web site"
    if fetch_site not in _OWN_SITES:
        return "Sec-Fetch-Site says that another web site sent this"
    return None


def frozen_field(
    form: Iterable[tuple[str, list[str]]], options: Mapping[str, Any], free: Collection[str]
) -> str | None:
    """The first field of a form that would change an option other than the `free` ones; None if there is none."""
    for name, values in form:
        if name in free or name in _WITHOUT_MEANING:
            continue
        if any(value != _text(options.get(name)) for value in values):
            return name
    return None


def _text(value: object) -> str:
    """An option as a form has it."""
    if value is None:
        return ""
    return str(value).lower() if isinstance(value, bool) else str(value)
