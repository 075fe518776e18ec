"""Decode steps that all ranks of a worker capture and replay together, as on GPUs: ranks as threads."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from disagg.engine.config import WorkerConfig
from disagg.engine.fake_runner import FAKE_FINGERPRINT, FakeModelRunner
from disagg.engine.parallel import group as group_module
from disagg.engine.parallel import leader
from disagg.engine.parallel.followers import RankLostError
from disagg.engine.parallel.group import Group
from disagg.engine.rank_messages import Join
from disagg.engine.runner import model_runner
from disagg.engine.runner.collectives import Alone
from disagg.engine.runner.model.replay import ReplayedDecoder
from disagg.engine.sharding.shards import Shard
from tests.support.captured import Again, captured_steps
from tests.support.rank_connections import fake_group
from tests.support.secret import SECRET
from tests.support.stepping import decode, make_runner, make_sequence, prefill
from tests.support.tiny_models import VOCAB_SIZE, make_checkpoint
from tests.unit.engine.parallel.ranks import running_ranks

ROLES = ("prefill", "decode")


@pytest.mark.parametrize("num_seqs", [2, 3])
def test_all_ranks_replay_what_one_rank_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_seqs: int
) -> None:
    """Also where a step is padded; every decode step is a replay on every rank, and steps with prompts are none."""
    folder = make_checkpoint("qwen3", tmp_path)
    prompts = [[(7 * i + 3 * row) % VOCAB_SIZE for i in range(17 + 9 * row)] for row in range(num_seqs)]
    replay, num_replays = Again.replay, []

    def counted(captured: Any) -> Any:
        num_replays.append(1)
        return replay(captured)

    monkeypatch.setattr(Again, "replay", counted)

    def tokens(runner: Any) -> list[list[int]]:
        sequences = [make_sequence(prompt, [3 * row, 3 * row + 1, 3 * row + 2]) for row, prompt in enumerate(prompts)]
        for sequence in sequences:
            sequence.token_ids.append(int(prefill(runner, sequence).argmax()))
        decode(runner, sequences, 6)
        return [sequence.token_ids for sequence in sequences]

    expected = tokens(make_runner(folder))
    num_replays.clear()
    with captured_steps(), running_ranks(folder, 2, captures=True, max_num_seqs=3, roles=ROLES) as ranks:
        assert ranks.runners[0].capture_sizes == ranks.runners[1].capture_sizes == (4, 2, 1)
        assert ranks.capture_steps() == [""] * 6
        assert num_replays == []
        assert tokens(ranks) == expected
        assert len(num_replays) == 2 * 6
        assert ranks.runners[0].step_queue is None


def test_ranks_that_exchange_over_gloo_capture_nothing(tmp_path: Path) -> None:
    with captured_steps(), running_ranks(make_checkpoint("qwen3", tmp_path), 2, roles=ROLES) as ranks:
        assert ranks.runners[0].capture_sizes == ()


def test_a_rank_that_dropped_its_captures_computes_op_by_op(tmp_path: Path) -> None:
    with captured_steps(), running_ranks(make_checkpoint("qwen3", tmp_path), 2, captures=True, roles=ROLES) as ranks:
        ranks.capture_steps()
        for runner in ranks.runners:
            runner.drop_captures()
        assert [replayed_of(runner)._captured for runner in ranks.runners] == [{}, {}]
        sequence = make_sequence([1, 2, 3], [0])
        sequence.token_ids.append(int(prefill(ranks, sequence).argmax()))
        decode(ranks, [sequence], 2)


def replayed_of(runner: Any) -> ReplayedDecoder:
    assert runner._replayed is not None
    return runner._replayed  # type: ignore[no-any-return]


# ---------------------------------------------------------------- who captures what when


class Capturing(FakeModelRunner):
    """Of one rank; says what it was given to do."""

    capture_sizes = (4, 2, 1)
    failing: Sequence[tuple[int, int]] = ()
    """(rank, rows) that fail."""
    done: list[tuple[int, Any]]

    def capture(self, num_seqs: int) -> str:
        self.done.append((self.shard.rank, num_seqs))
        return "it waits for the device" if (self.shard.rank, num_seqs) in self.failing else ""

    def drop_captures(self) -> None:
        self.done.append((self.shard.rank, "drop"))


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, Any]]:
    found: list[tuple[int, Any]] = []
    monkeypatch.setattr(Capturing, "done", found, raising=False)
    return found


def test_all_ranks_capture_one_size_after_the_other(done: list[tuple[int, Any]]) -> None:
    with fake_group(3, 3, make=Capturing) as group:
        model_runner.warm_up(group.runner)
    assert [size for _, size in done[:9]] == [4, 4, 4, 2, 2, 2, 1, 1, 1]
    assert [sorted(rank for rank, _ in done[at : at + 3]) for at in (0, 3, 6)] == [[0, 1, 2]] * 3
    assert sorted(done[9:]) == [(1, "drop"), (2, "drop")]  # when they end


@pytest.mark.parametrize("rank", [0, 2])
def test_what_one_rank_cannot_capture_no_rank_keeps(
    done: list[tuple[int, Any]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, rank: int
) -> None:
    """Nor does any go on with the next size: they would wait for the one that stopped."""
    monkeypatch.setattr(Capturing, "failing", [(rank, 2)])
    with caplog.at_level(logging.WARNING), fake_group(3, 3, make=Capturing) as group:
        group.runner.capture_steps()
    assert sorted(done[:6]) == [(each, size) for each in range(3) for size in (2, 4)]
    assert sorted(done[6:]) == [(each, "drop") for each in (0, 1, 1, 2, 2)]  # followers when they end as well
    assert f"steps of 2 rows cannot be captured on all ranks, computing op by op: {{{rank}: 'it waits" in caplog.text


def test_a_rank_that_is_silent_ends_the_start(done: list[tuple[int, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader._Answers, "wait", lambda *_: {})
    with (
        fake_group(2, 2, make=Capturing) as group,
        pytest.raises(RankLostError, match=r"ranks \[1\] did not capture a step in 300 s"),
    ):
        group.runner.capture_steps()


def test_captures_are_dropped_before_their_exchange_is_left(
    done: list[tuple[int, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL's abort waits for the end of every CUDA graph that holds an operation of the communicator."""

    class Exchange(Alone):
        def close(self) -> None:
            done.append((0, "close"))

    shard = Shard(0, 2)
    monkeypatch.setattr(group_module, "open_rendezvous", lambda *_: None)
    monkeypatch.setattr(group_module, "join_collective", lambda *_: Exchange(shard))
    config = WorkerConfig(worker_id="test-0", roles=("decode",), model_path="fake", tp=2)
    group = Group(config, SECRET, pytest.fail, lambda error: pytest.fail(str(error)))
    local = Capturing(10, 16, 4096, VOCAB_SIZE, num_kv_heads=2, shard=shard)
    group._begin(local, (Join(rank=1, pid=1, fingerprint=FAKE_FINGERPRINT, num_blocks=10),))
    group.close()
    assert done == [(0, "drop"), (0, "close")]
