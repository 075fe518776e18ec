"""A router and a gateway in this process before real workers, served over real sockets: the test decides where a
request is placed and sees its trace, and ends the gateway in the middle of an answer as if its process had died."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from disagg.gateway.config import GatewayConfig, ModelSource
from disagg.gateway.guardrails.config import GuardrailOptions
from disagg.gateway.server import GatewayServer
from disagg.proto.ids import GatewayId, WorkerId
from disagg.proto.messages import WorkerInfo, WorkerMetrics
from disagg.router.api import RequestTrace
from disagg.router.config import RouterConfig
from disagg.router.shell.server import RouterServer
from tests.integration.matrix.fleet import RESERVE_TOKENS
from tests.support.ports import free_port
from tests.support.router import EMPTY
from tests.support.secret import SECRET
from tests.support.waiting import WAIT_S, eventually

MODEL = "tiny"
NUM_TRACES = 50
ROUTER = RouterConfig(policy="random", local_prefill="never", admission=False, decode_reserve_tokens=RESERVE_TOKENS)


class FrontEnd:
    """Owner of both servers; see `open_front_end`."""

    def __init__(self, infos: Sequence[WorkerInfo], folder: Path, guardrails: tuple[GuardrailOptions, ...]) -> None:
        self._infos = {info.worker_id: info for info in infos}
        self._avoided: set[str] = set()
        self._gateway: GatewayServer | None = None
        self._config = GatewayConfig(
            models=(ModelSource(name=MODEL, path=str(folder), prefix_root=infos[0].fingerprint),),
            guardrails=guardrails,
            port=free_port(),
            http_port=free_port(),
        )

    @property
    def address(self) -> str:
        assert self._gateway is not None
        return self._gateway.address

    @property
    def http_url(self) -> str:
        assert self._gateway is not None
        return f"http://{self._gateway.http_address}"

    async def start(self) -> None:
        self.router = RouterServer(ROUTER, GatewayId("gateway"), list(self._infos.values()), SECRET)
        await self.router.start()
        await self.router.wait_until_connected(WAIT_S)
        await eventually(self._is_reported, "a worker has not reported")
        for name in self._avoided & self._infos.keys():
            self.avoid(name)
        self._gateway = GatewayServer(self._config, {"": self.router})
        await self._gateway.start()

    def _is_reported(self) -> bool:
        """Whether the counters of all workers are known."""
        return self.router.view().counters.keys() >= self._infos.keys()

    async def stop(self) -> None:
        if self._gateway is not None:
            await self._gateway.stop(0.0)
        await self.router.stop()

    async def restart(self) -> None:
        """End both, and have others at the same addresses, which know nothing of what runs."""
        await self.stop()
        await self.start()

    async def lose(self, name: str) -> None:
        """Forget a worker that was killed."""
        await self.router.remove_worker(self._infos.pop(WorkerId(name)).worker_id)

    def avoid(self, name: str) -> None:
        """Place nothing on a worker; what decodes there moves away."""
        self._avoided.add(name)
        self.router.drain_worker(WorkerId(name), self._infos[WorkerId(name)].incarnation)

    def use(self, name: str) -> None:
        """Place requests on a worker again that was avoided."""
        self._avoided.discard(name)
        self.router.resume_worker(WorkerId(name), self._infos[WorkerId(name)].incarnation)

    def prefill_on_decode_workers(self, *, may: bool) -> None:
        """Whether a decode worker may compute prompts."""
        self.router.configure(msgspec.structs.replace(ROUTER, local_prefill="auto" if may else "never"))

    def traces(self, max_tokens: int) -> list[RequestTrace]:
        """The requests that allowed so many tokens, the latest first."""
        return [trace for trace in self.router.recent(NUM_TRACES) if trace.most_output_tokens == max_tokens]

    def counters(self, name: str) -> WorkerMetrics:
        """What a worker has counted up to its last report."""
        return self.router.view().counters.get(WorkerId(name), WorkerMetrics())


@asynccontextmanager
async def open_front_end(
    infos: Sequence[WorkerInfo], folder: Path, guardrails: tuple[GuardrailOptions, ...] = ()
) -> AsyncIterator[FrontEnd]:
    """Servers that hold nothing when they end."""
    front = FrontEnd(infos, folder, guardrails)
    try:
        await front.start()
        yield front
        assert front.router.check_integrity() == []
        assert front.router.holdings() == EMPTY
    finally:
        await front.stop()
