"""Drafts of a smaller model: answers do not depend on it, blocks of its cache come back, and what cannot be is
refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from disagg.engine.commands import Add, End
from disagg.engine.config import SpeculationOptions, WorkerConfig
from disagg.engine.core.engine_core import EngineCore
from disagg.engine.parallel.factories import make_runner
from disagg.engine.plan import StepPlan
from disagg.engine.request import Sequence, SequenceState
from disagg.engine.runner.draft_model import CATCH_UP_TOKENS, DraftModel
from disagg.engine.runner.model.kv_cache import kv_layout
from disagg.engine.runner.model_runner import TorchModelRunner
from disagg.proto.errors import ConfigError
from disagg.proto.ids import GatewayId, RequestId
from disagg.proto.messages import Sampling, SequenceSpec
from disagg.proto.token_ids import pack_token_ids
from tests.support.engine import assert_idle, handle_all, run_until_idle, token_ids_of
from tests.support.tiny_models import VOCAB_SIZE, make_checkpoint

NUM_BLOCKS = 64
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "drawn": {"seed": 3},
    "filtered": {"seed": 4, "top_p": 0.9, "temperature": 0.7},
    "penalized": {"seed": 5, "repetition_penalty": 1.2, "logit_bias": ((9, 2.0),)},
    "logprobs": {"temperature": 0.0, "logprobs": 2},
}
MAX_TOKENS = 30


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    kinds = ("llama", "qwen3")
    return {kind: make_checkpoint(kind, tmp_path_factory.mktemp(kind)) for kind in kinds}


def config_of(folder: Path, draft: Path | None = None, **changes: Any) -> WorkerConfig:
    speculation = (
        SpeculationOptions(method="off") if draft is None else SpeculationOptions(method="draft", model=str(draft))
    )
    fields: dict[str, Any] = {"dtype": "float32", "num_blocks": NUM_BLOCKS, "speculation": speculation, **changes}
    return WorkerConfig(worker_id="w", roles=("prefill", "decode"), model_path=str(folder), **fields)


def core_of(config: WorkerConfig) -> EngineCore:
    return EngineCore(make_runner(config), config=config)


def spec_of(name: str, num_prompt_tokens: int = 20, **changes: Any) -> SequenceSpec:
    number = list(WAYS).index(name)
    return SequenceSpec(
        request_id=RequestId(name),
        attempt=1,
        gateway_id=GatewayId("g"),
        prompt_token_ids=pack_token_ids([(5 * number + 7 * i) % VOCAB_SIZE for i in range(num_prompt_tokens)]),
        sampling=Sampling(**{"max_tokens": MAX_TOKENS, **WAYS[name], **changes}),
    )


def answers(core: EngineCore, *specs: SequenceSpec) -> dict[str, list[int]]:
    events = handle_all(core, *map(Add, specs)) + run_until_idle(core)
    assert_idle(core)
    return {spec.request_id: token_ids_of(events, spec.request_id) for spec in specs}


def draft_of(core: EngineCore) -> DraftModel:
    proposer = core._runner.proposer
    assert isinstance(proposer, DraftModel)
    return proposer


@pytest.fixture(scope="module")
def expected(folders: dict[str, Path]) -> dict[str, list[int]]:
    core = core_of(config_of(folders["qwen3"]))
    return {name: answers(core, spec_of(name))[name] for name in WAYS}


def test_a_model_that_drafts_for_itself_is_right(folders: dict[str, Path], expected: dict[str, list[int]]) -> None:
    """In all ways to choose, because it draws with the same random numbers: hardly a draft is refused."""
    core = core_of(config_of(folders["qwen3"], folders["qwen3"]))
    assert answers(core, *map(spec_of, WAYS)) == expected
    speculation = core._scheduler.speculation
    assert speculation is not None
    totals = speculation.totals
    assert totals.accepted == totals.drafted
    assert totals.accepted > 50
    assert draft_of(core).num_free_blocks == NUM_BLOCKS


def test_a_model_that_is_wrong_changes_nothing(folders: dict[str, Path], expected: dict[str, list[int]]) -> None:
    core = core_of(config_of(folders["qwen3"], folders["llama"]))
    assert answers(core, *map(spec_of, WAYS)) == expected
    speculation = core._scheduler.speculation
    assert speculation is not None
    assert speculation.totals.drafted > 0
    assert speculation.totals.accepted < speculation.totals.drafted / 2
    assert draft_of(core).num_free_blocks == NUM_BLOCKS


def test_it_catches_up_with_a_long_prompt_before_it_drafts(folders: dict[str, Path]) -> None:
    length = 3 * CATCH_UP_TOKENS + 10
    spec = spec_of("greedy", length, max_tokens=20)
    expected = answers(core_of(config_of(folders["qwen3"])), spec)
    core = core_of(config_of(folders["qwen3"], folders["qwen3"]))
    assert answers(core, spec) == expected
    speculation = core._scheduler.speculation
    assert speculation is not None
    assert speculation.totals.accepted == speculation.totals.drafted > 0
    assert core.load().steps > 4


def test_blocks_come_back_from_an_answer_that_is_given_up(folders: dict[str, Path]) -> None:
    core = core_of(config_of(folders["qwen3"], folders["qwen3"]))
    handle_all(core, Add(spec_of("greedy")))
    for _ in range(3):
        core.step(0.0)
    assert draft_of(core).num_free_blocks < NUM_BLOCKS
    handle_all(core, End(spec_of("greedy").key, "cancelled", ""))
    assert draft_of(core).num_free_blocks == NUM_BLOCKS
    assert_idle(core)


def test_it_knows_for_which_sequences_it_makes_none(folders: dict[str, Path]) -> None:
    proposer = draft_of(core_of(config_of(folders["qwen3"], folders["llama"], num_blocks=4, max_model_len=50)))

    def most(num_tokens: int, **changes: Any) -> int:
        spec = spec_of("greedy", num_tokens, **changes)
        return proposer.most(Sequence(spec, SequenceState.RUNNING, token_ids=[0] * num_tokens), 8)

    assert [most(num_tokens) for num_tokens in (20, 42, 44, 49, 50)] == [8, 8, 6, 1, 0]
    assert most(20, grammar="{}") == 0
    first = spec_of("greedy", 30)
    assert proposer.propose(Sequence(first, SequenceState.RUNNING, token_ids=[0] * 30), 2).token_ids != ()
    assert [most(num_tokens) for num_tokens in (24, 25, 42)] == [8, 0, 0]


def test_answers_go_on_where_it_fails(
    folders: dict[str, Path], expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the midst of a run of drafts, whose texts it computes anew afterwards."""
    core = core_of(config_of(folders["qwen3"], folders["qwen3"]))
    runner = draft_of(core)._runner
    monkeypatch.setattr("disagg.engine.speculation.speculation.STEPS_BEHIND_FAILURE", 2)
    forward, num_calls = runner.forward, 0

    def failing_once(plan: StepPlan) -> Tensor:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 4:
            raise RuntimeError("out of memory")
        return forward(plan)

    monkeypatch.setattr(runner, "forward", failing_once)
    assert answers(core, *map(spec_of, WAYS)) == expected
    assert num_calls > 8
    speculation = core._scheduler.speculation
    assert speculation is not None
    assert speculation.totals.accepted == speculation.totals.drafted > 0
    assert draft_of(core).num_free_blocks == NUM_BLOCKS


def test_its_kv_is_counted_in_the_size_of_the_cache(folders: dict[str, Path]) -> None:
    plain = TorchModelRunner(config_of(folders["qwen3"], num_blocks=None, kv_cache_bytes=1 << 22))
    with_draft = TorchModelRunner(
        config_of(folders["qwen3"], folders["llama"], num_blocks=None, kv_cache_bytes=1 << 22)
    )
    own = plain.layout.bytes_per_token
    beside = kv_layout(TorchModelRunner(config_of(folders["llama"])).model_config, "float32").bytes_per_token
    assert with_draft.num_blocks == (1 << 22) // (16 * (own + beside))
    assert plain.num_blocks == (1 << 22) // (16 * own)


def test_another_vocabulary_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    other = make_checkpoint("llama", tmp_path / "other")
    file = other / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    (first, second) = [token for token, number in tokenizer["model"]["vocab"].items() if number in (17, 18)]
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    file.write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match=r"speculation\.model: .*another vocabulary: token 17 is .*, in the model "):
        make_runner(config_of(folders["qwen3"], other))


def test_a_larger_vocabulary_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    other = make_checkpoint("llama", tmp_path / "larger")
    file = other / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "vocab_size": VOCAB_SIZE + 8}))
    with pytest.raises(ConfigError, match=r"speculation\.model: .*a vocabulary of 392 tokens, the model one of 384"):
        make_runner(config_of(folders["qwen3"], other))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"speculation": SpeculationOptions(method="draft")}, "speculation.model: method draft needs a draft model"),
        (
            {"speculation": SpeculationOptions(method="lookup", model="m")},
            "speculation.model: is for method draft only, not lookup",
        ),
        ({"tp": 2}, "speculation.method: draft is for workers of one rank, not of 2"),
        ({"model": "none"}, "none: no such checkpoint folder"),
    ],
)
def test_what_does_not_go_together_is_refused(folders: dict[str, Path], changes: dict[str, Any], message: str) -> None:
    draft = Path(changes.pop("model", folders["llama"]))
    with pytest.raises(ConfigError, match=message):
        TorchModelRunner(config_of(folders["qwen3"], draft, **changes))
