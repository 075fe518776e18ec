"""The parameters of a URL's query."""

from __future__ import annotations

import pytest

from disagg.gateway.http.query import MAX_PARAMETERS, read_count, read_query
from disagg.gateway.text.tokenizer import ServedModel
from disagg.proto.errors import InvalidRequestError
from tests.support.http_app import TestApp, error_of


def test_the_first_value_of_each_parameter_counts() -> None:
    assert read_query({"query_string": b"limit=3&limit=4&after=a%20b&key="}) == {"limit": "3", "after": "a b"}
    assert read_query({}) == {}


def test_too_many_parameters_are_refused() -> None:
    assert read_query({"query_string": b"&".join(b"p%d=1" % i for i in range(MAX_PARAMETERS))})
    with pytest.raises(InvalidRequestError, match=f"query: has at most {MAX_PARAMETERS} parameters"):
        read_query({"query_string": b"&".join([b"limit=1"] * (MAX_PARAMETERS + 1))})


@pytest.mark.parametrize("given", ["0", "11", "-1", "1.0", "", "٣", "1" * 5000])
def test_a_count_is_a_number_in_its_range(given: str) -> None:
    with pytest.raises(InvalidRequestError, match="limit: must be from 1 to 10"):
        read_count({"limit": given}, "limit", 5, 10)


def test_a_count_has_a_default() -> None:
    assert (read_count({}, "limit", 5, 10), read_count({"limit": "10"}, "limit", 5, 10)) == (5, 10)


@pytest.mark.parametrize("path", ["/v1/usage", "/tokenizer_info"])
async def test_too_many_parameters_are_the_clients_mistake(model: ServedModel, path: str) -> None:
    app = TestApp(model)
    answer = await app.client.get(f"{path}?{'&'.join(['days=1'] * (MAX_PARAMETERS + 1))}")
    assert error_of(answer) == (400, "query", "invalid_value")


async def test_also_in_the_form_of_another_api(model: ServedModel) -> None:
    app = TestApp(model)
    url = f"/v1/models?{'&'.join(['limit=1'] * (MAX_PARAMETERS + 1))}"
    answer = await app.client.get(url, headers={"anthropic-version": "2023-06-01"})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("query: ")
