from __future__ import annotations

import contextvars
import hashlib
import re
from pathlib import Path
from typing import Any

import pytest

from disagg.gateway.auth.auth import (
    ANONYMOUS,
    CALLER,
    KEY_NEEDED,
    UNAUTHENTICATED,
    AnonymousAccess,
    ApiKey,
    ApiKeys,
    Authenticator,
    Caller,
    CertificateNames,
    RefusedError,
    digest_of,
)
from disagg.gateway.auth.shell.api_keys import KeyEntry, expiry_of, load_keys
from disagg.proto.errors import AuthenticationError, ConfigError
from disagg.router.api import NO_LIMITS, TenantLimits

KEY_A, KEY_B = "a" * 16, "key-of-the-operators"
PLAIN = TenantLimits(max_priority=0, is_sole=False)
"""Of one of several tenants of whom the file says no limits."""
KEYS = ApiKeys([ApiKey(digest_of(KEY_A), Caller("a", False)), ApiKey(digest_of(KEY_B), Caller("b", True))])


def write(folder: Path, text: str, mode: int = 0o600) -> str:
    file = folder / "keys.yaml"
    file.write_text(text)
    file.chmod(mode)
    return str(file)


def caller_of(keys: ApiKeys, header: str | None, certificate: str = "") -> Caller:
    """Who calls, apart from which key said so."""
    return keys.authenticate(header, certificate)._replace(credential="")


def refusal(path: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_keys(path)
    return str(caught.value)


# ---------------------------------------------------------------- who calls


@pytest.mark.parametrize(
    ("header", "caller"),
    [
        (f"Bearer {KEY_A}", Caller("a", False)),
        (f"bearer {KEY_B}", Caller("b", True)),
        (f"BEARER   {KEY_B} ", Caller("b", True)),
    ],
)
def test_a_key_says_who_calls(header: str, caller: Caller) -> None:
    assert caller_of(KEYS, header) == caller


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        KEY_A,
        f"Basic {KEY_A}",
        f"Bearer {KEY_A[:-1]}",
        f"Bearer {KEY_A}a",
        f"Bearer {KEY_A.upper()}",
        f"Bearer {digest_of(KEY_A).hex()}",
        "Bearer \ud800",
        "Bearer ключ",
        "Bearer " + "x" * 100_000,
    ],
)
def test_everything_else_is_refused_in_the_same_words(header: str | None) -> None:
    with pytest.raises(AuthenticationError) as caught:
        KEYS.authenticate(header)
    assert str(caught.value) == KEY_NEEDED


def test_the_digest_that_was_found_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where none was found: one comparison, however many keys there are."""
    compared: list[tuple[bytes, bytes]] = []

    def compare(known: bytes, brought: bytes) -> bool:
        compared.append((known, brought))
        return known == brought

    monkeypatch.setattr("disagg.gateway.auth.auth.hmac.compare_digest", compare)
    for key in (KEY_A, KEY_B):
        KEYS.authenticate(f"Bearer {key}")
    with pytest.raises(RefusedError):
        KEYS.authenticate("Bearer unknown")
    a, b, unknown = map(digest_of, (KEY_A, KEY_B, "unknown"))
    assert compared == [(a, a), (b, b), (bytes(32), unknown)]


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (None, "missing"),
        ("", "missing"),
        ("Bearer", "malformed"),
        ("Bearer  ", "malformed"),
        (KEY_A, "malformed"),
        (f"Basic {KEY_A}", "malformed"),
        ("Bearer unknown", "unknown"),
    ],
)
def test_the_operator_learns_why(header: str | None, reason: str) -> None:
    with pytest.raises(RefusedError) as caught:
        KEYS.authenticate(header)
    assert caught.value.reason == reason


def test_other_keys_are_taken_from_the_next_call_on() -> None:
    keys = ApiKeys([ApiKey(digest_of(KEY_A), Caller("a", False))])
    keys.take(ApiKeys([ApiKey(digest_of(KEY_B), Caller("b", False))], {"c": Caller("c", False)}))
    assert (len(keys), keys.takes_certificates) == (2, True)
    assert caller_of(keys, f"Bearer {KEY_B}") == Caller("b", False)
    assert caller_of(keys, None, "c") == Caller("c", False)
    with pytest.raises(RefusedError):
        keys.authenticate(f"Bearer {KEY_A}")


def test_only_digests_are_kept() -> None:
    assert digest_of("k") == hashlib.sha256(b"k").digest()
    assert KEY_B not in repr(vars(KEYS))


def test_who_was_not_looked_at_may_nothing() -> None:
    assert contextvars.Context().run(CALLER.get) == UNAUTHENTICATED


def test_without_keys_everybody_is_let_in() -> None:
    assert AnonymousAccess().authenticate(None) == ANONYMOUS == Caller("", True)
    assert AnonymousAccess(UNAUTHENTICATED).authenticate("Bearer x") == Caller("", False)


def test_a_key_ends_at_its_time_and_its_client_is_told() -> None:
    now = 99.9
    caller = Caller("a", False, expires_at=100.0)
    keys = ApiKeys([ApiKey(digest_of(KEY_A), caller)], {"a.example": caller}, wall_clock=lambda: now)
    assert caller_of(keys, f"Bearer {KEY_A}") == caller_of(keys, None, "a.example") == caller
    now = 100.0
    for header, certificate in ((f"Bearer {KEY_A}", ""), (None, "a.example")):
        with pytest.raises(RefusedError, match=r"has expired$") as caught:
            keys.authenticate(header, certificate)
        assert (caught.value.reason, caught.value.code) == ("expired", "expired_api_key")
    with pytest.raises(RefusedError) as caught:
        keys.authenticate("Bearer unknown")
    assert caught.value.code == "authentication_error"


# ---------------------------------------------------------------- the file


def credential_of(key: str) -> str:
    return f"sha256:{digest_of(key).hex()}"


def found_by(known: Authenticator, tenant: str, credential: str | None) -> Caller | str:
    """Who ordered work, or why it is refused."""
    try:
        return known.find(tenant, credential)
    except RefusedError as error:
        return error.reason


def test_work_has_the_rights_of_the_key_that_ordered_it_as_they_are_now() -> None:
    now, m1, m2 = 9.9, frozenset({"m1"}), frozenset({"m2"})
    one = Caller("a", False, models=m1, expires_at=10.0)
    other = Caller("a", False, models=m2)
    named = Caller("a", False, infers=False)
    keys = [ApiKey(digest_of(KEY_A), one), ApiKey(digest_of(KEY_B), other)]
    known = ApiKeys(keys, {"a.example": named}, wall_clock=lambda: now)
    credentials = [known.authenticate(*each).credential for each in ((f"Bearer {KEY_A}",), (None, "a.example"))]
    assert credentials == [credential_of(KEY_A), "certificate:a.example"]
    by_key, by_certificate = (one._replace(credential=credentials[0]), named._replace(credential=credentials[1]))
    assert [found_by(known, "a", each) for each in credentials] == [by_key, by_certificate]
    assert [found_by(known, "b", each) for each in credentials] == ["unknown", "unknown"]
    assert found_by(known, "a", "") == "unknown"  # ordered when callers needed no key
    now = 10.0
    assert found_by(known, "a", credentials[0]) == "expired"
    known.take(ApiKeys([ApiKey(digest_of(KEY_B), other)]))
    assert [found_by(known, "a", each) for each in credentials] == ["unknown", "unknown"]
    known.take(ApiKeys([ApiKey(digest_of(KEY_A), Caller("b", False))]))
    assert found_by(known, "a", credentials[0]) == "unknown"


def test_work_whose_key_was_not_kept_has_what_all_keys_of_its_tenant_have() -> None:
    def key(text: str, tenant: str, **rights: Any) -> ApiKey:
        return ApiKey(digest_of(text), Caller(tenant, False, **rights))

    m1, m2 = frozenset({"m1", "m3"}), frozenset({"m2", "m3"})
    keys = [
        key("1", "one", models=m1),
        key("2", "two", models=m1),
        key("3", "two", models=m2),
        key("4", "any", models=m1),
        key("5", "any"),
        key("6", "ended", expires_at=10.0),
        key("7", "renewed", expires_at=10.0),
        key("8", "renewed", models=m2),
        key("9", "reader"),
        key("10", "reader", infers=False, metrics=True),
    ]
    known = ApiKeys(keys, wall_clock=lambda: 10.0)
    found = {tenant: found_by(known, tenant, None) for tenant in ("one", "two", "any", "ended", "renewed", "none")}
    assert found == {
        "one": Caller("one", False, models=m1),
        "two": Caller("two", False, models=frozenset({"m3"})),
        "any": Caller("any", False, models=m1),
        "ended": "unknown",
        "renewed": Caller("renewed", False, models=m2),
        "none": "unknown",
    }
    assert found_by(known, "reader", None) == Caller("reader", False, infers=False)


def test_work_of_gateways_without_keys() -> None:
    anonymous, named = AnonymousAccess(), CertificateNames()
    assert [found_by(anonymous, "", each) for each in ("", None)] == [ANONYMOUS, ANONYMOUS]
    assert [found_by(anonymous, *each) for each in (("a", None), ("", credential_of(KEY_A)))] == ["unknown"] * 2
    caller = named.authenticate(None, "a")
    assert caller.credential == "certificate:a"
    assert [found_by(named, "a", each) for each in ("certificate:a", None)] == [caller, caller]
    assert [found_by(named, "a", each) for each in ("certificate:b", credential_of(KEY_A), "")] == ["certificate"] * 3
    assert found_by(named, "", None) == "certificate"


def test_both_forms_of_an_entry(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        f"- tenant: a\n  sha256: {digest_of(KEY_A).hex().upper()}\n- {{tenant: b, key: {KEY_B}, admin: true}}\n",
    )
    keys = load_keys(file)
    assert caller_of(keys, f"Bearer {KEY_A}") == Caller("a", False, PLAIN)
    assert caller_of(keys, f"Bearer {KEY_B}") == Caller("b", True, PLAIN)


def test_a_file_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path, f"[{{tenant: a, key: {KEY_A}}}]")
    owner = Path(file).stat().st_uid
    monkeypatch.setattr("disagg.connections.watched_files.os.geteuid", lambda: owner + 1)
    monkeypatch.setattr("disagg.connections.watched_files.ROOT", owner + 2)
    assert refusal(file) == (f"gateway.api_keys: {file} belongs to another user (uid {owner}), who could change it")
    monkeypatch.setattr("disagg.connections.watched_files.ROOT", owner)
    load_keys(file)


def test_rights_and_certificates_of_entries(tmp_path: Path) -> None:
    text = f"[{{tenant: m, key: {KEY_A}, metrics: true}}, {{tenant: c, certificate: c.example}}]"
    keys = load_keys(write(tmp_path, text))
    assert caller_of(keys, f"Bearer {KEY_A}")._replace(limits=NO_LIMITS) == Caller("m", False, metrics=True)
    assert caller_of(keys, "", "c.example")._replace(limits=NO_LIMITS) == Caller("c", False)
    twice = write(tmp_path, "[{tenant: a, certificate: x}, {tenant: b, certificate: x}]")
    assert refusal(twice) == f"gateway.api_keys: {twice}[1] is the same certificate as [0]; each needs its own"


@pytest.mark.parametrize(
    ("text", "expires_at"),
    [
        ("1970-01-02", 2 * 86_400.0),  # through its last day
        ("1970-01-01T00:00:10Z", 10.0),
        ("1970-01-01t00:00:10.5z", 10.5),
        ("1970-01-01T02:00:10+02:00", 10.0),
        ('"1970-01-01 00:00:10Z"', 10.0),
    ],
)
def test_when_a_key_expires(tmp_path: Path, text: str, expires_at: float) -> None:
    """As YAML reads it, and as a string."""
    for written in (text, '"' + text.strip('"') + '"'):
        keys = load_keys(write(tmp_path, f"[{{tenant: a, key: {KEY_A}, expires: {written}}}]"))
        with pytest.raises(RefusedError, match=r"expired"):
            keys.authenticate(f"Bearer {KEY_A}")
    assert expiry_of(text.strip('"')) == expires_at


@pytest.mark.parametrize(
    "text", ["", "soon", "2027-02-30", "2027-06-30T18:00:00", "20270630", "9999-12-31T23:59:59", "2027-06-30T25:00:00Z"]
)
def test_other_times_are_refused(tmp_path: Path, text: str) -> None:
    file = write(tmp_path, f"[{{tenant: a, key: {KEY_A}, expires: '{text}'}}]")
    assert refusal(file) == (
        f"gateway.api_keys: {file}[0].expires must be a date, such as 2027-06-30, or a time with its offset from UTC, "
        f"such as 2027-06-30T18:00:00Z, not {text!r}"
    )


@pytest.mark.parametrize(
    ("fields", "caller"),
    [
        ("scopes: [inference]", Caller("a", False)),
        ("scopes: [metrics]", Caller("a", False, metrics=True, infers=False)),
        ("scopes: [admin]", Caller("a", True, infers=False)),
        ("scopes: [admin, inference, metrics]", Caller("a", True, metrics=True)),
        ("admin: true", Caller("a", True)),
        ("models: [m, n]", Caller("a", False, models=frozenset({"m", "n"}))),
        ("expires: 2999-12-30", Caller("a", False, expires_at=32_503_593_600.0)),
    ],
)
def test_rights_of_a_key(tmp_path: Path, fields: str, caller: Caller) -> None:
    keys = load_keys(write(tmp_path, f"[{{tenant: a, key: {KEY_A}, {fields}}}]"))
    assert caller_of(keys, f"Bearer {KEY_A}")._replace(limits=NO_LIMITS) == caller


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ("scopes: []", ": Expected array of length >= 1 - at $[0].scopes"),
        ("scopes: [all]", ": Invalid enum value 'all' - at $[0].scopes[0]"),
        ("models: []", ": Expected array of length >= 1 - at $[0].models"),
        ("models: ['']", ": Expected str of length >= 1 - at $[0].models[0]"),
        ("expires: 5", ": Expected str | null, got int - at $[0].expires"),
        ("scopes: [admin], metrics: true", "[0].scopes stand instead of admin and metrics; give one or the other"),
    ],
)
def test_rights_that_cannot_be(tmp_path: Path, fields: str, message: str) -> None:
    file = write(tmp_path, f"[{{tenant: a, key: {KEY_A}, {fields}}}]")
    assert refusal(file) == f"gateway.api_keys: {file}{message}"


def test_a_tenant_may_have_two_keys(tmp_path: Path) -> None:
    keys = load_keys(write(tmp_path, f"[{{tenant: a, key: {KEY_A}}}, {{tenant: a, key: {KEY_B}}}]"))
    sole = Caller("a", False, TenantLimits(max_priority=0))
    assert caller_of(keys, f"Bearer {KEY_A}") == caller_of(keys, f"Bearer {KEY_B}") == sole


def test_limits_are_of_the_tenant_whatever_key_says_them(tmp_path: Path) -> None:
    text = f"""
- {{tenant: a, key: {KEY_A}}}
- tenant: a
  key: {KEY_B}
  limits: {{requests_per_minute: 60, tokens_per_minute: 9000, running: 4, queued: 8, weight: 2, max_priority: 1,
           min_ttft_ms: 200, boosted: 3}}
- {{tenant: c, key: {KEY_B}-and-more}}
"""
    keys = load_keys(write(tmp_path, text))
    limits = TenantLimits(
        requests_per_minute=60,
        tokens_per_minute=9000,
        running=4,
        queued=8,
        weight=2.0,
        max_priority=1,
        min_ttft_s=0.2,
        boosted=3,
        is_sole=False,
    )
    callers = [caller_of(keys, f"Bearer {key}") for key in (KEY_A, KEY_B, f"{KEY_B}-and-more")]
    assert callers == [Caller("a", False, limits), Caller("a", False, limits), Caller("c", False, PLAIN)]


def test_two_keys_of_a_tenant_say_the_same_limits(tmp_path: Path) -> None:
    def entry(key: str, running: int) -> str:
        return f"{{tenant: a, key: {key}, limits: {{running: {running}}}}}"

    load_keys(write(tmp_path, f"[{entry(KEY_A, 4)}, {entry(KEY_B, 4)}]"))
    file = write(tmp_path, f"[{entry(KEY_A, 4)}, {entry(KEY_B, 5)}]")
    assert refusal(file) == (
        f"gateway.api_keys: {file}[1].limits differ from those of another key of a; one tenant has one set of limits, "
        "so set them at one of its keys"
    )


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ("{requests_per_minute: 0}", "Expected int >= 1 - at $[0].limits.requests_per_minute"),
        ("{tokens_per_minute: 1.5}", "Expected int | null, got float - at $[0].limits.tokens_per_minute"),
        ("{running: -1}", "Expected int >= 1 - at $[0].limits.running"),
        ("{queued: 0}", "Expected int >= 1 - at $[0].limits.queued"),
        ("{weight: 0}", "Expected float > 0.0 - at $[0].limits.weight"),
        ("{weight: .nan}", "Expected float > 0.0 - at $[0].limits.weight"),
        ("{min_ttft_ms: -1}", "Expected float >= 0.0 - at $[0].limits.min_ttft_ms"),
        ("{rpm: 5}", "Object contains unknown field rpm - at $[0].limits"),
    ],
)
def test_wrong_limits_are_named(tmp_path: Path, limits: str, message: str) -> None:
    file = write(tmp_path, f"[{{tenant: a, key: {KEY_A}, limits: {limits}}}]")
    assert refusal(file) == f"gateway.api_keys: {file}: {message}"


@pytest.mark.parametrize("mode", [0o604, 0o602, 0o601, 0o644, 0o666, 0o777, 0o620, 0o660])
def test_a_file_that_others_can_use_is_refused(tmp_path: Path, mode: int) -> None:
    file = write(tmp_path, f"[{{tenant: a, key: {KEY_A}}}]", mode)
    assert refusal(file) == f"gateway.api_keys: others can use {file} (mode {mode:04o}); next: chmod 600 {file}"


@pytest.mark.parametrize("mode", [0o400, 0o600, 0o640, 0o440])
def test_a_file_of_its_owner_that_its_group_may_read_is_taken(tmp_path: Path, mode: int) -> None:
    keys = load_keys(write(tmp_path, f"[{{tenant: a, key: {KEY_A}}}]", mode))
    assert keys.authenticate(f"Bearer {KEY_A}").tenant == "a"


SHA = digest_of(KEY_A).hex()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no key; next: disagg key new TENANT --file FILE"),
        ("[]", "has no key; next: disagg key new TENANT --file FILE"),
        ("- tenant: [", "is not valid YAML, line 1"),
        ("a: b: c", "is not valid YAML, line 1"),
        ("\0", "is not valid YAML"),
        ("tenant: a", ": Expected array, got object"),
        (KEY_B, ": Expected array, got str"),
        (f"[{KEY_B}]", ": Expected object, got str - at $[0]"),
        ("[{key: aaaaaaaaaaaaaaaaaaaa}]", ": Object missing required field tenant - at $[0]"),
        (f"[{{tenant: a, secret: {KEY_A}}}]", ": Object contains unknown field secret - at $[0]"),
        ("[{tenant: a, key: 1234567890123456}]", ": Expected str | null, got int - at $[0].key"),
        ("[{tenant: a}]", "[0] needs one of key, sha256 and certificate"),
        (f"[{{tenant: a, key: {KEY_A}, sha256: {SHA}}}]", "[0] needs one of key, sha256 and certificate"),
        ("[{tenant: a, key: aaaaaaaaaaaaaaa}]", "[0].key must have 16 to 512 printable ASCII characters and no space"),
        (
            "[{tenant: a, key: a long enough key}]",
            "[0].key must have 16 to 512 printable ASCII characters and no space",
        ),
        (
            f"[{{tenant: a, key: {'ä' * 20}}}]",
            "[0].key must have 16 to 512 printable ASCII characters and no space",
        ),
        (f"[{{tenant: a, key: {'a' * 513}}}]", "[0].key must have 16 to 512 printable ASCII characters and no space"),
        (
            f"[{{tenant: a, sha256: {SHA[:-1]}}}]",
            r": Expected str matching regex '^[0-9a-fA-F]{64}\\Z' - at $[0].sha256",
        ),
        (
            "[{tenant: a b, key: aaaaaaaaaaaaaaaaaaaa}]",
            r": Expected str matching regex '^[A-Za-z0-9][A-Za-z0-9._-]{0,63}\\Z' - at $[0].tenant",
        ),
        (
            f"[{{tenant: a, key: {KEY_A}}}, {{tenant: b, sha256: {SHA}}}]",
            "[1] is the same key as [0]; each needs its own",
        ),
    ],
)
def test_a_file_that_is_wrong(tmp_path: Path, text: str, message: str) -> None:
    file = write(tmp_path, text)
    said = refusal(file)
    place = "" if message.startswith((":", "[")) else " "
    assert said == f"gateway.api_keys: {file}{place}{message.replace('FILE', file)}"


@pytest.mark.parametrize("text", [f"- key: {KEY_B}: {KEY_B}", f"- tenant: a\n  key: '{KEY_B}", f"&{KEY_B} *{KEY_B}"])
def test_no_message_repeats_a_key(tmp_path: Path, text: str) -> None:
    assert KEY_B not in refusal(write(tmp_path, text))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    file = tmp_path / "none.yaml"
    assert refusal(str(file)) == f"gateway.api_keys: cannot read {file} (No such file or directory)"


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    file = tmp_path / "binary"
    file.write_bytes(b"\xff\xfe\x00")
    file.chmod(0o600)
    assert refusal(str(file)) == f"gateway.api_keys: {file} is not UTF-8"


def test_yaml_objects_are_not_made(tmp_path: Path) -> None:
    made = tmp_path / "made"
    file = write(tmp_path, f"!!python/object/apply:pathlib.Path.touch [!!python/object/apply:pathlib.Path [{made}]]")
    assert re.fullmatch(r"gateway\.api_keys: .* is not valid YAML, line 1", refusal(file))
    assert not made.exists()


def test_an_entry_does_not_show_its_key() -> None:
    assert repr(KeyEntry(tenant="a", key=KEY_B)) == "KeyEntry(tenant='a', admin=False)"
