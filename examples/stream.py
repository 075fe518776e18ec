"""An answer over gRPC, printed as it is made."""

import os
import sys

from disagg.client import Client

ADDRESS = os.environ.get("DISAGG_ADDRESS", "127.0.0.1:8470")


def main() -> None:
    """Send one prompt."""
    question = " ".join(sys.argv[1:]) or "What is a cache?"
    with Client(ADDRESS) as client:
        for delta in client.stream([{"role": "user", "content": question}], max_tokens=64, temperature=0.0):
            print(delta.text, end="", flush=True)
            if delta.finished is not None:
                usage = delta.finished.usage
                print(f"\n[{usage.prompt_tokens} + {usage.completion_tokens} tokens, {delta.finished.reason}]")
                print(f"[disagg explain {delta.finished.request_id} shows where it ran]")


if __name__ == "__main__":
    main()
