"""Folders of adapters: what is read, and what is refused, by name."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from disagg.engine.adapters import folder as folder_module
from disagg.engine.adapters.folder import (
    CONFIG,
    PREFIX,
    TENSORS,
    AdapterConfig,
    AdapterError,
    check_config,
    open_adapter,
)
from disagg.engine.runner.adapters import AdapterSlots
from disagg.engine.runner.model_runner import TorchModelRunner
from disagg.proto.messages import Adapter
from tests.support.adapters import options_of, write_folder
from tests.support.stepping import make_runner
from tests.support.tiny_models import make_checkpoint

MODULE = f"{PREFIX}model.layers.1.self_attn.q_proj"
A, B = f"{MODULE}.lora_A.weight", f"{MODULE}.lora_B.weight"
GOOD = {A: torch.full((4, 64), 0.5), B: torch.full((64, 4), 0.25)}


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> TorchModelRunner:
    root = tmp_path_factory.mktemp("base")
    (root / "folder").mkdir()
    return make_runner(make_checkpoint("llama", root / "llama"), adapters=options_of(root / "folder"))


@pytest.fixture
def place(runner: TorchModelRunner) -> Path:
    """The folder of the adapter `a`, which is not there yet."""
    options = runner._config.adapters
    assert options is not None
    found = Path(options.folder) / "a"
    shutil.rmtree(found, ignore_errors=True)
    return found


def refusal(runner: TorchModelRunner, path: str = "a", fingerprint: str = "") -> tuple[str, str]:
    with pytest.raises(AdapterError) as caught:
        runner.read_adapter(Adapter(name="a", path=path, fingerprint=fingerprint))
    return caught.value.fault, str(caught.value)


def test_what_is_read_is_put_into_a_slot(runner: TorchModelRunner, place: Path) -> None:
    write_folder(place, GOOD, alpha=6.0)
    loaded = runner.read_adapter(Adapter(name="a", path="a"))
    assert loaded.num_bytes == 2 * 4 * 64 * 4
    runner.put_adapter(3, loaded)
    slots = runner._adapters
    assert isinstance(slots, AdapterSlots)
    qkv = slots.layers[1]["qkv"]
    assert qkv.ranks_SP[3].tolist() == [4, 0, 0]
    assert qkv.scales_SP[3, 0] == 1.5
    assert torch.equal(qkv.a_SPRI[3, 0, :4], GOOD[A])
    assert torch.equal(qkv.b_SRO[3, :4, :64], GOOD[B].T)
    assert not slots.layers[0]["qkv"].ranks_SP.any()
    write_folder(place, {name.replace("q_proj", "o_proj"): tensor for name, tensor in GOOD.items()})
    runner.put_adapter(3, runner.read_adapter(Adapter(name="a", path="a")))
    assert qkv.ranks_SP[3].tolist() == [0, 0, 0]


def test_the_fingerprint_covers_meaning_and_tensors(runner: TorchModelRunner, place: Path) -> None:
    def fingerprint(tensors: dict[str, Tensor] = GOOD, **fields: Any) -> str:
        write_folder(place, tensors, **fields)
        found = runner.read_adapter(Adapter(name="a", path="a")).fingerprint
        assert check_config(str(place.parent), "a", 24, 1 << 20) == (
            found,
            sum(4 * t.numel() for t in tensors.values()),
        )
        return found

    first = fingerprint()
    assert len(first) == 64
    same = (fingerprint(task_type="CAUSAL_LM"), fingerprint(lora_dropout=0.1, target_modules=["q_proj"]))
    assert set(same) == {first}
    other = {A: GOOD[A], B: GOOD[B] * 2}
    others = [fingerprint(alpha=9.0), fingerprint(use_rslora=True), fingerprint(other)]
    assert len({first, *others}) == 4
    assert refusal(runner, fingerprint=first) == (
        "changed", f"adapter changed: its fingerprint is {others[2][:16]}, not {first[:16]}",
    )  # fmt: skip


def test_scales_of_both_kinds() -> None:
    assert AdapterConfig(16, 32.0, rslora=False).scale == 2.0
    assert AdapterConfig(16, 32.0, rslora=True).scale == 32.0 / math.sqrt(16)


FIELDS = [
    ({"peft_type": "LOHA"}, "`peft_type` must be LORA, not 'LOHA'"),
    ({"r": 25}, "`r` is 25, more than adapters.max_rank (24)"),
    ({"r": 0}, "`r` must be a whole number of at least 1, not 0"),
    ({"r": None}, "`r` is missing"),
    ({"lora_alpha": float("nan")}, "`lora_alpha` must be a positive number, not nan"),
    ({"lora_alpha": 1e299}, "`lora_alpha` makes a scale of 2.5e+298; it is above 0 and at most 65504"),
    ({"use_dora": True}, "`use_dora` is 'True': that is not supported"),
    ({"bias": "lora_only"}, "`bias` is 'lora_only': biases of adapters are not supported"),
    ({"lora_bias": True}, "`lora_bias` is 'True': that is not supported"),
    ({"modules_to_save": ["lm_head"]}, "`modules_to_save` is \"['lm_head']\": that is not supported"),
    ({"rank_pattern": {"q_proj": 2}}, "`rank_pattern` is \"{'q_proj': 2}\": that is not supported"),
    ({"alpha_pattern": {"q_proj": 2}}, "`alpha_pattern` is \"{'q_proj': 2}\": that is not supported"),
    ({"fan_in_fan_out": True}, "`fan_in_fan_out` is 'True': that is not supported"),
    ({"init_lora_weights": "pissa_niter_4"}, "`init_lora_weights` is 'pissa_niter_4': the base model was changed, too"),
    ({"layer_replication": [[0, 2]]}, "`layer_replication` is '[[0, 2]]': that is not supported"),
    ({"something_new": 1}, "`something_new` is '1': that is not supported"),
]


@pytest.mark.parametrize(("fields", "message"), FIELDS, ids=[message.split("`")[1] for _, message in FIELDS])
def test_fields_that_ask_for_something_else_are_refused(
    runner: TorchModelRunner, place: Path, fields: dict[str, Any], message: str
) -> None:
    write_folder(place, GOOD, **fields)
    assert refusal(runner) == ("content", f"a/{CONFIG}: {message}")


def renamed(name: str) -> dict[str, Tensor]:
    """An adapter of another module."""
    return {f"{PREFIX}{name}.lora_{kind}.weight": GOOD[key] for kind, key in (("A", A), ("B", B))}


TENSOR_CASES: list[tuple[dict[str, Tensor], str]] = [
    ({}, f"a/{TENSORS}: there are no tensors"),
    ({A: GOOD[A]}, f"a/{TENSORS}: tensor {A} has no lora_B beside it"),
    ({B: GOOD[B]}, f"a/{TENSORS}: tensor {B} has no lora_A beside it"),
    ({**GOOD, A: torch.ones(3, 64)}, f"a/{TENSORS}: tensor {A} has shape [3, 64]; `r` of {CONFIG} is 4"),
    ({**GOOD, B: torch.ones(64, 8)}, f"a/{TENSORS}: tensor {B} has shape [64, 8]; `r` of {CONFIG} is 4"),
    ({**GOOD, A: torch.ones(4, 65)}, f"tensor {A} has shape [4, 65]; the base model has 64 in place of 65"),
    ({**GOOD, B: torch.ones(32, 4)}, f"tensor {B} has shape [32, 4]; the base model has 64 in place of 32"),
    ({**GOOD, A: GOOD[A].to(torch.float8_e4m3fn)}, f"a/{TENSORS}: tensor {A} is F8_E4M3; adapters are F32, BF16, F16"),
    ({**GOOD, A: torch.full((4, 64), math.inf)}, f"tensor {A} has numbers that are not finite"),
    ({**GOOD, B: torch.full((64, 4), 1e30)}, f"tensor {B} has numbers above 65504"),
    ({**GOOD, f"{MODULE}.lora_magnitude_vector": torch.ones(64)},
     f"a/{TENSORS}: tensor {MODULE}.lora_magnitude_vector maps to nothing (DoRA)"),
    ({**GOOD, f"{PREFIX}model.embed_tokens.lora_embedding_A": torch.ones(4, 384)},
     f"a/{TENSORS}: tensor {PREFIX}model.embed_tokens.lora_embedding_A maps to nothing (embeddings)"),
    ({**GOOD, "base_model.model.lm_head.weight": torch.ones(4, 4)},
     f"a/{TENSORS}: tensor base_model.model.lm_head.weight maps to nothing (it is no A or B)"),
    (renamed("lm_head"),
     f"tensor {PREFIX}lm_head.lora_A.weight maps to nothing of LlamaForCausalLM: it has no such module"),
    (renamed("model.layers.3.self_attn.q_proj"),
     f"tensor {PREFIX}model.layers.3.self_attn.q_proj.lora_A.weight maps to nothing of LlamaForCausalLM: "
     "it has no such module"),
    (renamed("model.layers.0.mlp.experts.1.up_proj"),
     f"tensor {PREFIX}model.layers.0.mlp.experts.1.up_proj.lora_A.weight maps to nothing of LlamaForCausalLM: "
     "adapters of experts are not supported"),
]  # fmt: skip


@pytest.mark.parametrize(("tensors", "message"), TENSOR_CASES, ids=range(len(TENSOR_CASES)))
def test_tensors_that_do_not_fit_are_refused(
    runner: TorchModelRunner, place: Path, tensors: dict[str, Tensor], message: str
) -> None:
    write_folder(place, tensors)
    assert refusal(runner) == ("content", message)


@pytest.mark.parametrize("path", ["", "/etc", "../a", "a/../../b", "x\0y", "a" * 1025])
def test_a_path_outside_is_refused(runner: TorchModelRunner, place: Path, path: str) -> None:
    write_folder(place, GOOD)
    assert refusal(runner, path) == ("content", f"path: {path!r} is not one inside of adapters.folder")


def test_links_that_lead_outside_are_refused(runner: TorchModelRunner, place: Path, tmp_path: Path) -> None:
    outside = write_folder(tmp_path / "outside", GOOD)
    place.symlink_to(outside)
    assert refusal(runner) == ("content", "path: 'a' leads out of adapters.folder")
    place.unlink()
    write_folder(place, GOOD)
    for name in (CONFIG, TENSORS):
        (place / name).rename(place / "kept")
        (place / name).symlink_to(outside / name)
        assert refusal(runner) == ("content", f"{name}: leads out of adapters.folder")
        (place / name).unlink()
        (place / "kept").rename(place / name)
    assert refusal(runner, ".") == ("content", "path: '.' leads out of adapters.folder")


def test_what_is_missing_may_be_elsewhere(runner: TorchModelRunner, place: Path) -> None:
    assert refusal(runner) == ("missing", "a: there is no such folder here")
    for name in (CONFIG, TENSORS):
        write_folder(place, GOOD)
        (place / name).unlink()
        assert refusal(runner) == ("missing", f"{name}: the file is missing")


def broken(change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    return lambda file: file.write_bytes(change(file.read_bytes()))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (TENSORS, broken(lambda data: data[:-1]), f"a/{TENSORS}: cut short"),
        (TENSORS, broken(lambda data: b"\xff" * 8 + data[8:]), f"a/{TENSORS}: not a safetensors file"),
        (TENSORS, broken(lambda data: bytes([0, 0, 0, 2, 0, 0, 0, 0]) + data[8:]), f"a/{TENSORS}: not a safetensors"),
        (CONFIG, broken(lambda data: data[:-1]), f"a/{CONFIG}: not valid JSON"),
        (CONFIG, broken(lambda data: data + b" " * (1 << 20)), f"{CONFIG}: "),
    ],
)  # fmt: skip
def test_broken_files_are_refused(
    runner: TorchModelRunner, place: Path, name: str, change: Callable[[Path], object], message: str
) -> None:
    write_folder(place, GOOD)
    change(place / name)
    fault, found = refusal(runner)
    assert fault == "content"
    assert found.startswith(message)


def test_sizes_are_bounded_before_anything_is_read(
    runner: TorchModelRunner, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sparse file of a terabyte; tensors that lie over each other; more tensors than any model has."""
    write_folder(place, GOOD)
    os.truncate(place / TENSORS, 1 << 40)
    fault, found = refusal(runner)
    assert fault == "content"
    assert found.startswith(f"{TENSORS}: {1 << 40} bytes are more than ")
    header = {
        name: {"dtype": "F32", "shape": [4, 64], "data_offsets": [0, 1024]}
        for name in (A, B.replace("lora_B", "lora_A").replace("q_proj", "k_proj"))
    }
    raw = json.dumps(header).encode()
    (place / TENSORS).write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(1024))
    assert "lies over another one" in refusal(runner)[1]
    write_folder(place, GOOD)
    monkeypatch.setattr(folder_module, "MAX_TENSORS", 1)
    assert refusal(runner) == ("content", f"a/{TENSORS}: 2 tensors are more than 1")


def test_a_file_that_becomes_shorter_is_found(tmp_path: Path) -> None:
    write_folder(tmp_path / "a", GOOD)
    adapter = open_adapter(str(tmp_path), "a", 24, 1 << 20)
    os.truncate(tmp_path / "a" / TENSORS, 300)
    with pytest.raises(AdapterError, match="cut short at tensor"):
        list(folder_module.read_tensors(adapter))
