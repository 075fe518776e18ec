"""The encoder against transformers, in fp32: alone, in batches, and through the engine core; and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from disagg.engine.checkpoint.checkpoint import read_model_config
from disagg.engine.commands import Add
from disagg.engine.config import TierOptions, WorkerConfig
from disagg.engine.core.engine_core import EngineCore
from disagg.engine.parallel.factories import make_runner
from disagg.engine.runner.encoder import EncoderRunner
from disagg.engine.runner.weights import check_weights
from disagg.proto.errors import ConfigError
from disagg.proto.messages import Pooling
from tests.support.engine import assert_idle, end_of, handle_all, make_spec, run_until_idle, token_ids_of

VOCAB_SIZE = 300
TEXTS = [[(7 * i * i + 3 * i + k) % VOCAB_SIZE for i in range(length)] for k, length in enumerate((1, 5, 64, 33))]
MEAN, CLS = Pooling(kind="mean"), Pooling(kind="cls", normalize=False)


@pytest.fixture(scope="module")
def model() -> Any:
    import transformers

    config = transformers.BertConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=96,
        max_position_embeddings=64,
    )
    torch.manual_seed(3)
    made = transformers.BertModel(config, add_pooling_layer=True).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(0.0, 0.3)
    return made


@pytest.fixture(scope="module")
def folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bert")
    model.save_pretrained(path)
    return path


def config_of(folder: Path, **changes: Any) -> WorkerConfig:
    fields: dict[str, Any] = {"roles": ("prefill", "decode"), "dtype": "float32", "token_budget": 80}
    return WorkerConfig(worker_id="w", model_path=str(folder), **{**fields, **changes})


def expected(model: Any, token_ids: list[int], pooling: Pooling) -> torch.Tensor:
    with torch.inference_mode():
        hidden_LH = model(torch.tensor([token_ids])).last_hidden_state[0]
    vector_H = hidden_LH.mean(dim=0) if pooling.kind == "mean" else hidden_LH[0]
    return torch.nn.functional.normalize(vector_H, dim=0) if pooling.normalize else vector_H


@pytest.mark.parametrize("pooling", [MEAN, CLS])
def test_vectors_through_the_engine_core(model: Any, folder: Path, pooling: Pooling) -> None:
    """Of the budget of 80 tokens a step takes whole texts only."""
    runner = make_runner(config_of(folder))
    assert isinstance(runner, EncoderRunner)
    core = EngineCore(runner, config=config_of(folder))
    specs = [
        msgspec.structs.replace(make_spec(f"t{number}", text, max_tokens=1, cached=False), pooling=pooling)
        for number, text in enumerate(TEXTS)
    ]
    events = handle_all(core, *map(Add, specs))
    lengths = []
    while core.has_work:
        events += core.plan_step(0.0)
        lengths.append([entry.num_tokens for entry in core.planned.entries])
        events += core.run_step()
    assert lengths == [[1, 5, 64], [33]]
    for number, text in enumerate(TEXTS):
        vector = torch.from_numpy(np.frombuffer(end_of(events, f"t{number}").vector, dtype="<f4").copy())
        wanted = expected(model, text, pooling)
        torch.testing.assert_close(vector, wanted, atol=1e-4 * float(wanted.norm()), rtol=0.0)
    assert_idle(core)


def test_a_probe_gets_tokens(folder: Path) -> None:
    core = EngineCore(make_runner(config_of(folder)), config=config_of(folder))
    events = handle_all(core, Add(make_spec("p", TEXTS[1], max_tokens=2))) + run_until_idle(core)
    assert token_ids_of(events, "p") == [0, 0]
    assert_idle(core)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tp": 2}, "tp: BertModel runs on one rank, not on 2"),
        ({"roles": ("prefill",)}, "mode: BertModel has no KV to hand over: set mode to colocated"),
        ({"is_elastic": True}, "mode: BertModel has no KV to hand over: set mode to colocated"),
        ({"quantization": "int8", "dtype": "bfloat16"}, "quantization: int8 is not for BertModel"),
        ({"tiers": TierOptions(host_bytes=1 << 20)}, "kv_cache.tiers: BertModel has no KV"),
        ({"fetch": True}, "kv_cache.fetch: BertModel has no KV"),
        ({"max_model_len": 65}, "max_model_len 65 is more than the model's 64"),
        (
            {"token_budget": 63, "max_model_len": 64},
            "token_budget: 63 is less than 64, the longest text: BertModel computes a text in one step",
        ),
    ],
)
def test_settings_that_cannot_work_are_refused(folder: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EncoderRunner(config_of(folder, **changes))
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("field", "value"),
    [("hidden_act", "relu"), ("position_embedding_type", "relative_key"), ("is_decoder", True), ("unknown_field", 3)],
)
def test_fields_that_are_not_computed_are_refused(folder: Path, tmp_path: Path, field: str, value: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, field: value}))
    with pytest.raises(ConfigError, match=f"`{field}`"):
        read_model_config(tmp_path)


def test_weights_are_checked(folder: Path, tmp_path: Path) -> None:
    check_weights(folder)
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    with pytest.raises(ConfigError, match=r"the weights lack encoder\.layer\.2"):
        check_weights(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    with pytest.raises(ConfigError, match=r"encoder\.layer\.1\.\S+ is not part of BertModel"):
        check_weights(tmp_path)
