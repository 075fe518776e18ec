"""Records and recordings of load tests, written down in one line each."""

from __future__ import annotations

from disagg.loadtests.records import RequestRecord, Status
from disagg.loadtests.verdict.recordings import Point, Recording, RunInfo
from disagg.loadtests.workload.arrivals import ArrivalConfig
from disagg.loadtests.workload.workload import RandomWorkload


def record(
    index: int,
    ttft_s: float | None = 0.5,
    tpot_s: float = 0.0,
    num_tokens: int = 1,
    *,
    due_s: float | None = None,
    status: Status = "ok",
    lateness_s: float = 0.0,
    group: str = "",
    error: str = "",
) -> RequestRecord:
    """A request due at second `index` whose tokens come `tpot_s` apart; none if `ttft_s` is None. It has
    `max_tokens` of `num_tokens`."""
    due = float(index) if due_s is None else due_s
    times = () if ttft_s is None else tuple(due + ttft_s + tpot_s * token for token in range(num_tokens))
    return RequestRecord(
        index=index,
        due_s=due,
        sent_s=due + lateness_s,
        status=status,
        num_prompt_tokens=10,
        max_tokens=num_tokens,
        token_times_s=times,
        end_s=times[-1] if times else None,
        group=group,
        error=error,
    )


def recording(
    shape: str, rate_per_s: float, num_good: int, repeat: int = 0, seed: int = 0, lateness_s: float = 0.0
) -> Recording:
    """Ten requests, of which `num_good` have a TTFT of 0.5 s and the others of 5 s."""
    return Recording(
        info=RunInfo(
            point=Point(
                shape=shape,
                shape_config={"mode": shape},
                workload=RandomWorkload(isl=10, osl=1),
                arrivals=ArrivalConfig(rate_per_s=rate_per_s, num_requests=10, seed=seed),
                repeat=repeat,
            ),
            duration_s=10 / rate_per_s,
            num_requests=10,
        ),
        records=[record(index, 0.5 if index < num_good else 5.0, lateness_s=lateness_s) for index in range(10)],
    )
