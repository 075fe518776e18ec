"""The page in headless Chromium, against a real HTTP server with a cluster that is made up. Chromium and its driver
are the system's (`apt install chromium chromium-driver`); `make test-page` makes the rest."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from disagg.gateway.auth.auth import ApiKey, ApiKeys, Authenticator, Caller, digest_of
from disagg.gateway.http.shell.protocol import ConnectionLimits
from disagg.gateway.http.shell.server import HttpServer
from disagg.gateway.operators.shell.page import Page
from disagg.gateway.text.tokenizer import load_model
from disagg.proto.ids import RequestId
from disagg.v1 import inference_pb2 as pb
from tests.support.architecture import REPOSITORY
from tests.support.gateway import CONFIG, MODEL_NAME, FakeRouter, write_checkpoint
from tests.support.http_app import TestApp

PYTHON = REPOSITORY / "build" / "page" / "bin" / "python"
LIMITS = ConnectionLimits(max_connections=100, idle_timeout_s=60.0, head_timeout_s=60.0, write_timeout_s=60.0)
MARKUP = "<img src=x onerror='window.hit=1'><script>window.hit=1</script>"
ANSWER = f"{MARKUP} hello <b>world</b> & more"
RATE = 1000
"""Requests per second of the cluster that is made up."""


class BusyViews:
    """A cluster in which everything changes all the time."""

    def __init__(self, num_prefill: int, num_decode: int) -> None:
        self._prefill = [f"prefill-{number}" for number in range(num_prefill)]
        self._decode = [f"decode-{number}" for number in range(num_decode)]
        self._start = time.time()

    async def state(self, caller: Caller, max_age_s: float) -> pb.GetClusterStateResponse:
        done = int((time.time() - self._start) * RATE)
        names = [*self._prefill, *self._decode]
        workers = [
            pb.WorkerState(
                worker_id=name,
                roles=[name.split("-")[0]],
                phase="ready",
                detail=MARKUP,
                sequences=(done + number) % 40,
                kv_blocks_total=4096,
                kv_blocks_active=(done * 7 + number * 331) % 2500,
                kv_blocks_reserved=(done + number * 17) % 400,
                kv_blocks_cached=(done * 3 + number * 77) % 1000,
            )
            for number, name in enumerate(names)
        ]
        pairs = [(src, dst) for src in self._prefill for dst in self._decode]
        transfers = [
            pb.TransferState(
                prefill_worker=src,
                decode_worker=dst,
                transport="shm",
                transfers=done * (number + 1) // len(pairs),
                bytes=done * (number + 1) * (3 << 20) // len(pairs),
            )
            for number, (src, dst) in enumerate(pairs)
        ]
        return pb.GetClusterStateResponse(
            workers=workers,
            transfers=transfers,
            pools=[pb.PoolState(name="prefill", desired=len(self._prefill), ready=len(self._prefill))],
            slos=[pb.SloState(slo=slo, met=50_000 + done % 9000, total=60_000) for slo in ("ttft", "tpot", "both")],
            running_requests=done % 300,
            requests_per_s=RATE + done % 60,
            output_tokens_per_s=40 * RATE + done % 3000,
        )

    async def recent(self, limit: int) -> AsyncIterator[pb.ExplainRequestResponse]:
        done = int((time.time() - self._start) * RATE)
        for number in range(limit):
            yield self.explain(RequestId(f"{done - number:012d}{0:020d}"), Caller("", True))

    def explain(self, request_id: RequestId, caller: Caller) -> pb.ExplainRequestResponse:
        option = pb.PlacementOption(prefill_worker="prefill-0", decode_worker="decode-0", cost=3.5, prefill_ms=2.0)
        return pb.ExplainRequestResponse(
            request_id=request_id,
            outcome="stop",
            prefill_worker="prefill-0",
            decode_worker="decode-0",
            kv_bytes=3 << 20,
            transport="shm",
            policy=MARKUP,
            arrived_at=time.time(),
            stages=[pb.StageTime(stage="first_token", at_ms=40.0), pb.StageTime(stage="end", at_ms=900.0)],
            spans=[pb.StageSpan(stage="prefill", worker="prefill-0", start_ms=1.0, end_ms=30.0)],
            options=[option],
            chosen=option,
        )


@asynccontextmanager
async def served(folder: Path, views: BusyViews, authenticator: Authenticator | None = None) -> AsyncIterator[str]:
    config = {**CONFIG, "max_position_embeddings": 2048}
    model = load_model(str(write_checkpoint(folder, config=config)), MODEL_NAME, None)
    tokens = model.tokenizer.encode_text(ANSWER, special=False)
    router = FakeRouter([[token] for token in tokens])
    app = TestApp(model, router, authenticator, page=Page(views, lambda: [MODEL_NAME], time.monotonic, time.time))
    server = HttpServer(app.app, LIMITS, time.monotonic)
    port = await server.start("127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        await server.stop(0.0)


async def browse(url: str, action: str) -> dict[str, Any]:
    """What tests/page/browse.py saw; for the rest of it, no console error and no request to another origin."""
    if not PYTHON.exists() or shutil.which("chromedriver") is None:
        pytest.skip("needs build/page (`make test-page`), and chromium and chromedriver in PATH")
    folder = REPOSITORY / "build" / "screenshots"
    folder.mkdir(parents=True, exist_ok=True)
    script = REPOSITORY / "tests" / "page" / "browse.py"
    process = await asyncio.create_subprocess_exec(
        PYTHON, script, url, action, MARKUP, folder, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, errors = await process.communicate()
    assert process.returncode == 0, f"{errors.decode()}\n{out.decode()}"
    found: dict[str, Any] = json.loads(out)
    print(action, json.dumps(found, indent=2))
    assert found["origins"] == [url]
    return found


async def test_markup_of_clients_and_models_is_shown_as_text(tmp_path: Path) -> None:
    async with served(tmp_path, BusyViews(2, 3)) as url:
        found = await browse(url, "chat")
    assert (found["prompt"], found["answer"]) == (MARKUP, ANSWER)
    assert (found["elements"], found["hit"], found["console"]) == (0, None, [])
    assert MARKUP in found["detail"]
    assert (found["was_open"], found["closed"], found["focus"]) == (True, True, "How it ran")
    assert all(name in found["workers"] for name in ("prefill-0", "prefill-1", "decode-0", "decode-1", "decode-2"))


@pytest.mark.parametrize(("num_prefill", "num_decode"), [(2, 3), (100, 200)])
async def test_a_thousand_requests_a_second_are_followed(tmp_path: Path, num_prefill: int, num_decode: int) -> None:
    async with served(tmp_path, BusyViews(num_prefill, num_decode)) as url:
        found = await browse(url, "feed")
    assert found["console"] == []
    assert found["frames"] > 0
    assert found["nodes"] < 2500
    assert found["bytes"] < 80_000


async def test_a_key_is_asked_for_and_kept_in_the_tab_only(tmp_path: Path) -> None:
    keys = ApiKeys([ApiKey(digest_of("k-admin"), Caller("ops", True))])
    async with served(tmp_path, BusyViews(2, 3), keys) as url:
        found = await browse(url, "key")
    assert (found["asked"], found["stored"]) == ("An API key is needed", [1, 0, ""])
    assert found["url"] == f"{url}/"
