"""The shapes of a cluster that are compared: a short name, or a configuration file, becomes a configuration.

    1p1d, 2p1d:512                      prefill and decode workers of one thread each; tokens of a prefill step
    2x1-chunked:256, 1x2-chunked:512    colocated workers x threads of each; chunked prefill, tokens of a step
    2x1-slack:1024                      the same with chunks by the targets of the requests
    2x1-elastic, 2x1-gather:1024        workers that compute prompts, answers or both, as the router chooses: answers
                                        on all of them (`placement.decodes: spread`), or on few (`gather`)
    4x1-split2:1024                     the same; two of the four decode and take no prompts (`split:2`)
    2x1-prefill-first, 2x1-static       the same with other ways to fill a step
    cluster.yaml                        anything else, called by its file's name
    2x1-static@0.25,0.5                 any of them, measured at rates of its own

All shapes of a comparison share the base configuration (model, KV memory, ...). A shape always listens on a
free port and admits everything, whatever that configuration has: a refusal would hide how the shape performs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from disagg.cluster.config.cluster_config import ClusterConfig, load_config, override
from disagg.loadtests.verdict.goodput import Slo
from disagg.proto.errors import ConfigError

_DISAGGREGATED = re.compile(r"(\d+)p(\d+)d(?::(\d+))?", re.ASCII)
_COLOCATED = re.compile(
    r"(\d+)x(\d+)-(chunked|slack|elastic|gather|split[1-9]\d{0,3}|prefill-first|static)(?::(\d+))?", re.ASCII
)
_SCHEDULING = {"chunked": "decode_first", "slack": "slack", "prefill-first": "prefill_first", "static": "static"}
_KINDS = {scheduling: kind.replace("-", "_") for kind, scheduling in _SCHEDULING.items()}
DISAGGREGATED = "disaggregated"
ELASTIC = "elastic"
_SPLIT = "split"


@dataclass(frozen=True, kw_only=True)
class ClusterShape:
    """One shape of a cluster."""

    name: str
    config: ClusterConfig
    rates_per_s: tuple[float, ...] = ()
    """Rates at which it is measured; empty for those of the comparison."""

    @property
    def kind(self) -> str:
        """Kind of the shape: `disaggregated`, `elastic`, or the way a colocated one fills its steps: `chunked`,
        `slack`, `prefill_first`, `static`."""
        if self.config.mode != "colocated":
            return self.config.mode
        return _KINDS[self.config.pools.colocated.scheduling]

    @property
    def raw(self) -> dict[str, Any]:
        """The whole configuration as plain values."""
        raw: dict[str, Any] = msgspec.to_builtins(self.config)
        return raw


def parse_shape(name: str, base: ClusterConfig) -> ClusterShape:
    """Parse the name of a shape; raises `ConfigError` for an invalid one."""
    if found := _DISAGGREGATED.fullmatch(name):
        num_prefill, num_decode, budget = found.groups()
        values: dict[str, Any] = {
            "mode": "disaggregated",
            "pools.prefill.size": int(num_prefill),
            "pools.prefill.num_threads": 1,
            "pools.decode.size": int(num_decode),
            "pools.decode.num_threads": 1,
        }
        if budget is not None:
            values["pools.prefill.token_budget"] = int(budget)
    elif found := _COLOCATED.fullmatch(name):
        size, num_threads, kind, budget = found.groups()
        is_elastic = kind in (ELASTIC, "gather") or kind.startswith(_SPLIT)
        pool = "pools.workers" if is_elastic else "pools.colocated"
        values = {
            "mode": ELASTIC if is_elastic else "colocated",
            f"{pool}.size": int(size),
            f"{pool}.num_threads": int(num_threads),
        }
        if is_elastic:
            values["placement.decodes"] = _decodes(kind)
        else:
            values[f"{pool}.scheduling"] = _SCHEDULING[kind]
        if budget is not None:
            values[f"{pool}.token_budget"] = int(budget)
    elif Path(name).suffix in (".yaml", ".yml"):
        base, values = load_config(Path(name)), {}
        name = Path(name).stem
    else:
        raise ConfigError(
            f"shape: {name!r} is none; examples: 1p1d, 2x1-chunked:256, 2x1-prefill-first, 1x2-static, cluster.yaml"
        )
    always = {"gateway.host": "127.0.0.1", "gateway.port": 0, "placement.admission": False}
    return ClusterShape(name=name, config=override(base, values | always))


def _decodes(kind: str) -> str:
    """The value of `placement.decodes` for an elastic shape."""
    if kind.startswith(_SPLIT):
        return f"{_SPLIT}:{kind.removeprefix(_SPLIT)}"
    return "gather" if kind == "gather" else "spread"


def with_targets(shape: ClusterShape, targets: Slo) -> ClusterShape:
    """The same shape with default targets for all requests."""
    limits = (("slo.ttft_ms", targets.ttft_s), ("slo.tpot_ms", targets.tpot_s))
    in_ms = {name: None if limit_s is None else limit_s * 1e3 for name, limit_s in limits}
    return replace(shape, config=override(shape.config, in_ms))


def parse_shapes(names: list[str], base: ClusterConfig) -> list[ClusterShape]:
    """Parse several names, with their own rates if they have some; raises `ConfigError` also for a duplicate."""
    shapes = []
    for text in names:
        name, at, rates = text.partition("@")
        own = tuple(numbers_of(rates, f"shape {name}")) if at else ()
        shapes.append(replace(parse_shape(name, base), rates_per_s=own))
    found = [shape.name for shape in shapes]
    if len(set(found)) != len(found):
        raise ConfigError(f"shape: each name once, please; got {', '.join(found)}")
    return shapes


def numbers_of(text: str, where: str) -> list[float]:
    """Parse numbers such as `0.5,1,2`; raises `ConfigError` naming `where`."""
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"{where}: expected numbers such as 0.5,1,2; got {text!r}") from None
    if not all(number > 0 for number in found):
        raise ConfigError(f"{where}: expected numbers above 0; got {text!r}")
    return found
