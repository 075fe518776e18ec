"""The page: its files, their headers, and who gets which data. What a browser makes of it is in tests/page."""

from __future__ import annotations

import re
import tomllib
from fnmatch import fnmatchcase
from typing import Any

import pytest

from disagg.gateway.auth.auth import ApiKey, ApiKeys, Caller, digest_of
from disagg.gateway.http.sites import Sites
from disagg.gateway.operators.history import Sample
from disagg.gateway.operators.requests_list import FoundRequests, RequestFilter, request_line
from disagg.gateway.operators.shell.page import (
    FOLDER,
    MAX_AGE_S,
    MAX_PAIRS,
    MAX_REQUESTS,
    MAX_WORKERS,
    POLICY,
    Page,
    state_json,
)
from disagg.gateway.text.tokenizer import ServedModel
from disagg.gateway.usage import counts as usage
from disagg.proto.errors import RequestNotFoundError, UnavailableError
from disagg.proto.ids import RequestId
from disagg.router.api import RequestTrace
from disagg.v1 import inference_pb2 as pb
from tests.support.architecture import REPOSITORY
from tests.support.http_app import NOW, TestApp, error_of

ADMIN, TENANT = Caller("ops", True), Caller("a", False)
KEYS = ApiKeys([ApiKey(digest_of("k-admin"), ADMIN), ApiKey(digest_of("k-a"), TENANT)])


class FakeViews:
    """A cluster of one worker, and a request of each tenant."""

    def __init__(self) -> None:
        self.seen: list[Caller] = []
        self.wanted: list[RequestFilter] = []
        self.samples: list[Sample | Exception] = []
        self.now = 1000.0

    async def state(self, caller: Caller, max_age_s: float) -> pb.GetClusterStateResponse:
        self.seen.append(caller)
        return pb.GetClusterStateResponse(workers=[pb.WorkerState(worker_id="decode-0")], running_requests=3)

    def find(self, wanted: RequestFilter, limit: int) -> FoundRequests:
        self.wanted.append(wanted)
        traces = [RequestTrace(request_id=RequestId(f"r{number}"), arrival=1.0) for number in range(limit)]
        return FoundRequests([request_line(trace, 0.0) for trace in traces], 200, 700)

    async def sample(self) -> Sample:
        sample = self.samples.pop(0)
        if isinstance(sample, Exception):
            raise sample
        return sample

    def explain(self, request_id: RequestId, caller: Caller) -> pb.ExplainRequestResponse:
        if not caller.may_see("a"):
            raise RequestNotFoundError("request_id: no such request runs or is remembered")
        return pb.ExplainRequestResponse(request_id=request_id, kv_bytes=1 << 40)


@pytest.fixture
def views() -> FakeViews:
    return FakeViews()


def app_of(model: ServedModel, views: FakeViews, **changes: Any) -> TestApp:
    return TestApp(model, page=Page(views, lambda: ["tiny"], lambda: views.now, lambda: NOW), **changes)


async def get(app: TestApp, path: str, key: str = "", **headers: str) -> Any:
    given = {"authorization": f"Bearer {key}"} if key else {}
    return await app.client.get(path, headers={**given, **headers})


async def test_every_file_that_the_page_names_is_served_without_a_key(model: ServedModel, views: FakeViews) -> None:
    app = app_of(model, views, authenticator=KEYS)
    page = await get(app, "/")
    assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    named = set(re.findall(r'(?:href|src)="(/[^"]+)"', page.text))
    for path in list(named):
        file = await get(app, path)
        assert file.status_code == 200
        named |= {f"/ui/{name}" for name in re.findall(r'from "\./([^"]+)"', file.text)}
    assert named | {"/"} == set(Page(views, lambda: ["tiny"], lambda: 0.0, lambda: NOW).paths)


async def test_nothing_but_its_own_files_may_run_in_the_page(model: ServedModel, views: FakeViews) -> None:
    headers = (await get(app_of(model, views), "/")).headers
    assert headers["content-security-policy"] == POLICY.decode()
    assert "unsafe" not in POLICY.decode()
    assert (headers["x-frame-options"], headers["x-content-type-options"]) == ("DENY", "nosniff")
    assert headers["referrer-policy"] == "no-referrer"
    for path in FOLDER.iterdir():
        if path.suffix in (".html", ".js", ".css", ".svg"):
            text = path.read_text(encoding="utf-8")
            assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(| on\w+=", text), path
            assert set(re.findall(r"https?://[^\"'/ ]+", text)) <= {"http://www.w3.org"}, path


async def test_a_file_that_did_not_change_is_not_sent_again(model: ServedModel, views: FakeViews) -> None:
    app = app_of(model, views)
    first = await get(app, "/ui/app.js")
    again = await get(app, "/ui/app.js", **{"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["etag"] == first.headers["etag"] != (await get(app, "/ui/dom.js")).headers["etag"]


async def test_data_needs_a_key_and_requests_of_all_an_admins(model: ServedModel, views: FakeViews) -> None:
    app = app_of(model, views, authenticator=KEYS)
    assert error_of(await get(app, "/ui/state"))[0] == 401
    assert error_of(await get(app, "/ui/requests/r1"))[0] == 401
    assert views.seen == []
    assert (await get(app, "/ui/state", "k-a")).json()["requests"] is None
    found = (await get(app, "/ui/state", "k-admin")).json()
    assert [request["id"] for request in found["requests"]] == [f"r{number}" for number in range(MAX_REQUESTS)]
    assert (found["num_matching"], found["num_searched"]) == (200, 700)
    assert (found["models"], found["now"], found["running"]) == (["tiny"], NOW, 3)
    assert [caller._replace(credential="") for caller in views.seen] == [TENANT, ADMIN]


class FakeUsage:
    """Remembers whose use was asked for."""

    def __init__(self, keeps: bool = True) -> None:
        self.seen: list[str | None] = []
        self._keeps = keeps

    async def read(self, days: int, tenant: str | None, limit: int) -> usage.Page:
        self.seen.append(tenant)
        if not self._keeps:
            raise UnavailableError("none is kept", usage.NO_USAGE)
        row = usage.Row(usage.Key("a", 20_000, "tiny"), usage.Counts(5, 1, 40, 16, 30))
        return usage.Page([row], 20_000 - days + 1, 20_000, False)


async def test_usage_is_shown_to_its_tenant_and_of_all_to_an_admin(model: ServedModel, views: FakeViews) -> None:
    kept = FakeUsage()
    page = Page(views, lambda: ["tiny"], lambda: views.now, lambda: NOW, kept)
    app = TestApp(model, page=page, authenticator=KEYS)
    assert error_of(await get(app, "/ui/usage"))[0] == 401
    found = (await get(app, "/ui/usage", "k-a")).json()
    assert (found["first_date"], found["last_date"], len(found["data"])) == ("2024-09-28", "2024-10-04", 1)
    assert (await get(app, "/ui/usage", "k-admin")).json() == found
    assert kept.seen == [TENANT.tenant, None]
    for without in (None, FakeUsage(keeps=False)):
        page = Page(views, lambda: ["tiny"], lambda: views.now, lambda: NOW, without)
        app = TestApp(model, page=page, authenticator=KEYS)
        assert (await get(app, "/ui/usage", "k-a")).json() == {"data": None}


async def test_a_key_sees_the_models_that_it_is_for(model: ServedModel, views: FakeViews) -> None:
    limited = TENANT._replace(models=frozenset({"b", "no longer served"}))
    keys = ApiKeys([ApiKey(digest_of("k-b"), limited), ApiKey(digest_of("k-a"), TENANT)])
    page = Page(views, lambda: ["a", "b"], lambda: views.now, lambda: NOW)
    app = TestApp(model, page=page, authenticator=keys)
    for key, seen in (("k-a", ["a", "b"]), ("k-b", ["b"]), ("k-a", ["a", "b"])):
        assert (await get(app, "/ui/state", key)).json()["models"] == seen
    assert len(views.seen) == 2


async def test_keys_for_other_models_share_no_state(model: ServedModel, views: FakeViews) -> None:
    """Also where the models that differ are not served any more, but have workers yet."""
    limited = [TENANT._replace(models=frozenset(models)) for models in ({"a"}, {"a", "withdrawn"})]
    keys = ApiKeys([ApiKey(digest_of(f"k-{i}"), caller) for i, caller in enumerate(limited)])
    page = Page(views, lambda: ["a", "b"], lambda: views.now, lambda: NOW)
    app = TestApp(model, page=page, authenticator=keys)
    for key in ("k-0", "k-1"):
        assert (await get(app, "/ui/state", key)).json()["models"] == ["a"]
    assert [caller.models for caller in views.seen] == [caller.models for caller in limited]


def test_what_is_left_out_is_told() -> None:
    shown = [state_json(pb.GetClusterStateResponse(load_left_out=left_out)) for left_out in (False, True)]
    assert [(one["has_load"], one["has_controller"]) for one in shown] == [(True, False), (False, False)]
    assert state_json(pb.GetClusterStateResponse(gateways=[pb.GatewayState(name="gateway")]))["has_controller"]


async def test_one_request_is_shown_to_its_tenant(model: ServedModel, views: FakeViews) -> None:
    other = ApiKeys([ApiKey(digest_of("k-a"), TENANT), ApiKey(digest_of("k-b"), Caller("b", False))])
    app = app_of(model, views, authenticator=other)
    found = await get(app, "/ui/requests/r1", "k-a")
    assert (found.json()["request_id"], found.json()["kv_bytes"]) == ("r1", 1 << 40)
    assert found.headers["cache-control"] == "no-store"
    assert error_of(await get(app, "/ui/requests/r1", "k-b"))[0] == 404


async def test_however_many_pages_are_open_a_state_is_made_once(model: ServedModel, views: FakeViews) -> None:
    app = app_of(model, views)
    for _ in range(5):
        await get(app, "/ui/state")
    assert len(views.seen) == 1
    views.now += MAX_AGE_S + 0.01
    await get(app, "/ui/state")
    assert len(views.seen) == 2


async def test_requests_are_filtered_for_admins(model: ServedModel, views: FakeViews) -> None:
    app = app_of(model, views, authenticator=KEYS)
    for query in (
        "",
        "id=r1&model=tiny&state=refused&worker=decode-0",
        "state=failed&state=refused&%00",
    ):
        assert (await get(app, f"/ui/state?{query}", "k-admin")).status_code == 200
    assert (await get(app, "/ui/state?id=" + "&" * 99, "k-admin")).status_code == 400
    assert views.wanted == [
        RequestFilter(),
        RequestFilter(id="r1", model="tiny", state="refused", worker="decode-0"),
        RequestFilter(state="failed"),
    ]
    assert (await get(app, "/ui/state?id=r1", "k-a")).json()["requests"] is None
    assert len(views.wanted) == 3


def sample(at: int) -> Sample:
    return Sample(at, 2.0, 50.0, {"ttft": (3, 4), "tpot": (0, 0)}, {"decode-0": 37, "decode-1": 99})


async def test_a_page_gets_the_part_of_the_history_that_it_does_not_have(model: ServedModel, views: FakeViews) -> None:
    views.samples = [sample(100), UnavailableError("no view now", "x"), sample(101)]
    limited = TENANT._replace(metrics=True)
    callers = {"k-ops": ADMIN, "k-a": TENANT, "k-m": limited}
    keys = ApiKeys([ApiKey(digest_of(key), caller) for key, caller in callers.items()])
    page = Page(views, lambda: ["tiny"], lambda: views.now, lambda: NOW)
    while views.samples:
        await page.take_sample()
    app = TestApp(model, page=page, authenticator=keys)

    async def history(key: str, query: str = "") -> Any:
        return (await get(app, f"/ui/state{query}", key)).json()["history"]

    # Of the workers only the one that the caller may see.
    shown = {"requests_per_s": 2.0, "output_tokens_per_s": 50.0, "targets": {"ttft": 0.75}, "kv": {"decode-0": 37}}
    first, second = ({"at": at, **shown} for at in (100, 101))
    assert await history("k-ops") == await history("k-m") == [first, second]
    assert await history("k-ops", "?after=100") == [second]
    assert await history("k-ops", "?after=nan") == await history("k-ops", "?after=101") == []
    assert await history("k-ops", "?after=x") == [first, second]
    assert await history("k-a") == []  # it sees no load


async def test_pages_of_other_sites_get_neither_page_nor_data(model: ServedModel, views: FakeViews) -> None:
    app = app_of(model, views, sites=Sites(checks_host=True, checks_origin=True))
    for path in ("/", "/ui/app.js", "/ui/state"):
        assert error_of(await get(app, path, host="rebound.example"))[0] == 403


async def test_without_the_page_its_paths_are_unknown(model: ServedModel) -> None:
    app = TestApp(model)
    for path in ("/", "/ui/state", "/ui/app.js"):
        assert error_of(await get(app, path))[0] == 404


def test_a_state_is_bounded_whatever_the_size_of_the_cluster() -> None:
    state = pb.GetClusterStateResponse(
        workers=[pb.WorkerState(worker_id=f"decode-{number}") for number in range(MAX_WORKERS + 44)],
        transfers=[pb.TransferState(prefill_worker="p", bytes=number) for number in range(5000)],
    )
    shown = state_json(state)
    assert (len(shown["workers"]), shown["num_workers"]) == (MAX_WORKERS, MAX_WORKERS + 44)
    assert [pair["bytes"] for pair in shown["pairs"]] == list(range(4999, 4999 - MAX_PAIRS, -1))
    assert shown["num_pairs"] == 5000


def test_a_worker_has_its_drafts() -> None:
    worker = pb.WorkerState(worker_id="d0", tokens_per_step=1.75444, drafted_tokens=40, accepted_tokens=12)
    [shown] = state_json(pb.GetClusterStateResponse(workers=[worker]))["workers"]
    assert (shown["tokens_per_step"], shown["drafted"], shown["accepted"]) == (1.754, 40, 12)


def test_a_worker_has_what_it_loaded_and_fetched() -> None:
    worker = pb.WorkerState(worker_id="p0", prompt_tokens=100, loaded_tokens=20, fetched_tokens=30)
    [shown] = state_json(pb.GetClusterStateResponse(workers=[worker]))["workers"]
    assert (shown["prompt"], shown["loaded"], shown["fetched"]) == (100, 20, 30)


def test_the_wheel_has_the_files() -> None:
    settings = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = settings["tool"]["setuptools"]["package-data"]["*"]
    files = [path.name for path in FOLDER.iterdir() if path.suffix not in (".py", "")]
    assert len(files) >= 8
    assert [name for name in files if not any(fnmatchcase(name, pattern) for pattern in patterns)] == []
