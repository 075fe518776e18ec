"""The `openai` package with a key that has limits: what it reads of them, and its own retries. A real gateway and
cluster, with the deterministic model."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import yaml

from disagg.cluster.config.cluster_config import parse_config
from disagg.cluster.hosts.processes import ProcessCluster
from tests.clients import conftest
from tests.clients.serving import client_environment

PROGRAM = Path(__file__).with_name("use_openai_quotas.py")
KEY = "key-of-tenant-a-0001"
PER_MINUTE, TOKENS_PER_MINUTE = 60, 100_000
PROMPT_TOKENS, OUTPUT_TOKENS = 3, 4
NUM_DONE = 1 + 3 * 16 + 9
"""Answers before the first refusal."""


def test_its_retries_wait_for_what_the_headers_say(tmp_path: Path) -> None:
    python = conftest.program("libraries", "python")
    keys = tmp_path / "keys.yaml"
    keys.touch(mode=0o600)
    limits = {"requests_per_minute": PER_MINUTE, "tokens_per_minute": TOKENS_PER_MINUTE}
    keys.write_text(yaml.safe_dump([{"tenant": "a", "key": KEY, "limits": limits}]))
    config = {
        "model": {"path": "fake"},
        "transfer": {"transport": "shm"},
        "gateway": {"port": 0, "http_port": 0, "api_keys": str(keys), "usage": {"folder": str(tmp_path / "usage")}},
    }
    with ProcessCluster(parse_config(config)) as cluster:
        done = subprocess.run(
            [python, PROGRAM, f"http://{cluster.http_address}", "fake", KEY],
            env=client_environment(),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    check(json.loads(done.stdout))


def check(seen: dict[str, Any]) -> None:
    first = seen["first"]
    assert (first["x-ratelimit-limit-requests"], first["x-ratelimit-limit-tokens"]) == ("60", "100000")
    assert first["x-ratelimit-remaining-requests"] in ("59", "60")  # one comes back each second
    assert 0 <= TOKENS_PER_MINUTE - int(first["x-ratelimit-remaining-tokens"]) <= PROMPT_TOKENS + OUTPUT_TOKENS
    refused = seen["refused"]
    assert (refused["status"], refused["code"]) == (429, "rate_limit_exceeded")
    left = int(refused["x-ratelimit-remaining-requests"])
    assert 2 <= left < 8  # 58 of 60 are used
    assert f"of 60 a minute has {left} left" in refused["message"]
    wait_ms = int(refused["retry-after-ms"])
    assert 1000 * (7 - left) < wait_ms <= 1000 * (8 - left)  # what is missing of eight
    assert int(refused["retry-after"]) == -(-wait_ms // 1000)

    # Refused once, then it waits as long as it was asked to, and succeeds at once: two attempts, whatever its own
    # pauses would have been.
    assert seen["attempts"] == [{"status": 429, "retry": "0"}, {"status": 200, "retry": "1"}]
    assert seen["gap_s"] * 1000 >= seen["retry_after_ms"] > 0

    # What can never be allowed is not tried again.
    assert (seen["never"]["attempts"], seen["never"]["code"]) == (1, "rate_limit_exceeded")
    assert "retry-after-ms" not in seen["never"]

    (usage,) = seen["usage"]
    num_answers, num_prompts = NUM_DONE + 8, 6
    assert (usage["key"], usage["num_requests"], usage["num_failed"]) == ("a", num_prompts + 3, 3)
    assert usage["prompt_tokens"] == PROMPT_TOKENS * num_prompts
    assert usage["completion_tokens"] == OUTPUT_TOKENS * num_answers
