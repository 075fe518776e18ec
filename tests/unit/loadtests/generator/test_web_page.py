"""Who may use Locust's web page, and what its forms may change."""

from __future__ import annotations

import pytest

from disagg.loadtests.generator.web_page import LOOPBACK_NAMES, foreign, frozen_field, is_form

OPTIONS = {"host": "127.0.0.1:8470", "record": "", "rate": "2", "run_time": None, "reset_stats": False}


@pytest.mark.parametrize(
    ("host", "origin", "site"),
    [
        ("127.0.0.1:8089", None, None),
        ("localhost:9000", "http://localhost:9000", "same-origin"),
        ("[::1]:8089", "https://[::1]:8089", "none"),
    ],
)
def test_the_page_itself_is_let_in(host: str, origin: str | None, site: str | None) -> None:
    assert foreign(host, origin, site, LOOPBACK_NAMES) is None


@pytest.mark.parametrize(
    ("host", "origin", "site", "why"),
    [
        ("", None, None, "Host"),
        ("[::1", None, None, "Host"),
        ("127.0.0.1.example:8089", None, None, "Host"),
        ("site.example", "http://site.example", "same-origin", "Host"),
        ("127.0.0.1:8089", "http://127.0.0.1:8090", None, "Origin"),
        ("127.0.0.1:8089", "null", None, "Origin"),
        ("127.0.0.1:8089", "", None, "Origin"),
        ("127.0.0.1:8089", None, "cross-site", "Sec-Fetch-Site"),
        ("127.0.0.1:8089", None, "same-site", "Sec-Fetch-Site"),
    ],
)
def test_other_sites_are_refused(host: str, origin: str | None, site: str | None, why: str) -> None:
    assert (foreign(host, origin, site, LOOPBACK_NAMES) or "").partition(" ")[0] == why


@pytest.mark.parametrize(
    ("form", "found"),
    [
        ([("rate", ["9"]), ("user_count", ["3"])], None),
        ([("host", ["127.0.0.1:8470"]), ("run_time", [""]), ("reset_stats", ["false"])], None),
        ([("host", ["127.0.0.1:8470", "10.0.0.1:1"])], "host"),
        ([("rate", ["9"]), ("record", ["/tmp/x"])], "record"),
        ([("run_time", ["3s"])], "run_time"),
        ([("unknown", ["1"])], "unknown"),
    ],
)
def test_a_form_changes_the_options_of_the_page_only(form: list[tuple[str, list[str]]], found: str | None) -> None:
    assert frozen_field(form, OPTIONS, {"rate"}) == found


def test_posts_go_to_three_paths() -> None:
    paths = ("/x/swarm", "/x/stop", "/x/stats/reset", "/x/user", "/login", "/")
    assert [path for path in paths if is_form(path)] == ["/x/swarm", "/x/stop", "/x/stats/reset"]
