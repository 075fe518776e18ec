"""Texts without tokens: hashes are equal exactly where the tokens would be."""

from __future__ import annotations

import pytest

from disagg.loadtests.workload.workload import PromptPart
from disagg.proto.block_hash import child_hash, root_hash
from disagg.proto.ids import BlockHash
from disagg.proto.token_ids import PackedTokenIds, pack_token_ids, slice_token_ids
from disagg.simulator.world.prompts import EMPTY, HashRuns, PromptText, answered, extend, run_for

ROOT = root_hash("test")


def text(*parts: tuple[int, str], run: int = 1, before: PromptText = EMPTY) -> PromptText:
    return extend(before, tuple(PromptPart(num_tokens, (name,)) for num_tokens, name in parts), ROOT, run)


def common(a: PromptText, b: PromptText) -> int:
    """Leading blocks that are the same."""
    pairs = enumerate(zip(list_of(a.hashes), list_of(b.hashes), strict=False))
    return next((at for at, (x, y) in pairs if x != y), min(len(a.hashes), len(b.hashes)))


def list_of(hashes: tuple[BlockHash, ...]) -> list[BlockHash]:
    return [hashes[at] for at in range(len(hashes))]


@pytest.mark.parametrize("run", [1, 4])
def test_a_text_has_a_hash_for_each_full_block_and_ids_behind_them(run: int) -> None:
    made = text((100, "a"), (30, "b"), run=run)
    assert made.num_tokens == 130
    assert len(made.hashes) == 8
    assert len(made.token_ids) == 4 * 130
    assert made.token_ids[: 4 * 128] == bytes(4 * 128)
    assert 0 not in made.token_ids[4 * 128 :: 4]


def test_a_shorter_part_is_a_prefix_of_a_longer_one() -> None:
    assert common(text((100, "a")), text((200, "a"))) == 6
    assert text((96, "a")).hashes == text((200, "a")).hashes[:6]


@pytest.mark.parametrize("run", [1, 4])
def test_texts_share_blocks_up_to_where_their_parts_differ(run: int) -> None:
    assert common(text((64, "a"), (64, "b"), run=run), text((64, "a"), (64, "c"), run=run)) == 4
    assert common(text((70, "a"), (64, "b"), run=run), text((70, "a"), (64, "c"), run=run)) == 4
    assert common(text((64, "a"), (64, "b"), run=run), text((64, "c"), (64, "b"), run=run)) == 0


def test_blocks_inside_a_part_depend_on_where_it_begins() -> None:
    assert common(text((8, "a"), (64, "b")), text((64, "b"))) == 0


@pytest.mark.parametrize("run", [1, 4])
def test_an_answer_is_hashed_as_a_worker_hashes_it(run: int) -> None:
    prompt = text((40, "a"), run=run)
    said = answered(prompt, [7] * 30, ROOT)
    assert said.num_tokens == 70
    ids = PackedTokenIds(prompt.token_ids + pack_token_ids([7] * 30))
    expected = list_of(prompt.hashes)
    for first in (32, 48):
        expected.append(child_hash(expected[-1], slice_token_ids(ids, first, first + 16)))
    assert list_of(said.hashes) == expected
    assert said.tail == ids[4 * 64 :]


@pytest.mark.parametrize("run", [1, 4])
def test_a_conversation_goes_on_from_what_was_said(run: int) -> None:
    said = answered(text((40, "a"), run=run), [7] * 30, ROOT)
    turn = text((50, "b"), before=said, run=run)
    assert turn.num_tokens == 120
    assert list_of(turn.hashes)[:4] == list_of(said.hashes)


def test_runs_look_like_the_chain_of_all_blocks() -> None:
    a, b, c = (BlockHash(bytes([n]) * 16) for n in range(3))
    runs, chain = HashRuns.of((a, b, c), (2, 3, 6)), (a, a, b, c, c, c)
    assert len(runs) == 6
    assert [runs[at] for at in range(-6, 6)] == [chain[at] for at in range(-6, 6)]
    assert list(runs) == [a, b, c]
    for start in range(7):
        for stop in range(7):
            part = runs[start:stop]
            assert list_of(part) == list(chain[start:stop])
            assert list(part) == list(dict.fromkeys(chain[start:stop]))
    assert tuple(runs[1::2]) == chain[1::2]
    more = (b, a)
    assert list_of(runs + more) == [*chain, b, a]
    assert list_of(runs + HashRuns.of((b,), (2,))) == [*chain, b, b]
    assert not HashRuns.of((), ())
    with pytest.raises(IndexError):
        runs[6]


def test_runs_are_shorter_in_small_caches() -> None:
    assert [run_for(tokens) for tokens in (1000, 16 * 1024 * 5, 10_000_000)] == [1, 5, 32]
