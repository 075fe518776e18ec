"""One request's life in the gateway, from the client's protobuf to text.

    check ──> tokenize, hash ──> submit ──> delta* ──> finish
                                   └─ stop string, error, deadline, the consumer leaves ──> cancel

Nothing is held before `submit`; after it, every way out but the normal end cancels the request in the cluster. The
generator asks for more tokens only when its consumer wants more, and the router's handle merges what came meanwhile:
a client that reads slowly, or not at all, costs the memory of its ids and of the messages that gRPC has in flight.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Literal, TypeVar

from disagg.proto.block_hash import chain_hashes, root_hash
from disagg.proto.errors import DeadlineError, InternalError
from disagg.proto.ids import BlockHash, RequestId
from disagg.router.api import RequestHandle, RoutedRequest, Router, TokenBatch
from disagg.router.gateway.text import TextStream
from disagg.router.gateway.tokenizer import ServedModel, Tokenizer
from disagg.router.gateway.validate import (
    ChatPrompt,
    CheckedRequest,
    IdsPrompt,
    Limits,
    Prompt,
    Targets,
    TextPrompt,
    check_deadline,
    check_request,
    fit_prompt,
)
from disagg.v1 import inference_pb2 as pb

T = TypeVar("T")

NO_TARGETS = Targets()


@dataclass(frozen=True, slots=True)
class Delta:
    """New tokens of an answer. `text` may lag behind the ids; the last delta may have text only."""

    first_index: int
    token_ids: tuple[int, ...]
    text: str


@dataclass(frozen=True, slots=True)
class Finish:
    """The end of an answer; comes once, last."""

    request_id: RequestId
    reason: Literal["stop", "length"]
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int


class Generator:
    """Runs requests for one model. Keeps nothing between requests.

    Args:
        model: what is served.
        router: where requests go.
        limits: what requests are checked against.
        fingerprint: of the workers' model; block hashes start from it.
        executor: tokenizes prompts above `inline_prompt_bytes`; `None` tokenizes all on the event loop.
        clock: monotonic seconds, the clock of the deadlines.
        mint_seed: 64 random bits.
    """

    def __init__(
        self,
        model: ServedModel,
        router: Router,
        limits: Limits,
        fingerprint: str,
        *,
        clock: Callable[[], float],
        mint_seed: Callable[[], int],
        executor: Executor | None = None,
        inline_prompt_bytes: int = 0,
    ) -> None:
        self.model = model
        self.limits = limits
        self._router = router
        self._root = root_hash(fingerprint)
        self._clock = clock
        self._mint_seed = mint_seed
        self._executor = executor
        self._inline_prompt_bytes = inline_prompt_bytes

    async def run(
        self,
        request: pb.GenerateRequest,
        request_id: RequestId,
        deadline: float | None = None,
        targets: Targets = NO_TARGETS,
    ) -> AsyncGenerator[Delta | Finish, None]:
        """Answer `request`. Close the generator (`contextlib.aclosing`) when leaving it early.

        Args:
            request: as it came in.
            request_id: minted by the caller, never used before.
            deadline: on `clock`; the request fails when it passes, in whatever phase.
            targets: the client's own; they decide where and whether the request is taken in.

        Raises:
            DisaggError: whatever is wrong with the request or happens to it.
        """
        arrival = self._clock()
        checked = check_request(request, self.limits, None if deadline is None else deadline - arrival)
        routed = await self._route(checked, request_id, deadline, targets)
        handle = self._router.submit(routed, arrival)
        sampling = routed.sampling
        text = TextStream(self.model.tokenizer, checked.stop, sampling.stop_token_ids, sampling.min_tokens)
        tokens = aiter(handle)
        try:
            while (batch := await self._read(tokens, deadline)) is not None:
                first_index = text.num_tokens
                piece = text.push(batch.token_ids)
                yield Delta(first_index, piece.token_ids, piece.text)
                if piece.stopped:
                    yield self._finish(routed, text, None)
                    return
            tail = text.finish()
            if tail.text:
                yield Delta(text.num_tokens, (), tail.text)
            yield self._finish(routed, text, None if tail.stopped else handle)
        finally:
            if handle.completion is None:
                handle.cancel()

    async def tokenize(self, prompt: Prompt) -> tuple[int, ...]:
        """The ids of a checked prompt. Raises `InvalidRequestError` where the chat template refuses it."""
        return await self.offload(prompt.num_bytes, lambda: _encode(prompt, self.model.tokenizer))

    async def offload(self, num_bytes: int, work: Callable[[], T]) -> T:
        """Do `work`, whose input has `num_bytes`: at once if it is small, on a thread otherwise."""
        if self._executor is None or num_bytes <= self._inline_prompt_bytes:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    async def _route(
        self, checked: CheckedRequest, request_id: RequestId, deadline: float | None, targets: Targets
    ) -> RoutedRequest:
        """Tokenize, check the context, hash."""
        seed = self._mint_seed()

        def prepare() -> RoutedRequest:
            prompt_token_ids = _encode(checked.prompt, self.model.tokenizer)
            return RoutedRequest(
                request_id=request_id,
                sampling=fit_prompt(checked, prompt_token_ids, self.limits, seed),
                prompt_token_ids=prompt_token_ids,
                block_hashes=self._hashes(prompt_token_ids),
                root_hash=self._root,
                deadline=deadline,
                ttft_slo_s=targets.ttft_s,
                tpot_slo_s=targets.tpot_s,
            )

        routed = await self.offload(checked.prompt.num_bytes, prepare)
        check_deadline(None if deadline is None else deadline - self._clock())
        return routed

    def _hashes(self, prompt_token_ids: tuple[int, ...]) -> tuple[BlockHash, ...]:
        return tuple(chain_hashes(self._root, prompt_token_ids))

    async def _read(self, tokens: AsyncIterator[TokenBatch], deadline: float | None) -> TokenBatch | None:
        """The next batch, `None` at the end. Raises `DeadlineError` on time also where the router does not."""
        scope = asyncio.timeout(None if deadline is None else max(0.0, deadline - self._clock()))
        try:
            async with scope:
                return await anext(tokens, None)
        except TimeoutError:
            if not scope.expired():
                raise
            raise DeadlineError("the deadline passed while the answer was generated") from None

    def _finish(self, routed: RoutedRequest, text: TextStream, handle: RequestHandle | None) -> Finish:
        """The end, as `handle` saw it, or without one by a stop string."""
        completion = None if handle is None else handle.completion
        if handle is not None and completion is None:
            raise InternalError(f"request {routed.request_id} ended without a completion")
        cached = self._traced_cached_tokens(routed.request_id) if completion is None else completion.cached_tokens
        return Finish(
            request_id=routed.request_id,
            reason="stop" if completion is None else completion.reason,
            num_prompt_tokens=len(routed.prompt_token_ids),
            num_cached_tokens=cached,
            num_output_tokens=text.num_tokens,
        )

    def _traced_cached_tokens(self, request_id: RequestId) -> int:
        """Prompt tokens that nobody computed, of an answer that was cut short."""
        trace = self._router.trace(request_id)
        if trace is None:
            return 0
        return trace.decode_cached_tokens if trace.prefill_worker is None else trace.prefill_cached_tokens


def _encode(prompt: Prompt, tokenizer: Tokenizer) -> tuple[int, ...]:
    match prompt:
        case TextPrompt(text):
            return tuple(tokenizer.encode_text(text))
        case IdsPrompt(token_ids):
            return token_ids
        case ChatPrompt(turns):
            return tuple(tokenizer.encode_chat(turns))
