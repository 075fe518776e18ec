"""A simulated cluster for calls of several tenants: the real router core and the real engine cores, in virtual time.

    call ──> router ──> P: a fixed time for each prompt token ──> D: a fixed time for each step ──> first token, end

Nothing is random here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from disagg.engine.config import WorkerConfig
from disagg.loadtests.workload.workload import PromptPart
from disagg.proto.errors import DisaggError
from disagg.proto.ids import RequestId
from disagg.proto.messages import KvLayout, RoleName, Sampling
from disagg.router.api import Completion, RoutedRequest, TenantLimits
from disagg.router.config import RouterConfig
from disagg.simulator.cluster import SimulatedCluster
from disagg.simulator.world.prompts import EMPTY, STOP_TOKEN, answer_token, extend
from disagg.simulator.world.settings import ClusterSpec, PoolSpec
from disagg.simulator.world.users import ROOT
from disagg.step_times.interface import StepWork

PREFILL_MS = 0.05
"""Milliseconds of a prompt token."""
STEP_MS = 20.0
"""Milliseconds of a step with decodes."""
TOKEN_BUDGET = 2048
MAX_MODEL_LEN = 16384
PREFILL_BLOCKS = 1 << 16
_LAYOUT = KvLayout.dense(num_layers=2, num_kv_heads=2, head_dim=4, dtype="fake", bytes_per_token=1024)


class FixedTimes:
    """A fixed time for each prompt token, and one for each step with decodes, however many."""

    def step_s(self, work: StepWork) -> float:
        """Seconds of a step."""
        return (PREFILL_MS * work.prefill_tokens + (STEP_MS if work.num_decodes else 0.0)) / 1000


@dataclass(frozen=True, kw_only=True)
class Wish:
    """One answer that a client wants."""

    label: str
    tenant: str
    limits: TenantLimits
    prompt_tokens: int
    output_tokens: int
    max_tokens: int
    ttft_slo_s: float | None = None


@dataclass
class Seen:
    """What the client of one answer saw. Implements `Client`; times in seconds."""

    wish: Wish
    arrival: float
    ttft_s: float | None = None
    error: str = ""
    ended: float | None = None

    def on_tokens(self, num_tokens: int, now: float) -> None:
        """Note the first token."""
        if self.ttft_s is None:
            self.ttft_s = now - self.arrival

    def on_finish(self, completion: Completion, now: float) -> None:
        """Note the end."""
        self.ended = now

    def on_error(self, error: DisaggError, now: float) -> None:
        """Note the error."""
        self.error, self.ended = error.code, now


class TenantsCluster:
    """A simulated cluster without users of its own: calls come by `ask`."""

    def __init__(
        self, num_prefills: int, num_decodes: int, places: int, num_blocks: int, config: RouterConfig | None = None
    ) -> None:
        self.seen: dict[RequestId, Seen] = {}
        spec = ClusterSpec(
            pools=[
                _pool("prefill", num_prefills, 512, PREFILL_BLOCKS),
                _pool("decode", num_decodes, places, num_blocks),
            ],
            kv_layout=_LAYOUT,
            max_model_len=MAX_MODEL_LEN,
            router=config or RouterConfig(local_prefill="never"),
        )
        self._cluster = SimulatedCluster(spec, ())

    def at(self, when: float, what: Callable[[], None]) -> None:
        """Do this then."""
        self._cluster.loop.at(when, what)

    def run(self, until: float) -> None:
        """Let time pass."""
        self._cluster.loop.run(until)

    def problems(self) -> list[str]:
        """What is still held, and inconsistencies."""
        return self._cluster.problems()

    def ask(self, wish: Wish, num_answers: int = 1) -> None:
        """A call arrives."""
        now = self._cluster.loop.now
        call = []
        for _ in range(num_answers):
            number = len(self.seen)
            request_id = RequestId(f"r{number}")
            self.seen[request_id] = Seen(wish, now)
            self._cluster.answers.add(request_id, answer_token(number), wish.output_tokens, is_followed=False)
            prompt = extend(EMPTY, (PromptPart(wish.prompt_tokens, ("prompt", number)),), ROOT, 1)
            request = RoutedRequest(
                request_id=request_id,
                prompt_token_ids=prompt.token_ids,
                block_hashes=prompt.hashes,
                root_hash=ROOT,
                sampling=Sampling(temperature=0.0, max_tokens=wish.max_tokens, stop_token_ids=(STOP_TOKEN,)),
                ttft_slo_s=wish.ttft_slo_s,
                tenant=wish.tenant,
                limits=wish.limits,
                prepaid_tokens=wish.prompt_tokens + wish.max_tokens,
            )
            call.append((request, self.seen[request_id]))
        self._cluster.gateway.submit_call(call, now)


def _pool(role: RoleName, size: int, places: int, num_blocks: int) -> PoolSpec:
    worker = WorkerConfig(
        worker_id="", roles=(role,), model_path="fake", max_num_seqs=places, token_budget=TOKEN_BUDGET, swap_bytes=0
    )
    return PoolSpec(name=role, size=size, worker=worker, num_blocks=num_blocks, times=FixedTimes())
