from __future__ import annotations

import io
import os
import re
import stat
from pathlib import Path

import pytest
from rich.console import Console

from disagg.cli.keys import KeyRights, run_key_new
from disagg.gateway.auth.auth import Caller
from disagg.gateway.auth.shell.api_keys import MIN_KEY_CHARS, load_keys
from disagg.proto.errors import ConfigError
from disagg.router.api import NO_LIMITS


@pytest.fixture
def console() -> Console:
    return Console(file=io.StringIO(), width=1000)


def said(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def new_key(capsys: pytest.CaptureFixture[str], console: Console, tenant: str, admin: bool, file: Path | None) -> str:
    assert run_key_new(tenant, KeyRights(admin=admin), file, console) == 0
    (key,) = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"disagg_[A-Za-z0-9_-]{43}", key)
    assert len(key) >= MIN_KEY_CHARS
    assert key not in said(console)
    return key


def mode_of(file: Path) -> int:
    return stat.S_IMODE(file.stat().st_mode)


def test_keys_are_added_to_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str], console: Console) -> None:
    file = tmp_path / "keys.yaml"
    mask = os.umask(0)
    try:
        first = new_key(capsys, console, "team-a", False, file)
        assert mode_of(file) == 0o600
        file.write_text("# ours\n" + file.read_text())
        second = new_key(capsys, console, "ops", True, file)
    finally:
        os.umask(mask)
    assert mode_of(file) == 0o600
    assert [entry.name for entry in tmp_path.iterdir()] == ["keys.yaml"]
    assert file.read_text().startswith("# ours\n- tenant: team-a\n  sha256: ")
    assert first not in file.read_text()
    keys = load_keys(str(file))
    assert keys.authenticate(f"Bearer {first}")._replace(limits=NO_LIMITS, credential="") == Caller("team-a", False)
    assert keys.authenticate(f"Bearer {second}")._replace(limits=NO_LIMITS, credential="") == Caller("ops", True)
    assert f"an admin's key of ops, added to {file}; " in said(console)


def test_without_a_file_the_entry_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], console: Console
) -> None:
    key = new_key(capsys, console, "team-a", True, None)
    (entry,) = re.findall(r"- tenant: team-a\n  sha256: [0-9a-f]{64}\n  admin: true\n", said(console))
    file = tmp_path / "keys.yaml"
    file.write_text(entry)
    file.chmod(0o600)
    assert load_keys(str(file)).authenticate(f"Bearer {key}")._replace(limits=NO_LIMITS, credential="") == Caller(
        "team-a", True
    )


def test_a_file_with_an_empty_list(tmp_path: Path, capsys: pytest.CaptureFixture[str], console: Console) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text("# none yet\n")
    file.chmod(0o600)
    key = new_key(capsys, console, "a", False, file)
    assert load_keys(str(file)).authenticate(f"Bearer {key}")._replace(limits=NO_LIMITS, credential="") == Caller(
        "a", False
    )


@pytest.mark.parametrize(
    ("text", "mode", "message"),
    [
        ("- tenant: a\n  key: aaaaaaaaaaaaaaaaaaaa\n", 0o644, "others can use"),
        ("[{tenant: a, key: aaaaaaaaaaaaaaaaaaaa}]\n", 0o600, "is not valid YAML"),
        ("a: b\n", 0o600, "Expected array, got object"),
    ],
)
def test_a_file_that_cannot_be_added_to_stays_as_it_is(
    tmp_path: Path, console: Console, capsys: pytest.CaptureFixture[str], text: str, mode: int, message: str
) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(text)
    file.chmod(mode)
    with pytest.raises(ConfigError, match=message):
        run_key_new("b", KeyRights(), file, console)
    assert file.read_text() == text
    assert capsys.readouterr().out == ""


def test_a_folder_that_is_not_there(tmp_path: Path, console: Console) -> None:
    with pytest.raises(ConfigError, match=r"^--file: cannot write .*none/keys\.yaml \(No such file or directory\)$"):
        run_key_new("a", KeyRights(), tmp_path / "none" / "keys.yaml", console)


@pytest.mark.parametrize("tenant", ["", "a b", "-a", "a" * 65, "ä", "a\n"])
def test_a_name_that_is_no_tenant_s(console: Console, capsys: pytest.CaptureFixture[str], tenant: str) -> None:
    with pytest.raises(ConfigError, match=r"^tenant: expected at most 64 letters"):
        run_key_new(tenant, KeyRights(), None, console)
    assert capsys.readouterr().out == ""


def test_a_key_that_may_read_metrics(tmp_path: Path, console: Console, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "keys.yaml"
    assert run_key_new("monitoring", KeyRights(metrics=True), file, console) == 0
    caller = load_keys(str(file)).authenticate(f"Bearer {capsys.readouterr().out.strip()}")
    assert (caller.tenant, caller.is_admin, caller.sees_counts) == ("monitoring", False, True)


def test_a_key_with_scopes_models_and_an_end(
    tmp_path: Path, console: Console, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "keys.yaml"
    rights = KeyRights(scopes=["inference"], models=["a", "b"], expires="2999-12-30")
    assert run_key_new("team-a", rights, file, console) == 0
    key = capsys.readouterr().out.strip()
    caller = Caller("team-a", False, models=frozenset({"a", "b"}), expires_at=32_503_593_600.0)
    assert load_keys(str(file)).authenticate(f"Bearer {key}")._replace(limits=NO_LIMITS, credential="") == caller


@pytest.mark.parametrize(
    ("rights", "message"),
    [
        (KeyRights(expires="soon"), "expires must be a date, "),
        (KeyRights(scopes=["all"]), "Invalid enum value 'all' - at scopes"),
        (KeyRights(scopes=["admin"], admin=True), "scopes stand instead of admin and metrics; "),
        (KeyRights(models=[""]), "Expected str of length >= 1 - at models"),
    ],
)
def test_rights_that_cannot_be(
    tmp_path: Path, console: Console, capsys: pytest.CaptureFixture[str], rights: KeyRights, message: str
) -> None:
    file = tmp_path / "keys.yaml"
    with pytest.raises(ConfigError) as caught:
        run_key_new("a", rights, file, console)
    assert str(caught.value).startswith(message)
    assert not file.exists()
    assert capsys.readouterr().out == ""
