"""The router's benchmark measures what it says: its traffic ends as it should, and its workers' reports are true."""

from __future__ import annotations

import itertools

import pytest

from benchmarks.router.command import parse_arguments, summary
from benchmarks.router.lookups import NUM_WORKERS, OurIndex, compare_lookups, make_sessions
from benchmarks.router.placements import CLOCKS, OUTPUT_TOKENS, Traffic, measure_placements
from tests.support.router import reported_blocks


def test_every_request_lives_through_all_stages_and_leaves_what_was_reported() -> None:
    ticks = itertools.count()
    traffic = Traffic(6, 3000, "joint", lambda: next(ticks))
    traffic.run(200)
    traffic.finish()
    calls = {kind: len(times) for kind, times in traffic.times_ns.items()}
    num_pairs = 200 - traffic.num_placed_alone
    assert num_pairs > 0
    assert calls == {
        "up": 6,
        "snapshot": 6,
        "submit": 200,
        "prefilled": 200,
        "handed_over": num_pairs,
        "report": 200 + num_pairs,
        "token": 200 * (OUTPUT_TOKENS - 2),
        "end": 200,
    }
    assert set(itertools.chain.from_iterable(traffic.times_ns.values())) == {1}
    assert +traffic.core.counters == {"duplicate_tokens": num_pairs}, "D repeats the token that P has sent"
    assert traffic.core.check_integrity() == []


def test_what_the_traffic_says_of_a_worker_is_prefix_closed_and_what_the_index_has() -> None:
    traffic = Traffic(4, 3000, "round_robin", CLOCKS["wall"])
    traffic.run(300)
    traffic.finish()
    holdings = traffic.holdings
    for worker_id in holdings.prefills + holdings.decodes:
        first = set(holdings.snapshot(worker_id).hashes)
        latest = {h for pieces in holdings.latest_of[worker_id].values() for piece in pieces for h in piece}
        assert latest
        assert reported_blocks(traffic.core._fleet.index, worker_id) == first | latest


def test_a_row_of_placements() -> None:
    row = measure_placements(4, 2000, 20, 2, "least_loaded", "cpu")
    assert (row["workers"], row["requests"]) == (4, 40)
    assert 2000 <= row["indexed_blocks"] < 2200
    assert row["lives_per_s"] < row["placements_per_s"]
    assert sorted(row["us_per_request"]) == ["end", "handed_over", "prefilled", "report", "submit", "token"]


def test_lookups_are_those_of_a_loop() -> None:
    sessions = make_sessions(turn_blocks=5, num_sessions=40, seed=3)
    index = OurIndex(sessions)
    held = [set[int]() for _ in range(NUM_WORKERS)]
    for worker, chain in sessions.held:
        held[worker].update(chain)
    for chain in sessions.asked:
        lengths = {
            worker: sum(1 for _ in itertools.takewhile(blocks.__contains__, chain))
            for worker, blocks in enumerate(held)
        }
        assert index.scores(index.lookup(index.key(chain))) == lengths
        assert len(chain) > max(lengths.values()) > min(lengths.values()) > 0


def test_without_the_radix_tree_there_is_no_ratio() -> None:
    rows = compare_lookups(None, [2, 4], num_sessions=5, repeats=1)
    assert [row["lookups"] for row in rows] == [5, 5]
    assert rows[0]["mean_matched_blocks"] < rows[1]["mean_matched_blocks"] < rows[1]["chain_blocks"]
    assert summary(rows) == {}


class ForgetfulTree:
    def apply_event(self, worker: int, event: bytes) -> None:
        pass

    def find_matches(self, sequence: list[int]) -> ForgetfulTree:
        return self

    scores: dict[tuple[int, int], int] = {}  # noqa: RUF012


def test_other_scores_are_an_error() -> None:
    with pytest.raises(RuntimeError, match="different scores"):
        compare_lookups(ForgetfulTree, [2], num_sessions=5, repeats=1)


def test_the_summary_takes_most_blocks_and_the_least_ratio() -> None:
    def row(workers: int, blocks: int, rate: int, p99_us: float) -> dict[str, object]:
        return {
            "part": "placements",
            "workers": workers,
            "indexed_blocks": blocks,
            "placements_per_s": rate,
            "lives_per_s": rate - 1,
            "submit_p99_us": p99_us,
        }

    rows = [row(10, 500, 7, 1.5), row(10, 100, 9, 1.0), row(1000, 500, 5, 2.0)]
    rows += [
        {"part": "lookups", "over_radix_tree": ratio, "over_radix_tree_cpu": cpu_ratio}
        for ratio, cpu_ratio in ((3.0, 2.5), (1.75, 1.5), (2.0, 3.0))
    ]
    assert summary(rows) == {
        "placements_per_s_10": 7,
        "lives_per_s_10": 6,
        "submit_p99_us_10": 1.5,
        "placements_per_s_1000": 5,
        "lives_per_s_1000": 4,
        "submit_p99_us_1000": 2.0,
        "lookups_over_radixtree": 1.5,
    }


def test_arguments() -> None:
    options = parse_arguments(["--workers", "4", "8"])
    assert (options.workers, options.part, options.policy, options.clock) == ([4, 8], "both", "joint", "wall")
    with pytest.raises(SystemExit):
        parse_arguments(["--blocks", "0"])
