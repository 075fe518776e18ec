"""Which provider of `attention` a rank uses, and whether one gives right results here.

    choose(setting, spec)       at start, before the model is loaded
    probe(name, spec)           runs `python -m disagg.kernels.attention_choice NAME SPEC`

`auto` is the first provider, which needs no probe: its kernels are those that the warm-up runs. One that is named is
tried first, in a process of its own with a time limit, because a library that compiles at its first use may crash or
hang, or be wrong on a new device. The probe computes two chunks, one of them behind a context, through a scattered
table, and compares them with `reference` in fp32; without windows, soft caps and sinks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch

from disagg.kernels import reference
from disagg.kernels.attention import PROVIDERS, AttentionProvider, OwnKernels, prompts
from disagg.kernels.ops import AttentionForm, AttentionSpec, Prefills

AttentionSetting = Literal["auto", "triton", "flashinfer"]

PROBE_S = 180.0
"""Time limit of a probe, in seconds. Libraries that compile at their first use take a minute or two."""
MAX_ERROR = 0.02
"""Largest error that a probe allows, for values around 1 or less in bfloat16."""
CHUNKS = ((0, 150), (200, 40))
"""Chunks of the probe as (start, number of tokens)."""


NOT_NAMED = "used where kernels.attention names it"


class ProviderError(Exception):
    """The provider that was asked for cannot be used; the message says why."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The provider of a rank, and why it was chosen."""

    provider: AttentionProvider
    reasons: Mapping[str, str] = field(default_factory=dict)
    """Reasons why the other providers are not used, by name."""

    def __str__(self) -> str:
        others = "".join(f"; {name}: {reason}" for name, reason in self.reasons.items())
        return self.provider.name + others


def choose(setting: AttentionSetting, spec: AttentionSpec) -> Choice:
    """Choose the provider of a rank.

    Raises:
        ProviderError: the one that `setting` names does not take the spec, or its probe failed.
    """
    if setting == "auto":
        # What the first one does not take, `dispatch` computes by the reference.
        return Choice(OwnKernels.of(spec), {kind.name: kind.takes(spec) or NOT_NAMED for kind in PROVIDERS[1:]})
    refusals = {provider.name: provider.takes(spec) for provider in PROVIDERS}
    (named,) = (provider for provider in PROVIDERS if provider.name == setting)
    if reason := refusals[setting] or probe(setting, spec):
        raise ProviderError(f"{setting}: {reason}")
    others = {name: reason or NOT_NAMED for name, reason in refusals.items() if name != setting}
    return Choice(named.of(spec), others)


def probe(name: str, spec: AttentionSpec, limit_s: float = PROBE_S) -> str | None:
    """Try the provider `name`, and return what is wrong with it, or None."""
    arguments = [sys.executable, "-m", "disagg.kernels.attention_choice", name, json.dumps(dataclasses.asdict(spec))]
    child = subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        output, _ = child.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        return f"its probe did not end within {limit_s:g} s"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)  # with the compilers that it started
        child.communicate()
    last = next((line for line in reversed(output.splitlines()) if line.strip()), "no output")
    if child.returncode:
        return f"its probe ended with status {child.returncode}: {last}"
    error = float(last)
    return None if error <= MAX_ERROR else f"it differs from the reference by {error:.3g}"


def largest_error(name: str, spec: AttentionSpec) -> float:
    """The largest difference from the reference; infinite where a value is not finite."""
    (provider,) = (kind.of(spec) for kind in PROVIDERS if kind.name == name)
    random = torch.Generator().manual_seed(0)
    widths = [-(-(start + num_tokens) // spec.block_size) for start, num_tokens in CHUNKS]
    scattered = torch.randperm(sum(widths), generator=random).to(torch.int32)
    tables = torch.split(scattered.to(spec.device), widths)
    shape = (2, sum(widths), spec.num_kv_heads, spec.block_size, spec.head_dim)
    keys, values = torch.randn(shape, generator=random).to(spec.device, getattr(torch, spec.kv_dtype))
    if spec.value_dim is not None:
        values = keys[..., : spec.value_dim]
    num_rows = sum(num_tokens for _, num_tokens in CHUNKS)
    q_TND = torch.randn((num_rows, spec.num_heads, spec.head_dim), generator=random)
    q_TND = q_TND.to(spec.device, getattr(torch, spec.dtype))
    prefills = prompts(provider, *((table_M, *chunk) for table_M, chunk in zip(tables, CHUNKS, strict=True)))
    out_TND = q_TND.new_full((num_rows, spec.num_heads, values.shape[3]), torch.nan)
    provider.plan(prefills)
    form = AttentionForm(spec.scale)
    provider.attend(q_TND, keys, values, form, out_TND)
    right_TND = torch.empty(out_TND.shape, device=q_TND.device)
    arguments = (q_TND.float(), keys.float(), values.float(), Prefills(prefills.chunks), form)
    reference.paged_prefill_attention(*arguments, right_TND)
    largest = (out_TND.float() - right_TND).abs().max().cpu()  # NaN, if one is
    return float(largest) if largest.isfinite() else float("inf")


def _spec_of(text: str) -> AttentionSpec:
    """A spec from JSON, whose arrays are lists."""
    fields = json.loads(text)
    return AttentionSpec(**fields | {"windows": tuple(fields["windows"])})


def main() -> None:
    """Print the largest error."""
    name, text = sys.argv[1:]
    print(largest_error(name, _spec_of(text)))


if __name__ == "__main__":
    main()
