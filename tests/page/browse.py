"""Opens the page in headless Chromium and writes what it saw as JSON, on the last line. Runs in an environment of its
own, which has Selenium and nothing of ours.

    browse.py URL ACTION INPUT FOLDER      ACTION: a function of this file; screenshots go into FOLDER

A line before the last one has something to be done meanwhile, `{"ask": ...}`; a line on the standard input tells that
it is.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.common.exceptions import TimeoutException
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select, WebDriverWait

TIMEOUT_S = 60.0
FEED_S = 10.0
PHONE = (375, 812)

WATCH = """
window.seen = {tasks: [], frames: [], shifts: 0};
new PerformanceObserver(list => window.seen.tasks.push(...list.getEntries().map(each => each.duration)))
  .observe({type: 'longtask', buffered: true});
let last = performance.now();
const frame = now => { window.seen.frames.push(now - last); last = now; requestAnimationFrame(frame); };
requestAnimationFrame(frame);
"""

CUT_OFF = """
const isScroller = each => ['auto', 'scroll'].includes(getComputedStyle(each).overflowX);
const scrolls = each => each && (isScroller(each) || scrolls(each.parentElement));
const isShown = each => each.checkVisibility({visibilityProperty: true}) && !each.closest('.skip, thead');
const found = [...document.body.querySelectorAll('*')].filter(isShown).filter(each => {
  const box = each.getBoundingClientRect();
  return box.width && (box.left < -0.5 || box.right > innerWidth + 0.5) && !scrolls(each.parentElement);
});
const tables = [...document.querySelectorAll('.overview .scroll, dialog .scroll')];
found.push(...tables.filter(each => each.scrollWidth > each.clientWidth));
const names = found.map(each => `${each.localName}#${each.id}.${each.getAttribute('class')}`);
return [document.scrollingElement.scrollWidth, names];
"""
"""The width of what is scrolled; the elements that go beyond the window and cannot be scrolled to, and the tables of
the page that have to be scrolled."""

RENDER = """
const [sources, done] = arguments;
import('/ui/markdown.js').then(({render}) => done(sources.map(source => {
  const root = document.createElement('div');
  root.append(...render(source));
  return root.innerHTML;
})), error => done(String(error)));
"""

GROW = """
const [source, size, done] = arguments;
import('/ui/markdown.js').then(({render, MarkdownView}) => {
  const [whole, grown] = [document.createElement('div'), document.createElement('div')];
  whole.append(...render(source));
  const view = new MarkdownView(grown);
  for (let end = size; end < source.length + size; end += size) view.show(source.slice(0, end));
  done([whole.innerHTML, grown.innerHTML]);
}, error => done([String(error), '']));
"""

CHARTS = """
const texts = (root, what) => [...document.querySelectorAll(`${root} ${what}`)].map(each => each.textContent);
const pixels = canvas => canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
const inked = canvas => pixels(canvas).filter((value, i) => i % 4 === 3 && value).length;
const chart = root => ({
  lines: [...document.querySelectorAll(`${root} path`)].map(each => each.getAttribute('d')),
  y: texts(root, '.y span'), x: texts(root, '.axis span'), label: document.querySelector(`${root} .plot`)?.ariaLabel,
});
return {
  targets: chart('#targets'), requests: chart('#requests-rate'), tokens: chart('#tokens-rate'),
  strips: [...document.querySelectorAll('.worker canvas')].map(inked),
};
"""


def make_driver() -> Any:
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or shutil.which("google-chrome") or ""
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--no-proxy-server", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    set_window(driver, 1440, 1000)
    driver.execute_cdp_cmd("Emulation.setScrollbarsHidden", {"hidden": True})
    driver.set_script_timeout(TIMEOUT_S)
    return driver


def set_window(driver: Any, width: int, height: int, scheme: str = "light") -> None:
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    feature = {"name": "prefers-color-scheme", "value": scheme}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})


def ask(what: str) -> None:
    """Have the tests do something, and wait until it is done."""
    print(json.dumps({"ask": what}), flush=True)
    sys.stdin.readline()


def wait(driver: Any, what: Callable[[Any], Any]) -> Any:
    return WebDriverWait(driver, TIMEOUT_S, poll_frequency=0.05).until(what)


def text_of(driver: Any, selector: str) -> str:
    return str(driver.execute_script("return document.querySelector(arguments[0])?.textContent ?? ''", selector))


def texts_of(driver: Any, selector: str) -> list[str]:
    script = "return [...document.querySelectorAll(arguments[0])].map(each => each.textContent)"
    return list(driver.execute_script(script, selector))


def find(driver: Any, selector: str) -> Any:
    return driver.find_element(By.CSS_SELECTOR, selector)


def is_open(driver: Any) -> bool:
    return bool(driver.execute_script("return document.getElementById('detail').open"))


def write(driver: Any, prompt: str) -> None:
    find(driver, "#prompt").send_keys(prompt + Keys.ENTER)


def last_note(driver: Any) -> str:
    return (texts_of(driver, ".message.assistant .who > span") or [""])[-1]


def cut_off(driver: Any) -> Any:
    """What is cut off once the page has taken the size of its window."""
    with suppress(TimeoutException):
        wait(driver, lambda it: not it.execute_script(CUT_OFF)[1])
    return driver.execute_script(CUT_OFF)


def shoot(driver: Any, name: str) -> None:
    driver.save_screenshot(str(Path(sys.argv[4]) / f"{name}.png"))


# ---------------------------------------------------------------- actions


def chat(driver: Any, given: str) -> dict[str, Any]:
    """A prompt with markup, answered with markup; then the answer is explained, by keyboard only."""
    wait(driver, lambda it: text_of(it, "#model"))
    write(driver, given)
    wait(driver, lambda it: "tokens, first" in last_note(it))
    find(driver, ".message.assistant a").send_keys(Keys.ENTER)
    wait(driver, lambda it: text_of(it, "#detail-body dd"))
    was_open = is_open(driver)
    detail = text_of(driver, "#detail-body")
    driver.switch_to.active_element.send_keys(Keys.ESCAPE)
    wait(driver, lambda it: not is_open(it))
    return {
        "prompt": text_of(driver, ".message.user .text"),
        "answer": text_of(driver, ".message.assistant .text"),
        "elements": driver.execute_script("return document.querySelectorAll('img, #messages script').length"),
        "hit": driver.execute_script("return window.hit ?? null"),
        "detail": detail,
        "was_open": was_open,
        "closed": not is_open(driver),
        "focus": driver.execute_script("return document.activeElement.textContent"),
        "workers": text_of(driver, "#map"),
    }


def feed(driver: Any, given: str) -> dict[str, Any]:
    """Nothing but watching, for `FEED_S` seconds."""
    wait(driver, lambda it: text_of(it, "#requests a"))
    driver.execute_script(WATCH)
    first = text_of(driver, "#requests a")
    time.sleep(FEED_S)
    wait(driver, lambda it: text_of(it, "#requests a") != first)
    seen = driver.execute_script("return window.seen")
    return {
        "long_tasks_ms": [round(each, 1) for each in seen["tasks"]],
        "frames": len(seen["frames"]),
        "longest_frame_ms": round(max(seen["frames"]), 1),
        "nodes": driver.execute_script("return document.querySelectorAll('*').length"),
        "bytes": driver.execute_script(
            "return performance.getEntriesByType('resource').filter(e => e.name.includes('/ui/state')).at(-1)"
            ".decodedBodySize"
        ),
    }


def key(driver: Any, given: str) -> dict[str, Any]:
    """The page asks for a key, gets one, and keeps it in the tab."""
    wait(driver, lambda it: it.execute_script("return document.getElementById('key').open"))
    asked = text_of(driver, "#status")
    driver.find_element(By.ID, "key-value").send_keys("k-admin" + Keys.ENTER)
    wait(driver, lambda it: text_of(it, "#model"))
    script = "return [sessionStorage.length, localStorage.length, document.cookie]"
    return {"asked": asked, "stored": driver.execute_script(script), "url": driver.current_url}


def charts(driver: Any, given: str) -> dict[str, Any]:
    """The charts, before and after the page is loaded again."""
    found = {}
    for when in ("before", "after"):
        wait(driver, lambda it: text_of(it, "#tokens-rate .axis"))
        found[when] = driver.execute_script(CHARTS)
        if when == "before":
            driver.refresh()
    return found


def outage(driver: Any, given: str) -> dict[str, Any]:
    """The gateway goes away while a request is explained, and comes back; the chat is used meanwhile. Then it is there
    and answers late."""
    looks = (
        "return [document.title, document.body.className, document.querySelector('#status').textContent,"
        " ...['.banner', '#detail .banner'].map(each => document.querySelector(each).checkVisibility()),"
        " ...['#map', '#requests', '#pools', '#tokens-rate', '#detail-body', '#messages']"
        ".map(each => getComputedStyle(document.querySelector(each)).filter)]"
    )
    wait(driver, lambda it: text_of(it, "#requests a"))
    before = driver.execute_script(looks)
    find(driver, "#requests a").click()
    wait(driver, lambda it: text_of(it, "#detail-body dd"))
    ask("stop")
    wait(driver, lambda it: text_of(it, ".banner"))
    during = driver.execute_script(looks)
    banners, detail = texts_of(driver, ".banner"), text_of(driver, "#detail-body dd")
    shoot(driver, "outage-detail")
    find(driver, "#detail-close").click()
    write(driver, "anybody?")
    wait(driver, last_note)
    failed = last_note(driver)
    shoot(driver, "away")
    ask("start")
    wait(driver, lambda it: not text_of(it, ".banner"))
    after = driver.execute_script(looks)
    find(driver, ".message.assistant button").click()
    wait(driver, lambda it: "tokens, first" in last_note(it))
    messages = texts_of(driver, ".message .text")
    ask("hang")
    wait(driver, lambda it: text_of(it, ".banner"))
    slow = text_of(driver, ".banner")
    ask("go on")
    wait(driver, lambda it: not text_of(it, ".banner"))
    return {
        "before": before,
        "during": during,
        "after": after,
        "banners": banners,
        "detail": detail,
        "failed": failed,
        "messages": messages,
        "slow": slow,
    }


def requests(driver: Any, given: str) -> dict[str, Any]:
    """A thousand requests: filtered by each field, and one of them by its address."""
    found: dict[str, Any] = {}

    def look(name: str) -> None:
        hash_ = driver.execute_script("return location.hash")
        rows = texts_of(driver, "#requests tbody tr")
        ids = driver.execute_script("return [...document.querySelectorAll('#requests a')].map(each => each.dataset.id)")
        found[name] = {"found": text_of(driver, "#found"), "hash": hash_, "ids": ids, "first": rows[0] if rows else ""}

    def seen(text: str) -> Callable[[Any], bool]:
        return lambda it: text in text_of(it, "#found")

    wait(driver, lambda it: text_of(it, "#found"))
    look("all")
    found["nodes"] = driver.execute_script("return document.querySelectorAll('*').length")
    Select(find(driver, "#filter-state")).select_by_visible_text("refused")
    wait(driver, seen("that match"))
    look("refused")
    found["reasons"] = texts_of(driver, "#requests .reason")
    driver.execute_script("document.querySelector('#filter').scrollIntoView()")
    shoot(driver, "refused")
    driver.refresh()
    wait(driver, seen("that match"))
    look("reloaded")
    found["state"] = find(driver, "#filter-state").get_attribute("value")
    find(driver, "#filter-clear").click()
    wait(driver, lambda it: "match" not in text_of(it, "#found"))
    find(driver, "#filter-id").send_keys("000000000042")
    wait(driver, lambda it: text_of(it, "#found").startswith("1 that match"))
    look("id")
    found["focus"] = driver.execute_script("return document.activeElement.id")
    find(driver, "#filter-clear").click()
    wait(driver, lambda it: "match" not in text_of(it, "#found"))
    Select(find(driver, "#filter-model")).select_by_value("small")
    wait(driver, seen("that match"))
    look("model")
    find(driver, "#filter-worker").send_keys("decode-1")
    wait(
        driver, lambda it: "worker=" in it.execute_script("return location.hash") and "33 that" in text_of(it, "#found")
    )
    look("worker")
    find(driver, "#requests a").send_keys(Keys.ENTER)
    wait(driver, lambda it: text_of(it, "#detail-body dd"))
    found["link"] = driver.current_url
    driver.refresh()
    wait(driver, lambda it: text_of(it, "#detail-body dd"))
    found["linked"] = texts_of(driver, "#detail-body dd")[0]
    shoot(driver, "detail")
    driver.switch_to.active_element.send_keys(Keys.ESCAPE)
    wait(driver, lambda it: "request=" not in it.current_url)
    found["closed"] = driver.execute_script("return location.hash")
    driver.back()
    wait(driver, is_open)
    driver.execute_script("document.getElementById('detail').close(); location.hash = 'request=nobody'")
    wait(driver, lambda it: "no such request" in text_of(it, "#detail-body"))
    found["unknown"] = text_of(driver, "#detail-body")
    return found


def phone(driver: Any, given: str) -> dict[str, Any]:
    """All of the page at the width of a phone, light and dark, with what is widest in it."""
    found = {}
    wait(driver, lambda it: text_of(it, "#requests a"))
    write(driver, "a-long-word-" * 20)
    wait(driver, lambda it: "tokens, first" in last_note(it))
    find(driver, ".system summary").click()
    for scheme in ("light", "dark"):
        for name, size in (("phone", PHONE), ("desktop", (1440, 1000))):
            set_window(driver, *size, scheme)
            driver.execute_script("scrollTo(0, 0)")
            found[f"{name} {scheme}"] = cut_off(driver)
            shoot(driver, f"{name}-{scheme}")
    set_window(driver, *PHONE)
    height = driver.execute_script("return document.scrollingElement.scrollHeight")
    set_window(driver, PHONE[0], min(height, 9000))
    shoot(driver, "phone-whole")
    set_window(driver, *PHONE)
    find(driver, "#requests a").click()
    wait(driver, lambda it: text_of(it, "#detail-body dd"))
    found["phone detail"] = cut_off(driver)
    shoot(driver, "phone-detail")
    return found


def markdown(driver: Any, given: str) -> dict[str, Any]:
    """What is made of each of the sources in a file, and whether one that grows becomes the same."""
    sources = json.loads(Path(given).read_text(encoding="utf-8"))
    made = driver.execute_async_script(RENDER, sources)
    grown = [driver.execute_async_script(GROW, source, 3) for source in sources if len(source) < 2000]
    return {"made": made, "differ": [pair for pair in grown if pair[0] != pair[1]], "num_grown": len(grown)}


def answers(driver: Any, given: str) -> dict[str, Any]:
    """A system prompt, an answer, another one in its place, and one that is stopped."""
    wait(driver, lambda it: text_of(it, "#model"))
    find(driver, ".system summary").click()
    find(driver, "#system").send_keys("be brief")
    write(driver, "first")
    wait(driver, lambda it: "tokens, first" in last_note(it))
    one = texts_of(driver, ".message .text")
    find(driver, ".message button").click()
    wait(driver, lambda it: "tokens, first" in last_note(it) and texts_of(it, ".message .text") != one)
    two = texts_of(driver, ".message .text")
    find(driver, "#system").clear()
    find(driver, "#system").send_keys("be long")
    write(driver, "second")
    wait(driver, lambda it: len(texts_of(it, ".message.assistant .text")) == 2 and texts_of(it, ".message .text")[-1])
    is_disabled = find(driver, "#send").get_attribute("disabled")
    find(driver, "#stop").click()
    wait(driver, lambda it: last_note(it) == "stopped")
    shoot(driver, "answers")
    return {
        "one": one,
        "two": two,
        "three": texts_of(driver, ".message .text"),
        "was_disabled": is_disabled,
        "is_disabled": find(driver, "#send").get_attribute("disabled"),
        "stop": find(driver, "#stop").is_displayed(),
        "state": text_of(driver, "#system-state"),
        "retries": len(driver.find_elements(By.CSS_SELECTOR, ".message button")),
    }


ACTIONS = {each.__name__: each for each in (chat, feed, key, charts, outage, requests, phone, markdown, answers)}


def main() -> None:
    url, action, given, _folder = sys.argv[1:]
    driver = make_driver()
    try:
        driver.get(url)
        found = ACTIONS[action](driver, given)
        paints = driver.execute_script("return performance.getEntriesByType('paint').map(e => [e.name, e.startTime])")
        found["paint_ms"] = {name: round(at, 1) for name, at in paints}
        asked = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
        urls = [each["params"]["request"]["url"] for each in asked if each["method"] == "Network.requestWillBeSent"]
        found["origins"] = sorted({"/".join(each.split("/")[:3]) for each in urls if each.startswith("http")})
        found["console"] = [entry["message"] for entry in driver.get_log("browser")]
        shoot(driver, action)
    finally:
        driver.quit()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
