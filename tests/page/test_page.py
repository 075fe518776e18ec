"""The page in headless Chromium, against a real HTTP server with a cluster that is made up. Chromium and its driver
are the system's (`apt install chromium chromium-driver`); `make test-page` makes the rest."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from disagg.gateway.auth.auth import ApiKey, ApiKeys, Authenticator, Caller, digest_of
from disagg.gateway.http.shell.protocol import ConnectionLimits
from disagg.gateway.http.shell.server import HttpServer
from disagg.gateway.operators.shell.page import MAX_REQUESTS, Page
from disagg.gateway.text.tokenizer import ServedModel, load_model
from disagg.proto.token_ids import unpack_token_ids
from disagg.router.api import RoutedRequest
from tests.page.views import MARKUP, NOW, REFUSAL, BusyViews, SteadyViews, refused_trace, request_trace
from tests.support.architecture import REPOSITORY
from tests.support.gateway import CONFIG, MODEL_NAME, FakeRouter, Script, forever, write_checkpoint
from tests.support.http_app import TestApp

PYTHON = REPOSITORY / "build" / "page" / "bin" / "python"
LIMITS = ConnectionLimits(max_connections=100, idle_timeout_s=60.0, head_timeout_s=60.0, write_timeout_s=60.0)
ANSWER = f"{MARKUP} hello <b>world</b> & more"
NO_ANSWER = "No answer from the gateway"
WIDE = (
    "# Title\n\n| a | b |\n|---|---|\n| "
    + "wide " * 40
    + " | x |\n\n```py\n"
    + "print(1); " * 40
    + "\n```\n\n"
    + "w" * 300
)


class Gateway:
    """A gateway that may be away: its address stays."""

    def __init__(self, app: TestApp) -> None:
        self.app = app
        self._server: HttpServer | None = None
        self._port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    async def start(self) -> None:
        self._server = HttpServer(self.app.app, LIMITS, time.monotonic)
        self._port = await self._server.start("127.0.0.1", self._port)

    async def stop(self) -> None:
        assert self._server is not None
        await self._server.stop(0.0)


def model_in(folder: Path) -> ServedModel:
    config = {**CONFIG, "max_position_embeddings": 2048}
    return load_model(str(write_checkpoint(folder, config=config)), MODEL_NAME, None)


def script_of(model: ServedModel, text: str) -> Script:
    """Each answer is this text."""
    tokens = model.tokenizer.encode_text(text, special=False)
    return lambda _: [[token] for token in tokens]


@asynccontextmanager
async def served(
    model: ServedModel,
    views: BusyViews | SteadyViews,
    script: Script | None = None,
    authenticator: Authenticator | None = None,
    models: tuple[str, ...] = (MODEL_NAME,),
) -> AsyncIterator[Gateway]:
    """A gateway; the time of a steady cluster stands still."""
    is_steady = isinstance(views, SteadyViews)
    page = Page(views, lambda: models, time.monotonic, (lambda: NOW) if is_steady else time.time)
    router = FakeRouter(script or script_of(model, ANSWER))
    gateway = Gateway(TestApp(model, router, authenticator, page=page))
    await gateway.start()
    task: asyncio.Task[None] | None = None
    if isinstance(views, SteadyViews):
        while views.samples:
            await page.take_sample()
    else:
        task = asyncio.create_task(page.keep_history())
    try:
        yield gateway
    finally:
        if task is not None:
            task.cancel()
        await gateway.stop()


async def browse(
    url: str,
    action: str,
    given: str = MARKUP,
    asked: Mapping[str, Callable[[], Awaitable[None]]] | None = None,
    *,
    place: str = "",
) -> dict[str, Any]:
    """What tests/page/browse.py saw; for the rest of it, no request to another origin.

    Args:
        url: of the gateway.
        action: one of those of the script.
        given: its input.
        asked: what the script may have done meanwhile.
        place: in the page.
    """
    if not PYTHON.exists() or shutil.which("chromedriver") is None:
        pytest.skip("needs build/page (`make test-page`), and chromium and chromedriver in PATH")
    folder = REPOSITORY / "build" / "screenshots"
    folder.mkdir(parents=True, exist_ok=True)
    script = REPOSITORY / "tests" / "page" / "browse.py"
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        PYTHON, script, url + place, action, given, folder, stdin=pipe, stdout=pipe, stderr=pipe, limit=1 << 24
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    errors = asyncio.ensure_future(process.stderr.read())
    found: dict[str, Any] = {}
    async for line in process.stdout:
        found = json.loads(line)
        if "ask" in found:
            await (asked or {})[found["ask"]]()
            process.stdin.write(b"\n")
    await process.wait()
    assert process.returncode == 0, (await errors).decode()
    print(action, json.dumps(found, indent=2))
    assert found["origins"] == [url]
    return found


async def test_markup_of_clients_and_models_is_shown_as_text(tmp_path: Path) -> None:
    async with served(model_in(tmp_path), BusyViews(2, 3)) as gateway:
        found = await browse(gateway.url, "chat")
    assert (found["prompt"], found["answer"]) == (MARKUP, ANSWER)
    assert (found["elements"], found["hit"], found["console"]) == (0, None, [])
    assert MARKUP in found["detail"]
    assert (found["was_open"], found["closed"], found["focus"]) == (True, True, "How it ran")
    assert all(name in found["workers"] for name in ("prefill-0", "prefill-1", "decode-0", "decode-1", "decode-2"))


@pytest.mark.parametrize(("num_prefill", "num_decode"), [(2, 3), (100, 200)])
async def test_a_thousand_requests_a_second_are_followed(tmp_path: Path, num_prefill: int, num_decode: int) -> None:
    async with served(model_in(tmp_path), BusyViews(num_prefill, num_decode)) as gateway:
        found = await browse(gateway.url, "feed")
    assert found["console"] == []
    assert found["frames"] > 0
    assert found["nodes"] < 2500
    assert found["bytes"] < 80_000


async def test_a_key_is_asked_for_and_kept_in_the_tab_only(tmp_path: Path) -> None:
    keys = ApiKeys([ApiKey(digest_of("k-admin"), Caller("ops", True))])
    async with served(model_in(tmp_path), BusyViews(2, 3), authenticator=keys) as gateway:
        found = await browse(gateway.url, "key")
        assert found["url"] == f"{gateway.url}/"
    assert (found["asked"], found["stored"]) == ("An API key is needed", [1, 0, ""])


async def test_charts_have_axes_with_units_and_their_past_also_when_loaded_again(tmp_path: Path) -> None:
    async with served(model_in(tmp_path), SteadyViews()) as gateway:
        found = await browse(gateway.url, "charts")
    before = found["before"]
    assert [before[name]["y"] for name in ("targets", "requests", "tokens")] == [
        ["100 %", "50 %", "0 %"],
        ["50 req/s", "25 req/s", "0 req/s"],
        ["2 k tok/s", "1 k tok/s", "0 tok/s"],
    ]
    begin, end = (time.strftime("%H:%M:%S", time.localtime(at)) for at in (NOW - 300, NOW))
    assert before["requests"]["x"] == [begin, "", end]
    assert (
        before["requests"]["label"]
        == f"Requests per second, {begin} to {end}: last 12 req/s, least 10 req/s, most 42 req/s"
    )
    assert [line.count("L") for line in before["requests"]["lines"]] == [299]
    assert len(before["targets"]["lines"]) == 2  # nobody had the third one
    assert [ink > 0 for ink in before["strips"]] == [True, False, True, False, False]
    assert found["after"] == before
    assert found["console"] == []


async def test_what_is_shown_is_marked_as_old_while_the_gateway_is_away(tmp_path: Path) -> None:
    model = model_in(tmp_path)
    views = SteadyViews([request_trace(1)])

    async def hang() -> None:
        views.answers.clear()

    async def go_on() -> None:
        views.answers.set()

    async with served(model, views, script_of(model, "here")) as gateway:
        asked = {"stop": gateway.stop, "start": gateway.start, "hang": hang, "go on": go_on}
        found = await browse(gateway.url, "outage", asked=asked)
    since = f"Not updated since {time.strftime('%H:%M:%S', time.localtime(NOW))}"
    away = f"{since}: {NO_ANSWER}"
    grey, usual = "grayscale(1)", "none"
    assert found["before"] == ["disagg", "", "Connected", False, False, *[usual] * 6]
    assert found["during"] == ["disagg (not updated)", "old", NO_ANSWER, True, True, *[grey] * 5, usual]
    assert found["after"] == found["before"]
    assert found["banners"] == [away, away]
    assert "000000000001" in found["detail"]
    assert found["failed"] == NO_ANSWER
    assert found["messages"] == ["anybody?", "here"]
    assert found["slow"] == f"{since}: the gateway is slow to answer"


async def test_requests_are_filtered_linked_to_and_refused_ones_have_their_reason(tmp_path: Path) -> None:
    numbers = range(999, -1, -1)
    changes: dict[int, dict[str, Any]] = {number: {"model": "small"} for number in numbers if number % 10 == 3}
    traces = [
        refused_trace(number) if number % 20 == 7 else request_trace(number, **changes.get(number, {}))
        for number in numbers
    ]
    ids = {number: trace.request_id for number, trace in zip(numbers, traces, strict=True)}
    async with served(model_in(tmp_path), SteadyViews(traces), models=(MODEL_NAME, "small")) as gateway:
        found = await browse(gateway.url, "requests")
        place = f"{gateway.url}/#model=small&worker=decode-1&request={ids[973]}"
    assert (found["all"]["found"], found["all"]["hash"]) == (f"{MAX_REQUESTS} of 1000", "")
    assert found["all"]["ids"] == [ids[number] for number in range(999, 949, -1)]
    assert found["nodes"] < 2500
    refused = found["refused"]
    assert (refused["found"], refused["hash"]) == ("50 that match, among the latest 1000", "#state=refused")
    assert refused["ids"] == [ids[number] for number in range(987, 0, -20)]
    assert "refused: rate_limit_exceeded" in refused["first"]
    assert found["reasons"] == [REFUSAL] * 50
    assert (found["reloaded"], found["state"]) == (refused, "refused")
    assert (found["id"]["ids"], found["id"]["hash"]) == ([ids[42]], "#id=000000000042")
    assert found["focus"] == "filter-id"
    assert (found["model"]["found"], found["model"]["ids"][0]) == (
        "50 of 100 that match, among the latest 1000",
        ids[993],
    )
    assert found["worker"]["ids"] == [ids[number] for number in range(973, 0, -30)]
    assert (found["link"], found["linked"]) == (place, ids[973])
    assert found["closed"] == "#model=small&worker=decode-1"
    assert found["unknown"] == "request_id: no such request runs or is remembered"


async def test_nothing_is_cut_off_on_a_phone(tmp_path: Path) -> None:
    model = model_in(tmp_path)
    traces = [refused_trace(2), request_trace(1, outcome="running", stages={})]
    async with served(model, SteadyViews(traces), script_of(model, WIDE)) as gateway:
        found = await browse(gateway.url, "phone")
    seen = {name: value for name, value in found.items() if name.startswith(("phone", "desktop"))}
    assert seen == {
        **{name: [375, []] for name in ("phone light", "phone dark", "phone detail")},
        **{name: [1440, []] for name in ("desktop light", "desktop dark")},
    }
    assert found["console"] == []


LINK = '<a href="{0}" target="_blank" rel="noopener noreferrer">{1}</a>'
MARKDOWN = {
    "one\ntwo\n\nthree": "<p>one<br>two</p><p>three</p>",
    "# T #\n## C#": "<h3>T</h3><h4>C#</h4>",
    "*a* _b_ **c** __d__ ***e*** ~~f~~": "<p><em>a</em> <em>b</em> <strong>c</strong> <strong>d</strong> "
    "<em><strong>e</strong></em> <del>f</del></p>",
    "**a *b* c** 2 * 3 * 4 snake_case_name **open": "<p><strong>a <em>b</em> c</strong> 2 * 3 * 4 snake_case_name "
    "**open</p>",
    "`a*b*` ``c ` d`` \\*e\\* `open": "<p><code>a*b*</code> <code>c ` d</code> *e* `open</p>",
    "```py\nif a < b:\n\n    *c*\n```\nafter": '<div class="code"><div class="language">py</div><pre tabindex="0" '
    'role="region" aria-label="Code, py"><code>if a &lt; b:\n\n    *c*</code></pre></div><p>after</p>',
    "~~~\n```\n": '<div class="code"><pre tabindex="0" role="region" aria-label="Code"><code>```\n</code></pre></div>',
    "- a\n- b\n  - c\n  - d\n\nend": "<ul><li>a</li><li>b<ul><li>c</li><li>d</li></ul></li></ul><p>end</p>",
    "3. a\n\n   more\n4. b": '<ol start="3"><li><p>a</p><p>more</p></li><li><p>b</p></li></ol>',
    "> a\n> > b\n\n---": "<blockquote><p>a</p><blockquote><p>b</p></blockquote></blockquote><hr>",
    "| a | b |\n|:-:|--:|\n| *c* | d \\| e |\n| f |": '<div class="scroll" tabindex="0" role="region" '
    'aria-label="Table"><table><thead><tr><th class="middle" scope="col">a</th><th class="num" scope="col">b</th></tr>'
    '</thead><tbody><tr><td class="middle"><em>c</em></td><td class="num">d | e</td></tr><tr><td class="middle">f</td>'
    "</tr></tbody></table></div>",
    "[a *b*](https://x.example/p?q=1) ![i](http://x.example/i.png)": "<p>"
    + LINK.format("https://x.example/p?q=1", "a <em>b</em>")
    + " "
    + LINK.format("http://x.example/i.png", "i")
    + "</p>",
    "see https://x.example/a_b. (http://x.example) <https://y.example>": "<p>see "
    + LINK.format("https://x.example/a_b", "https://x.example/a_b")
    + ". ("
    + LINK.format("http://x.example/", "http://x.example")
    + ") "
    + LINK.format("https://y.example/", "https://y.example")
    + "</p>",
    "[a](javascript:alert(1)) [b](data:text/html,x) [c](/ui/state) [d](//x.example) ![e](vbscript:x)": "<p>"
    "[a](javascript:alert(1)) [b](data:text/html,x) [c](/ui/state) [d](//x.example) ![e](vbscript:x)</p>",
    "[a](java\nscript:alert(1)) [b]( JaVaScRiPt:alert(1))": "<p>[a](java<br>script:alert(1)) [b]( JaVaScRiPt:alert(1))"
    "</p>",
    '[a](https://x.example/"onclick="alert(1))': "<p>"
    + LINK.format("https://x.example/%22onclick=%22alert(1)", "a")
    + "</p>",
    MARKUP: "<p>&lt;img src=x onerror='window.hit=1'&gt;&lt;script&gt;window.hit=1&lt;/script&gt;</p>",
    "**[1]** text [2] and *[a*](https://x.example)": "<p><strong>[1]</strong> text [2] and *"
    + LINK.format("https://x.example/", "a*")
    + "</p>",
}
HOSTILE = [
    "*" * 20_000,
    "*a" * 10_000,
    "**a _b " * 5_000,
    "[" * 20_000 + "](https://x.example)",
    "[a](" * 5_000,
    "`" + "``a" * 10_000,
    "> " * 10_000,
    "- " * 10_000,
    "|" * 5_000 + "\n" + "-|" * 5_000,
    "\n".join(" " * level + "- a" for level in range(500)),
    "# " + " " * 20_000 + "#",
    " " * 20_000 + "x",
    "http://" * 3_000,
]


async def test_markdown_is_shown_and_no_part_of_it_is_html(tmp_path: Path) -> None:
    async with served(model_in(tmp_path), SteadyViews()) as gateway:
        sources = tmp_path / "sources.json"
        sources.write_text(json.dumps([*MARKDOWN, *HOSTILE]))
        found = await browse(gateway.url, "markdown", str(sources))
    made = found["made"]
    assert dict(zip(MARKDOWN, made, strict=False)) == MARKDOWN
    assert len(made) == len(MARKDOWN) + len(HOSTILE)
    assert (found["differ"], found["num_grown"]) == ([], len(MARKDOWN))
    assert found["console"] == []


async def test_answers_are_retried_and_stopped_and_follow_a_system_prompt(tmp_path: Path) -> None:
    model = model_in(tmp_path)
    texts = iter(("**one**", "two"))

    def script(request: RoutedRequest) -> Any:
        text = next(texts, None)
        endless = model.tokenizer.encode_text("word ", special=False)
        return forever(list(endless)) if text is None else script_of(model, text)(request)

    async with served(model, SteadyViews(), script) as gateway:
        found = await browse(gateway.url, "answers")
        router = gateway.app.router
        prompts = [model.tokenizer.decode(unpack_token_ids(sent.prompt_token_ids)) for sent, _ in router.submitted]
        assert router.handles[-1].cancelled.is_set()
    assert (found["one"], found["two"]) == (["first", "one"], ["first", "two"])
    assert found["three"][:3] == ["first", "two", "second"]
    assert found["three"][3].startswith("word word")
    assert (found["was_disabled"], found["is_disabled"], found["stop"]) == ("true", None, False)
    assert (found["state"], found["retries"]) == ("set", 1)
    assert prompts[0] == prompts[1]
    assert [("be brief" in each, "be long" in each) for each in prompts] == [
        (True, False),
        (True, False),
        (False, True),
    ]
    assert ["two" in each for each in prompts] == [False, False, True]
