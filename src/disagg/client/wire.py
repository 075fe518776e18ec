"""Conversion between the client's types and protobuf; needs no connection."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from disagg.client.types import (
    Answer,
    ClusterState,
    Delta,
    Finished,
    FinishReason,
    Message,
    Options,
    Prompt,
    Targets,
    TokenLogprob,
    Usage,
)
from disagg.proto.errors import InvalidRequestError, UnavailableError
from disagg.v1 import inference_pb2 as pb

_REASONS: dict[int, FinishReason] = {
    pb.FINISH_REASON_STOP: "stop",
    pb.FINISH_REASON_CONTENT_FILTER: "content_filter",
}


def make_request(prompt: Prompt, options: Options) -> pb.GenerateRequest:
    """Make the request, without its model. Raises `TypeError` or `ValueError` for arguments that cannot be written as
    one."""
    request = pb.GenerateRequest()
    if isinstance(prompt, str):
        request.text = prompt
    elif prompt and isinstance(prompt[0], Mapping):
        request.chat.CopyFrom(_chat(cast(Sequence[Message], prompt)))
    else:
        request.token_ids.SetInParent()
        request.token_ids.ids.extend(cast(Sequence[int], prompt))
    structured = [name for name in options if name in pb.StructuredOutput.DESCRIPTOR.fields_by_name]
    if len(structured) > 1:
        raise ValueError(f"an answer follows one of {' and '.join(structured)}, not several")
    for name, value in options.items():
        if name not in Options.__annotations__:
            raise TypeError(f"there is no option {name!r}; there are {', '.join(Options.__annotations__)}")
        try:
            _set_option(request, name, value)
        except (TypeError, ValueError) as error:
            raise (TypeError if isinstance(error, TypeError) else ValueError)(f"{name}: {error}") from error
    return request


def _set_option(request: pb.GenerateRequest, name: str, value: Any) -> None:
    if name in ("stop", "stop_token_ids"):
        getattr(request.stopping, name).extend([value] if isinstance(value, str) else value)
    elif name == "logit_bias":
        request.sampling.logit_bias.update(value)
    elif name == "choice":
        request.structured.choice.texts.extend(value)
    elif name in request.structured.DESCRIPTOR.fields_by_name:
        setattr(request.structured, name, value if isinstance(value, str | bool) else json.dumps(value))
    elif name in request.DESCRIPTOR.fields_by_name:
        setattr(request, name, value)
    else:
        is_stopping = name in request.stopping.DESCRIPTOR.fields_by_name
        setattr(request.stopping if is_stopping else request.sampling, name, value)


def _chat(messages: Sequence[Message]) -> pb.ChatMessages:
    return pb.ChatMessages(messages=[pb.ChatMessage(**message) for message in messages])


def target_metadata(targets: Targets | None) -> tuple[tuple[str, str], ...]:
    """Metadata of a call that carries a request's targets."""
    if targets is None:
        return ()
    named = (("x-slo-ttft-ms", targets.ttft_ms), ("x-slo-tpot-ms", targets.tpot_ms))
    return tuple((name, repr(float(value))) for name, value in named if value is not None)


def tokenize_request(prompt: str | Sequence[Message], model: str) -> pb.TokenizeRequest:
    """Make the request to tokenize a text or a chat."""
    if isinstance(prompt, str):
        return pb.TokenizeRequest(model=model, text=prompt)
    return pb.TokenizeRequest(model=model, chat=_chat(prompt))


def sizes_request(sizes: Mapping[str, int]) -> pb.SetPoolSizesRequest:
    """Make the request of new sizes by pool. Raises `ValueError` for one that cannot be sent."""
    request = pb.SetPoolSizesRequest()
    for pool, size in sizes.items():
        try:
            request.sizes.add(pool=pool, size=size)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{pool}: {error}") from error
    return request


def only_name(answer: pb.ListModelsResponse) -> str:
    """Name of the model that is used when none is given. Raises `UnavailableError` if there is none, and
    `InvalidRequestError` if there are several."""
    if not answer.models:
        raise UnavailableError("the gateway serves no model", "no_model")
    if len(answer.models) > 1:
        names = ", ".join(model.name for model in answer.models)
        raise InvalidRequestError("model", f"must be set, to one of {names}")
    return answer.models[0].name


def delta_of(response: pb.GenerateResponse) -> Delta:
    """Convert one message of a stream."""
    if response.HasField("finished"):
        return Delta("", (), _finished(response.finished), (), response.finished.answer_index)
    delta = response.delta
    logprobs = _logprobs(delta.logprobs)
    return Delta(delta.text, tuple(delta.token_ids), None, logprobs, delta.answer_index, delta.reasoning)


def state_of(response: pb.WatchClusterStateResponse) -> ClusterState:
    """Convert one message of `watch`."""
    return response.state


def answer_of(response: pb.GenerateOnceResponse) -> Answer:
    """Convert the whole answer of `GenerateOnce`."""
    end = _finished(response.finished)
    logprobs = _logprobs(response.logprobs)
    ids, reasoning = tuple(response.token_ids), response.reasoning
    return Answer(response.text, ids, end.reason, end.usage, end.request_id, logprobs, reasoning)


def _logprobs(logprobs: Iterable[pb.TokenLogprob]) -> tuple[TokenLogprob, ...]:
    return tuple(TokenLogprob(one.logprob, tuple((top.token_id, top.logprob) for top in one.top)) for one in logprobs)


def _finished(finished: pb.Finished) -> Finished:
    usage = finished.usage
    return Finished(
        _REASONS.get(finished.reason, "length"),
        Usage(usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens, usage.reasoning_tokens),
        finished.request_id,
    )
