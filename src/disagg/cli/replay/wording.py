"""The router core's events and commands in plain language. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from disagg.cluster.system.terminal import format_bytes
from disagg.proto.errors import DisaggError
from disagg.proto.ids import RequestId
from disagg.proto.messages import StepUpdate
from disagg.proto.wording import counted
from disagg.router.recording.entries import ChargedElsewhere, Entry, Handled, Refunded
from disagg.router.requests import events
from disagg.router.requests.events import Command, Event


def entry_text(entry: Entry, request_id: RequestId | None = None) -> str:
    """Text of an entry; of a worker's results only those for this request, if one is given."""
    match entry:
        case Handled(event=event):
            return event_text(event, request_id)
        case Refunded(tenant=tenant, num_tokens=num_tokens):
            return f"{counted(num_tokens, 'token')} given back to tenant {tenant!r}"
        case ChargedElsewhere(charges=charges):
            tenants = ", ".join(sorted({repr(charge.tenant) for charge in charges}))
            return f"other models of the gateway charged tenant {tenants}"
        case _:
            return type(entry).__name__


def event_text(event: Event, request_id: RequestId | None = None) -> str:
    """Text of an event, as in `entry_text`."""
    match event:
        case events.Submit(request=request):
            prompt, most = counted(request.num_prompt_tokens, "token"), request.sampling.max_tokens
            text = f"submitted: {prompt} of the prompt, at most {most} of the answer"
            text += f", adapter {request.adapter.name}" if request.adapter is not None else ""
            text += f", priority {request.priority}" if request.priority else ""
            return text + (f", tenant {request.tenant!r}" if request.tenant else "")
        case events.CancelRequest(num_answered=None):
            return "cancelled by the client"
        case events.CancelRequest(num_answered=num_answered):
            return f"ended by the gateway, after {counted(num_answered or 0, 'token')} of the answer"
        case events.FromWorker(worker_id=worker_id, update=update):
            return f"{worker_id}: {'; '.join(_results(update, request_id)) or 'results of other requests'}"
        case events.WorkerUp(info=info):
            return f"the session to {info.worker_id} is established"
        case events.WorkerLost(worker_id=worker_id):
            return f"the session to {worker_id} broke"
        case events.WorkerSuspected(worker_id=worker_id, why=why):
            return f"{worker_id} {why}"
        case events.WorkerRecovered(worker_id=worker_id):
            return f"{worker_id} responds again"
        case events.DrainWorker(worker_id=worker_id):
            return f"{worker_id} drains"
        case events.ResumeWorker(worker_id=worker_id):
            return f"draining of {worker_id} is revoked"
        case events.WorkerReported(report=report):
            return f"load report of {report.worker_id}"
        case events.WorkersExpected(in_s=in_s):
            names = ", ".join(f"{name} in {seconds:.0f} s" for name, seconds in in_s.items())
            return f"coming: {names or 'no worker'}"
        case events.LimitsChanged():
            return "the limits of tenants changed"
        case events.SetDecodes(decodes=decodes):
            return f"answers decode with {decodes} from now on"
        case events.ConfigChanged(config=config):
            return f"another configuration is followed, with policy {config.policy}"
        case events.AdapterRemoved(adapter=adapter):
            return f"the adapter {adapter.name} is not served any more"
        case events.StoodStill(seconds=seconds):
            return f"the gateway stood still for {seconds:.1f} s"
        case events.Tick():
            return "a time came that was waited for"


def command_text(command: Command) -> str:
    """Text of a command of the core."""
    match command:
        case events.Dispatch(worker_id=worker_id, message=message):
            peer = message.decode_peer
            where = f"{worker_id}, which decodes too" if peer is None else f"{worker_id}, to decode on {peer.worker_id}"
            return f"dispatch attempt {message.spec.attempt} to {where}"
        case events.CancelOn(worker_id=worker_id, key=key):
            return f"cancel attempt {key.attempt} on {worker_id}"
        case events.Migrate(worker_id=worker_id, message=migrate):
            return f"move attempt {migrate.attempt} from {worker_id} to {migrate.decode_peer.worker_id}"
        case events.CancelMigration(worker_id=worker_id, key=key):
            return f"keep attempt {key.attempt} on {worker_id}"
        case events.ConnectPair(prefill_id=prefill_id, decode_peer=peer):
            return f"form the pair {prefill_id} -> {peer.worker_id}"
        case events.Emit(batch=batch):
            return f"emit {counted(len(batch.token_ids), 'token')}"
        case events.Finish(completion=done):
            cached = f", {done.cached_tokens} of the prompt cached" if done.cached_tokens else ""
            return f"finish: {done.reason} after {counted(done.num_output_tokens, 'token')}{cached}"
        case events.Fail(error=error):
            return f"fail: {error_text(error)}"
        case events.WatchAgain(worker_id=worker_id):
            return f"open a new report stream to {worker_id}"
        case events.WorkerIsDrained(worker_id=worker_id):
            return f"nothing is left on {worker_id}"


def error_text(error: Exception) -> str:
    """Code and message of an error."""
    return f"{error.code}: {error}" if isinstance(error, DisaggError) else f"{type(error).__name__}: {error}"


def _results(update: StepUpdate, request_id: RequestId | None) -> Iterator[str]:
    for tokens in update.tokens:
        if request_id in (None, tokens.request_id):
            yield f"{counted(len(tokens.token_ids), 'token')} from index {tokens.first_index}"
    for fetched in update.fetched:
        if request_id in (None, fetched.request_id):
            yield f"fetched {counted(fetched.tokens, 'token')} from {fetched.source}: {fetched.outcome}"
    for prefilled in update.prefilled:
        if request_id in (None, prefilled.request_id):
            yield f"prompt computed, {prefilled.cached_tokens} of it cached"
    for moved in update.handed_over:
        if request_id in (None, moved.request_id):
            yield f"has the KV, {format_bytes(moved.kv_bytes)} by {moved.transport}"
    for stayed in update.migrations_failed:
        if request_id in (None, stayed.request_id):
            yield f"attempt {stayed.attempt} did not move: {stayed.detail}"
    for end in update.ends:
        if request_id in (None, end.request_id):
            yield f"ended attempt {end.attempt}: {end.reason}" + (f" ({end.detail})" if end.detail else "")
