"""The gateway in virtual time: the real router core, with a replacement for its shell.

Clients submit requests by `submit` and get their tokens by the `Client` protocol. The router's commands are sent to the
workers as messages, whose answers come back as events. A request is charged to its tenant as by the real gateway.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

from disagg.proto.errors import DisaggError
from disagg.proto.ids import AttemptKey, RequestId, WorkerId
from disagg.proto.messages import Cancel, CancelMigration, Connect, GatewayToWorker, WorkerInfo
from disagg.router.api import CallDemand, Completion, RoutedRequest
from disagg.router.config import RouterConfig
from disagg.router.requests import events
from disagg.router.requests.router_core import RouterCore
from disagg.simulator.durations.overheads import Overheads
from disagg.simulator.world.clock import EventLoop
from disagg.simulator.world.machine import Machine
from disagg.simulator.world.surroundings import GATEWAY


class Client(Protocol):
    """The recipient of one answer."""

    def on_tokens(self, num_tokens: int, now: float) -> None:
        """Take `num_tokens` more tokens that came at `now`."""
        ...

    def on_finish(self, completion: Completion, now: float) -> None:
        """The answer is complete."""
        ...

    def on_error(self, error: DisaggError, now: float) -> None:
        """The request failed or was refused."""
        ...


class ServingWorker(Protocol):
    """A worker, as the gateway uses it."""

    @property
    def info(self) -> WorkerInfo:
        """The info with which the worker registered."""
        ...

    def receive(self, message: GatewayToWorker) -> None:
        """Handle a message of the gateway."""
        ...


class Gateway:
    """Owner of the router core. `on_drained` is called when nothing is left on a worker that was drained.
    `before_submit` is called before a request is placed, to deliver the messages that workers have delayed."""

    def __init__(
        self,
        loop: EventLoop,
        config: RouterConfig,
        overheads: Overheads,
        on_drained: Callable[[WorkerId], None] = lambda worker_id: None,
        machine: Machine | None = None,
        before_submit: Callable[[], None] = lambda: None,
    ) -> None:
        self.core = RouterCore(config, GATEWAY)
        self._loop = loop
        self._overheads = overheads
        self._on_drained = on_drained
        self._machine = machine
        self._before_submit = before_submit
        self._workers: dict[WorkerId, ServingWorker] = {}
        self._clients: dict[RequestId, Client] = {}
        self._timer_due = math.inf

    # ------------------------------------------------------------ clients

    def submit(self, request: RoutedRequest, arrival: float, client: Client) -> None:
        """Submit a request that was checked and tokenized; `arrival` is when its first byte came."""
        self.submit_call([(request, client)], arrival)

    def submit_call(self, answers: Sequence[tuple[RoutedRequest, Client]], arrival: float) -> None:
        """Submit the answers of one call, of one tenant: they are admitted together or refused together."""
        self._before_submit()
        now = self._loop.now
        first = answers[0][0]
        num_tokens = first.num_prompt_tokens + first.sampling.max_tokens
        call = CallDemand(
            tenant=first.tenant,
            limits=first.limits,
            num_answers=len(answers),
            num_tokens=len(answers) * num_tokens,
        )
        error: DisaggError | None = self.core.admit(call, now)
        for request, client in answers:
            if error is not None:
                client.on_error(error, now)
                continue
            self._clients[request.request_id] = client
            self.handle(events.Submit(request, arrival))
            if request.request_id not in self._clients:  # refused at once
                self.core.refund(request.tenant, num_tokens, 1, now)

    def cancel(self, request_id: RequestId) -> None:
        """Cancel the request of a client that disconnected. The client is not called again."""
        self._clients.pop(request_id, None)
        self.handle(events.CancelRequest(request_id))

    @property
    def num_in_flight(self) -> int:
        """Number of requests whose clients wait."""
        return len(self._clients)

    # ------------------------------------------------------------ workers

    def worker_up(self, worker: ServingWorker) -> None:
        """Use a worker from now on."""
        self._workers[worker.info.worker_id] = worker
        self.handle(events.WorkerUp(worker.info))

    def worker_lost(self, worker: ServingWorker) -> None:
        """Remove a worker whose session broke."""
        info = worker.info
        if self._workers.get(info.worker_id) is worker:
            self.handle(events.WorkerLost(info.worker_id, info.incarnation))
            del self._workers[info.worker_id]

    def drain(self, worker: ServingWorker) -> None:
        """Place nothing new on a worker."""
        self.handle(events.DrainWorker(worker.info.worker_id, worker.info.incarnation))

    # ------------------------------------------------------------ events and commands

    def handle(self, event: events.Event) -> None:
        """Pass an event to the core and execute its commands."""
        now = self._loop.now
        if self._machine is not None and isinstance(event, events.FromWorker):
            self._machine.gateway_worked(event.worker_id, sum(len(out.token_ids) for out in event.update.tokens))
        commands = self.core.handle(event, now)
        if commands:
            seen = now
            if self._overheads.token_s:
                emitted = (len(command.batch.token_ids) for command in commands if isinstance(command, events.Emit))
                seen += sum(emitted) * self._overheads.token_s
            for command in commands:
                self._execute(command, seen)
        self._set_timer()

    def _execute(self, command: events.Command, seen: float) -> None:
        match command:
            case events.Emit(request_id=request_id, batch=batch):
                if (client := self._clients.get(request_id)) is not None:
                    client.on_tokens(len(batch.token_ids), seen)
            case events.Dispatch(worker_id=worker_id, message=message):
                self._send(worker_id, message)
            case events.CancelOn(worker_id=worker_id, key=key):
                self._send(worker_id, _cancel(key))
            case events.Finish(request_id=request_id, completion=completion):
                if (client := self._clients.pop(request_id, None)) is not None:
                    client.on_finish(completion, seen)
            case events.Fail(request_id=request_id, error=error):
                if (client := self._clients.pop(request_id, None)) is not None:
                    client.on_error(error, seen)
            case events.Migrate(worker_id=worker_id, message=migrate):
                self._send(worker_id, migrate)
            case events.CancelMigration(worker_id=worker_id, key=key):
                self._send(worker_id, CancelMigration(request_id=key.request_id, attempt=key.attempt))
            case events.ConnectPair(prefill_id=prefill_id, decode_peer=peer):
                self._send(prefill_id, Connect(decode_peer=peer))
            case events.WorkerIsDrained(worker_id=worker_id):
                self._on_drained(worker_id)
            case events.WatchAgain(worker_id=worker_id):
                raise AssertionError(f"the reports of {worker_id} have a gap, and none was lost")

    def _send(self, worker_id: WorkerId, message: GatewayToWorker) -> None:
        self._loop.after(self._overheads.message_s, self._workers[worker_id].receive, message)

    def _set_timer(self) -> None:
        due = self.core.next_wakeup()
        if due is not None and due < self._timer_due:
            self._timer_due = due
            self._loop.at(due, self._on_timer, due)

    def _on_timer(self, due: float) -> None:
        if due == self._timer_due:
            self._timer_due = math.inf
            self.handle(events.Tick())


def _cancel(key: AttemptKey) -> Cancel:
    return Cancel(request_id=key.request_id, attempt=key.attempt)
