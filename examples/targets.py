"""Latency targets of a request. The cluster places it where they are met, or refuses it at once with a time to retry
after."""

import os
import time

from disagg.client import Answer, Client, Targets
from disagg.proto.errors import OverloadedError

ADDRESS = os.environ.get("DISAGG_ADDRESS", "127.0.0.1:8470")
TARGETS = Targets(ttft_ms=2000, tpot_ms=200)
MAX_TRIES = 5


def generate_with_retries(client: Client, prompt: str) -> Answer:
    """The answer, after at most `MAX_TRIES` tries. Raises `OverloadedError` after the last one."""
    for tries_left in reversed(range(MAX_TRIES)):
        try:
            return client.generate(prompt, targets=TARGETS, timeout_s=30, max_tokens=32, temperature=0.0)
        except OverloadedError as error:
            if not tries_left:
                raise
            print(f"refused ({error}); again in {error.retry_after_s:g} s")
            time.sleep(error.retry_after_s)
    raise AssertionError("the last try returns or raises")


def main() -> None:
    """Send a request, and compare its TTFT with the target."""
    with Client(ADDRESS) as client:
        answer = generate_with_retries(client, "The three largest oceans are")
        trace = client.explain(answer.request_id)
    ended_ms = {stage.stage: stage.at_ms for stage in trace.stages}
    print(answer.text)
    print(f"the first token came after {ended_ms['first_token']:.0f} ms; the target was {TARGETS.ttft_ms} ms")


if __name__ == "__main__":
    main()
