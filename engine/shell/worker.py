"""The shell of a worker process, with one role or both.

    start()   build the model runner (over all ranks, if there are several; this process is the first), bind the control
              server, start engine thread and roles, return `WorkerInfo`
    ...       sessions bring dispatches and cancels, the engine steps, the outbox carries tokens back
    stop()    roles give up their attempts, the server closes, both threads end, then the other ranks

A bug, on either thread, ends the worker (`crashed`): after a lost event none of its counts could be trusted. So does
the loss of a rank or of the device. What peers and gateways send never does.

Threads: the engine thread owns model, cache and scheduler; one asyncio thread owns sockets, sessions, roles and
outbox. They meet in `EngineThread.post` (commands down) and `Worker._on_batch` (events up).
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from disagg.connections.cluster_secret import ClusterSecret
from disagg.engine import commands
from disagg.engine.adapters.folder import AdapterError
from disagg.engine.commands import Command, Event, FetchEnded, FetchOrdered, FetchPrefix, Gathered, TokenSampled
from disagg.engine.config import WorkerConfig
from disagg.engine.core.calibration import calibrate
from disagg.engine.core.engine_core import EngineCore
from disagg.engine.core.outbox import Outbox
from disagg.engine.core.reports import PendingPrompts
from disagg.engine.kv_transfer.transport import Checksum
from disagg.engine.parallel.factories import choose_threads, make_runner, warm_up
from disagg.engine.parallel.group import Group
from disagg.engine.parallel.interfaces import Followers, NoFollowers, StartRanks
from disagg.engine.plan import Buffer, ModelRunner
from disagg.engine.shell.adapter_loader import AdapterLoader
from disagg.engine.shell.calibration_memory import remembered_calibration
from disagg.engine.shell.engine_thread import Batch, EngineThread
from disagg.engine.shell.parts import DEFAULT_PARTS, WorkerParts
from disagg.engine.shell.role import Role, RoleContext
from disagg.engine.shell.service import WorkerService
from disagg.engine.shell.tier_disk import TierDisk, open_tier_disk
from disagg.engine.start_stages import StartStages
from disagg.engine.tiers.sizes import staging_bytes
from disagg.engine.tiers.store import TierParts
from disagg.proto.clock.process_clock import AwakeLoop, process_clock
from disagg.proto.errors import ConfigError
from disagg.proto.ids import AttemptKey, GatewayId, Incarnation, WorkerId, is_probe
from disagg.proto.messages import (
    Adapter,
    AdapterLoaded,
    AdapterState,
    AdapterUnloaded,
    AuditReport,
    BlocksSnapshot,
    BufferSize,
    Cancel,
    CancelMigration,
    Connect,
    Dispatch,
    ForgetTenant,
    GatewayToWorker,
    Migrate,
    StepSample,
    TransferCount,
    WorkerInfo,
)

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S = 5.0
"""How long a thread may take to end beyond its grace period."""
QUIET_SHARE = 0.9
"""Share of its core that a worker has while it measures its steps. With less, it logs that the machine was busy."""
LAST_TASKS_S = 1.0
"""Seconds for what gRPC still has to do after its server stopped."""


class RoleFactory(Protocol):
    """Makes a role for a worker."""

    def __call__(self, context: RoleContext) -> Role:
        """The role, not started."""
        ...


class Worker:
    """The server, sessions, roles and engine thread of a worker process. Owner of the asyncio side.

    Raises:
        ConfigError: the worker has several ranks, and there is no `start_ranks` to start the other ranks.
    """

    def __init__(
        self,
        config: WorkerConfig,
        role_factories: Sequence[RoleFactory],
        secret: ClusterSecret,
        start_ranks: StartRanks | None = None,
        *,
        parts: WorkerParts = DEFAULT_PARTS,
    ) -> None:
        if config.num_ranks > 1 and start_ranks is None:
            key, num_others = "tp" if config.tp > 1 else "pp", config.num_ranks - 1
            raise ConfigError(
                f"{key}: a worker of {config.num_ranks} ranks needs `start_ranks`, to start {num_others} of them"
            )
        self.config = config
        self.cluster_secret = secret
        self.parts = parts
        self.outbox = Outbox()
        self.incarnation = Incarnation(uuid.uuid4().hex[:16])
        self._role_factories = role_factories
        self._roles: list[Role] = []
        self._pending_prompts = PendingPrompts()
        self._probes: dict[GatewayId, int] = {}
        """Prompt tokens of each probe whose prompt is being computed here, by the id of the gateway that probes."""
        self._info: WorkerInfo | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop_event: asyncio.Event | None = None
        self._started = False
        self._ready = threading.Event()
        self._start_error: BaseException | None = None
        self._thread = threading.Thread(target=self._run_loop, name="asyncio", daemon=True)
        self._now = process_clock().now
        self.stages = StartStages(time.monotonic)
        """Stages of the worker's start."""
        self._tier_disk: TierDisk | None = None
        self._adapter_loader: AdapterLoader | None = None
        self._one_load = asyncio.Lock()
        """Held from the read of an operator's adapter until it has a slot or none: followers keep no second one."""
        self._group: Group | None = None
        """The other ranks; None where there are none."""
        if config.num_ranks > 1 and start_ranks is not None:
            self._group = Group(config, secret, start_ranks, self._on_crash)
        self.followers: Followers = NoFollowers() if self._group is None else self._group.followers
        self.crashed = threading.Event()
        """Set when the worker can work no longer: the process should exit and be restarted."""

    # ------------------------------------------------------------ start and stop

    def start(self) -> WorkerInfo:
        """Load the model, bind, start. Blocks until the worker can be used; raises what went wrong otherwise."""
        try:
            self._make_engine()
        except BaseException:
            if self._group is not None:
                self._group.close()
            if self._tier_disk is not None:
                self._tier_disk.stop(0.0)
            raise
        self._started = True
        self._thread.start()
        self._ready.wait()
        if self._start_error is not None:
            self.stop()
            raise self._start_error
        return self.info

    def _make_engine(self) -> None:
        config = self.config
        runner: ModelRunner = self._make_runner() if self._group is None else self._form(self._group)
        self.stages.begin("warm_up")
        warm_up(runner, config)
        config = msgspec.structs.replace(config, num_threads=choose_threads(runner, config, time.monotonic))
        self.stages.begin("calibration")
        with remembered_calibration(runner, config) as memory:
            self._calibration = memory.samples = self._measured(runner, memory.samples)
        self.stages.end()
        self._tier_disk = open_tier_disk(config, runner, self.cluster_secret, self.parts.wrap_files)
        if config.adapters is not None:
            self._adapter_loader = AdapterLoader(runner)
        core = EngineCore(
            self.parts.wrap_runner(runner),
            config=config,
            calibration=self._calibration,
            tier_parts=TierParts(process_clock().now, self._tier_disk, time.time),
            order_adapter=None if self._adapter_loader is None else self._adapter_loader.order,
        )
        self._runner = runner
        self._engine = EngineThread(core, self._deliver, self._on_crash, self._on_gathered, config.token_interval_s)
        self._max_model_len, self._idle_load, self._tiers = core.max_model_len, core.load(), core.tiers

    def _measured(self, runner: ModelRunner, known: tuple[StepSample, ...]) -> tuple[StepSample, ...]:
        """What the router begins with; by processor time where this thread takes part in all that is computed."""
        config, now = self.config, process_clock().now
        wall_s, work_s = now(), time.thread_time()
        computes_alone = config.device == "cpu" and config.num_ranks == 1 and not config.is_fake
        work_clock = time.thread_time if computes_alone else None
        samples = calibrate(runner, config, now, known, work_clock)
        share = (time.thread_time() - work_s) / max(now() - wall_s, 1e-6)
        if computes_alone and share < QUIET_SHARE:
            text = "%s measured its steps while it had its core for %.0f %% of the time; what others took is left out"
            logger.info(text, config.worker_id, 100.0 * share)
        return samples

    def _form(self, group: Group) -> ModelRunner:
        self.stages.begin("ranks")
        return group.form()

    def _make_runner(self) -> ModelRunner:
        runner = make_runner(self.config, on_stage=self.stages.begin)
        runner.checksum = Checksum.of_secret(self.cluster_secret)
        return runner

    def stop(self, grace_s: float = 2.0) -> None:
        """End everything; returns when threads, sockets and tasks are gone. Idempotent."""
        if not self._started:
            return
        self._request_stop()
        self._end_thread("asyncio", self._join_asyncio, grace_s)
        if self._end_thread("engine", self._engine.stop, grace_s) and self._group is not None:
            self._group.close()
        if self._adapter_loader is not None and not self._adapter_loader.stop(grace_s):
            logger.error("%s: its folder of adapters did not answer in %.0f s", self.config.worker_id, grace_s)
        if self._tier_disk is not None and not self._tier_disk.stop(grace_s):
            logger.error("%s: the disk of its KV tier did not answer in %.0f s", self.config.worker_id, grace_s)

    def _end_thread(self, name: str, wait: Callable[[float], bool], grace_s: float) -> bool:
        """`wait` for a thread to end; whether it did. Another rank that hangs may hold it up, and is ended then."""
        worker_id = self.config.worker_id
        if wait(grace_s):
            return True
        if self._group is not None:
            logger.error("%s: the %s thread did not end in %.0f s: ending the other ranks", worker_id, name, grace_s)
            self._group.abandon()
        if wait(STOP_TIMEOUT_S):
            return True
        logger.error("%s: the %s thread did not end in %.0f s more; left as it is", worker_id, name, STOP_TIMEOUT_S)
        return False

    def _join_asyncio(self, timeout_s: float) -> bool:
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run_loop(self) -> None:
        try:
            with asyncio.Runner(loop_factory=AwakeLoop) as runner:
                runner.run(self._main())
        except BaseException as error:
            if self._ready.is_set():
                self._on_crash(error)
            else:
                self._start_error = error
                self._ready.set()

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop_event = asyncio.Event()
        self._roles = [factory(self) for factory in self._role_factories]
        self._service = WorkerService(self, self._idle_load, self.cluster_secret, self.parts.new_mailbox)
        ticker: asyncio.Task[None] | None = None
        try:
            await self._open()
            ticker = asyncio.create_task(self._tick_forever(), name="tick")
            self._ready.set()
            await self._stop_event.wait()
        finally:
            if ticker is not None:
                ticker.cancel()
            await self._close()

    async def _open(self) -> None:
        self.stages.begin("listen")
        role_handlers = [handler for role in self._roles for handler in role.handlers()]
        port = await self._service.bind(self.config.host, self.config.port, role_handlers)
        self._engine.start()
        if self._tier_disk is not None:
            self._tier_disk.start(self._engine.post)
        if self._adapter_loader is not None:
            self._adapter_loader.start(self._engine.post)
        for role in self._roles:
            await role.start()
        self.stages.end()
        self._info = self._make_info(f"{self.config.host}:{port}")
        logger.info("%s listens on %s", self.config.worker_id, self._info.address)

    async def _close(self) -> None:
        """End each part, also if another one fails to end."""
        ended = await asyncio.gather(*(role.stop() for role in self._roles), return_exceptions=True)
        for error in ended:
            if isinstance(error, Exception):
                logger.error("%s: a role did not stop; stopping the rest", self.config.worker_id, exc_info=error)
        await self._service.close()
        if others := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(others, timeout=LAST_TASKS_S)

    def _make_info(self, address: str) -> WorkerInfo:
        runner, config = self._runner, self.config
        return WorkerInfo(
            worker_id=WorkerId(config.worker_id),
            incarnation=self.incarnation,
            roles=config.roles,
            is_elastic=config.is_elastic,
            address=address,
            pid=os.getpid(),
            start_id=config.start_id,
            config_hash=config.config_hash,
            fingerprint=runner.fingerprint,
            kv_layout=runner.layout,
            num_blocks=runner.num_blocks,
            block_size=runner.block_size,
            max_num_seqs=config.num_places,
            token_budget=config.token_budget,
            max_model_len=self._max_model_len,
            tp=runner.shape.tp,
            stage_ends=runner.shape.stage_ends,
            ep=config.ep,
            calibration=self._calibration,
            decode_reserve_tokens=config.decode_reserve_tokens,
            watermark_blocks=config.watermark_blocks(runner.num_blocks),
            scheduling=config.scheduling,
            max_itl_ms=config.max_itl_ms,
            start_phases=self.stages.phases,
            tiers=self._tiers,
            fetches=config.fetch,
            arithmetic=runner.arithmetic,
            expert_share=runner.expert_share,
            buffers=(*runner.buffers, BufferSize("swap", config.swap_bytes), *self._tier_buffers),
        )

    @property
    def _tier_buffers(self) -> list[BufferSize]:
        tiers = self.config.tiers
        if tiers is None:
            return []
        buffers = [BufferSize("tier_host", tiers.host_bytes)] if tiers.host_bytes else []
        if tiers.disk is not None:
            buffers.append(BufferSize("tier_staging", staging_bytes(self._runner.layout, self._runner.shape.tp)))
        return buffers

    async def _tick_forever(self) -> None:
        while True:
            await asyncio.sleep(self.config.transfer.heartbeat_s)
            self._call_and_flush(self._tick, ())

    def _tick(self) -> None:
        for role in self._roles:
            role.tick(self.now())

    # ------------------------------------------------------------ what roles use

    @property
    def info(self) -> WorkerInfo:
        """What the worker registers."""
        if self._info is None:
            raise RuntimeError("the worker has not started")
        return self._info

    def post(self, command: Command) -> None:
        """Queue a command for the engine."""
        self._engine.post(command)

    def new_staging(self, nbytes: int) -> Buffer:
        """A staging buffer of the runner's kind."""
        return self._runner.new_staging(nbytes)

    @property
    def digests(self) -> bool:
        """Whether the runner's device computes digests of KV."""
        return self._runner.digests

    def now(self) -> float:
        """Current time of the process's clock."""
        return self._now()

    def call_soon(self, callback: Callable[..., None], *args: Any) -> None:
        """Run `callback(*args)` on the asyncio thread, then flush. Dropped once the loop is gone."""
        loop = self._loop
        if loop is None or loop.is_closed():
            return
        try:
            loop.call_soon_threadsafe(self._call_and_flush, callback, args)
        except RuntimeError:
            logger.debug("dropped a callback while stopping")

    def flush(self) -> None:
        """Send what the outbox holds, one message per gateway. Attempts of a gateway without a session end: such an
        attempt came through another worker, after `on_gateway_lost`."""
        for gateway_id, update in self.outbox.flush().items():
            if not self._service.send(gateway_id, update):
                self.on_gateway_lost(gateway_id)

    def _call_and_flush(self, callback: Callable[..., None], args: tuple[Any, ...]) -> None:
        try:
            callback(*args)
            self.flush()
        except Exception as error:
            self._on_crash(error)

    # ------------------------------------------------------------ engine side

    def _deliver(self, batch: Batch) -> None:
        self.call_soon(self._on_batch, batch)

    def _on_gathered(self, gathered: Gathered) -> None:
        self.call_soon(self._route, gathered)

    def _on_crash(self, error: BaseException) -> None:
        """A bug, on any thread: end the worker."""
        logger.critical("%s: internal error in worker; exiting", self.config.worker_id, exc_info=error)
        self.crashed.set()
        self._request_stop()

    def _request_stop(self) -> None:
        loop, stop_event = self._loop, self._stop_event
        if loop is None or stop_event is None:
            return
        try:
            loop.call_soon_threadsafe(stop_event.set)
        except RuntimeError:
            logger.debug("%s: stop ignored, the event loop is closed already", self.config.worker_id)

    def _on_batch(self, batch: Batch) -> None:
        for event in batch.events:
            match event:
                case TokenSampled():
                    if is_probe(event.gateway_id):
                        self._leave_out(event)
                    self.outbox.token(event.gateway_id, event.key, event.index, event.token_id, event.logprobs)
                case FetchEnded():
                    self.outbox.fetched(event.gateway_id, event.message)
                case FetchOrdered():
                    for role in self._roles:
                        role.fetch(event)
                case _:
                    self._route(event)
        self._pending_prompts.added(batch.added)
        self._service.publish(batch)

    def _leave_out(self, event: TokenSampled) -> None:
        """A token of a probe, and its prompt with the first one, do not count. What was handed over comes with a token
        that the other worker sampled."""
        prompt_tokens = self._probes.pop(event.gateway_id, None)
        if prompt_tokens is not None or event.index > 0:
            self._service.leave_out(prompt_tokens or 0, 1)

    def _owns(self, key: AttemptKey) -> bool:
        return any(role.owns(key) for role in self._roles)

    def _route(self, event: Event) -> None:
        for role in [role for role in self._roles if role.owns(event.key)]:
            role.on_event(event)

    # ------------------------------------------------------------ gateway side, called by the service

    def on_message(self, message: GatewayToWorker, gateway_id: GatewayId) -> None:
        """A message of a gateway."""
        if self._stop_event is not None and self._stop_event.is_set():
            return  # The roles end all attempts, and the session ends.
        match message:
            case Cancel():
                for role in self._roles:
                    role.cancel(AttemptKey(message.request_id, message.attempt))
            case Connect():
                for role in self._roles:
                    role.connect(message.decode_peer)
            case Migrate():
                for role in self._roles:
                    role.migrate(message, gateway_id)
            case CancelMigration():
                for role in self._roles:
                    role.cancel_migration(AttemptKey(message.request_id, message.attempt), gateway_id)
            case ForgetTenant(tenant_tag=tag):
                self.post(commands.ForgetTenant(tag))
            case Dispatch():
                self._dispatch(message)
        self.flush()

    def forget_tenants(self, tags: Sequence[bytes]) -> None:
        """Drop what is kept of tenants. Any thread, once the worker has started."""
        for tag in tags:
            self.post(commands.ForgetTenant(tag))

    def _dispatch(self, dispatch: Dispatch) -> None:
        spec = dispatch.spec
        for role in self._roles:
            if role.takes(dispatch):
                if not self._owns(spec.key):  # else it is dropped, and the engine has the first one
                    self._pending_prompts.dispatched(spec.key, spec.num_known_tokens)
                    if is_probe(spec.gateway_id):
                        self._probes[spec.gateway_id] = spec.num_known_tokens
                    if dispatch.fetch is not None and self.config.fetch:
                        self.post(FetchPrefix(spec, dispatch.fetch))
                role.dispatch(dispatch)
                return
        detail = f"{self.config.worker_id} with roles {', '.join(self.config.roles)} cannot run this dispatch"
        self.outbox.end(spec.gateway_id, spec.key, "refused", detail)

    def on_gateway_lost(self, gateway_id: GatewayId) -> None:
        """A gateway's session broke: it will place its requests elsewhere, so theirs here end. Idempotent."""
        self._probes.pop(gateway_id, None)
        for role in self._roles:
            for key in role.keys_of_gateway(gateway_id):
                role.cancel(key)

    def transfers(self) -> tuple[TransferCount, ...]:
        """What was sent to each decode worker since the start."""
        return tuple(count for role in self._roles for count in role.transfers())

    def num_served_fetches(self) -> int:
        """Fetches of other workers for which KV was given, since the start."""
        return sum(role.num_served_fetches for role in self._roles)

    def num_pending_prompt_tokens(self) -> int:
        """Number of tokens of prompts that were dispatched and that the engine's load does not count yet."""
        return self._pending_prompts.num_tokens(self._owns)

    def turn_s(self) -> float:
        """Duration of the engine's current turn so far, or of its wait for a copy of KV; 0 where it waits for nothing
        of its own. Any thread."""
        return self._engine.turn_s()

    def doing(self) -> str:
        """What takes that long, for the log; empty for a step. Any thread."""
        return self._engine.doing()

    def expected_s(self) -> float:
        """Predicted duration of the engine's current turn; 0 where no turn lasts long. Any thread."""
        return self._engine.expected_s()

    async def prefix_snapshot(self) -> BlocksSnapshot:
        """All cached prefix blocks, taken between two steps. Raises `EngineStoppedError`."""
        return await asyncio.wrap_future(self._engine.call(lambda core: core.prefix_snapshot()))

    async def load_adapter(self, adapter: Adapter) -> AdapterLoaded:
        """Check an adapter, and load it where there is a slot.

        Raises:
            AdapterError: it cannot be used, or this worker takes none.
            EngineStoppedError: the worker ends.
        """
        if self._adapter_loader is None:
            raise AdapterError("changed", "this worker takes no adapters")
        async with self._one_load:
            loaded, load_ms = await asyncio.wrap_future(self._adapter_loader.read(adapter))

            def keep(core: EngineCore) -> tuple[float, tuple[AdapterState, ...]]:
                return core.keep_adapter(loaded, adapter, load_ms), core.adapters()

            load_ms, states = await asyncio.wrap_future(self._engine.call(keep))
        self._service.note_adapters(states)
        return AdapterLoaded(fingerprint=loaded.fingerprint, bytes=loaded.num_bytes, load_ms=load_ms)

    async def unload_adapter(self, fingerprint: str) -> AdapterUnloaded:
        """Have an adapter leave once nobody uses it. Raises `EngineStoppedError`."""

        def unload(core: EngineCore) -> tuple[tuple[bool, int], tuple[AdapterState, ...]]:
            return core.unload_adapter(fingerprint), core.adapters()

        (was_loaded, uses), states = await asyncio.wrap_future(self._engine.call(unload))
        self._service.note_adapters(states)
        return AdapterUnloaded(was_loaded=was_loaded, uses=uses)

    async def audit(self) -> AuditReport:
        """Everything that this worker holds. Raises `EngineStoppedError`."""
        counts, problems = await asyncio.wrap_future(self._engine.call(lambda core: core.audit()))
        counts["copies"] += self._engine.num_copies
        holdings: dict[str, int] = {}
        for role in self._roles:
            for name, count in role.holdings().items():
                holdings[name] = holdings.get(name, 0) + count
        return AuditReport(
            worker_id=self.info.worker_id,
            incarnation=self.incarnation,
            counts={**counts, **holdings},
            problems=tuple(problems),
        )
