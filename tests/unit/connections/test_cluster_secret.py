from __future__ import annotations

import io

import msgspec
import pytest
from rich.console import Console

from disagg.connections.cluster_secret import METADATA_KEY, NUM_BYTES, ClusterSecret
from tests.support.secret import OTHER_SECRET, SECRET


def test_its_own_metadata_matches() -> None:
    assert SECRET.metadata == ((METADATA_KEY, bytes(range(32))),)
    assert SECRET.matches((("gateway-id", "g"), *SECRET.metadata))


@pytest.mark.parametrize(
    "metadata",
    [
        (),
        OTHER_SECRET.metadata,
        ((METADATA_KEY, b""),),
        ((METADATA_KEY, SECRET.value[:-1]),),
        ((METADATA_KEY, SECRET.value + b"\0"),),
        ((METADATA_KEY, SECRET.value.hex()),),
        (("other-bin", SECRET.value),),
        (*SECRET.metadata, *OTHER_SECRET.metadata),
        (*SECRET.metadata, *SECRET.metadata),
    ],
)
def test_nothing_else_matches(metadata: tuple[tuple[str, str | bytes], ...]) -> None:
    assert not SECRET.matches(metadata)


@pytest.mark.parametrize("num_bytes", [0, NUM_BYTES - 1, NUM_BYTES + 1])
def test_it_has_one_size(num_bytes: int) -> None:
    with pytest.raises(ValueError, match=f"has 32 bytes, not {num_bytes}"):
        ClusterSecret(bytes(num_bytes))
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(msgspec.json.encode({"value": bytes(num_bytes)}), type=ClusterSecret)


def test_it_travels_in_start_messages() -> None:
    assert msgspec.json.decode(msgspec.json.encode(SECRET), type=ClusterSecret) == SECRET != OTHER_SECRET


def test_nothing_shows_it() -> None:
    class Start(msgspec.Struct):
        secret: ClusterSecret

    printed = io.StringIO()
    Console(file=printed, width=200).print(Start(SECRET), SECRET)
    texts = (repr(Start(SECRET)), f"{SECRET}", str([SECRET]), printed.getvalue())
    assert texts[:2] == ("Start(secret=ClusterSecret(...))", "ClusterSecret(...)")
    for text in texts:
        assert "\\x01" not in text
        assert "..." in text
