"""What D may find in its prefix cache: nothing of an attempt before its KV is verified and joined, nothing of one that
failed, and nothing of another tenant."""

from __future__ import annotations

import random
from collections.abc import Callable

import msgspec
import pytest

from disagg.engine.commands import Join
from disagg.proto.block_hash import chain_hashes, root_hash
from disagg.proto.ids import AttemptKey, BlockHash
from disagg.proto.messages import SequenceSpec
from tests.support.pair import WorkerPair, prompt_of, spec_of

NUM_BLOCKS = 3


def two_attempts() -> WorkerPair:
    pair = WorkerPair()
    for number in range(2):
        pair.offer(spec_of(f"r{number}", prompt_of(16 * NUM_BLOCKS + 5, 300 * number)))
    return pair


def published(pair: WorkerPair, key: AttemptKey) -> int:
    """Blocks of this attempt's prompt that D's cache can be hit with."""
    return len(set(pair.specs[key].block_hashes) & set(pair.d.core.prefix_snapshot().hashes))


class Watched(WorkerPair):
    """Checks after every delivery that only what was joined is published."""

    def __init__(self) -> None:
        super().__init__()
        self.joined: set[AttemptKey] = set()

    def _check_always(self) -> None:
        super()._check_always()
        for key in self.specs:
            assert published(self, key) == 0 or key in self.joined

    def deliver(self, name: str) -> None:
        if name == "d_command" and isinstance(command := self.d.commands[0], Join):
            self.joined.add(command.key)
        super().deliver(name)


@pytest.mark.parametrize("seed", range(20))
def test_nothing_is_published_before_the_join(seed: int) -> None:
    pair = Watched()
    for number in range(2):
        pair.offer(spec_of(f"r{number}", prompt_of(16 * NUM_BLOCKS + 5, 300 * number)))
    pair.run_randomly(seed)
    assert pair.joined == set(pair.specs)
    assert [published(pair, key) for key in pair.specs] == [NUM_BLOCKS, NUM_BLOCKS]


def corrupt(pair: WorkerPair) -> None:
    pair.wire.corrupt_next = True


def break_transport(pair: WorkerPair) -> None:
    pair.wire.fail_next = True


def cancel_all(pair: WorkerPair) -> None:
    for key in pair.specs:
        pair.cancel(key, "both")


@pytest.mark.parametrize("fault", [corrupt, break_transport, cancel_all, WorkerPair.break_stream])
def test_nothing_of_an_attempt_that_failed_is_ever_published(fault: Callable[[WorkerPair], None]) -> None:
    num_failed = 0
    for seed in range(40):
        dice, pair = random.Random(seed), two_attempts()
        for _ in range(dice.randrange(60)):
            pair.deliver(dice.choice(pair.ready()))
        fault(pair)
        pair.run(dice.choice)
        for key in pair.specs:
            if not pair.committed(key) and not pair.answer(key)[1:]:
                assert published(pair, key) == 0
                num_failed += 1
    assert num_failed > 20


def of_tenant(spec: SequenceSpec, salt: str) -> SequenceSpec:
    """The same prompt under a tenant's own root."""
    root: BlockHash = root_hash("fake", salt.encode())
    hashes = tuple(chain_hashes(root, spec.prompt_token_ids))
    return msgspec.structs.replace(spec, root_hash=root, block_hashes=hashes)


def test_a_tenant_hits_its_own_blocks_and_never_those_of_another() -> None:
    pair = WorkerPair()
    prompt = prompt_of(40)
    cached = []
    for number, tenant in enumerate(["x", "y", "x", "y", "z"]):
        key = pair.offer(of_tenant(spec_of(f"r{number}", prompt), tenant))
        pair.run()
        assert pair.answer(key) == pair.expected(key)
        cached.append(pair.d_overs[key][0].cached_tokens)
    assert cached == [0, 0, 32, 32, 0]
    pair.assert_at_rest()


def test_a_prompt_without_hashes_is_never_found() -> None:
    pair = WorkerPair()
    bare = msgspec.structs.replace(spec_of("a", prompt_of(40)), block_hashes=(), root_hash=BlockHash(b""))
    pair.offer(bare)
    pair.run()
    key = pair.offer(spec_of("b", prompt_of(40)))
    pair.run()
    assert pair.d_overs[key][0].cached_tokens == 0
    pair.assert_at_rest()
