"""Two answers at once with asyncio. The second one is left early, which frees all that it held in the cluster."""

import asyncio
import os
from contextlib import aclosing

from disagg.client import AsyncClient

ADDRESS = os.environ.get("DISAGG_ADDRESS", "127.0.0.1:8470")


async def whole(client: AsyncClient, prompt: str) -> str:
    """All of an answer."""
    texts = [delta.text async for delta in client.stream(prompt, max_tokens=48, temperature=0.0)]
    return "".join(texts)


async def beginning(client: AsyncClient, prompt: str, num_tokens: int) -> int:
    """Reads this many tokens or a few more, and leaves."""
    seen = 0
    async with aclosing(client.stream(prompt, max_tokens=48, temperature=0.0)) as deltas:
        async for delta in deltas:
            seen += len(delta.token_ids)
            if seen >= num_tokens:
                break
    return seen


async def main() -> None:
    """Send both at once."""
    async with AsyncClient(ADDRESS) as client:
        text, seen = await asyncio.gather(
            whole(client, "The capital of France is"), beginning(client, "Once upon a time", 5)
        )
    print(f"the first answer, whole: {text!r}")
    print(f"of the second one: {seen} tokens, then we left")


if __name__ == "__main__":
    asyncio.run(main())
