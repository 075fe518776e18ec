"""Makes model runners, and the collective of a worker's ranks. Torch is loaded only where a model needs it: the `fake`
model has neither weights nor anything to exchange.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from disagg.connections.cluster_secret import ClusterSecret
from disagg.engine.checkpoint.checkpoint import read_model_config
from disagg.engine.config import WorkerConfig
from disagg.engine.core.calibration import clear_blocks, dummy_step, longest
from disagg.engine.parallel.interfaces import ShardRunner
from disagg.engine.plan import ModelRunner
from disagg.engine.sharding.shards import WHOLE, Shard
from disagg.engine.start_stages import OnStage, no_stages
from disagg.proto.errors import ConfigError

if TYPE_CHECKING:
    from disagg.engine.io.rendezvous import RendezvousServer
    from disagg.engine.runner.collectives import Collective

logger = logging.getLogger(__name__)

THREAD_REPEATS: Final = 3
LEAST_GAIN: Final = 1.1
"""How many times as fast several threads have to be, in the mean of decoding and of prompts."""


def make_runner(config: WorkerConfig, shard: Shard = WHOLE, on_stage: OnStage = no_stages) -> ShardRunner:
    """The configured model runner, on one rank of the worker; `fake` needs neither weights nor
    torch. `on_stage` is called with what begins.

    Raises:
        ConfigError: the checkpoint, the device, or the configuration cannot work.
    """
    if config.is_fake:
        from disagg.engine.fake_runner import FakeModelRunner

        return FakeModelRunner(
            num_blocks=config.num_blocks or 1024,
            block_size=config.block_size,
            max_model_len=config.max_model_len or 4096,
            num_layers=config.fake_layers,
            shard=shard,
            adapters=config.adapters,
        )
    on_stage("libraries")
    from disagg.engine.runner.model_runner import TorchModelRunner

    if read_model_config(config.model_path).encoder is not None:
        from disagg.engine.runner.encoder import EncoderRunner

        if config.adapters is not None:
            raise ConfigError("adapters: are for models that decode")

        return EncoderRunner(config)
    runner = TorchModelRunner(config, shard, on_stage)
    if config.speculation.method == "draft" and "decode" in config.roles:
        from disagg.engine.runner.draft_model import DraftModel

        runner.proposer = DraftModel(config, runner.num_blocks, runner.max_model_len)
    return runner


def choose_threads(runner: ModelRunner, config: WorkerConfig, clock: Callable[[], float]) -> int:
    """With how many threads this worker computes from now on: those of the configuration, or one where it may choose
    and more are not faster. To be called before any sequence. `clock` gives seconds."""
    if not config.threads_are_open or config.is_fake or config.device != "cpu" or config.num_ranks > 1:
        return config.num_threads
    from disagg.kernels.dispatch import set_num_threads

    plans = [dummy_step(runner, num_decodes=1, context=min(64, longest(runner)))]
    plans.append(dummy_step(runner, prefill_tokens=min(128, config.token_budget, longest(runner))))
    clear_blocks(runner, plans)
    least_s = {(number, count): float("inf") for number in range(len(plans)) for count in (1, config.num_threads)}
    for _ in range(THREAD_REPEATS):
        for number, count in least_s:
            set_num_threads(count)
            began_s = clock()
            runner.run(plans[number])
            least_s[number, count] = min(least_s[number, count], clock() - began_s)
    gain = math.prod(least_s[number, 1] / least_s[number, config.num_threads] for number in range(len(plans)))
    chosen = config.num_threads if gain > LEAST_GAIN ** len(plans) else 1
    set_num_threads(chosen)
    text = "%s computes with %d of %d threads: one sequence takes %.1f ms with one, %.1f ms with all"
    times_ms = 1e3 * least_s[0, 1], 1e3 * least_s[0, config.num_threads]
    logger.info(text, config.worker_id, chosen, config.num_threads, *times_ms)
    return chosen


def warm_up(runner: ModelRunner, config: WorkerConfig) -> None:
    """Run the first steps, which cost more than the later ones; to be called before any sequence."""
    if not config.is_fake:
        from disagg.engine.runner import model_runner

        model_runner.warm_up(runner)


NO_RENDEZVOUS = ""
"""Address that stands for none, where no rank exchanges anything."""


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
