"""The digest of KV in a device's memory: Triton's in the interpreter and torch's, against plain integers."""

from __future__ import annotations

import random
from functools import partial

import pytest
import torch

from disagg.engine.kv_transfer.transport import Checksum
from disagg.engine.kv_transfer.transports.digest import checksum_of, digest
from disagg.kernels import dispatch, reference
from disagg.kernels.triton import copy
from disagg.kernels.triton.ops import TritonOps
from disagg.proto.splitmix import splitmix64

SEEDS = [0, 1, 0x0123456789ABCDEF, (1 << 63) + 12345, (1 << 64) - 1]
LOW = (1 << 32) - 1


def signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number


def expected_sums(words: list[int], seed: int) -> list[int]:
    def total(first: int) -> int:
        products = 0
        for index, word in enumerate(words):
            key = splitmix64(seed, index + first)
            products += ((word + key) & LOW) * (((word >> 32) + (key >> 32)) & LOW)
        return products & ((1 << 64) - 1)

    return [signed(total(0)), signed(total(1))]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("num_words", [0, 1, 2, 1023, 1024, 1025, 3000])
def test_sums_have_the_bits_of_plain_integers(num_words: int, seed: int) -> None:
    numbers = random.Random(num_words)
    words = [numbers.choice([numbers.getrandbits(64), (1 << 64) - 1, 1 << 31, 0]) for _ in range(num_words)]
    tensor = torch.tensor([signed(word) for word in words], dtype=torch.int64)
    expected = expected_sums(words, seed)
    assert reference.digest_sums(tensor, signed(seed)).tolist() == expected
    found = TritonOps().digest_sums(tensor, signed(seed))
    assert found is not None
    assert found.tolist() == expected


def test_more_words_than_a_piece_of_the_reference_or_all_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy, "_MAX_PROGRAMS", 100)
    words = torch.randint(-(1 << 63), (1 << 63) - 1, ((1 << 18) + 7,), generator=torch.Generator().manual_seed(1))
    whole = reference.digest_sums(words, 5)
    found = TritonOps().digest_sums(words, 5)
    assert found is not None
    assert torch.equal(found, whole)
    odd = torch.arange(1, len(words) + 1)
    keys = reference._mix(odd * reference._signed(reference._GOLDEN) + 5)
    assert int(whole[0]) == int(reference._products(words, keys).sum())


def payload(num_bytes: int) -> torch.Tensor:
    return torch.arange(num_bytes).mul(37).add(11).to(torch.uint8)


def test_a_checksum_of_words_depends_on_every_byte_its_place_the_size_and_the_key() -> None:
    of_words, data = partial(digest, checksum=Checksum(77)), payload(41)
    seen = {of_words(data), digest(data, Checksum(78)), of_words(data[:40]), of_words(data[:0])}
    for at in range(41):
        for bit in range(8):
            changed = data.clone()
            changed[at] ^= 1 << bit
            seen.add(of_words(changed))
    seen.add(of_words(torch.cat([data, data.new_zeros(1)])))  # what fills up the last word
    seen.add(of_words(torch.cat([data[8:16], data[:8], data[16:]])))
    assert len(seen) == 4 + 41 * 8 + 2
    assert all(0 <= value < 1 << 61 for value in seen)


def test_it_does_not_depend_on_where_the_bytes_are() -> None:
    data, checksum = payload(83), Checksum((1 << 63) + 9)
    shifted = torch.cat([data.new_zeros(3), data])[3:]
    assert digest(shifted, checksum) == digest(torch.cat([data, data])[:83], checksum) == digest(data, checksum)


def test_which_function_a_payload_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of host memory xxh3, by which pairs of CPU workers compare; of a GPU's the digest, without a copy to the host."""

    class OnDevice(torch.Tensor):
        is_cuda = True

        def numpy(self, *, force: bool = False) -> object:  # type: ignore[override]
            raise AssertionError("it is copied to the host")

    data, checksum = payload(64), Checksum(3)
    assert checksum_of(data, checksum) == checksum(data.numpy()) == 0x66F6E932E7010B44
    monkeypatch.setattr(dispatch, "_ops", lambda _: reference)
    assert checksum_of(data.as_subclass(OnDevice), checksum) == digest(data, checksum) != checksum(data)
