"""Packed token ids: what goes in comes out, and nothing else is taken."""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.proto.token_ids import (
    PackedTokenIds,
    check_packed,
    num_token_ids,
    pack_token_ids,
    slice_token_ids,
    unpack_token_ids,
)

id_lists = st.lists(st.integers(0, 2**32 - 1), max_size=80)


def test_the_definition_spelled_out() -> None:
    assert pack_token_ids([1, 0x01020304, 2**32 - 1]) == b"\1\0\0\0\4\3\2\1\xff\xff\xff\xff"


@given(id_lists)
def test_round_trip(ids: list[int]) -> None:
    packed = pack_token_ids(ids)
    assert type(packed) is bytes
    assert (len(packed), num_token_ids(packed)) == (4 * len(ids), len(ids))
    assert unpack_token_ids(packed) == ids


@pytest.mark.parametrize("ids", [range(5), iter([0, 1, 2, 3, 4]), (0, 1, 2, 3, 4)])
def test_any_iterable_is_packed(ids: Iterable[int]) -> None:
    assert unpack_token_ids(pack_token_ids(ids)) == [0, 1, 2, 3, 4]


def test_nothing() -> None:
    packed = pack_token_ids([])
    assert (packed, num_token_ids(packed), unpack_token_ids(packed)) == (b"", 0, [])


@pytest.mark.parametrize("token_id", [-1, 2**32, 2**64, 1.0, "1", None])
def test_what_is_no_id_is_refused(token_id: int) -> None:
    with pytest.raises(ValueError, match="a token id is no integer from 0 to 4294967295"):
        pack_token_ids([7, token_id])


@pytest.mark.parametrize("num_bytes", [1, 2, 3, 5, 4001])
def test_an_id_that_is_cut_off_is_refused(num_bytes: int) -> None:
    message = re.escape(f" has {num_bytes} bytes, which is no multiple of 4")
    with pytest.raises(ValueError, match=f"^packed{message}$"):
        unpack_token_ids(PackedTokenIds(bytes(num_bytes)))
    with pytest.raises(ValueError, match=f"^prompt{message}$"):
        check_packed("prompt", bytes(num_bytes))


@given(id_lists, st.integers(0, 90), st.none() | st.integers(0, 90))
def test_a_slice_is_that_of_a_list(ids: list[int], start: int, end: int | None) -> None:
    assert unpack_token_ids(slice_token_ids(pack_token_ids(ids), start, end)) == ids[start:end]


def test_on_the_wire_they_are_one_string_of_bytes() -> None:
    packed = pack_token_ids(range(1000))
    frame = msgspec.msgpack.encode(packed)
    assert frame == b"\xc5" + (4000).to_bytes(2, "big") + packed
    assert msgspec.msgpack.Decoder(PackedTokenIds).decode(frame) == packed
