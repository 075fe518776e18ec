"""Answers as the protobuf that clients get."""

from __future__ import annotations

from collections.abc import Sequence

from disagg.gateway.requests.answer_events import Delta, Finish
from disagg.proto.messages import TokenLogprobs
from disagg.v1 import inference_pb2 as pb

_REASONS = {
    "stop": pb.FINISH_REASON_STOP,
    "length": pb.FINISH_REASON_LENGTH,
    "content_filter": pb.FINISH_REASON_CONTENT_FILTER,
}


def write_delta(delta: Delta) -> pb.TokenDelta:
    """The message with the new tokens of an answer."""
    return pb.TokenDelta(
        first_index=delta.first_index,
        token_ids=delta.token_ids,
        text=delta.text,
        logprobs=write_logprobs(delta.logprobs),
        answer_index=delta.answer_index,
        model_version=delta.model_version,
        reasoning=delta.reasoning,
    )


def write_logprobs(logprobs: Sequence[TokenLogprobs]) -> list[pb.TokenLogprob]:
    """One message for each token."""
    return [
        pb.TokenLogprob(
            logprob=one.logprob,
            top=[
                pb.TopLogprob(token_id=token_id, logprob=logprob)
                for token_id, logprob in zip(one.top_ids, one.top_logprobs, strict=True)
            ],
        )
        for one in logprobs
    ]


def write_finish(finish: Finish) -> pb.Finished:
    """The end of an answer."""
    usage = pb.Usage(
        prompt_tokens=finish.num_prompt_tokens,
        cached_tokens=finish.num_cached_tokens,
        completion_tokens=finish.num_output_tokens,
        reasoning_tokens=finish.num_reasoning_tokens,
    )
    return pb.Finished(
        reason=_REASONS[finish.reason], usage=usage, request_id=finish.request_id, answer_index=finish.answer_index
    )
