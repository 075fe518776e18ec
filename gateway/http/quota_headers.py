"""`x-ratelimit-*`: what is left of a tenant's limits for a minute, in OpenAI's names and units. Pure.

x-ratelimit-limit-requests: 600        x-ratelimit-remaining-requests: 599        x-ratelimit-reset-requests: 100ms
"""

from __future__ import annotations

import math

from disagg.gateway.http.errors import Headers
from disagg.router.api import Quota

_ROUNDED_DIGITS = 6
"""Decimal digits to which milliseconds are rounded before they are rounded up, so that a floating-point error does not
become a whole one."""


def quota_headers(quota: Quota) -> Headers:
    """Three headers for each limit that the tenant has."""
    headers: Headers = []
    for name, rate in zip((b"requests", b"tokens"), quota, strict=True):
        if rate is not None:
            headers += [
                (b"x-ratelimit-limit-" + name, b"%d" % rate.limit),
                (b"x-ratelimit-remaining-" + name, b"%d" % rate.remaining),
                (b"x-ratelimit-reset-" + name, duration(rate.reset_s).encode()),
            ]
    return headers


def duration(seconds: float) -> str:
    """A duration as Go writes it, in whole milliseconds, rounded up: `0s`, `20ms`, `1s`, `1.5s`, `6m0s`, `1h0m0s`."""
    millis = math.ceil(round(max(0.0, seconds) * 1000, _ROUNDED_DIGITS))
    if 0 < millis < 1000:
        return f"{millis}ms"
    minutes, rest = divmod(millis, 60_000)
    text = f"{rest // 1000}.{rest % 1000:03}".rstrip("0").rstrip(".") + "s"
    hours, minutes_left = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes_left}m{text}"
    return f"{minutes}m{text}" if minutes else text
