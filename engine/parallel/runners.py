"""Makes model runners. Torch is loaded only where a model needs it."""

from __future__ import annotations

from disagg.engine.config import WorkerConfig
from disagg.engine.parallel.runner import ShardRunner
from disagg.engine.plan import ModelRunner
from disagg.engine.sharding.shards import WHOLE, Shard


def make_runner(config: WorkerConfig, shard: Shard = WHOLE) -> ShardRunner:
    """The model runner that the configuration asks for, on one rank of the worker; `fake` needs neither weights nor
    torch.

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
    from disagg.engine.runner.model_runner import TorchModelRunner

    return TorchModelRunner(config, shard)


def warm_up(runner: ModelRunner, config: WorkerConfig) -> None:
    """Run the first steps, which cost more than the later ones; to be called before any sequence."""
    if not config.is_fake:
        from disagg.engine.runner import model_runner

        model_runner.warm_up(runner)
