"""For the gateway's tests: a tiny checkpoint with a byte-level tokenizer, and a router that follows a script."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import itertools
import json
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from disagg.gateway.answers.grammars.compiler import verdict_of
from disagg.gateway.answers.grammars.grammars import Grammars
from disagg.gateway.event_loop.fair_order import FairOrder
from disagg.gateway.event_loop.shell.turns import LoopTurns
from disagg.gateway.requests.validate import Limits
from disagg.gateway.text.tokenizer import ServedModel, load_model
from disagg.proto.errors import DisaggError, LimitError, RequestCancelledError
from disagg.proto.grammars import grammar_tokenizer
from disagg.proto.ids import RequestId, WorkerId
from disagg.proto.messages import Adapter
from disagg.router.api import (
    CallDemand,
    ClusterView,
    Completion,
    Quota,
    RequestTrace,
    RoutedRequest,
    TenantLimits,
    TokenBatch,
)
from disagg.router.config import Decodes

if TYPE_CHECKING:
    from llguidance import LLTokenizer

MODEL_NAME = "tiny"
FINGERPRINT = "tiny-model"
SPECIAL_TOKENS = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
BOS, EOS, IM_START, IM_END = range(4)
NUM_TOKENS = 300
"""Of the tokenizer; ids above are rows of the embedding that no text uses."""
VOCAB_SIZE = 320
MAX_MODEL_LEN = 128
CORPUS = ["hello world, hello there", "the cat sat on the mat", "user assistant system", "a quick brown fox jumps"]
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'system' and not loop.first %}{{ raise_exception('system comes first') }}{% endif %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

CONFIG = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": MAX_MODEL_LEN, "eos_token_id": EOS}
TOKENIZER_CONFIG = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": TEMPLATE}


@functools.cache
def tokenizer_json() -> str:
    """A byte-level BPE tokenizer that puts `<s>` before a text, as the content of tokenizer.json."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=NUM_TOKENS,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 4, trainer)
    assert tokenizer.get_vocab_size() == NUM_TOKENS
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    return str(tokenizer.to_str())


def write_checkpoint(folder: Path, **changes: str | dict[str, Any] | None) -> Path:
    """The files that a gateway reads. `changes` replaces some, by name without its suffix; `None` leaves a file out."""
    files: dict[str, str | dict[str, Any] | None] = {
        "tokenizer.json": tokenizer_json(),
        "config.json": CONFIG,
        "generation_config.json": {"eos_token_id": [IM_END, EOS]},
        "tokenizer_config.json": TOKENIZER_CONFIG,
        "chat_template.jinja": None,
        "special_tokens_map.json": None,
    }
    names = {name.split(".")[0]: name for name in files}
    files |= {names[name]: content for name, content in changes.items()}
    for name, content in files.items():
        if content is not None:
            text = content if isinstance(content, str) else json.dumps(content)
            (folder / name).write_text(text, encoding="utf-8")
    return folder


def served_model(folder: Path, max_model_len: int | None = None) -> ServedModel:
    """The tiny model, written into `folder` and loaded."""
    return load_model(str(write_checkpoint(folder)), MODEL_NAME, max_model_len)


def limits_of(model: ServedModel, max_prompt_bytes: int = 4096) -> Limits:
    """The model's, and at most `max_prompt_bytes` of prompt text."""
    return Limits(model.info, max_prompt_bytes)


def grammar_vocabulary(model: ServedModel) -> LLTokenizer:
    """Of a model, as grammars need it."""
    info = model.info
    return grammar_tokenizer(model.tokenizer.backend.to_str(), info.vocab_size, info.eos_token_ids, "nonce")


class CompilerHere:
    """Implements `Compiler` in this process, for grammars that do it no harm."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model
        self.num_verdicts = 0

    def prepare(self) -> None:
        """It loads when it is used."""

    def verdict(self, grammar: str) -> str:
        self.num_verdicts += 1
        return verdict_of(grammar_vocabulary(self._model), grammar)

    def close(self) -> None:
        """There is nothing to end."""


def grammars_here(model: ServedModel) -> Grammars:
    """Without a thread or a process."""
    return Grammars(CompilerHere(model) if model.info.eos_token_ids else None, is_inline=True)


def make_turns() -> LoopTurns:
    """With room for all that waits."""
    return LoopTurns(FairOrder(1 << 30, 1 << 30))


class Wait:
    """A step of a script: nothing comes until the request is cancelled."""


Step = list[int] | TokenBatch | Exception | Completion | Wait
Script = Callable[[RoutedRequest], Iterable[Step]]


class FakeHandle:
    """Implements `api.RequestHandle` by a script: batches come in order, an error is raised, a `Completion` ends it,
    and so does the end of the script, by length."""

    def __init__(self, request_id: RequestId, script: Iterable[Step]) -> None:
        self.request_id = request_id
        self.completion: Completion | None = None
        self.num_answered: int | None = None
        self.cancelled = asyncio.Event()
        self.waiting = asyncio.Event()
        self.num_cancels = 0
        self.num_reads = 0
        self._script = iter(script)
        self._num_tokens = 0

    def cancel(self) -> None:
        self.num_cancels += 1
        self.cancelled.set()

    def __aiter__(self) -> AsyncIterator[TokenBatch]:
        return self

    async def __anext__(self) -> TokenBatch:
        self.num_reads += 1
        await asyncio.sleep(0)
        if self.cancelled.is_set():
            raise RequestCancelledError("cancelled")
        step = next(self._script, Completion("length", self._num_tokens, 0))
        if isinstance(step, Wait):
            self.waiting.set()
            await self.cancelled.wait()
            raise RequestCancelledError("cancelled")
        if isinstance(step, Exception):
            raise step
        if isinstance(step, Completion):
            self.completion = step
            raise StopAsyncIteration
        batch = step if isinstance(step, TokenBatch) else TokenBatch(step)
        self._num_tokens += len(batch.token_ids)
        return batch


class FakeRouter:
    """Implements `api.Router`: every request follows `script`; all calls are recorded."""

    def __init__(self, script: Script | Iterable[Step] = (), refusal: DisaggError | None = None) -> None:
        self.script: Script = script if callable(script) else _same(script)
        self.refusal = refusal
        self.limit: LimitError | None = None
        """What every call is refused with."""
        self.admitted: list[CallDemand] = []
        self.left = Quota()
        self.stated: list[dict[str, TenantLimits]] = []
        self.forgotten: list[str] = []
        self.removed_adapters: list[Adapter] = []
        self.given_back: list[tuple[str, int, int]] = []
        self.no_room: DisaggError | None = None
        self.submitted: list[tuple[RoutedRequest, float]] = []
        self.handles: list[FakeHandle] = []
        self.arrived = asyncio.Event()
        self.traces: dict[RequestId, RequestTrace] = {}
        self.cluster = ClusterView((), 0, 0)

    def admit(self, call: CallDemand) -> None:
        if self.limit is not None:
            raise self.limit
        self.admitted.append(call)

    def refund(self, tenant: str, num_tokens: int, num_answers: int) -> None:
        self.given_back.append((tenant, num_tokens, num_answers))

    def remaining_quota(self, tenant: str, limits: TenantLimits) -> Quota:
        return self.left

    def set_limits(self, limits: Mapping[str, TenantLimits]) -> None:
        self.stated.append(dict(limits))

    def set_decodes(self, decodes: Decodes) -> None:
        placement = self.cluster.placement._replace(decodes=decodes)
        self.cluster = dataclasses.replace(self.cluster, placement=placement)

    def forget(self, tenant: str) -> dict[WorkerId, bool]:
        self.forgotten.append(tenant)
        return {WorkerId("decode-0"): False, WorkerId("prefill-0"): True}

    def remove_adapter(self, adapter: Adapter) -> None:
        self.removed_adapters.append(adapter)

    def submit(self, request: RoutedRequest, arrival: float) -> FakeHandle:
        if self.refusal is not None:
            raise self.refusal
        self.submitted.append((request, arrival))
        self.handles.append(FakeHandle(request.request_id, self.script(request)))
        self.arrived.set()
        return self.handles[-1]

    def check_queue_capacity(self) -> None:
        if self.no_room is not None:
            raise self.no_room

    def view(self) -> ClusterView:
        return self.cluster

    def trace(self, request_id: RequestId) -> RequestTrace | None:
        return self.traces.get(request_id)

    def recent(self, limit: int) -> list[RequestTrace]:
        return list(reversed(self.traces.values()))[:limit]


def _same(steps: Iterable[Step]) -> Script:
    kept = tuple(steps)
    return lambda request: kept


def forever(batch: list[int]) -> Iterator[Step]:
    """The same batch again and again."""
    return itertools.repeat(batch)
