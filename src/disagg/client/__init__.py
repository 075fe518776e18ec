"""The Python client of a disagg gateway, blocking and asyncio.

    from disagg.client import Client

    with Client("127.0.0.1:8470") as client:
        print(client.generate("The capital of France is", max_tokens=16).text)
        for delta in client.stream([{"role": "user", "content": "What is a cache?"}]):
            print(delta.text, end="", flush=True)

A prompt is a text, a list of token ids, or a list of chat messages. A stream starts with the first delta that is read,
and closing it early cancels the request. Failed calls raise the errors of `disagg.proto.errors`.
"""

from __future__ import annotations

from disagg.client.asynchronous import AsyncClient
from disagg.client.blocking import Client
from disagg.client.failures import error_of
from disagg.client.types import (
    Answer,
    Applied,
    AutoscalerState,
    ClusterState,
    Delta,
    Explanation,
    Finished,
    FinishReason,
    Message,
    Model,
    Options,
    Probe,
    Prompt,
    RecentLoad,
    Shape,
    ShapeComparison,
    Targets,
    TokenLogprob,
    Usage,
    UsageByDay,
)
from disagg.client.wire import make_request

__all__ = [
    "Answer",
    "Applied",
    "AsyncClient",
    "AutoscalerState",
    "Client",
    "ClusterState",
    "Delta",
    "Explanation",
    "FinishReason",
    "Finished",
    "Message",
    "Model",
    "Options",
    "Probe",
    "Prompt",
    "RecentLoad",
    "Shape",
    "ShapeComparison",
    "Targets",
    "TokenLogprob",
    "Usage",
    "UsageByDay",
    "error_of",
    "make_request",
]
