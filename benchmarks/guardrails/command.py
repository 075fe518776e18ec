"""What do guardrails cost the gateway for each token of an answer, and for a prompt?

    python -m benchmarks.guardrails [--tokens 20000] [--rounds 7] --json FILE

Answers of the default model's tokenizer pass from a router that has them ready to the deltas that a stream would write,
one token at a time, as steps bring them. In turns, so that all see the same machine; medians.

token_us_NAME     processor time of a token
ratio_NAME        over that without guardrails of the same round
prompt_ms_NAME    to look at a prompt of 64 KiB, once, on one thread
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

from disagg.cluster.models.catalog import DEFAULT_MODEL, resolve_model
from disagg.gateway.answers.answer import Answer
from disagg.gateway.answers.guarded import GuardedAnswer
from disagg.gateway.guardrails.config import GuardrailOptions, RuleOptions
from disagg.gateway.guardrails.shell.guardrails import Guardrails
from disagg.gateway.requests.request import Call, TextPrompt
from disagg.gateway.requests.verdicts import Decisions
from disagg.gateway.text.detokenizer import TextStream
from disagg.gateway.text.tokenizer import ServedModel, load_model
from disagg.proto.block_hash import root_hash
from disagg.proto.ids import RequestId
from disagg.proto.messages import Sampling
from disagg.proto.token_ids import pack_token_ids
from disagg.router.api import Completion, RequestTrace, RoutedRequest, TokenBatch
from tests.support.reports import print_table, report, write_json

CARD: Final = RuleOptions(pattern=r"\b[0-9]{4}(?:[ -]?[0-9]{4}){3}\b", action="replace")
EMAIL: Final = RuleOptions(pattern=r"\b[A-Za-z0-9._%+-]{1,64}@[A-Za-z0-9.-]{1,120}\.[A-Za-z]{2,24}\b", action="replace")
WORD: Final = RuleOptions(pattern=r"\bproject crimson\b", ignore_case=True)
KINDS: Final[dict[str, tuple[RuleOptions, ...]]] = {
    "none": (),
    "word": (WORD,),
    "secrets": (RuleOptions(secrets=True),),
    "all": (WORD, CARD, EMAIL, RuleOptions(secrets=True, action="replace")),
}
"""Rules by name."""
PROMPT_BYTES: Final = 64 << 10
SOURCE: Final = Path(__file__).resolve().parents[2] / "docs" / "architecture.md"
"""Text that answers are made of."""


class _Handle:
    """Tokens that are ready, each a batch of its own."""

    def __init__(self, token_ids: list[int]) -> None:
        self.request_id = RequestId("r")
        self.completion: Completion | None = None
        self.num_answered: int | None = None
        self._token_ids = token_ids

    async def _batches(self) -> AsyncIterator[TokenBatch]:
        for token_id in self._token_ids:
            yield TokenBatch([token_id])
        self.completion = Completion("length", len(self._token_ids), 0)

    def __aiter__(self) -> AsyncIterator[TokenBatch]:
        return self._batches()

    def cancel(self) -> None:
        """Nothing runs."""


class _Router:
    """The part of a router that an answer uses."""

    def __init__(self, token_ids: list[int]) -> None:
        self._token_ids = token_ids

    def submit(self, request: RoutedRequest, arrival: float) -> _Handle:
        return _Handle(self._token_ids)

    def trace(self, request_id: RequestId) -> RequestTrace | None:
        return None


async def _read(model: ServedModel, token_ids: list[int], guardrails: Guardrails | None) -> float:
    """Seconds of processor time."""
    router: Any = _Router(token_ids)
    routed = RoutedRequest(
        request_id=RequestId("r"),
        prompt_token_ids=pack_token_ids([1]),
        block_hashes=(),
        root_hash=root_hash("m", b""),
        sampling=Sampling(),
    )
    text = TextStream(model.tokenizer, ())
    if guardrails is None:
        answer = Answer(router, routed, 0.0, text, time.monotonic)
    else:
        guard = guardrails.on_answer(Call(request_id=RequestId("r")), RequestId("r"), model, True, Decisions())
        assert guard is not None
        answer = GuardedAnswer(router, routed, 0.0, text, time.monotonic, 0, guard)
    began = time.process_time()
    async for _ in answer.events():
        pass
    return time.process_time() - began


async def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each kind and round."""
    model = load_model(str(resolve_model(options.model)), options.model)
    source = SOURCE.read_text(encoding="utf-8")
    token_ids: list[int] = []
    while len(token_ids) < options.tokens:
        token_ids += model.tokenizer.encode_text(source)
    token_ids = token_ids[: options.tokens]
    prompt = TextPrompt((source * (PROMPT_BYTES // len(source) + 1))[:PROMPT_BYTES])
    guardrails = {
        name: Guardrails([GuardrailOptions(name="g", rules=rules)]) if rules else None for name, rules in KINDS.items()
    }

    async def at_once(_: int, work: Any) -> Any:
        return work()

    rows = []
    for number in range(options.rounds):
        plain_s = 0.0
        for name, guards in guardrails.items():
            spent_s = await _read(model, token_ids, guards)
            plain_s = plain_s if guards is not None else spent_s
            prompt_s = 0.0
            if guards is not None:
                began = time.process_time()
                await guards.check_prompt(prompt, Call(request_id=RequestId("r")), model, at_once)
                prompt_s = time.process_time() - began
            rows.append(
                {
                    "kind": name,
                    "round": number,
                    "token_us": 1e6 * spent_s / len(token_ids),
                    "ratio": spent_s / plain_s,
                    "prompt_ms": 1e3 * prompt_s,
                }
            )
    return rows


def summarize(rows: list[dict[str, Any]]) -> dict[str, float | None]:
    """Medians by kind."""
    return {
        f"{figure}_{name}": statistics.median(row[figure] for row in rows if row["kind"] == name)
        for name in KINDS
        for figure in ("token_us", "ratio", "prompt_ms")
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = asyncio.run(measure(options))
    summary = summarize(rows)
    shown = [[name, *(f"{summary[f'{f}_{name}']:.2f}" for f in ("token_us", "ratio", "prompt_ms"))] for name in KINDS]
    print_table("Guardrails", ["rules", "µs a token", "ratio", "ms a prompt of 64 KiB"], shown)
    if options.json is not None:
        write_json(options.json, report(rows, summary))
