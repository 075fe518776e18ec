"""Makes model runners, and the collective of a worker's ranks. Torch is loaded only where a model needs it: the `fake`
model has neither weights nor anything to exchange.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from disagg.engine.config import WorkerConfig
from disagg.engine.parallel.interfaces import ShardRunner
from disagg.engine.plan import ModelRunner
from disagg.engine.sharding.shards import WHOLE, Shard
from disagg.engine.start_stages import OnStage, no_stages
from disagg.proto.cluster_secret import ClusterSecret

if TYPE_CHECKING:
    from disagg.engine.io.rendezvous import RendezvousServer
    from disagg.engine.runner.collectives import Collective


def make_runner(config: WorkerConfig, shard: Shard = WHOLE, on_stage: OnStage = no_stages) -> ShardRunner:
    """The configured model runner, on one rank of the worker; `fake` needs neither weights nor
    torch. `on_stage` is called with what begins.

    Raises:
        ConfigError: the checkpoint, the device, or the configuration cannot work.
    """
    if config.is_fake:
        from disagg.engine.runner.fake import FakeModelRunner

        return FakeModelRunner(
            num_blocks=config.num_blocks or 1024,
            block_size=config.block_size,
            max_model_len=config.max_model_len or 4096,
            shard=shard,
        )
    on_stage("libraries")
    from disagg.engine.runner.model_runner import TorchModelRunner

    return TorchModelRunner(config, shard, on_stage)


def warm_up(runner: ModelRunner, config: WorkerConfig) -> None:
    """Run the first steps, which cost more than the later ones; to be called before any sequence."""
    if not config.is_fake:
        from disagg.engine.runner import model_runner

        model_runner.warm_up(runner)


NO_RENDEZVOUS = ""
"""In place of the address, where no rank exchanges anything."""


def open_rendezvous(config: WorkerConfig, secret: ClusterSecret) -> RendezvousServer | None:
    """Rank 0's rendezvous server, which listens on `config.host` only and stays open while the ranks compute; None
    where they exchange nothing.

    Raises:
        OSError: if it cannot listen there.
    """
    if config.is_fake:
        return None
    from disagg.engine.io.rendezvous import RendezvousServer

    return RendezvousServer(config.host, secret)


def join_collective(config: WorkerConfig, secret: ClusterSecret, shard: Shard, address: str) -> Collective | None:
    """Wait for all other ranks; None at `NO_RENDEZVOUS`.

    Raises:
        RuntimeError: if they do not all come in time.
    """
    if address == NO_RENDEZVOUS:
        return None
    from disagg.engine.runner.collectives import make_collective

    return make_collective(config.device, address, secret, shard, config.host)
