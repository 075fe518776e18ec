"""What a gateway has of each model that it serves, and how a model comes and goes while it runs.

add       its tokenizer and its router are there: requests may name it
withdraw  requests that name it are refused; its running requests continue, and operators see it
remove    nothing of it is left
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from disagg.gateway.answers.generator import Generator
from disagg.gateway.answers.grammars.compiler import CompilerStart
from disagg.gateway.answers.grammars.compiler_process import CompilerProcess
from disagg.gateway.answers.grammars.grammars import Grammars
from disagg.gateway.config import GatewayConfig, ModelSource
from disagg.gateway.event_loop.shell.offload import Offload
from disagg.gateway.guardrails.shell.guardrails import Guardrails
from disagg.gateway.models.models import Models
from disagg.gateway.models.pair_check import RouterPairChecker
from disagg.gateway.requests.validate import Limits
from disagg.gateway.text.tokenizer import ServedModel, load_model
from disagg.proto.clock.process_clock import process_clock
from disagg.proto.control import ServedAdapter
from disagg.proto.ids import RequestId
from disagg.router.all_routers import AllRouters
from disagg.router.api import ClusterView, Router


def load_served(source: ModelSource, config: GatewayConfig) -> ServedModel:
    """Read the tokenizer and chat template of a model; large ones take a second. Raises `ConfigError`."""
    return load_model(
        source.path,
        source.name,
        source.max_model_len,
        special_tokens_in_chat=config.special_tokens_in_chat,
        nonce=secrets.token_hex(8),
        tool_parser=config.tool_parser,
        reasoning_parser=config.reasoning_parser,
    )


def _grammars_of(model: ServedModel, source: ModelSource) -> Grammars:
    info = model.info
    if not info.eos_token_ids:
        return Grammars(None)
    start = CompilerStart(
        tokenizer_file=str(Path(source.path) / "tokenizer.json"),
        vocab_size=info.vocab_size,
        eos_token_ids=info.eos_token_ids,
    )
    return Grammars(CompilerProcess(start))


class ServedModels:
    """The tokenizers, generators, grammars and pair checkers of the models. The caller starts and stops the routers.

    Args:
        config: of the gateway; has the models at its start.
        routers: of these, by key.
        mint_id: a request id that was never used.

    Raises:
        ConfigError: if a model's files are missing or broken.
    """

    def __init__(self, config: GatewayConfig, routers: Mapping[str, Router], mint_id: Callable[[], RequestId]) -> None:
        self._config = config
        self._mint_id = mint_id
        self._make: Callable[[str], Generator] | None = None
        """Makes the generator of the model with this key; None before `begin`."""
        self._generators: dict[str, Generator] = {}
        self._grammars: dict[str, Grammars] = {}
        self.sources = {source.key: source for source in config.models}
        """Models by key, as all dictionaries here but `views`; withdrawn models included."""
        self.loaded = {source.key: load_served(source, config) for source in config.models}
        self.routers = {source.key: routers[source.key] for source in config.models}
        self.all = AllRouters(self.routers, self.names)
        self.views: dict[str, Callable[[], ClusterView]] = {}
        """Views of the routers by model name, for metrics and for the room of batches; always the same dictionary."""
        self.pair_checkers: dict[str, RouterPairChecker] = {}
        self.batch_views: dict[str, Callable[[], ClusterView]] = {}
        """The same with the names of adapters, for the room of batches."""
        self._adapters: tuple[ServedAdapter, ...] = ()
        self.models = Models()
        """The models that requests may name."""
        self._observe()

    @property
    def longest_context(self) -> int:
        """Largest context of the loaded models, in tokens."""
        return max(model.info.max_model_len for model in self.loaded.values())

    def names(self) -> dict[str, str]:
        """Names of the models by key."""
        return {key: source.name for key, source in self.sources.items()}

    def begin(self, offload: Offload, guardrails: Guardrails | None) -> Models:
        """Serve the configured models, with these threads for tokenizing and these guardrails."""

        def make(key: str) -> Generator:
            model = self.loaded[key]
            grammars = self._grammars[key] = _grammars_of(model, self.sources[key])
            grammars.prepare()
            return Generator(
                model,
                self.routers[key],
                Limits(model.info, self._config.max_prompt_bytes),
                self.sources[key].prefix_root,
                clock=process_clock().now,
                mint_seed=lambda: secrets.randbits(64),
                mint_id=self._mint_id,
                offload=offload,
                guardrails=guardrails,
                grammars=grammars,
            )

        self._make = make
        for key in self.sources:
            self._serve(key)
        return self.models

    def set_adapters(self, adapters: Sequence[ServedAdapter]) -> None:
        """Let requests name these adapters from now on, and no others. Requests that wait for one whose name is gone
        are ended; those of a replaced one go on with its earlier content."""
        self._adapters = tuple(adapters)
        self._follow_adapters()

    def add(self, source: ModelSource, model: ServedModel, router: Router) -> None:
        """Serve another model. It may have the name of a withdrawn one."""
        key = source.key
        self.sources[key], self.loaded[key], self.routers[key] = source, model, router
        self._observe()
        self._serve(key)

    def withdraw(self, key: str) -> None:
        """Refuse further requests for a model."""
        self.models.remove(self._generators[key])
        self._follow_adapters()

    def restore(self, key: str) -> None:
        """Accept requests for a withdrawn model again. Undoes `withdraw`."""
        self.models.add(self._generators[key])
        self._follow_adapters()

    def is_idle(self, key: str) -> bool:
        """Whether a model has no worker and no request."""
        view = self.routers[key].view()
        return not (view.workers or view.unreachable or view.num_queued or view.num_running)

    def close(self) -> None:
        """End the grammar processes of all models. Idempotent."""
        for grammars in self._grammars.values():
            grammars.close()

    def remove(self, key: str) -> None:
        """Remove all state of a withdrawn model."""
        self._grammars.pop(key).close()
        for of_models in (self._generators, self.sources, self.loaded, self.routers, self.pair_checkers):
            of_models.pop(key)
        self._observe()

    def _serve(self, key: str) -> None:
        assert self._make is not None, "the gateway has not started"
        self._generators[key] = self._make(key)
        self.pair_checkers[key] = RouterPairChecker(
            self.routers[key],
            self.loaded[key].info.vocab_size,
            clock=process_clock().now,
            mint_id=self._mint_id,
            dice=random.SystemRandom(),
        )
        self.models.add(self._generators[key])
        self._follow_adapters()

    def _follow_adapters(self) -> None:
        """Make the generators of adapters whose model may be named; one that is as before stays."""
        before, now = self.models.adapters, dict[str, Generator]()
        bases = {generator.model.info.name: generator for generator in self.models.generators}
        for each in self._adapters:
            base = self._generators.get(each.model)
            if base is None or bases.get(base.model.info.name) is not base or each.adapter.name in bases:
                continue
            known = before.get(each.adapter.name)
            is_same = known is not None and known.adapter == each.adapter and known.is_of(base)
            now[each.adapter.name] = known if known and is_same else base.with_adapter(each.adapter, each.num_bytes)
        self.models.set_adapters(now)
        self._observe()
        for name, generator in before.items():
            if name not in now:
                generator.remove_adapter()

    def _observe(self) -> None:
        self.views.clear()
        self.views.update({source.name: self.routers[key].view for key, source in self.sources.items()})
        adapters = {name: self.views[each.base_name] for name, each in self.models.adapters.items()}
        self.batch_views.clear()
        self.batch_views.update({**adapters, **self.views})
