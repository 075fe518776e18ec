"""Loads for the twin's tests, and a replay that is not one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from disagg.router.config import Decodes
from disagg.router.telemetry.recent_load import Arrival, Capacity, Load

WORKERS = tuple(
    Capacity(
        worker_id=f"workers-{number}",
        num_blocks=1000,
        block_size=16,
        max_num_seqs=64,
        token_budget=1024,
        max_model_len=4096,
        bytes_per_token=1000,
    )
    for number in range(2)
)


def arrival(at_s: float, **fields: object) -> Arrival:
    """Of 512 prompt tokens, 64 of the answer, 2 s and 20 ms."""
    values: dict[str, object] = {
        "at_s": at_s,
        "prompt_tokens": 512,
        "output_tokens": 64,
        "most_output_tokens": 64,
        "ttft_s": 2.0,
        "tpot_s": 0.02,
        **fields,
    }
    return Arrival(**values)  # type: ignore[arg-type]  # of the fields above


def evenly(number: int, *, start_s: float = 0.0, gap_s: float = 1.0, **fields: object) -> list[Arrival]:
    """So many, one after the other."""
    return [arrival(start_s + index * gap_s, **fields) for index in range(number)]


def load(
    arrivals: Sequence[Arrival], now_s: float, decodes: Decodes | None = "spread", workers: Sequence[Capacity] = WORKERS
) -> Load:
    """A look at that time."""
    return Load(now_s=now_s, arrivals=tuple(arrivals), workers=tuple(workers), decodes=decodes)


class FakeReplay:
    """Says which requests meet their targets by a function of (setting, index of the arrival); notes the calls."""

    def __init__(self, meets: Callable[[Decodes, int], bool]) -> None:
        self.meets = meets
        self.calls: list[tuple[Decodes, float, int, int]] = []
        """(setting, rate, arrivals, those of them that lead in)."""

    def __call__(
        self, load: Load, arrivals: Sequence[Arrival], num_lead: int, decodes: Decodes, rate: float
    ) -> list[tuple[int, bool]]:
        self.calls.append((decodes, rate, len(arrivals), num_lead))
        return [(index, self.meets(decodes, index)) for index in range(num_lead, len(arrivals))]
