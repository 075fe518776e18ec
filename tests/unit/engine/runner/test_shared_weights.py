"""Workers that share their weights compute the same bits, from one file that is written once and checked always."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from disagg.engine.config import WeightsSource
from disagg.engine.runner import loaded_weights, shared_weights
from disagg.engine.runner import weights as weights_module
from disagg.engine.runner.model import parameters
from disagg.engine.runner.model_runner import TorchModelRunner
from disagg.engine.runner.shared_weights import shared_folder
from disagg.kernels.dispatch import packing_name
from disagg.proto.errors import ConfigError
from tests.support.stepping import generate, make_runner, make_sequence
from tests.support.tiny_models import VOCAB_SIZE, make_checkpoint

PROMPT = [(7 * i * i + 3 * i + 5) % VOCAB_SIZE for i in range(40)]
KINDS = ["llama_bias", "llama_tied", "qwen3", "deepseek_v3"]

needs_packing = pytest.mark.skipif(packing_name(torch.bfloat16) is None, reason="oneDNN packs the weights")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: make_checkpoint(kind, tmp_path_factory.mktemp(kind), dtype=torch.bfloat16) for kind in KINDS}


@pytest.fixture
def packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DISAGG_HOME", str(tmp_path))
    return tmp_path / "packed"


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was loaded and packed rather than mapped."""
    made, load, pack = list[str](), weights_module.load_parameters, parameters.pack_parameters

    def counted_load(*args: Any) -> Any:
        made.append("load")
        return load(*args)

    def counted_pack(*args: Any) -> None:
        made.append("pack")
        pack(*args)

    monkeypatch.setattr(loaded_weights, "load_parameters", counted_load)
    monkeypatch.setattr(loaded_weights, "pack_parameters", counted_pack)
    return made


def runner_of(folder: Path, **changes: Any) -> TorchModelRunner:
    return make_runner(folder, **{"dtype": "bfloat16", "share_weights": True, **changes})


def answer(runner: TorchModelRunner) -> torch.Tensor:
    """Logits of a prefill and some decodes."""
    return generate(runner, make_sequence(PROMPT, [3, 1, 4, 5]), 4)


def weights(packed: Path) -> list[str]:
    """Everything in the folder but the lock."""
    return sorted(path.name for path in packed.iterdir() if path.name != "lock")


def test_the_folder_is_beside_the_models() -> None:
    assert shared_folder({"DISAGG_HOME": "/a", "XDG_CACHE_HOME": "/b"}) == Path("/a/packed")
    assert shared_folder({"XDG_CACHE_HOME": "/b"}) == Path("/b/disagg/packed")
    assert shared_folder({}) == Path.home() / ".cache/disagg/packed"


@needs_packing
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_shared_weights_give_the_same_bits(
    folders: dict[str, Path], packed: Path, loads: list[str], kind: str, quantization: str
) -> None:
    expected = answer(make_runner(folders[kind], dtype="bfloat16", quantization=quantization))
    loads.clear()
    writer = runner_of(folders[kind], quantization=quantization)
    assert loads == ["load", "pack"]
    reader = runner_of(folders[kind], quantization=quantization)
    assert loads == ["load", "pack"]
    assert torch.equal(answer(writer), expected)
    assert torch.equal(answer(reader), expected)
    assert len(weights(packed)) == 1


@needs_packing
def test_processes_map_the_file_itself(folders: dict[str, Path], packed: Path) -> None:
    runner = runner_of(folders["qwen3"])
    (name,) = weights(packed)
    assert answer(runner).isfinite().all()
    lines = [
        line.split() for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(f"{packed}/{name}")
    ]
    assert [line[1] for line in lines] == ["r--s"]


@needs_packing
def test_several_at_once_make_one_file(folders: dict[str, Path], packed: Path, loads: list[str]) -> None:
    with ThreadPoolExecutor(4) as threads:
        runners = list(threads.map(runner_of, [folders["qwen3"]] * 4))
    assert loads == ["load", "pack"]
    assert len(weights(packed)) == 1
    answers = [answer(runner) for runner in runners]
    assert all(torch.equal(found, answers[0]) for found in answers)


@needs_packing
@pytest.mark.parametrize("change", ["cut", "altered", "foreign"])
def test_a_broken_file_is_replaced(
    folders: dict[str, Path], packed: Path, loads: list[str], caplog: pytest.LogCaptureFixture, change: str
) -> None:
    expected = answer(runner_of(folders["qwen3"]))
    file = packed / weights(packed)[0]
    good = file.read_bytes()
    broken = {"cut": good[: len(good) // 2], "altered": good[:500] + b"\x7f" + good[501:], "foreign": b"GIF89a" * 99}
    file.unlink()  # what is mapped stays as it is
    file.write_bytes(broken[change])
    with caplog.at_level(logging.WARNING):
        assert torch.equal(answer(runner_of(folders["qwen3"])), expected)
    assert [record.message.count(f"ignoring {file}") for record in caplog.records] == [1]
    assert file.read_bytes() == good
    assert loads == ["load", "pack"] * 2


@needs_packing
def test_other_models_have_other_files_and_older_packings_go(
    folders: dict[str, Path], packed: Path, tmp_path: Path, loads: list[str]
) -> None:
    runner_of(folders["qwen3"])
    (first,) = weights(packed)
    runner_of(folders["qwen3"], quantization="int8")
    both = weights(packed)
    assert len(both) == 2
    assert first in both
    os.utime(folders["qwen3"] / "model.safetensors", (1, 1))  # what a fingerprint of samples could miss
    (packed / f"{first}.tmp").touch()
    runner_of(folders["qwen3"])
    after = weights(packed)
    assert len(after) == 2
    assert first not in after
    assert loads == ["load", "pack"] * 3


@needs_packing
@pytest.mark.parametrize("obstacle", ["no folder", "full disk"])
def test_where_nothing_can_be_written_each_has_its_own(
    folders: dict[str, Path], packed: Path, loads: list[str], caplog: pytest.LogCaptureFixture, obstacle: str
) -> None:
    expected = answer(runner_of(folders["qwen3"]))
    (name,) = weights(packed)
    (packed / name).unlink()
    if obstacle == "no folder":
        (packed / "lock").unlink()
        packed.rmdir()
        packed.write_text("a file in its place")
    else:
        (packed / name).with_suffix(".tmp").symlink_to("/dev/full")
    loads.clear()
    with caplog.at_level(logging.WARNING):
        assert torch.equal(answer(runner_of(folders["qwen3"])), expected)
    assert loads == ["load", "pack"]
    (message,) = [record.message for record in caplog.records]
    assert re.search("cannot write to .*packed, this worker keeps weights of its own: .*(exists|No space)", message)
    assert packed.is_file() or weights(packed) == []


@needs_packing
def test_without_locks_the_file_is_used_but_not_written(
    folders: dict[str, Path], packed: Path, loads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner_of(folders["qwen3"])
    (name,) = weights(packed)
    monkeypatch.setattr(fcntl, "flock", _no_locks)
    loads.clear()
    runner_of(folders["qwen3"])
    assert loads == []
    (packed / name).unlink()
    runner_of(folders["qwen3"])
    assert loads == ["load", "pack"]
    assert weights(packed) == []


def _no_locks(*_: object) -> None:
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


def test_what_has_another_form_is_not_shared(
    folders: dict[str, Path], packed: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shared_weights, "packing_name", lambda dtype: None)
    with caplog.at_level(logging.WARNING):
        shared = answer(runner_of(folders["qwen3"], dtype="float32"))
    assert [record.message for record in caplog.records if record.message.startswith("share_weights")] == [
        "share_weights: there are no C++ kernels, so float32 weights cannot be shared; this worker keeps its own"
    ]
    assert torch.equal(shared, answer(make_runner(folders["qwen3"])))
    assert not packed.exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device": "cuda:0"}, "share_weights: only weights on device cpu are shared, not on cuda:0"),
        ({"tp": 2}, "share_weights: only workers of one rank share their weights, not of 2"),
    ],
)
def test_what_cannot_be_is_refused(folders: dict[str, Path], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}$"):
        runner_of(folders["qwen3"], **changes)


# ---------------------------------------------------------------- kept in a template


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loaded_weights, "_kept", {})


@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_workers_of_a_template_compute_the_same_bits_with_weights_that_were_loaded_once(
    folders: dict[str, Path], loads: list[str], quantization: str
) -> None:
    alone = make_runner(folders["qwen3"], dtype="bfloat16", quantization=quantization)
    loads.clear()
    loaded_weights.keep_weights(WeightsSource(str(folders["qwen3"]), "bfloat16", quantization, False))  # type: ignore[arg-type]
    assert loads == ["load", "pack"]
    runners = [make_runner(folders["qwen3"], dtype="bfloat16", quantization=quantization) for _ in range(2)]
    assert loads == ["load", "pack"]
    assert [runner.fingerprint for runner in runners] == [alone.fingerprint] * 2
    expected = answer(alone)
    assert all(torch.equal(answer(runner), expected) for runner in runners)


@pytest.mark.usefixtures("kept")
def test_kept_weights_are_not_those_of_another_form_or_of_files_that_have_changed(
    folders: dict[str, Path], loads: list[str]
) -> None:
    folder = folders["llama_bias"]
    loaded_weights.keep_weights(WeightsSource(str(folder), "bfloat16", "none", False))
    loads.clear()
    make_runner(folder, dtype="float32")
    make_runner(folders["qwen3"], dtype="bfloat16")
    assert loads == ["load", "pack"] * 2
    make_runner(folder, dtype="bfloat16")
    assert loads == ["load", "pack"] * 2
    os.utime(folder / "model.safetensors", ns=(0, 0))
    make_runner(folder, dtype="bfloat16")
    assert loads == ["load", "pack"] * 3
