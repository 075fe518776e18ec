"""A chat with the `openai` package, with another base URL."""

import os
import sys

try:
    import openai
except ImportError:
    sys.exit("this example needs the openai package: pip install openai")

URL = os.environ.get("DISAGG_URL", "http://127.0.0.1:8471")


def main() -> None:
    """Send one message."""
    question = " ".join(sys.argv[1:]) or "What is a cache?"
    client = openai.OpenAI(base_url=f"{URL}/v1", api_key=os.environ.get("DISAGG_API_KEY", "none is needed"))
    model = client.models.list().data[0].id
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        max_tokens=64,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        for choice in chunk.choices:
            print(choice.delta.content or "", end="", flush=True)
        if chunk.usage is not None:
            print(f"\n[{chunk.usage.prompt_tokens} + {chunk.usage.completion_tokens} tokens from {model}]")


if __name__ == "__main__":
    main()
