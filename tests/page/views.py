"""Clusters that are made up, as the page's data."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from disagg.gateway.auth.auth import Caller
from disagg.gateway.operators.admin_answers import explanation
from disagg.gateway.operators.history import LENGTH_S, Sample
from disagg.gateway.operators.requests_list import FoundRequests, RequestFilter, request_line
from disagg.proto.errors import RequestNotFoundError
from disagg.proto.ids import RequestId
from disagg.router.api import RequestTrace
from disagg.v1 import inference_pb2 as pb

MARKUP = "<img src=x onerror='window.hit=1'><script>window.hit=1</script>"
RATE = 1000
"""Requests per second of the busy cluster."""
NOW = 1_700_000_100.0
"""Time of the steady cluster, in seconds since the epoch."""
REFUSAL = "tenant batch has a limit of 60 requests per minute; try again in 12.5 s " + "and-a-very-long-word-" * 6
KV_BYTES = 3 << 20


def worker_state(name: str, active: int, reserved: int, cached: int, sequences: int) -> pb.WorkerState:
    return pb.WorkerState(
        worker_id=name,
        roles=[name.split("-")[0]],
        phase="ready",
        detail=MARKUP,
        sequences=sequences,
        kv_blocks_total=4096,
        kv_blocks_active=active,
        kv_blocks_reserved=reserved,
        kv_blocks_cached=cached,
    )


def request_trace(number: int, **changes: Any) -> RequestTrace:
    """The request with this number, which was answered a second after the one before it."""
    arrival = NOW - 1000 + number
    fields: dict[str, Any] = {
        "request_id": RequestId(f"{number:012d}{0:020d}"),
        "prefill_worker": f"prefill-{number % 2}",
        "decode_worker": f"decode-{number % 3}",
        "transport": "shm",
        "kv_bytes": KV_BYTES,
        "attempts": 1,
        "arrival": arrival,
        "stages": {"tokenize": arrival + 0.001, "first_token": arrival + 0.04, "end": arrival + 0.9},
        "outcome": "stop",
        "model": "tiny",
        "num_prompt_tokens": 100,
        "num_output_tokens": 30,
    }
    return RequestTrace(**{**fields, **changes})


def refused_trace(number: int) -> RequestTrace:
    nothing: dict[str, Any] = {"prefill_worker": None, "decode_worker": None, "transport": "", "kv_bytes": 0}
    return request_trace(
        number, **nothing, attempts=0, stages={}, outcome="rate_limit_exceeded", detail=REFUSAL, num_output_tokens=0
    )


class BusyViews:
    """A cluster in which everything changes all the time."""

    def __init__(self, num_prefill: int, num_decode: int) -> None:
        self._prefill = [f"prefill-{number}" for number in range(num_prefill)]
        self._decode = [f"decode-{number}" for number in range(num_decode)]
        self._start = time.time()

    async def state(self, caller: Caller, max_age_s: float) -> pb.GetClusterStateResponse:
        done = self._done
        names = [*self._prefill, *self._decode]
        workers = [
            worker_state(
                name,
                active=(done * 7 + number * 331) % 2500,
                reserved=(done + number * 17) % 400,
                cached=(done * 3 + number * 77) % 1000,
                sequences=(done + number) % 40,
            )
            for number, name in enumerate(names)
        ]
        pairs = [(src, dst) for src in self._prefill for dst in self._decode]
        transfers = [
            pb.TransferState(
                prefill_worker=src,
                decode_worker=dst,
                transport="shm",
                transfers=done * (number + 1) // len(pairs),
                bytes=done * (number + 1) * KV_BYTES // len(pairs),
            )
            for number, (src, dst) in enumerate(pairs)
        ]
        return pb.GetClusterStateResponse(
            workers=workers,
            transfers=transfers,
            pools=[pb.PoolState(name="prefill", desired=len(self._prefill), ready=len(self._prefill))],
            slos=[pb.SloState(slo=slo, met=50_000 + done % 9000, total=60_000) for slo in ("ttft", "tpot", "both")],
            running_requests=done % 300,
            requests_per_s=RATE + done % 60,
            output_tokens_per_s=40 * RATE + done % 3000,
        )

    def find(self, wanted: RequestFilter, limit: int) -> FoundRequests:
        lines = [request_line(request_trace(self._done - number), time.time() - NOW) for number in range(limit)]
        return FoundRequests(lines, RATE, RATE)

    async def sample(self) -> Sample:
        done = self._done
        kv = {name: (done + number * 8) % 100 for number, name in enumerate((*self._prefill, *self._decode))}
        targets = dict.fromkeys(("ttft", "tpot", "both"), (50000 + done % 9000, 60000))
        return Sample(int(time.time()), RATE + done % 60, 40 * RATE + done % 3000, targets, kv)

    def explain(self, request_id: RequestId, caller: Caller) -> pb.ExplainRequestResponse:
        option = pb.PlacementOption(prefill_worker="prefill-0", decode_worker="decode-0", cost=3.5, prefill_ms=2.0)
        return pb.ExplainRequestResponse(
            request_id=request_id,
            outcome="stop",
            prefill_worker="prefill-0",
            decode_worker="decode-0",
            kv_bytes=KV_BYTES,
            transport="shm",
            policy=MARKUP,
            arrived_at=time.time(),
            stages=[pb.StageTime(stage="first_token", at_ms=40.0), pb.StageTime(stage="end", at_ms=900.0)],
            spans=[pb.StageSpan(stage="prefill", worker="prefill-0", start_ms=1.0, end_ms=30.0)],
            options=[option],
            chosen=option,
        )

    @property
    def _done(self) -> int:
        return int((time.time() - self._start) * RATE)


class SteadyViews:
    """A cluster that stands still at `NOW`, with the requests that it is given and five minutes of history."""

    def __init__(self, traces: Sequence[RequestTrace] = ()) -> None:
        self.traces = list(traces)
        self.samples = [self._sample(int(NOW) - LENGTH_S + 1 + second, second) for second in range(LENGTH_S)]
        """Taken one by one."""
        self.answers = asyncio.Event()
        """The state is not told while this is not set."""
        self.answers.set()

    async def state(self, caller: Caller, max_age_s: float) -> pb.GetClusterStateResponse:
        await self.answers.wait()
        names = ("prefill-0", "prefill-1", "decode-0", "decode-1", "decode-2")
        return pb.GetClusterStateResponse(
            workers=[worker_state(name, 1024, 512, 256, number + 1) for number, name in enumerate(names)],
            transfers=[
                pb.TransferState(
                    prefill_worker=src, decode_worker=dst, transport="shm", transfers=9, bytes=9 * KV_BYTES
                )
                for src in names[:2]
                for dst in names[2:]
            ],
            pools=[pb.PoolState(name="prefill", desired=2, ready=2), pb.PoolState(name="decode", desired=4, ready=3)],
            slos=[pb.SloState(slo="ttft", met=57, total=60), pb.SloState(slo="both", met=54, total=60)],
            gateways=[pb.GatewayState(name="gateway-0")],
            running_requests=7,
            requests_per_s=42.0,
            output_tokens_per_s=1234.0,
        )

    def find(self, wanted: RequestFilter, limit: int) -> FoundRequests:
        found = [trace for trace in self.traces if wanted.lets_through(trace)]
        return FoundRequests([request_line(trace, 0.0) for trace in found[:limit]], len(found), len(self.traces))

    async def sample(self) -> Sample:
        return self.samples.pop(0)

    def explain(self, request_id: RequestId, caller: Caller) -> pb.ExplainRequestResponse:
        found = next((trace for trace in self.traces if trace.request_id == request_id), None)
        if found is None:
            raise RequestNotFoundError("request_id: no such request runs or is remembered")
        shown = explanation(found, 0.0)
        option = pb.PlacementOption(prefill_worker="prefill-0", decode_worker="decode-0", cost=3.5, prefill_ms=2.0)
        shown.options.append(option)
        shown.chosen.CopyFrom(option)
        shown.policy = "joint"
        shown.spans.append(pb.StageSpan(stage="prefill", worker="prefill-0", start_ms=1.0, end_ms=30.0))
        return shown

    def _sample(self, at: int, second: int) -> Sample:
        targets = {"ttft": (57, 60), "both": (54, 60), "tpot": (0, 0)}
        return Sample(at, 10.0 + second % 33, 1234.0, targets, {"prefill-0": 37, "decode-0": 1 + second % 99})
