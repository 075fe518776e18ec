"""Models with windows in cache groups of their own: tokens are those of transformers though blocks that left a window
have other owners, behind cached prefixes, after preemption, and on a worker that got the KV from another one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from disagg.engine.commands import Add, Gather, Join, PrefillComputed, Release, Reserve, Reserved, Scatter
from disagg.engine.config import WorkerConfig
from disagg.engine.core.engine_core import EngineCore
from disagg.engine.plan import Buffer
from disagg.engine.runner.model_runner import TorchModelRunner
from disagg.proto.block_hash import chain_hashes, root_hash
from disagg.proto.ids import GatewayId, RequestId
from disagg.proto.messages import Sampling, SequenceSpec
from disagg.proto.token_ids import pack_token_ids
from tests.support.engine import assert_idle, end_of, handle_all, run_until_idle, token_ids_of
from tests.support.tiny_models import VOCAB_SIZE, make_checkpoint, reference_generate

KINDS = ("ministral", "gemma3", "mistral_window")
PROMPT = [(11 * i * i + 2 * i + 1) % VOCAB_SIZE for i in range(90)]
ROOT = root_hash("windows")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    return {kind: make_checkpoint(kind, root / kind) for kind in KINDS}


def core_of(folder: Path, **changes: Any) -> EngineCore:
    fields: dict[str, Any] = {
        "roles": ("prefill", "decode"),
        "dtype": "float32",
        "num_blocks": 40,
        "token_budget": 48,
        "max_num_seqs": 4,
        "decode_reserve_tokens": 16,
        "swap_bytes": 0,
    }
    config = WorkerConfig(worker_id="w", model_path=str(folder), **{**fields, **changes})
    return EngineCore(TorchModelRunner(config), config=config)


def spec_of(name: str, prompt: list[int], num_tokens: int) -> SequenceSpec:
    packed = pack_token_ids(prompt)
    return SequenceSpec(
        request_id=RequestId(name),
        attempt=1,
        gateway_id=GatewayId("g"),
        prompt_token_ids=packed,
        block_hashes=tuple(chain_hashes(ROOT, packed)),
        root_hash=ROOT,
        sampling=Sampling(temperature=0.0, max_tokens=num_tokens),
    )


def test_layers_form_groups(folders: dict[str, Path]) -> None:
    layouts = {kind: core_of(folder)._runner.layout for kind, folder in folders.items()}
    layers = {kind: [(group.layers, group.window) for group in layout.groups] for kind, layout in layouts.items()}
    assert layers == {
        "ministral": [((1,), 0), ((0, 2), 16)],
        "gemma3": [((2,), 0), ((0, 1, 3), 16)],
        "mistral_window": [((0, 1, 2), 0)],
    }


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_transformers(folders: dict[str, Path], kind: str) -> None:
    """Several sequences side by side, whose blocks change owners, then a turn that is resumed."""
    core = core_of(folders[kind])
    prompts = {"a": PROMPT, "b": PROMPT[5:60], "c": PROMPT[:33]}
    events = handle_all(core, *(Add(spec_of(name, prompt, 60)) for name, prompt in prompts.items()))
    events += run_until_idle(core)
    for name, prompt in prompts.items():
        assert token_ids_of(events, name) == reference_generate(folders[kind], prompt, 60)[0]
    history = [*PROMPT, *token_ids_of(events, "a"), 3, 1, 4]
    events = handle_all(core, Add(spec_of("next", history, 20))) + run_until_idle(core)
    assert token_ids_of(events, "next") == reference_generate(folders[kind], history, 20)[0]
    assert end_of(events, "next").cached_tokens == 144
    assert_idle(core)


@pytest.mark.parametrize("kind", ["gemma3"])
def test_a_preempted_sequence_goes_on_alike(folders: dict[str, Path], kind: str) -> None:
    core = core_of(folders[kind], num_blocks=14, swap_bytes=1 << 22, decode_reserve_tokens=0)
    prompts = {"a": PROMPT[:60], "b": PROMPT[20:80]}
    events = handle_all(core, *(Add(spec_of(name, prompt, 60)) for name, prompt in prompts.items()))
    events += run_until_idle(core)
    assert core.totals().swapped_in_blocks > 0
    for name, prompt in prompts.items():
        assert token_ids_of(events, name) == reference_generate(folders[kind], prompt, 60)[0]
    assert_idle(core)


@pytest.mark.parametrize("kind", KINDS)
def test_d_goes_on_with_what_p_sends(folders: dict[str, Path], kind: str) -> None:
    p, d = core_of(folders[kind]), core_of(folders[kind], block_size=32)
    layout, spec = p._runner.layout, spec_of("r", PROMPT, 40)
    (reserved,) = handle_all(d, Reserve(spec))
    assert reserved == Reserved(spec.key, 0)
    computed = handle_all(p, Add(spec, hold_after_prefill=True)) + run_until_idle(p)
    (first,) = [event for event in computed if isinstance(event, PrefillComputed)]
    num_bytes = 0
    for number, group in enumerate(layout.groups):
        start = group.kept_from(len(PROMPT))
        for seq, (begin, end) in enumerate([(start, 70), (70, 90)]):
            buffer: Buffer = np.empty((end - begin) * group.bytes_per_token, dtype=np.uint8)
            handle_all(p, Gather(spec.key, seq, begin, end, buffer, group=number))
            handle_all(d, Scatter(spec.key, seq, begin, end, buffer, group=number))
            num_bytes += len(buffer)
    assert num_bytes == layout.bytes_of(len(PROMPT))
    handle_all(p, Release(spec.key))
    events = handle_all(d, Join(spec.key, first.token_id)) + run_until_idle(d)
    assert token_ids_of(events, "r") == reference_generate(folders[kind], PROMPT, 40)[0]
    assert_idle(p)
    assert_idle(d)
