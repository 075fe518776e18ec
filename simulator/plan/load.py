"""The load of a cluster: lengths of requests, their rate, limits."""

from __future__ import annotations

import math
from dataclasses import dataclass

from disagg.autoscaler.queueing import Lengths
from disagg.loadtests.verdict.goodput import DEFAULT_MIN_ATTAINMENT, Slo
from disagg.proto.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Load:
    """Requests that come at random (a Poisson process), each as likely one of `kinds`.

    Raises:
        ConfigError: naming the flag.
    """

    rate_per_s: float
    kinds: tuple[Lengths, ...]
    slo: Slo
    min_attainment: float = DEFAULT_MIN_ATTAINMENT

    def __post_init__(self) -> None:
        if not 0.0 < self.rate_per_s < math.inf:
            raise ConfigError(f"--rate: expected requests per second above 0, not {self.rate_per_s:g}")
        if not 0.0 < self.min_attainment < 1.0:
            raise ConfigError(f"--min-attainment: expected a share between 0 and 1, not {self.min_attainment:g}")
        if not self.kinds:
            raise ConfigError("--scenario: it has no request")
        for kind in self.kinds:
            if kind.prompt < 1 or kind.output < 1 or not 0 <= kind.cached < kind.prompt:
                raise ConfigError(
                    f"--prompt-tokens, --output-tokens: expected at least 1 each, and fewer cached tokens than "
                    f"prompt tokens; got {kind.prompt}, {kind.output} and {kind.cached} cached"
                )

    @property
    def mean_prompt(self) -> float:
        """Mean number of tokens of a prompt."""
        return sum(kind.prompt for kind in self.kinds) / len(self.kinds)

    @property
    def mean_output(self) -> float:
        """Mean number of tokens of an answer."""
        return sum(kind.output for kind in self.kinds) / len(self.kinds)

    @property
    def longest(self) -> int:
        """Number of tokens of the longest sequence."""
        return max(kind.prompt + kind.output for kind in self.kinds)
