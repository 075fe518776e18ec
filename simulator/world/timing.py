"""The durations of a simulation, as a file gives them.

    kv_bytes_per_token: 46080                             of all layers
    kv_windows: [{window: 512, bytes_per_token: 38400}]   of them those with a window
    step: {base_ms: 5.0, prefill_token_ms: 0.4, attended_ms: 1.0e-4, decode_ms: 0.5, context_ms: 1.0e-3}
    pools: {decode: {base_ms: ...}}                       where they differ
    link: {bandwidth_bytes_per_s: 1.0e+10, latency_s: 1.0e-4}
    overheads: {message_s: 5.0e-4, ...}                   see `simulator/durations/overheads.py`
    tiers: {host_bytes_per_s: 2.0e+10, ...}               of workers with tiers, see `simulator/durations/tier_times.py`
    sharing: {decode_by_decode: 0.2, ...}                 where all workers run on one machine
    cold_start_s: 30
    drafts: {tokens_per_step: 1.8, rows_per_step: 3.5}    of workers with speculation, see `durations/drafts.py`

A step of a model with experts has `experts_ms`, the time to read all of them, and `expert_share`, the share of them
that a token chooses.

A recording of steps (`format: disagg-step-times`) can be used, too: its steps are fitted, see
`simulator/durations/fitted.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import msgspec

from disagg.proto.messages import KvLayout, WindowKv, experts_read
from disagg.simulator.durations.calibration_file import FORMAT, StepRecording, check_samples
from disagg.simulator.durations.drafts import DraftedSteps, Drafts
from disagg.simulator.durations.fitted import MIN_SAMPLES, fit
from disagg.simulator.durations.overheads import NO_OVERHEADS, Overheads, Sharing
from disagg.simulator.durations.tier_times import DEFAULT_TIER_TIMES, TierTimes
from disagg.simulator.world.settings import DEFAULT_LINK
from disagg.step_times.interface import LinkTimes, StepTimes, StepWork

Milliseconds = Annotated[float, msgspec.Meta(ge=0, le=1e6)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]


class LinearSteps(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A step time that is linear in the work, and in the experts that it reads; see `StepTimes`. Counts as in
    `proto.messages.StepSample`, times as in `StepCoefficients`."""

    base_ms: Annotated[float, msgspec.Meta(gt=0, le=1e6)]
    prefill_token_ms: Milliseconds
    attended_ms: Milliseconds = 0.0
    decode_ms: Milliseconds
    context_ms: Milliseconds = 0.0
    experts_ms: Milliseconds = 0.0
    expert_share: Share = 0.0

    def step_s(self, work: StepWork) -> float:
        """Seconds of one engine step."""
        ms = (
            self.base_ms
            + work.prefill_tokens * self.prefill_token_ms
            + work.prefill_attended * self.attended_ms
            + work.num_decodes * self.decode_ms
            + work.decode_context * self.context_ms
        )
        if self.experts_ms:
            ms += self.experts_ms * experts_read(self.expert_share, work.prefill_tokens + work.num_decodes)
        return ms / 1e3


class _Link(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    bandwidth_bytes_per_s: Annotated[float, msgspec.Meta(gt=0)]
    latency_s: Annotated[float, msgspec.Meta(ge=0)] = DEFAULT_LINK.latency_s


class _File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    step: LinearSteps
    kv_bytes_per_token: Annotated[int, msgspec.Meta(ge=1)]
    kv_windows: tuple[WindowKv, ...] = ()
    pools: dict[str, LinearSteps] = {}
    link: _Link | None = None
    overheads: Overheads = NO_OVERHEADS
    tiers: TierTimes = DEFAULT_TIER_TIMES
    sharing: Sharing | None = None
    drafts: Drafts | None = None
    cold_start_s: Annotated[float, msgspec.Meta(ge=0, le=1e6)] = 0.0


class Timing(NamedTuple):
    """The contents of such a file."""

    step: StepTimes
    pools: dict[str, LinearSteps]
    kv_layout: KvLayout
    link: LinkTimes
    overheads: Overheads
    cold_start_s: float
    sharing: Sharing | None = None
    """How much workers on one machine slow each other down; None if each has its own machine."""
    drafts: Drafts | None = None
    """Means of steps with drafts; None if not known."""
    tiers: TierTimes = DEFAULT_TIER_TIMES

    def of_pool(self, name: str, *, has_drafts: bool = False) -> StepTimes:
        """The step times of a pool's workers. `has_drafts`: whether they compute drafts, which changes nothing where
        the file does not say how many."""
        times = self.pools.get(name, self.step)
        return DraftedSteps(times, self.drafts) if has_drafts and self.drafts is not None else times


def read_timing(raw: Any) -> Timing:
    """The timing by plain values; raises `ValueError` naming the field."""
    if not isinstance(raw, dict):
        raise ValueError("expected the keys step and kv_bytes_per_token, or a recording of steps")
    try:
        if raw.get("format") == FORMAT:
            return _of_recording(msgspec.convert(raw, StepRecording))
        file = msgspec.convert(raw, _File)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from None
    link = DEFAULT_LINK
    if file.link is not None:
        link = LinkTimes(bandwidth_bytes_per_s=file.link.bandwidth_bytes_per_s, latency_s=file.link.latency_s)
    return Timing(
        file.step,
        file.pools,
        _layout(file.kv_bytes_per_token, file.kv_windows),
        link,
        file.overheads,
        file.cold_start_s,
        file.sharing,
        file.drafts,
        file.tiers,
    )


def _layout(bytes_per_token: int, windows: Sequence[WindowKv]) -> KvLayout:
    try:
        return KvLayout.sized(bytes_per_token, windows)
    except ValueError as error:
        raise ValueError(f"kv_windows: {error}") from None


def _of_recording(recording: StepRecording) -> Timing:
    check_samples(recording.samples, "recording")
    if len(recording.samples) < MIN_SAMPLES:
        raise ValueError(f"samples: {len(recording.samples)} steps are too few; {MIN_SAMPLES} are needed")
    if recording.kv_bytes_per_token < 1:
        raise ValueError("kv_bytes_per_token: expected at least 1")
    step = fit(recording.samples, expert_share=recording.expert_share)
    layout = _layout(recording.kv_bytes_per_token, recording.kv_windows)
    return Timing(step, {}, layout, DEFAULT_LINK, recording.overheads, 0.0, recording.sharing, recording.drafts)
