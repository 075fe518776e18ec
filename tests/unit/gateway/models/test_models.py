"""Several models behind one gateway: found by name, and together in the views of operators."""

from __future__ import annotations

import pytest

from disagg.gateway.answers.generator import Generator
from disagg.gateway.auth.auth import ANONYMOUS
from disagg.gateway.metrics.registry import GatewayMetrics
from disagg.gateway.models.models import Models
from disagg.gateway.text.tokenizer import fake_model
from disagg.proto.errors import InvalidRequestError, ModelDeniedError, ModelNotFoundError
from disagg.proto.ids import RequestId
from disagg.router.all_routers import AllRouters, together
from disagg.router.api import BackgroundView, ClusterView, RequestTrace
from disagg.router.statistics import Rates
from tests.support.gateway import FakeRouter, limits_of
from tests.support.metrics import busy_view, read_samples, value

LIMITED = ANONYMOUS._replace(models=frozenset({"b", "elsewhere"}))


def generator(name: str) -> Generator:
    model = fake_model(name, 100)
    return Generator(
        model,
        FakeRouter(),
        limits_of(model),
        name,
        clock=lambda: 0.0,
        mint_seed=lambda: 0,
        mint_id=lambda: RequestId("r"),
    )


TWO = Models([generator("a"), generator("b")])
ONE = Models([generator("a")])


def test_a_request_goes_to_the_model_that_it_names() -> None:
    assert [TWO.find(ANONYMOUS, name).model.info.name for name in ("a", "b")] == ["a", "b"]
    assert TWO.find(LIMITED, "b").model.info.name == "b"
    assert [each.model.info.name for each in TWO.allowed(LIMITED)] == ["b"]


@pytest.mark.parametrize("name", [None, ""])
def test_a_request_must_name_one_of_several(name: str | None) -> None:
    with pytest.raises(InvalidRequestError, match=r"^model: must be set, to one of a, b$"):
        TWO.find(ANONYMOUS, name)
    with pytest.raises(InvalidRequestError, match=r"^model: must be set, to one of b$"):
        TWO.find(LIMITED, name)


def test_the_only_model_may_be_left_out_where_that_is_allowed() -> None:
    assert ONE.find(ANONYMOUS, None).model.info.name == "a"
    with pytest.raises(ModelNotFoundError):
        ONE.find(ANONYMOUS, "")


def test_an_unknown_name_is_refused_with_those_that_the_caller_may_use() -> None:
    with pytest.raises(ModelNotFoundError, match="a, b") as refused:
        TWO.find(ANONYMOUS, "c" * 1000)
    assert len(str(refused.value)) < 300
    with pytest.raises(ModelDeniedError):
        TWO.find(LIMITED, "a")
    with pytest.raises(ModelNotFoundError) as unknown:
        TWO.find(LIMITED, "elsewhere")
    assert "a, b" not in str(unknown.value)


def test_models_come_and_go() -> None:
    models, second = Models([generator("a")]), generator("b")
    assert models.find(ANONYMOUS, None).model.info.name == "a"
    models.add(second)
    assert models.find(ANONYMOUS, "b") is second
    with pytest.raises(InvalidRequestError, match=r"^model: must be set, to one of a, b$"):
        models.find(ANONYMOUS, None)
    again = generator("b")
    models.add(again)
    models.remove(second)  # another one has its name
    assert models.find(ANONYMOUS, "b") is again
    models.remove(again)
    assert models.names == ["a"]
    with pytest.raises(ModelNotFoundError):
        models.find(ANONYMOUS, "b")


def test_operators_see_one_cluster() -> None:
    busy = busy_view()
    other = ClusterView((), 2, 3, stages={"queued": 2}, rates=Rates(1.0, 10.0), slos={"both": (1, 2)})
    both = together([busy, other])
    assert (both.workers, both.unreachable, both.counters) == (busy.workers, busy.unreachable, busy.counters)
    assert (both.num_queued, both.num_running) == (busy.num_queued + 2, busy.num_running + 3)
    assert both.stages["queued"] == busy.stages.get("queued", 0) + 2
    assert both.rates == Rates(busy.rates.requests_per_s + 1.0, busy.rates.output_tokens_per_s + 10.0)
    met, total = busy.slos.get("both", (0, 0))
    assert both.slos["both"] == (met + 1, total + 2)
    assert together([busy]) is busy


def test_lines_of_batches_of_all_models_count() -> None:
    """Else those that wait would hold up others as if they were interactive, and prompts would not be paced."""
    views = [
        ClusterView((), 1, 0, BackgroundView(num_queued=1, num_prefill=2, prompt_tokens=30)),
        ClusterView((), 2, 0, BackgroundView(num_queued=2, num_prefill=3, prompt_tokens=50)),
    ]
    assert together(views).background == BackgroundView(num_queued=3, num_prefill=5, prompt_tokens=80)


def test_the_latest_requests_of_all_models_are_in_one_order() -> None:
    class Traces(FakeRouter):
        def __init__(self, *arrivals: float) -> None:
            super().__init__()
            self._found = [RequestTrace(request_id=RequestId(f"at {at:g}"), arrival=at) for at in arrivals]

        def recent(self, limit: int) -> list[RequestTrace]:
            return self._found[:limit]

        def trace(self, request_id: RequestId) -> RequestTrace | None:
            return next((trace for trace in self._found if trace.request_id == request_id), None)

    routers = AllRouters({"a": Traces(5.0, 2.0, 1.0), "b": Traces(4.0, 3.0)})
    assert [trace.request_id for trace in routers.recent(4)] == ["at 5", "at 4", "at 3", "at 2"]
    found = routers.trace(RequestId("at 3"))
    assert found is not None
    assert (found.arrival, found.model) == (3.0, "b")
    named = AllRouters({"a": Traces(5.0), "b": Traces(4.0, 3.0)}, lambda: {"a": "llama"})
    assert [(trace.arrival, trace.model) for trace in named.recent(2)] == [(5.0, "llama"), (4.0, "b")]
    assert routers.trace(RequestId("at 9")) is None


def test_metrics_of_several_models_have_the_name_as_a_label() -> None:
    views = {"a": busy_view, "b": lambda: ClusterView((), 0, 0)}
    found = read_samples(GatewayMetrics(views).render()[0])
    one = read_samples(GatewayMetrics({"a": busy_view}).render()[0])
    assert value(found, "disagg_output_tokens_total", model="a") == value(one, "disagg_output_tokens_total")
    assert value(found, "disagg_output_tokens_total", model="b") == 0
    assert {dict(labels)["model_name"] for labels in found["vllm:generation_tokens_total"]} == {"a", "b"}
    assert found.keys() == one.keys()
    assert not any("model" in dict(labels) for samples in one.values() for labels in samples)
