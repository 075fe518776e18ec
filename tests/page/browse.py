"""Opens the page in headless Chromium and writes what it saw as JSON. Runs in an environment of its own, which has
Selenium and nothing of ours.

    browse.py URL ACTION PROMPT FOLDER      ACTION: chat, feed, key; screenshots go into FOLDER
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

TIMEOUT_S = 120.0
FEED_S = 10.0

WATCH = """
window.seen = {tasks: [], frames: [], shifts: 0};
new PerformanceObserver(list => window.seen.tasks.push(...list.getEntries().map(each => each.duration)))
  .observe({type: 'longtask', buffered: true});
let last = performance.now();
const frame = now => { window.seen.frames.push(now - last); last = now; requestAnimationFrame(frame); };
requestAnimationFrame(frame);
"""


def make_driver(width: int = 1440, height: int = 1000) -> Any:
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or shutil.which("google-chrome") or ""
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--no-proxy-server", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    return driver


def wait(driver: Any, what: Callable[[Any], Any]) -> Any:
    return WebDriverWait(driver, TIMEOUT_S, poll_frequency=0.05).until(what)


def text_of(driver: Any, selector: str) -> str:
    return str(driver.execute_script("return document.querySelector(arguments[0])?.textContent ?? ''", selector))


def chat(driver: Any, prompt: str) -> dict[str, Any]:
    """A prompt with markup, answered with markup; then the answer is explained, by keyboard only."""
    wait(driver, lambda it: text_of(it, "#model"))
    driver.find_element(By.ID, "prompt").send_keys(prompt + Keys.ENTER)
    wait(driver, lambda it: "tokens, first" in text_of(it, ".message.assistant .who"))
    driver.find_element(By.CSS_SELECTOR, ".message.assistant button").send_keys(Keys.ENTER)
    wait(driver, lambda it: text_of(it, "#detail-body dd"))
    is_open = driver.execute_script("return document.getElementById('detail').open")
    detail = text_of(driver, "#detail-body")
    driver.switch_to.active_element.send_keys(Keys.ESCAPE)
    return {
        "prompt": text_of(driver, ".message.user .text"),
        "answer": text_of(driver, ".message.assistant .text"),
        "elements": driver.execute_script("return document.querySelectorAll('img, #messages script').length"),
        "hit": driver.execute_script("return window.hit ?? null"),
        "detail": detail,
        "was_open": is_open,
        "closed": not driver.execute_script("return document.getElementById('detail').open"),
        "focus": driver.execute_script("return document.activeElement.textContent"),
        "workers": text_of(driver, "#map"),
    }


def feed(driver: Any, prompt: str) -> dict[str, Any]:
    """Nothing but watching, for `FEED_S` seconds."""
    wait(driver, lambda it: text_of(it, "#requests button"))
    driver.execute_script(WATCH)
    first = text_of(driver, "#requests button")
    time.sleep(FEED_S)
    wait(driver, lambda it: text_of(it, "#requests button") != first)
    seen = driver.execute_script("return window.seen")
    return {
        "long_tasks_ms": [round(each, 1) for each in seen["tasks"]],
        "frames": len(seen["frames"]),
        "longest_frame_ms": round(max(seen["frames"]), 1),
        "nodes": driver.execute_script("return document.querySelectorAll('*').length"),
        "bytes": driver.execute_script(
            "return performance.getEntriesByType('resource').filter(e => e.name.endsWith('/ui/state')).at(-1)"
            ".decodedBodySize"
        ),
    }


def key(driver: Any, prompt: str) -> dict[str, Any]:
    """The page asks for a key, gets one, and keeps it in the tab."""
    wait(driver, lambda it: it.execute_script("return document.getElementById('key').open"))
    asked = text_of(driver, "#status")
    driver.find_element(By.ID, "key-value").send_keys("k-admin" + Keys.ENTER)
    wait(driver, lambda it: text_of(it, "#model"))
    script = "return [sessionStorage.length, localStorage.length, document.cookie]"
    return {"asked": asked, "stored": driver.execute_script(script), "url": driver.current_url}


def main() -> None:
    url, action, prompt, folder = sys.argv[1:]
    driver = make_driver()
    try:
        driver.get(url)
        found = {"chat": chat, "feed": feed, "key": key}[action](driver, prompt)
        paints = driver.execute_script("return performance.getEntriesByType('paint').map(e => [e.name, e.startTime])")
        found["paint_ms"] = {name: round(at, 1) for name, at in paints}
        asked = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
        urls = [each["params"]["request"]["url"] for each in asked if each["method"] == "Network.requestWillBeSent"]
        found["origins"] = sorted({"/".join(each.split("/")[:3]) for each in urls if each.startswith("http")})
        found["console"] = [entry["message"] for entry in driver.get_log("browser")]
        driver.save_screenshot(str(Path(folder) / f"{action}.png"))
    finally:
        driver.quit()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
