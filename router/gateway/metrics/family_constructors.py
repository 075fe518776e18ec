"""Makes Prometheus metric families (`counter`, `gauge`, `histogram`) from plain numbers; registry.py collects them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from disagg.router.statistics import Histogram

Labels = tuple[str, ...]


def gauge(name: str, text: str, labels: Sequence[str], values: Iterable[tuple[Labels, float]]) -> GaugeMetricFamily:
    """A gauge of (label values, value)."""
    family = GaugeMetricFamily(name, text, labels=labels)
    for label_values, value in values:
        family.add_metric(label_values, value)
    return family


def counter(name: str, text: str, labels: Sequence[str], values: Iterable[tuple[Labels, float]]) -> CounterMetricFamily:
    """A counter of (label values, value); `name` without `_total`."""
    family = CounterMetricFamily(name, text, labels=labels)
    for label_values, value in values:
        family.add_metric(label_values, value)
    return family


def histogram(
    name: str, text: str, labels: Sequence[str], values: Iterable[tuple[Labels, Histogram]]
) -> HistogramMetricFamily:
    """The Prometheus family of our `Histogram`s, one for each set of label values."""
    return histogram_of_counts(
        name, text, labels, ((label_values, h.bounds, h.counts, h.total) for label_values, h in values)
    )


def histogram_of_counts(
    name: str,
    text: str,
    labels: Sequence[str],
    values: Iterable[tuple[Labels, Sequence[float], Sequence[int], float]],
) -> HistogramMetricFamily:
    """A histogram of (label values, upper ends, values in each interval and beyond, their sum)."""
    family = HistogramMetricFamily(name, text, labels=labels)
    for label_values, bounds, counts, total in values:
        ends = [*(repr(float(bound)) for bound in bounds), "+Inf"]
        family.add_metric(label_values, list(zip(ends, accumulate(counts), strict=True)), total)
    return family
