"""A caller's `traceparent` and ours."""

from __future__ import annotations

import pytest

from disagg.gateway.requests.headers import child_of, parent_span, sibling_of
from disagg.proto.ids import RequestId

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
BITS = (0xABC << 64) | 0xDEF
NEW = "00-00000000000000000000000000000abc-0000000000000def-01"


@pytest.mark.parametrize("flags", ["00", "01", "ff"])
@pytest.mark.parametrize("form", ["00-{0}-{1}-{2}", "01-{0}-{1}-{2}", "cc-{0}-{1}-{2}-more-of-it"])
def test_a_span_under_the_callers(form: str, flags: str) -> None:
    assert child_of(form.format(TRACE, SPAN, flags), BITS) == f"00-{TRACE}-0000000000000def-{flags}"


@pytest.mark.parametrize(
    "header",
    [
        "",
        "x",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{TRACE}-{SPAN}-01\n",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"01-{TRACE}-{SPAN}-01more",
    ],
)
def test_what_is_none_begins_a_trace(header: str) -> None:
    assert child_of(header, BITS) == NEW


def test_ids_are_never_zero() -> None:
    assert child_of("", 0) == f"00-{1:032x}-{1:016x}-01"


@pytest.mark.parametrize(("header", "span"), [(f"00-{TRACE}-{SPAN}-01", SPAN), (f"00-{TRACE}-{SPAN}", ""), ("", "")])
def test_the_span_of_the_caller(header: str, span: str) -> None:
    assert parent_span(header) == span


def test_further_answers_have_spans_of_their_own_in_the_same_trace() -> None:
    ours = f"00-{TRACE}-{SPAN}-01"
    first, second = sibling_of(ours, RequestId("r1")), sibling_of(ours, RequestId("r2"))
    assert sibling_of(ours, RequestId("r1")) == first
    assert len({ours, first, second}) == 3
    assert [each.split("-")[1::2] for each in (first, second)] == [[TRACE, "01"]] * 2
    assert sibling_of("", RequestId("r1")) == ""
