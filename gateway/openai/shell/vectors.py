"""`/v1/embeddings`, `/rerank` and `/score`: a body becomes a call, the vectors of its prompts become JSON."""

from __future__ import annotations

from typing import Final

import msgspec

from disagg.gateway.calls import CallScope, Times, no_support
from disagg.gateway.event_loop.shell.turns import run_cooperatively
from disagg.gateway.http.quota_headers import quota_headers
from disagg.gateway.http.shell.exchange import Exchange
from disagg.gateway.openai.schema import EmbeddingBody, RerankBody, ScoreBody, decoded
from disagg.gateway.openai.shell.completions import Completions
from disagg.gateway.openai.vectors import (
    Head,
    Pairs,
    Wanted,
    check_normalizing,
    embeddings_json,
    pooling_of,
    read_embeddings,
    read_rerank,
    read_score,
    rerank_json,
    score_json,
    scores_of,
    wanted_pairs,
)
from disagg.gateway.requests.part_counts import Cooperative
from disagg.gateway.text.pooling import PoolingInfo
from disagg.proto.ids import RequestId
from disagg.proto.messages import Pooling

_EMBEDDINGS: Final = msgspec.json.Decoder(EmbeddingBody)
_RERANK: Final = msgspec.json.Decoder(RerankBody)
_SCORE: Final = msgspec.json.Decoder(ScoreBody)


class Vectors:
    """Handlers; `completions` open the calls."""

    def __init__(self, completions: Completions) -> None:
        self._completions = completions
        self._limits = completions.limits

    async def embeddings(self, exchange: Exchange, request_id: RequestId) -> None:
        """`POST /v1/embeddings`."""
        async with self._completions.opened(exchange, request_id, "embd-") as (scope, times):
            body, wanted = await self._limits.read(exchange, _read_embeddings)
            info = _pooling_info(scope, body.model, "Embeddings")
            if info.kind == "score":
                raise no_support("Embeddings")
            check_normalizing(body, info)
            pooling = pooling_of(info, body.dimensions, num_texts=len(wanted.prompts))
            head, vectors = await self._computed(exchange, scope, times, wanted, pooling, body.truncate_prompt_tokens)
            answer = await run_cooperatively(embeddings_json(head, vectors, body.encoding_format or "float"))
            await scope.finished()
            await exchange.respond(200, answer)

    async def rerank(self, exchange: Exchange, request_id: RequestId) -> None:
        """`POST /v1/rerank`, and without `/v1`."""
        async with self._completions.opened(exchange, request_id, "rerank-") as (scope, times):
            body, pairs = await self._limits.read(exchange, _read_rerank)
            head, scores = await self._scored(exchange, scope, times, pairs, "Rerank (Score)")
            await scope.finished()
            await exchange.respond(200, rerank_json(head, body, pairs.seconds, scores))

    async def score(self, exchange: Exchange, request_id: RequestId) -> None:
        """`POST /v1/score`, and without `/v1`."""
        async with self._completions.opened(exchange, request_id, "score-") as (scope, times):
            pairs = await self._limits.read(exchange, _read_score)
            head, scores = await self._scored(exchange, scope, times, pairs, "Score")
            await scope.finished()
            await exchange.respond(200, score_json(head, scores))

    async def _scored(
        self, exchange: Exchange, scope: CallScope, times: Times, pairs: Pairs, api: str
    ) -> tuple[Head, list[float]]:
        info = _pooling_info(scope, pairs.model, api)
        wanted = wanted_pairs(pairs, info)
        pooling, truncated = pooling_of(info), pairs.truncate_prompt_tokens
        head, vectors = await self._computed(exchange, scope, times, wanted, pooling, truncated)
        return head, await run_cooperatively(scores_of(wanted, vectors))

    async def _computed(
        self,
        exchange: Exchange,
        scope: CallScope,
        times: Times,
        wanted: Wanted,
        pooling: Pooling,
        truncate_prompt_tokens: int | None,
    ) -> tuple[Head, list[bytes]]:
        """The vectors of all prompts. Raises whatever is wrong with the call or happens to it."""
        generator = scope.generator
        exchange.late_headers = lambda: quota_headers(generator.remaining_quota(scope.call.caller))
        model = generator.model.info.name
        inputs = wanted.inputs(model, pooling, truncate_prompt_tokens)
        async with exchange.until_disconnect():
            admitted = await scope.admit(inputs, wanted.names, times)
            found = await scope.vectors(admitted)
        head = Head(
            call_id=scope.call.response_id,
            created=int(self._completions.wall_clock()),
            model=model,
            num_prompt_tokens=sum(vector.num_prompt_tokens for vector in found),
        )
        return head, [vector.numbers for vector in found]


def _pooling_info(scope: CallScope, model: str | None, api: str) -> PoolingInfo:
    """How the model of a call makes vectors. Raises as `CallScope.find`."""
    info = scope.find(model, api).model.info.pooling
    assert info is not None, "it gives vectors"
    return info


def _read_embeddings(raw: bytes) -> Cooperative[tuple[EmbeddingBody, Wanted]]:
    def read(body: EmbeddingBody) -> Cooperative[tuple[EmbeddingBody, Wanted]]:
        return body, (yield from read_embeddings(body))

    return decoded(raw, _EMBEDDINGS, read)


def _read_rerank(raw: bytes) -> Cooperative[tuple[RerankBody, Pairs]]:
    def read(body: RerankBody) -> Cooperative[tuple[RerankBody, Pairs]]:
        return body, (yield from read_rerank(body))

    return decoded(raw, _RERANK, read)


def _read_score(raw: bytes) -> Cooperative[Pairs]:
    return decoded(raw, _SCORE, read_score)
