"""Makes Prometheus metric families (`counter`, `gauge`, `histogram`) from plain numbers; registry.py collects them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from disagg.router.statistics import Histogram

Labels = tuple[str, ...]


def gauge(name: str, text: str, labels: Sequence[str], values: Iterable[tuple[Labels, float]]) -> GaugeMetricFamily:
    """A gauge from pairs of label values and value."""
    family = GaugeMetricFamily(name, text, labels=labels)
    for label_values, value in values:
        family.add_metric(label_values, value)
    return family


def counter(name: str, text: str, labels: Sequence[str], values: Iterable[tuple[Labels, float]]) -> CounterMetricFamily:
    """A counter from pairs of label values and value; `name` has no `_total`."""
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
    """A histogram from (label values, upper bounds, number of values in each interval and above the last, sum of
    values)."""
    family = HistogramMetricFamily(name, text, labels=labels)
    for label_values, bounds, counts, total in values:
        ends = [*(repr(float(bound)) for bound in bounds), "+Inf"]
        family.add_metric(label_values, list(zip(ends, accumulate(counts), strict=True)), total)
    return family


def of_models(families: Mapping[str, Iterable[Metric]], label: str = "model") -> Iterator[Metric]:
    """Merge the families of several models: each family once, its samples with the model's name under `label`. A single
    model's families are not changed. With an empty `label` the samples must have the name already."""
    if len(families) == 1:
        yield from next(iter(families.values()))
        return
    found: dict[str, Metric] = {}
    for model, each in families.items():
        for family in each:
            samples = family.samples
            if label:
                samples = [sample._replace(labels={label: model, **sample.labels}) for sample in samples]
            if family.name in found:
                found[family.name].samples.extend(samples)
            else:
                family.samples = samples
                found[family.name] = family
    yield from found.values()
