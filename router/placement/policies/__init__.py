"""How workers are compared, one policy a file; `create` makes one by its name in the configuration."""

from __future__ import annotations

from disagg.router.config import PolicyName, RouterConfig
from disagg.router.placement.placement import Draw, Policy
from disagg.router.placement.policies.baselines import LeastLoaded, Prefix, Random, RoundRobin
from disagg.router.placement.policies.elastic import Elastic
from disagg.router.placement.policies.joint import Joint
from disagg.router.workers.cost_model import LinkModel
from disagg.router.workers.pairs import Pairs


def create(name: PolicyName, config: RouterConfig, links: LinkModel, pairs: Pairs, draw: Draw) -> Policy:
    """The policy of that name."""
    match name:
        case "joint" | "auto":
            return Joint(config.kv_barrier_ms, links, pairs)
        case "elastic":
            return Elastic(config.kv_barrier_ms, links, pairs, config.decodes)
        case "prefix":
            return Prefix()
        case "least_loaded":
            return LeastLoaded()
        case "round_robin":
            return RoundRobin()
        case "random":
            return Random(draw)
