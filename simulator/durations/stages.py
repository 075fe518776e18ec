"""Workers of several stages (pipeline parallelism): which layers a stage has, and how long it takes.

A step passes the stages one after the other. A stage takes what its layers take by the roofline, and then sends the
hidden rows to the next one: each rank to its like, so that tokens x hidden numbers go over the link of each device, the
one inside a node or, where the next stage is on another node, the network. Ranks are numbered stage by stage and fill
one node after the other. The last stage sends the logits of the rows that sample to the first rank.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from disagg.engine.sharding.stages import ends_by_weights, stage_ranges
from disagg.proto.errors import ConfigError
from disagg.proto.wording import counted
from disagg.simulator.durations.devices import Device
from disagg.simulator.durations.model_shapes import ModelShape
from disagg.simulator.durations.roofline import (
    NETWORK_LATENCY_S,
    NETWORK_SHARE,
    RooflineStepTimes,
    num_sampling,
)
from disagg.step_times.interface import StepWork

LINK_SHARE = 0.8
"""Share of the bandwidth between two devices of a node that one message reaches; an assumption."""


def stage_layers(model: ModelShape, pp: int, flag: str = "--pp") -> tuple[range, ...]:
    """The layers of each stage. They are cut as `engine/sharding/stages.py` does it, by weights, embedding and head
    counted. Layers without experts are taken as the first ones, as models with both have them.

    Raises:
        ConfigError: there are more stages than layers.
    """
    if not 1 <= pp <= model.num_layers:
        layers = counted(model.num_layers, "layer")
        raise ConfigError(f"{flag}: {pp} stages are not between 1 and the {layers} of {model.name}")
    weights = tuple(layer.matrix_parameters for layer in _layers(model))
    return _ranges(weights, model.vocab_size * model.hidden_size, pp)


def stage_shapes(model: ModelShape, pp: int, flag: str = "--pp") -> tuple[ModelShape, ...]:
    """The layers of each stage, as models of their own.

    Raises:
        ConfigError: there are more stages than layers.
    """
    return tuple(_part(model, layers) for layers in stage_layers(model, pp, flag))


@lru_cache(maxsize=256)
def _ranges(weights: tuple[int, ...], embedding: int, pp: int) -> tuple[range, ...]:
    return stage_ranges(ends_by_weights(weights, embedding, pp))


def _layers(model: ModelShape) -> list[ModelShape]:
    """Each layer as a model; those of one kind are one object."""
    kinds = {has_experts: _of(model, 1, int(has_experts)) for has_experts in (False, True)}
    return [kinds[number >= model.num_dense_layers] for number in range(model.num_layers)]


def _part(model: ModelShape, layers: range) -> ModelShape:
    num_dense = len(range(layers.start, min(layers.stop, model.num_dense_layers)))
    part = _of(model, len(layers), len(layers) - num_dense)
    return replace(part, windows=model.windows[layers.start : layers.stop])


def _of(model: ModelShape, num_layers: int, num_with_experts: int) -> ModelShape:
    """A model with this number of layers, without windows."""
    experts = None if model.experts is None else replace(model.experts, num_layers=num_with_experts)
    return replace(model, num_layers=num_layers, windows=(), experts=experts)


class StagedStepTimes:
    """The step times of a worker of `pp` stages, each of which has as many ranks as `whole`, by whose kernels it
    computes.

    Raises:
        ConfigError: there are more stages than layers.
    """

    def __init__(self, whole: RooflineStepTimes, pp: int) -> None:
        self.whole, self.num_stages = whole, pp
        shapes = stage_shapes(whole.model, pp)
        self.stages = tuple(
            whole.of_stage(shape, is_first=stage == 0, is_last=stage == pp - 1) for stage, shape in enumerate(shapes)
        )
        self._crosses = [self._is_next_on_other_node(stage) for stage in range(pp)]
        """For each stage, whether what it sends goes to another node."""
        self._like = [self._first_like(stage) for stage in range(pp)]
        """For each stage, the first one that takes as long."""
        self.corrected = whole.corrected

    def step_s(self, work: StepWork) -> float:
        """Seconds of a step that passes all stages while no other one is under way."""
        return sum(self.stages_s(work))

    def stages_s(self, work: StepWork) -> tuple[float, ...]:
        """Seconds that each stage takes for one step, with what it sends to the next one."""
        found: list[float] = []
        for stage, like in enumerate(self._like):
            found.append(found[like] if like < stage else self._stage_s(stage, work))
        return tuple(found)

    def sent_s(self, stage: int, work: StepWork) -> float:
        """Seconds in which a stage sends what it computed: hidden rows, or the last one logits."""
        whole, is_last = self.whole, stage == self.num_stages - 1
        if is_last and num_sampling(work) == 0:
            return 0.0
        numbers = num_sampling(work) * whole.model.vocab_size
        if not is_last:
            numbers = (work.prefill_tokens + work.num_decodes) * whole.model.hidden_size
        return message_s(whole.device, whole.activation_bytes * numbers, crosses=self._crosses[stage])

    def _stage_s(self, stage: int, work: StepWork) -> float:
        return self.stages[stage].step_s(work) + self.sent_s(stage, work)

    def _first_like(self, stage: int) -> int:
        """Stages between the first and the last one differ only by their layers and by where the next one is."""
        if stage in (0, self.num_stages - 1):
            return stage
        shapes = [each.model for each in self.stages]
        alike = [
            other
            for other in range(1, stage)
            if shapes[other] == shapes[stage] and self._crosses[other] == self._crosses[stage]
        ]
        return alike[0] if alike else stage

    def _is_next_on_other_node(self, stage: int) -> bool:
        tp, per_node = self.whole.tp, self.whole.device.max_tp
        receiver = (stage + 1) % self.num_stages
        return any((stage * tp + rank) // per_node != (receiver * tp + rank) // per_node for rank in range(tp))


def message_s(device: Device, num_bytes: float, *, crosses: bool) -> float:
    """Seconds of a message from one device to another one, of the same node or, where it `crosses`, of another one."""
    if crosses:
        return NETWORK_LATENCY_S + num_bytes / (device.network_bandwidth * NETWORK_SHARE)
    return device.kernels.all_reduce_start_s + num_bytes / (device.link_bandwidth * LINK_SHARE)
