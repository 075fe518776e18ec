"""Sends a random prompt through one pair of workers, to see that KV moves from the one to the other.

    find both ──> random ids ──submit(pair)──> two tokens ──> trace: bytes that moved against bytes that the prompt has

The prompt fits into one step of P, so that nothing of the transfer hides behind further prefill: what is exposed is all
of it. Its hashes start from a random root: no cache has any of it, and nothing else will ever hit what it leaves there.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from typing_extensions import override

from disagg.proto.block_hash import HASH_BYTES, chain_hashes
from disagg.proto.errors import InternalError, InvalidRequestError, UnavailableError
from disagg.proto.ids import BlockHash, RequestId, WorkerId, model_of
from disagg.proto.messages import Sampling, WorkerInfo
from disagg.proto.token_ids import pack_token_ids
from disagg.router.api import RoutedRequest, Router

MAX_PROMPT_TOKENS = 2048
"""Maximum tokens of the prompt: enough that the transfer of bytes, not of messages, takes most of the time."""
OUTPUT_TOKENS = 2
"""Number of output tokens: one of the prefill worker and one of the decode worker."""
TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PairCheckResult:
    """Size and duration of the KV transfer of one pair check."""

    kv_bytes: int
    expected_bytes: int
    """KV bytes of the whole prompt."""
    exposed_s: float
    """Seconds from the end of prefill to the hand-over, as the gateway saw both."""
    transport: str


class PairChecker(Protocol):
    """Sends a prompt through a pair of workers."""

    async def run(self, prefill_id: WorkerId, decode_id: WorkerId) -> PairCheckResult:
        """Send a short random prompt through one pair.

        Raises:
            InvalidRequestError: for a worker that is not there.
            UnavailableError: if the two form no pair, have no room now, or fail.
            DeadlineError: if that takes longer than `TIMEOUT_S` seconds.
        """
        ...


class PairCheckers(PairChecker):
    """The pair checks of all models, each by the checker of the model's key; models may come and go."""

    def __init__(self, checkers: Mapping[str, RouterPairChecker]) -> None:
        self._checkers = checkers

    @override
    async def run(self, prefill_id: WorkerId, decode_id: WorkerId) -> PairCheckResult:
        checker = self._checkers.get(model_of(prefill_id)) or next(iter(self._checkers.values()))
        return await checker.run(prefill_id, decode_id)


class RouterPairChecker(PairChecker):
    """The pair checks of one model's router. Keeps nothing between two checks.

    Args:
        router: where the prompts go.
        vocab_size: ids are below it.
        clock: the router's clock.
        mint_id: a request id that was never used.
        dice: where random ids come from.
    """

    def __init__(
        self,
        router: Router,
        vocab_size: int,
        *,
        clock: Callable[[], float],
        mint_id: Callable[[], RequestId],
        dice: random.Random,
    ) -> None:
        self._router = router
        self._vocab_size = vocab_size
        self._clock = clock
        self._mint_id = mint_id
        self._dice = dice

    @override
    async def run(self, prefill_id: WorkerId, decode_id: WorkerId) -> PairCheckResult:
        prefill, decode = self._find("prefill_worker", prefill_id), self._find("decode_worker", decode_id)
        request = self._request(prefill, decode)
        handle = self._router.submit(request, self._clock())
        try:
            async for _ in handle:
                pass
        finally:
            if handle.completion is None:
                handle.cancel()
        return self._result(request, prefill)

    def _find(self, field: str, worker_id: WorkerId) -> WorkerInfo:
        infos = {view.info.worker_id: view.info for view in self._router.view().workers}
        if worker_id not in infos:
            raise InvalidRequestError(
                field, f"there is no worker {worker_id!r}; there are {', '.join(sorted(infos)) or 'none'}"
            )
        return infos[worker_id]

    def _request(self, prefill: WorkerInfo, decode: WorkerInfo) -> RoutedRequest:
        longest = min(min(info.max_model_len, info.num_blocks * info.block_size) for info in (prefill, decode))
        num_tokens = min(MAX_PROMPT_TOKENS, prefill.token_budget, longest - OUTPUT_TOKENS)
        if num_tokens < 1:
            raise UnavailableError(f"{prefill.worker_id}, {decode.worker_id}: not even one token fits", "no_room")
        prompt = pack_token_ids(self._dice.randrange(self._vocab_size) for _ in range(num_tokens))
        root = BlockHash(self._dice.randbytes(HASH_BYTES))
        return RoutedRequest(
            request_id=self._mint_id(),
            prompt_token_ids=prompt,
            block_hashes=tuple(chain_hashes(root, prompt)),
            root_hash=root,
            sampling=Sampling(temperature=0.0, max_tokens=OUTPUT_TOKENS),
            deadline=self._clock() + TIMEOUT_S,
            pair=(prefill.worker_id, decode.worker_id),
        )

    def _result(self, request: RoutedRequest, prefill: WorkerInfo) -> PairCheckResult:
        trace = self._router.trace(request.request_id)
        if trace is None:
            raise InternalError("the probe ended without a trace")
        computed, moved = trace.stages.get("first_token"), trace.stages.get("kv_transfer")
        return PairCheckResult(
            kv_bytes=trace.kv_bytes,
            expected_bytes=prefill.kv_layout.bytes_of(request.num_prompt_tokens),
            exposed_s=0.0 if computed is None or moved is None else max(0.0, moved - computed),
            transport=trace.transport,
        )
