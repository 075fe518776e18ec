"""What it saves that forced tokens take no steps of their own: whole answers of the engine alone, with and without."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import tokenizers

from benchmarks.structured.steps import ITEM, KINDS
from disagg.engine.checkpoint.checkpoint import read_model_config
from disagg.engine.commands import Add, TokenSampled
from disagg.engine.config import WorkerConfig
from disagg.engine.core.engine_core import EngineCore
from disagg.engine.parallel.factories import make_runner, warm_up
from disagg.proto.ids import GatewayId, RequestId
from disagg.proto.messages import Sampling, SequenceSpec
from disagg.proto.token_ids import pack_token_ids

BATCHES = (1, 8, 32)
FORMS: dict[str, dict[str, Any]] = {
    "free": ITEM,
    "one_form": {**ITEM, "x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}},
}
"""White space is left to the model, as in `response_format`, or not, as in tool calls."""
PROMPT = "<|im_start|>user\nDescribe article {} of a shop as a JSON object.<|im_end|>\n<|im_start|>assistant\n"
MAX_TOKENS = 120


class Answers(NamedTuple):
    """The answers of one batch."""

    seconds: float
    num_steps: int
    token_ids: dict[str, list[int]]
    """Token ids by request."""

    @property
    def num_tokens(self) -> int:
        """Sampled and forced ones, over all requests of the batch."""
        return sum(map(len, self.token_ids.values()))


class ForcedBench:
    """An engine on the calling thread."""

    def __init__(self, model_path: Path, *, skips: bool) -> None:
        config = WorkerConfig(
            worker_id="bench",
            roles=("prefill", "decode"),
            model_path=str(model_path),
            num_blocks=1024,
            skip_forced=skips,
        )
        runner = make_runner(config)
        warm_up(runner, config)
        self._core = EngineCore(runner, config=config)
        self._tokenizer = tokenizers.Tokenizer.from_file(str(model_path / "tokenizer.json"))
        self._ends = read_model_config(model_path).eos_token_ids
        self._attempt = 0

    def answers(self, kind: str, schema: dict[str, Any], batch: int) -> Answers:
        """All that a batch of requests is answered, from the first step to the last."""
        self._attempt += 1
        grammar = msgspec.json.encode({"grammars": [{"json_schema": schema}]}).decode()
        token_ids: dict[str, list[int]] = {}
        for number in range(batch):
            spec = SequenceSpec(
                request_id=RequestId(str(number)),
                attempt=self._attempt,
                gateway_id=GatewayId("bench"),
                prompt_token_ids=pack_token_ids(self._tokenizer.encode(PROMPT.format(number)).ids),
                sampling=Sampling(
                    max_tokens=MAX_TOKENS, seed=number, grammar=grammar, stop_token_ids=self._ends, **KINDS[kind]
                ),
            )
            self._core.handle(Add(spec), time.monotonic())
        num_steps, began = 0, time.perf_counter()
        while self._core.has_work:
            for event in self._core.step(time.monotonic()):
                if isinstance(event, TokenSampled):
                    token_ids.setdefault(event.key.request_id, []).append(event.token_id)
            num_steps += 1
        return Answers(time.perf_counter() - began, num_steps, token_ids)


def measure(model_path: Path, repeats: int) -> list[dict[str, Any]]:
    """Pairs in turns, in both orders: tokens/s, steps, and whether the answers are the same."""
    benches = {skips: ForcedBench(model_path, skips=skips) for skips in (False, True)}
    rows = []
    for form, schema in FORMS.items():
        for kind in KINDS:
            for batch in BATCHES:
                for bench in benches.values():
                    bench.answers(kind, schema, min(batch, 2))
                for repeat in range(repeats):
                    found: dict[bool, Answers] = {}
                    for skips in (False, True) if repeat % 2 == 0 else (True, False):
                        found[skips] = benches[skips].answers(kind, schema, batch)
                    plain, skipped = found[False], found[True]
                    rows.append(
                        {
                            "form": form,
                            "kind": kind,
                            "batch": batch,
                            "repeat": repeat,
                            "tokens": plain.num_tokens,
                            "steps": plain.num_steps,
                            "steps_skipping": skipped.num_steps,
                            "tok_s": plain.num_tokens / plain.seconds,
                            "tok_s_skipping": skipped.num_tokens / skipped.seconds,
                            "same_answers": sum(skipped.token_ids[key] == ids for key, ids in plain.token_ids.items()),
                        }
                    )
    return rows
