import pytest

from disagg.gateway.http.quota_headers import duration, quota_headers
from disagg.router.api import Quota, RateView


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-1.0, "0s"),
        (0.0, "0s"),
        (1e-10, "0s"),
        (0.0001, "1ms"),
        (0.1, "100ms"),
        (0.9991, "1s"),
        (1.0, "1s"),
        (1.5, "1.5s"),
        (10.0, "10s"),
        (59.9999, "1m0s"),
        (60.0, "1m0s"),
        (61.02, "1m1.02s"),
        (360.0, "6m0s"),
        (3600.0, "1h0m0s"),
        (3725.25, "1h2m5.25s"),
    ],
)
def test_durations_are_written_as_go_does(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_each_limit_has_three_headers_and_no_limit_has_none() -> None:
    assert quota_headers(Quota()) == []
    assert quota_headers(Quota(tokens=RateView(1000, 400, 36.0))) == [
        (b"x-ratelimit-limit-tokens", b"1000"),
        (b"x-ratelimit-remaining-tokens", b"400"),
        (b"x-ratelimit-reset-tokens", b"36s"),
    ]
    both = quota_headers(Quota(RateView(600, 599, 0.1), RateView(1, 0, 60.0)))
    assert {name.decode(): value.decode() for name, value in both} == {
        "x-ratelimit-limit-requests": "600",
        "x-ratelimit-remaining-requests": "599",
        "x-ratelimit-reset-requests": "100ms",
        "x-ratelimit-limit-tokens": "1",
        "x-ratelimit-remaining-tokens": "0",
        "x-ratelimit-reset-tokens": "1m0s",
    }
