"""The client for asyncio: the methods of `Client`, to be awaited. It awaits the calls of `calls.py`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any, Self, TypeVar, Unpack

import grpc
import grpc.aio

from disagg.client.calls import Call, ClientBase, Flow, Pause, StreamedAnswer
from disagg.client.failures import error_of
from disagg.client.types import (
    CHANNEL_OPTIONS,
    Adapter,
    Answer,
    Applied,
    ClusterState,
    Delta,
    Explanation,
    Message,
    Model,
    Options,
    Probe,
    Prompt,
    RecentLoad,
    Shape,
    ShapeComparison,
    Targets,
    UsageByDay,
)
from disagg.client.wire import state_of

T = TypeVar("T")


class AsyncClient(ClientBase):
    """The client for asyncio, with the methods of `Client`. Belongs to the event loop that it was made on; an async
    context manager."""

    def _open_channel(self, address: str, tls: grpc.ChannelCredentials | None) -> Any:
        if tls is None:
            return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        return grpc.aio.secure_channel(address, tls, options=CHANNEL_OPTIONS)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection; running calls end as cancelled."""
        await self._channel.close(None)

    def stream(
        self,
        prompt: Prompt,
        *,
        model: str | None = None,
        timeout_s: float | None = None,
        targets: Targets | None = None,
        **options: Unpack[Options],
    ) -> AsyncGenerator[Delta, None]:
        """Stream the answer as it is made. When the gateway dies, the stream continues where it broke at the same
        address: through another gateway that listens there, or through the same one after its restart; see `resume_s`.
        Close it with `contextlib.aclosing` when leaving it early.

        Args:
            prompt: text, token ids or chat messages.
            model: a name of `models`; may be left out if there is only one.
            timeout_s: the request's deadline, in every phase.
            targets: targets of its latencies.
            options: see `Options`.

        Raises:
            TypeError, ValueError: if an option or the prompt is not of the right kind.
            DisaggError: while iterating, the error that the server answered.
        """
        return self._answer(self._calls.stream(prompt, options, model, timeout_s, targets))

    async def generate(
        self,
        prompt: Prompt,
        *,
        model: str | None = None,
        timeout_s: float | None = None,
        targets: Targets | None = None,
        **options: Unpack[Options],
    ) -> Answer:
        """Generate the whole answer; one, not `n`. Arguments and errors as for `stream`."""
        return await self._run(self._calls.generate(prompt, options, model, timeout_s, targets))

    async def models(self) -> list[Model]:
        """The models that the gateway serves."""
        return await self._run(self._calls.models())

    async def tokenize(self, prompt: str | Sequence[Message], *, model: str | None = None) -> list[int]:
        """The ids that `generate` would use."""
        return await self._run(self._calls.tokenize(prompt, model))

    async def detokenize(self, token_ids: Sequence[int], *, model: str | None = None) -> str:
        """The text of ids, special tokens left out."""
        return await self._run(self._calls.detokenize(token_ids, model))

    async def cluster_state(self) -> ClusterState:
        """The pools, and the workers with their load."""
        return await self._run(self._calls.cluster_state())

    async def scale(self, sizes: Mapping[str, int]) -> None:
        """Make pools larger or smaller from now on, `{"prefill": 3, "decode": 2}`: all of them, or none. Returns when
        that is noted; `cluster_state` shows the progress. Raises `InvalidRequestError` naming the pool."""
        await self._run(self._calls.scale(sizes))

    async def apply(
        self,
        config: Mapping[str, object],
        *,
        dry_run: bool = False,
        surge: bool = True,
        restart: bool = False,
        ready_timeout_s: float | None = None,
    ) -> Applied:
        """Give the cluster another configuration, worker by worker where workers have to be replaced. It returns when
        that is noted; `cluster_state` shows the progress.

        Args:
            config: the whole configuration, as in the YAML file.
            dry_run: only return what would be done.
            surge: start another worker before one is replaced; without, each pool has one worker less meanwhile.
            restart: replace all workers, also where nothing differs.
            ready_timeout_s: how long a new worker may take to be ready, before the old configuration is restored.

        Raises:
            InvalidRequestError: for a field that has a bad value or cannot be changed while the cluster runs.
            PermissionDeniedError: without the key of an admin, where the gateway has keys.
        """
        return await self._run(
            self._calls.apply(config, dry_run=dry_run, surge=surge, restart=restart, ready_timeout_s=ready_timeout_s)
        )

    async def drain(self, worker_id: str, deadline_s: float | None = None) -> None:
        """Replace a worker by a new process, after its sequences have moved to others or ended. What it still has
        `deadline_s` seconds later is computed again elsewhere. Returns when that is noted."""
        await self._run(self._calls.drain(worker_id, deadline_s))

    async def forget(self, tenant: str) -> tuple[list[str], list[str]]:
        """Have all workers drop the KV that they keep of a tenant, in memory and in files, except what running
        sequences use. Returns the workers that were told, and those that were not reached and may still have some.
        Raises `InvalidRequestError` after that for a tenant that no key has: the name may be misspelt."""
        return await self._run(self._calls.forget(tenant))

    async def add_adapter(self, name: str, path: str, base: str = "") -> tuple[Adapter, list[str]]:
        """Serve the LoRA adapter in a folder below `adapters.folder` under a name, or replace the one of that name.
        `base` may be left out where one model takes adapters. Returns how it is served, and what did not go as it
        should."""
        return await self._run(self._calls.add_adapter(name, path, base))

    async def remove_adapter(self, name: str) -> list[str]:
        """Serve an adapter no more; answers that run end with it. Returns what did not go as it should."""
        return await self._run(self._calls.remove_adapter(name))

    async def adapters(self) -> list[Adapter]:
        """All adapters that are registered, by name."""
        return await self._run(self._calls.adapters())

    async def explain(self, request_id: str) -> Explanation:
        """Explain where a recent request ran and what moved. Raises `RequestNotFoundError` if the gateway does not know
        the id (any more)."""
        return await self._run(self._calls.explain(request_id))

    async def requests(self, limit: int = 20) -> list[Explanation]:
        """Explanations of the latest requests, newest first."""
        return await self._run(self._calls.requests(limit))

    async def load(self, limit: int = 600) -> RecentLoad:
        """The latest requests, newest first, and the workers as placement sees them: what a replay needs."""
        return await self._run(self._calls.load(limit))

    async def shape(self) -> Shape:
        """Where answers decode, since when, and the latest comparisons."""
        return await self._run(self._calls.shape())

    async def usage(self, days: int = 7, key: str = "", limit: int = 10_000) -> UsageByDay:
        """Use of keys by day and model in the last `days` days (UTC), the present one included: an admin's key reads
        that of all keys or of one (`key`, a tenant's name), another key its own. At most `limit` entries, the latest
        days first. Raises `UnavailableError` where the gateway keeps no record of use."""
        return await self._run(self._calls.usage(days, key, limit))

    async def set_decodes(self, decodes: str, comparison: ShapeComparison | None = None) -> None:
        """Set the placement of new answers, `spread` or `gather`, in a cluster of mode elastic; running ones stay where
        they are. The gateway keeps the comparison for `shape`."""
        await self._run(self._calls.set_decodes(decodes, comparison))

    def watch(self, interval_s: float = 1.0) -> AsyncGenerator[ClusterState, None]:
        """Yield the state of the cluster, at once and then every `interval_s` seconds (at least 0.1), until it is
        closed. Close it with `contextlib.aclosing` when leaving it early."""
        return self._stream(self._calls.watch(interval_s), state_of)

    async def probe(self, prefill_worker: str, decode_worker: str) -> Probe:
        """Send a short random prompt through this pair of workers. Raises `UnavailableError` if it cannot run there
        now."""
        return await self._run(self._calls.probe(prefill_worker, decode_worker))

    async def _run(self, flow: Flow[T]) -> T:
        """Make the calls of a flow, and return its result."""
        try:
            step = next(flow)
            while True:
                try:
                    response = await self._perform(step)
                except grpc.RpcError as error:
                    failure = error_of(error)
                    failure.__cause__ = error
                    step = flow.throw(failure)
                else:
                    step = flow.send(response)
        except StopIteration as end:
            result: T = end.value
            return result

    async def _perform(self, step: Call | Pause) -> Any:
        if isinstance(step, Pause):
            return await asyncio.sleep(step.seconds)
        return await step.begin()

    async def _answer(self, flow: Flow[StreamedAnswer]) -> AsyncGenerator[Delta, None]:
        answer = await self._run(flow)
        while True:
            running = answer.begin()
            try:
                async for response in running:
                    delta = answer.take(response)
                    if delta is not None:
                        yield delta
                return
            except grpc.RpcError as error:
                pause_s = answer.pause_s(error)
                if pause_s is None:
                    return
            finally:
                running.cancel()
            await asyncio.sleep(pause_s)

    async def _stream(self, flow: Flow[Call], read: Callable[[Any], T]) -> AsyncGenerator[T, None]:
        call = (await self._run(flow)).begin()
        try:
            async for response in call:
                yield read(response)
        except grpc.RpcError as error:
            raise error_of(error) from error
        finally:
            call.cancel()
