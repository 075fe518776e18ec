"""No sampling settings of one request may change another's tokens, or fail a step.

    python -m tests.acceptance.isolation.sampling_fuzz [--count 100000] [--ways whole,ranks] [--json FILE]

Settings are generated (`sampling_settings.py`) and go through the gateway's own validation, as JSON and as protobuf.
Every accepted one runs through the real sampler, 24 at a time in a batch with innocent requests, whose tokens must
be those that they have alone. Each way of running steps is one row:

    whole        one worker from prompt to end
    handed_over  token 0 is sampled on a prefill worker, the others on a decode worker, which counts the penalties anew
    preempted    a worker with too few blocks: sequences are suspended, or computed again
    ranks        a worker of two ranks
    captured     decode steps are captured and replayed
    queued       and launched before the tokens of the step before them are known

The model is a fake one, whose logits depend on the row's context only, to the bit. Captures are calls
(`tests/support/captured.py`): what a graph replays is for the tests of the kernels.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from disagg.engine.blocks.swap import slot_tokens_for
from disagg.engine.commands import (
    Add,
    Ended,
    Event,
    Gather,
    Join,
    PrefillComputed,
    Release,
    Reserve,
    Scatter,
    TokenSampled,
)
from disagg.engine.config import WorkerConfig
from disagg.engine.core.admission import new_sequence
from disagg.engine.core.engine_core import EngineCore
from disagg.engine.plan import ModelRunner
from disagg.engine.request import SequenceState
from disagg.engine.sampling_rules import edits_logits
from disagg.gateway.text.tokenizer import ModelInfo
from disagg.proto.block_hash import chain_hashes, root_hash
from disagg.proto.errors import InvalidRequestError
from disagg.proto.ids import GatewayId, RequestId
from disagg.proto.messages import Sampling, SequenceSpec, encode
from disagg.proto.token_ids import num_token_ids, pack_token_ids
from tests.acceptance.isolation.sampling_settings import Settings
from tests.support.captured import CapturedRunner, captured_steps
from tests.support.engine import VOCAB_SIZE
from tests.support.rank_connections import fake_group
from tests.support.reports import print_table, report, write_json
from tests.support.sampling import SampledRunner

GUESTS = 24
NUM_BLOCKS = 200
ROOT = root_hash("fake")
MODEL = ModelInfo(name="fake", vocab_size=VOCAB_SIZE, max_model_len=512, eos_token_ids=(2,))
PLAIN: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "drawn": {"seed": 5},
    "filtered": {"seed": 6, "temperature": 1.3, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
}
"""Those whose steps can be launched before the tokens of the step before are known."""
INNOCENTS: dict[str, dict[str, Any]] = {
    **PLAIN,
    "penalized": {"seed": 7, "repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    "asking": {"temperature": 0.0, "logprobs": 3, "repetition_penalty": 1.1},
    "biased": {"seed": 8, "logit_bias": ((3, 5.0), (9, -100.0)), "min_tokens": 4, "stop_token_ids": (3, 4)},
}
NUM_TOKENS = 5

Serve = Callable[[Sequence[SequenceSpec]], list[Event]]


def make_spec(name: str, prompt: Sequence[int], sampling: Sampling) -> SequenceSpec:
    """What a router would send."""
    packed = pack_token_ids(prompt)
    return SequenceSpec(
        request_id=RequestId(name),
        attempt=0,
        gateway_id=GatewayId("gateway"),
        prompt_token_ids=packed,
        block_hashes=tuple(chain_hashes(ROOT, packed)),
        root_hash=ROOT,
        sampling=sampling,
    )


def innocents(rules: Mapping[str, Mapping[str, Any]] = INNOCENTS) -> list[SequenceSpec]:
    """The same at every call."""
    rng = random.Random(1)
    return [
        make_spec(
            name, [rng.randrange(VOCAB_SIZE) for _ in range(20 + 7 * at)], Sampling(max_tokens=NUM_TOKENS, **sampling)
        )
        for at, (name, sampling) in enumerate(rules.items())
    ]


# ---------------------------------------------------------------- ways to run steps


def core_of(runner: ModelRunner, **changes: Any) -> EngineCore:
    """A worker around a runner."""
    fields: dict[str, Any] = {"max_num_seqs": 32, "token_budget": 2048, "watermark": 0.0, **changes}
    return EngineCore(
        runner, config=WorkerConfig(worker_id="w", roles=("prefill", "decode"), model_path="fake", **fields)
    )


def run_all(core: EngineCore) -> list[Event]:
    """Step until nothing is left to do."""
    events: list[Event] = []
    while core.has_work:
        events += core.step(0.0)
    return events


def serve_on(core: EngineCore, specs: Sequence[SequenceSpec]) -> list[Event]:
    """From prompt to end on one worker."""
    events = [event for spec in specs for event in core.handle(Add(spec), 0.0)]
    return events + run_all(core)


def serve_by_hand_over(prefill: EngineCore, decode: EngineCore, specs: Sequence[SequenceSpec]) -> list[Event]:
    """Prompt and token 0 on one worker, the rest on the other."""
    cached = {}
    for spec in specs:
        (reserved,) = decode.handle(Reserve(spec), 0.0)
        cached[spec.key] = getattr(reserved, "cached_tokens")  # noqa: B009 - a refusal has none, and raises here
        prefill.handle(Add(spec, hold_after_prefill=True), 0.0)
    events = run_all(prefill)
    known = {spec.key: num_token_ids(spec.prompt_token_ids) for spec in specs}
    for event in list(events):
        if isinstance(event, PrefillComputed):
            start, end = cached[event.key], known[event.key]
            buffer = np.empty((end - start) * 8, dtype=np.uint8)
            if end > start:
                prefill.handle(Gather(event.key, 0, start, end, buffer), 0.0)
                decode.handle(Scatter(event.key, 0, start, end, buffer), 0.0)
            events += decode.handle(Join(event.key, event.token_id, event.logprobs), 0.0)
            prefill.handle(Release(event.key), 0.0)
        elif isinstance(event, Ended):
            decode.handle(Release(event.key), 0.0)
    events += run_all(decode)
    check_idle(prefill)
    return events


def check_idle(core: EngineCore) -> None:
    """Nothing is held, and nothing is wrong."""
    counts, problems = core.audit()
    assert not any(counts.values()), counts
    assert not problems, problems


@contextmanager
def way(name: str, verdict: Verdict) -> Iterator[Serve]:
    """A worker, or a pair, that serves any number of batches one after the other."""
    with ExitStack() as stack:
        if name == "handed_over":
            pair = core_of(SampledRunner(NUM_BLOCKS)), core_of(SampledRunner(NUM_BLOCKS))
            yield lambda specs: serve_by_hand_over(*pair, specs)
            check_idle(pair[1])
            return
        captured: CapturedRunner | None = None
        core: EngineCore
        if name == "whole":
            core = core_of(SampledRunner(NUM_BLOCKS))
        elif name == "preempted":
            slot_bytes = slot_tokens_for(16) * 8
            core = core_of(SampledRunner(24), decode_reserve_tokens=0, swap_bytes=2 * slot_bytes)
        elif name == "ranks":
            group = stack.enter_context(fake_group(2, num_blocks=NUM_BLOCKS, make=SampledRunner))
            core = core_of(group.runner)
        else:
            stack.enter_context(captured_steps())
            captured = CapturedRunner(NUM_BLOCKS, ahead=name == "queued")
            core = core_of(captured)
        yield lambda specs: serve_on(core, specs)
        check_idle(core)
        verdict.preemptions = core.totals().preemptions
        verdict.steps_ahead = captured.num_behind if captured else 0


WAYS = ("whole", "handed_over", "preempted", "ranks", "captured", "queued")

# ---------------------------------------------------------------- verdict


@dataclass
class Verdict:
    """What came of the settings in one way."""

    way: str
    generated: int = 0
    accepted: int = 0
    steps_failed: int = 0
    """Requests that a fault ended, or that did not end; 0 is right."""
    innocents_changed: int = 0
    """Innocent requests whose tokens, logprobs or end were not those that they have alone; 0 is right."""
    without_token: int = 0
    """Guests that nothing could be sampled for."""
    preemptions: int = 0
    steps_ahead: int = 0
    """Steps that were launched before the tokens of the one before were known."""
    refused: Counter[str] = field(default_factory=Counter)
    """By field."""
    seconds: float = 0.0

    @property
    def is_good(self) -> bool:
        """Whether no other request was changed and no step failed."""
        return not self.steps_failed and not self.innocents_changed


def is_plain(spec: SequenceSpec) -> bool:
    """Whether its steps can be queued from its first token on."""
    return spec.sampling.logprobs < 0 and not edits_logits(new_sequence(spec, SequenceState.WAITING, 0.0))


def outcome(events: Sequence[Event], names: Sequence[str]) -> dict[str, tuple[Any, ...]]:
    """Tokens with their logprobs, and the end, of the requests named."""
    tokens: dict[str, dict[int, Any]] = {name: {} for name in names}
    ends: dict[str, str] = {}
    for event in events:
        if isinstance(event, TokenSampled) and event.key.request_id in tokens:
            tokens[event.key.request_id][event.index] = (event.token_id, event.logprobs)
        elif isinstance(event, Ended):
            ends[event.key.request_id] = event.reason
    return {name: (sorted(tokens[name].items()), ends.get(RequestId(name))) for name in names}


def fuzz(name: str, count: int, seed: int = 0, change: Callable[[Sampling], Sampling] = lambda it: it) -> Verdict:
    """Generate `count` settings and run the accepted ones beside the innocents, as `change` makes them."""
    rng, order = random.Random(seed), random.Random(seed)
    settings, verdict, began = Settings(rng, MODEL), Verdict(name), time.monotonic()
    waiting: dict[bool, list[SequenceSpec]] = {True: [], False: []}
    """Guests of the next batch: where steps are queued, those that can be have batches of their own."""
    with way(name, verdict) as serve:
        alone: dict[str, tuple[Any, ...]] = {
            each.request_id: outcome(serve([each]), [each.request_id])[each.request_id] for each in innocents()
        }

        def run_batch(guests: list[SequenceSpec]) -> None:
            is_queued = name == "queued" and all(map(is_plain, guests))
            names = list(PLAIN if is_queued else INNOCENTS)
            batch = [*guests, *innocents(PLAIN if is_queued else INNOCENTS)]
            order.shuffle(batch)
            events = serve(batch)
            ends = [event for event in events if isinstance(event, Ended)]
            verdict.steps_failed += sum(end.reason in ("failed", "refused", "preempted") for end in ends)
            verdict.without_token += sum(end.reason == "invalid" for end in ends)
            found = outcome(events, names)
            verdict.innocents_changed += sum(found[innocent] != alone[innocent] for innocent in names)
            verdict.steps_failed += len(batch) - len({end.key for end in ends})
            guests.clear()

        for number in range(count):
            prompt = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 40))]
            verdict.generated += 1
            try:
                sampling = settings.draw(prompt)
            except InvalidRequestError as error:
                verdict.refused[error.field.split("[")[0]] += 1
                continue
            verdict.accepted += 1
            max_tokens = min(sampling.max_tokens, NUM_TOKENS)
            sampling = msgspec.structs.replace(
                sampling, max_tokens=max_tokens, min_tokens=min(sampling.min_tokens, max_tokens)
            )
            guest = make_spec(f"guest-{number}", prompt, change(sampling))
            encode(guest)
            guests = waiting[name == "queued" and is_plain(guest)]
            guests.append(guest)
            if len(guests) == GUESTS:
                run_batch(guests)
        for guests in filter(None, waiting.values()):
            run_batch(guests)
    verdict.seconds = time.monotonic() - began
    return verdict


# ---------------------------------------------------------------- the program


def main() -> None:
    """Fuzz each way; the exit status is 1 where an innocent request was changed or a step failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100_000, help="settings to generate for each way")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    verdicts = [fuzz(name, arguments.count, arguments.seed) for name in arguments.ways.split(",")]
    print_table(
        "Sampling settings beside innocent requests",
        ["way", "generated", "accepted", "innocents changed", "requests failed", "without a token", "preempted",
         "steps ahead", "s"],
        [
            [each.way, *map(str, (each.generated, each.accepted, each.innocents_changed, each.steps_failed)),
             *map(str, (each.without_token, each.preemptions, each.steps_ahead)), f"{each.seconds:.0f}"]
            for each in verdicts
        ],
    )  # fmt: skip
    if arguments.json:
        rows = [{**vars(each), "refused": dict(each.refused)} for each in verdicts]
        totals = ("generated", "accepted", "innocents_changed", "steps_failed", "without_token")
        write_json(arguments.json, report(rows, {name: sum(row[name] for row in rows) for name in totals}))
    sys.exit(not all(each.is_good for each in verdicts))


if __name__ == "__main__":
    main()
