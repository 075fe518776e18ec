"""Many prompts that begin alike, a few at a time: how much of them was cached, and where they ran."""

import os
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

from disagg.client import Answer, Client

ADDRESS = os.environ.get("DISAGG_ADDRESS", "127.0.0.1:8470")
NUM_REQUESTS = 100
AT_A_TIME = 16
SHARED = "You are a patient teacher of geography. You answer in one short sentence, in plain words. "


def main() -> None:
    """Send them all."""
    with Client(ADDRESS) as client:  # its methods may be called from several threads

        def send(number: int) -> Answer:
            return client.generate(f"{SHARED}Question {number}: name a river.", max_tokens=16, temperature=0.0)

        began = time.perf_counter()
        with ThreadPoolExecutor(AT_A_TIME) as threads:
            answers = list(threads.map(send, range(NUM_REQUESTS)))
        took_s = time.perf_counter() - began

        pairs = Counter[str]()
        for answer in answers:
            trace = client.explain(answer.request_id)
            pairs[f"{trace.prefill_worker or '-'} -> {trace.decode_worker or '-'}"] += 1
    prompt_tokens = sum(answer.usage.prompt_tokens for answer in answers)
    cached_tokens = sum(answer.usage.cached_tokens for answer in answers)
    print(f"{len(answers)} answers in {took_s:.1f} s; {cached_tokens} of {prompt_tokens} prompt tokens were cached")
    for pair, count in pairs.most_common():
        print(f"  {count:4} on {pair}")


if __name__ == "__main__":
    main()
