"""The blocking client: makes the calls of `calls.py` one after the other.

It has gRPC's blocking stubs, and does not run `AsyncClient` on an event loop in a thread. That was tried, and is worse
for its users. In a process that has used gRPC's asyncio, a child made by `fork` hangs in its first call, even with a
new client, because the thread that polls for gRPC's asyncio does not survive a fork. With blocking stubs the child's
calls succeed; only the first one on a connection that the parent had used fails, with `UnavailableError`. Each client
would need a thread more, and each token costs more: over loopback, with 200 tokens at intervals of 5 ms, the median
time from sent to received was 0.45 to 0.50 ms instead of 0.37 to 0.40 ms, and the client's CPU time 0.35 ms instead of
0.29 ms a token. So what the two clients decide is written once, in `calls.py`, and each has only the code that waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, Self, TypeVar, Unpack

import grpc

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


class Client(ClientBase):
    """A blocking client; its methods may be called from several threads. A context manager."""

    def _open_channel(self, address: str, tls: grpc.ChannelCredentials | None) -> Any:
        if tls is None:
            return grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
        return grpc.secure_channel(address, tls, options=CHANNEL_OPTIONS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; running calls end as cancelled."""
        self._channel.close()

    def stream(
        self,
        prompt: Prompt,
        *,
        model: str | None = None,
        timeout_s: float | None = None,
        targets: Targets | None = None,
        **options: Unpack[Options],
    ) -> Generator[Delta, None, None]:
        """Stream the answer as it is made. When the gateway dies, the stream continues where it broke at the same
        address: through another gateway that listens there, or through the same one after its restart; see `resume_s`.

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

    def generate(
        self,
        prompt: Prompt,
        *,
        model: str | None = None,
        timeout_s: float | None = None,
        targets: Targets | None = None,
        **options: Unpack[Options],
    ) -> Answer:
        """Generate the whole answer; one, not `n`. Arguments and errors as for `stream`."""
        return self._run(self._calls.generate(prompt, options, model, timeout_s, targets))

    def models(self) -> list[Model]:
        """The models that the gateway serves."""
        return self._run(self._calls.models())

    def tokenize(self, prompt: str | Sequence[Message], *, model: str | None = None) -> list[int]:
        """The ids that `generate` would use."""
        return self._run(self._calls.tokenize(prompt, model))

    def detokenize(self, token_ids: Sequence[int], *, model: str | None = None) -> str:
        """The text of ids, special tokens left out."""
        return self._run(self._calls.detokenize(token_ids, model))

    def cluster_state(self) -> ClusterState:
        """The pools, and the workers with their load."""
        return self._run(self._calls.cluster_state())

    def scale(self, sizes: Mapping[str, int]) -> None:
        """Make pools larger or smaller from now on, `{"prefill": 3, "decode": 2}`: all of them, or none. Returns when
        that is noted; `cluster_state` shows the progress. Raises `InvalidRequestError` naming the pool."""
        self._run(self._calls.scale(sizes))

    def apply(
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
        return self._run(
            self._calls.apply(config, dry_run=dry_run, surge=surge, restart=restart, ready_timeout_s=ready_timeout_s)
        )

    def drain(self, worker_id: str, deadline_s: float | None = None) -> None:
        """Replace a worker by a new process, after its sequences have moved to others or ended. What it still has
        `deadline_s` seconds later is computed again elsewhere. Returns when that is noted."""
        self._run(self._calls.drain(worker_id, deadline_s))

    def forget(self, tenant: str) -> tuple[list[str], list[str]]:
        """Have all workers drop the KV that they keep of a tenant, in memory and in files, except what running
        sequences use. Returns the workers that were told, and those that were not reached and may still have some.
        Raises `InvalidRequestError` after that for a tenant that no key has: the name may be misspelt."""
        return self._run(self._calls.forget(tenant))

    def add_adapter(self, name: str, path: str, base: str = "") -> tuple[Adapter, list[str]]:
        """Serve the LoRA adapter in a folder below `adapters.folder` under a name, or replace the one of that name.
        `base` may be left out where one model takes adapters. Returns how it is served, and what did not go as it
        should."""
        return self._run(self._calls.add_adapter(name, path, base))

    def remove_adapter(self, name: str) -> list[str]:
        """Serve an adapter no more; answers that run end with it. Returns what did not go as it should."""
        return self._run(self._calls.remove_adapter(name))

    def adapters(self) -> list[Adapter]:
        """All adapters that are registered, by name."""
        return self._run(self._calls.adapters())

    def explain(self, request_id: str) -> Explanation:
        """Explain where a recent request ran and what moved. Raises `RequestNotFoundError` if the gateway does not know
        the id (any more)."""
        return self._run(self._calls.explain(request_id))

    def requests(self, limit: int = 20) -> list[Explanation]:
        """Explanations of the latest requests, newest first."""
        return self._run(self._calls.requests(limit))

    def load(self, limit: int = 600) -> RecentLoad:
        """The latest requests, newest first, and the workers as placement sees them: what a replay needs."""
        return self._run(self._calls.load(limit))

    def shape(self) -> Shape:
        """Where answers decode, since when, and the latest comparisons."""
        return self._run(self._calls.shape())

    def usage(self, days: int = 7, key: str = "", limit: int = 10_000) -> UsageByDay:
        """Use of keys by day and model in the last `days` days (UTC), the present one included: an admin's key reads
        that of all keys or of one (`key`, a tenant's name), another key its own. At most `limit` entries, the latest
        days first. Raises `UnavailableError` where the gateway keeps no record of use."""
        return self._run(self._calls.usage(days, key, limit))

    def set_decodes(self, decodes: str, comparison: ShapeComparison | None = None) -> None:
        """Set the placement of new answers, `spread` or `gather`, in a cluster of mode elastic; running ones stay where
        they are. The gateway keeps the comparison for `shape`."""
        self._run(self._calls.set_decodes(decodes, comparison))

    def watch(self, interval_s: float = 1.0) -> Generator[ClusterState, None, None]:
        """Yield the state of the cluster, at once and then every `interval_s` seconds (at least 0.1), until it is
        closed."""
        return self._stream(self._calls.watch(interval_s), state_of)

    def probe(self, prefill_worker: str, decode_worker: str) -> Probe:
        """Send a short random prompt through this pair of workers. Raises `UnavailableError` if it cannot run there
        now."""
        return self._run(self._calls.probe(prefill_worker, decode_worker))

    def _run(self, flow: Flow[T]) -> T:
        """Make the calls of a flow, and return its result."""
        try:
            step = next(flow)
            while True:
                try:
                    response = self._perform(step)
                except grpc.RpcError as error:
                    failure = error_of(error)
                    failure.__cause__ = error
                    step = flow.throw(failure)
                else:
                    step = flow.send(response)
        except StopIteration as end:
            result: T = end.value
            return result

    def _perform(self, step: Call | Pause) -> Any:
        if isinstance(step, Pause):
            return time.sleep(step.seconds)
        return step.begin()

    def _answer(self, flow: Flow[StreamedAnswer]) -> Generator[Delta, None, None]:
        answer = self._run(flow)
        while True:
            running = answer.begin()
            try:
                for response in running:
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
            time.sleep(pause_s)

    def _stream(self, flow: Flow[Call], read: Callable[[Any], T]) -> Generator[T, None, None]:
        call = (self._run(flow)).begin()
        try:
            for response in call:
                yield read(response)
        except grpc.RpcError as error:
            raise error_of(error) from error
        finally:
            call.cancel()
