"""`disagg generate`: one prompt, its answer streamed to standard output, what was counted to standard error."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import closing
from typing import TextIO

from disagg.cli.address import check_address, reaching
from disagg.client import Client, Finished, Options, Prompt
from disagg.proto.errors import ConfigError


def run_generate(
    address: str,
    prompt: bytes,
    *,
    chat: bool,
    model: str | None = None,
    max_tokens: int,
    temperature: float,
    seed: int | None = None,
    out: TextIO = sys.stdout,
    notes: TextIO = sys.stderr,
) -> None:
    """Write the answer to `out` as it comes, and one line about it to `notes`.

    Raises:
        ConfigError: if the address is invalid, or the prompt is no text in UTF-8.
        LaunchError: if there is no gateway at the address.
        DisaggError: the error that the gateway answered.
    """
    check_address(address)
    try:
        text = prompt.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"prompt: not UTF-8 at byte {error.start}") from None
    options = Options(max_tokens=max_tokens, temperature=temperature)
    if seed is not None:
        options["seed"] = seed
    content: Prompt = [{"role": "user", "content": text}] if chat else text
    with Client(address) as client:
        with reaching(address):
            served = model or only_model([each.name for each in client.models()])
        with closing(client.stream(content, model=served, **options)) as deltas:
            for delta in deltas:
                out.write(delta.text)
                out.flush()
                if delta.finished is not None:
                    out.write("\n")
                    notes.write(summary(delta.finished) + "\n")


def only_model(names: Sequence[str]) -> str:
    """The only model; raises `ConfigError` unless there is exactly one."""
    if len(names) != 1:
        raise ConfigError(f"--model: the gateway serves {', '.join(names) or 'none that you may use'}; choose one")
    return names[0]


def summary(finished: Finished) -> str:
    """Text such as `17 + 32 tokens, 16 cached, length, request 1f..`."""
    usage = finished.usage
    cached = f", {usage.cached_tokens} cached" if usage.cached_tokens else ""
    return (
        f"[{usage.prompt_tokens} + {usage.completion_tokens} tokens{cached}, {finished.reason}; "
        f"request {finished.request_id}]"
    )
