"""Lookups of prefixes: our index against the radix tree of NVIDIA Dynamo (`ai-dynamo-runtime`, written in Rust), both
called from Python with the same blocks, chains and order.

    sessions (seeded trees of chains, 16 workers) -> both indexes -> scores compared -> timed in turns -> rows

Both give one dict of worker -> number of leading blocks. Every answer is compared before any is timed.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from disagg.proto.ids import BlockHash, Incarnation, WorkerId
from disagg.proto.messages import BlocksSnapshot, BlocksStored, Load, WorkerReport
from disagg.router.workers.prefix_index import PrefixIndex

NUM_WORKERS = 16
NUM_PROMPTS = 8
"""System prompts, which every worker has."""
TURNS = 4
"""Turns of a session after the system prompt. Its worker has all but the last; some others have the first ones."""


@dataclass(frozen=True, kw_only=True)
class Sessions:
    """What the workers hold, as (worker, chain held), and the chains to look up. Blocks are numbers of 64 bits."""

    held: tuple[tuple[int, tuple[int, ...]], ...]
    asked: tuple[tuple[int, ...], ...]


def make_sessions(turn_blocks: int, num_sessions: int, seed: int) -> Sessions:
    """Sessions that begin with one of some system prompts and grow by about `turn_blocks` blocks a turn. Each is looked
    up as it comes back: with one turn that no worker has."""
    rng = random.Random(seed)

    def blocks(mean: int) -> tuple[int, ...]:
        return tuple(rng.getrandbits(64) for _ in range(rng.randint(max(1, mean // 2), mean + mean // 2)))

    prompts = [blocks(turn_blocks) for _ in range(NUM_PROMPTS)]
    held = [(worker, prompt) for worker in range(NUM_WORKERS) for prompt in prompts]
    asked = []
    for _ in range(num_sessions):
        chain = rng.choice(prompts)
        turns = [chain := chain + blocks(turn_blocks) for _ in range(TURNS)]
        workers = rng.sample(range(NUM_WORKERS), rng.randint(1, 3))
        held += [(worker, turns[-2 - behind]) for behind, worker in enumerate(workers)]
        asked.append(turns[-1])
    return Sessions(held=tuple(held), asked=tuple(asked))


# ---------------------------------------------------------------- the two indexes

Scores = dict[int, int]
"""Worker -> number of leading blocks."""


class OurIndex:
    """`PrefixIndex`, with the blocks as it gets them from the wire."""

    name = "disagg"

    def __init__(self, sessions: Sessions) -> None:
        self._index = PrefixIndex()
        self._numbers = {WorkerId(f"w{worker}"): worker for worker in range(NUM_WORKERS)}
        sequences = [0] * NUM_WORKERS
        for worker_id in self._numbers:
            self._index.add_worker(worker_id, Incarnation("1"))
        for worker, chain in sessions.held:
            first = BlocksSnapshot(hashes=()) if sequences[worker] == 0 else None
            stored = BlocksStored(hashes=_as_hashes(chain))
            report = WorkerReport(
                worker_id=WorkerId(f"w{worker}"),
                incarnation=Incarnation("1"),
                sequence=sequences[worker],
                load=Load(),
                kv_events=(first, stored) if first else (stored,),
            )
            assert self._index.apply(report)
            sequences[worker] += 1

    def key(self, chain: Sequence[int]) -> Sequence[Any]:
        """The chain as the router gets it."""
        return _as_hashes(chain)

    def lookup(self, key: Sequence[Any]) -> Any:
        """Cached blocks of every worker."""
        return self._index.match(key)

    def best(self, key: Sequence[Any]) -> Any:
        """The four workers with the most cached blocks, which is what placement uses."""
        return self._index.find(key).best(4)

    def scores(self, answer: Mapping[WorkerId, int]) -> Scores:
        """A `lookup` in common terms."""
        return {self._numbers[worker_id]: num_blocks for worker_id, num_blocks in answer.items()}


class DynamoIndex:
    """`dynamo._core.RadixTree`. It distinguishes blocks by the hash of their own tokens along the path, and finds their
    parents by another hash; here one number is both."""

    name = "radix_tree"

    def __init__(self, radix_tree: Callable[[], Any], sessions: Sessions) -> None:
        self._tree = radix_tree()
        for number, (worker, chain) in enumerate(sessions.held):
            blocks = [{"block_hash": block, "tokens_hash": block} for block in chain]
            event = {"event_id": number, "data": {"stored": {"parent_hash": None, "blocks": blocks}}}
            self._tree.apply_event(worker, json.dumps(event).encode())

    def key(self, chain: Sequence[int]) -> Sequence[Any]:
        """The chain as the tree takes it."""
        return [block | 0 for block in chain]

    def lookup(self, key: Sequence[Any]) -> Any:
        """The scores, which are made into a dict only when they are read."""
        return self._tree.find_matches(key).scores

    def scores(self, answer: Mapping[tuple[int, int], int]) -> Scores:
        """A `lookup` in common terms; the second part of a worker's key is its data-parallel rank, always 0 here."""
        return {worker: num_blocks for (worker, _), num_blocks in answer.items()}


def _as_hashes(chain: Sequence[int]) -> tuple[BlockHash, ...]:
    return tuple(BlockHash(block.to_bytes(8, "little") * 2) for block in chain)


# ---------------------------------------------------------------- measuring

CHUNK = 50
"""Chains that one subject looks up before it is the next one's turn."""

Subject = tuple[Callable[[Any], Any], Callable[[Sequence[int]], Any]]
"""A lookup, and what makes its key."""


def load_radix_tree() -> Callable[[], Any] | None:
    """Dynamo's class, or None where the package is not installed."""
    try:
        from dynamo._core import RadixTree  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        return None
    return RadixTree  # type: ignore[no-any-return, unused-ignore]


def compare_lookups(
    radix_tree: Callable[[], Any] | None, turn_blocks: Sequence[int], num_sessions: int, repeats: int
) -> list[dict[str, Any]]:
    """One row per length of turns: lookups per second and processor time of both, medians over `repeats`
    passes, and their ratios.

    Raises:
        RuntimeError: if the two disagree on a score.
    """
    return [_compare(radix_tree, make_sessions(length, num_sessions, length), repeats) for length in turn_blocks]


def _compare(radix_tree: Callable[[], Any] | None, sessions: Sessions, repeats: int) -> dict[str, Any]:
    ours = OurIndex(sessions)
    scores = [ours.scores(ours.lookup(ours.key(chain))) for chain in sessions.asked]
    best = [max(answer.values(), default=0) for answer in scores]
    subjects: dict[str, Subject] = {"disagg": (ours.lookup, ours.key), "disagg_best": (ours.best, ours.key)}
    if radix_tree is not None:
        theirs = DynamoIndex(radix_tree, sessions)
        if scores != [theirs.scores(theirs.lookup(theirs.key(chain))) for chain in sessions.asked]:
            raise RuntimeError("the two indexes give different scores")
        subjects["radix_tree"] = (theirs.lookup, theirs.key)
    passes = _measure(subjects, sessions.asked, repeats)
    row: dict[str, Any] = {
        "part": "lookups",
        "workers": NUM_WORKERS,
        "chain_blocks": round(statistics.fmean(map(len, sessions.asked)), 1),
        "mean_matched_blocks": round(statistics.fmean(best), 1),
        "lookups": len(sessions.asked),
    }
    for name, times in passes.items():
        row[f"{name}_per_s"] = round(1 / statistics.median(wall_s for wall_s, _ in times))
        row[f"{name}_cpu_us"] = round(1e6 * statistics.median(cpu_s for _, cpu_s in times), 2)
    if "radix_tree" in passes:
        pairs = list(zip(passes["radix_tree"], passes["disagg"], strict=True))
        row["over_radix_tree"] = round(statistics.median(theirs[0] / ours[0] for theirs, ours in pairs), 2)
        row["over_radix_tree_cpu"] = round(statistics.median(theirs[1] / ours[1] for theirs, ours in pairs), 2)
    return row


def _measure(
    subjects: Mapping[str, Subject], chains: Sequence[Sequence[int]], repeats: int
) -> dict[str, list[tuple[float, float]]]:
    """Seconds per lookup of each, (by the clock, of processors in all threads), pass by pass.

    The subjects take turns every `CHUNK` chains, the first one last in every second turn, so that whatever else this
    machine does hits all of them. The keys of a turn are made right before it, as a router has just got or computed
    them; that is not counted. The tree answers in a thread of its own: how long that takes to wake up depends much on
    the machine, and shows in the clock only.
    """
    passes: dict[str, list[tuple[float, float]]] = {name: [] for name in subjects}
    for _ in range(repeats):
        sums = {name: [0.0, 0.0] for name in subjects}
        for turn, start in enumerate(range(0, len(chains), CHUNK)):
            for name in list(subjects) if turn % 2 == 0 else reversed(list(subjects)):
                lookup, make_key = subjects[name]
                keys = [make_key(chain) for chain in chains[start : start + CHUNK]]
                wall, cpu = time.perf_counter(), time.process_time()
                for key in keys:
                    lookup(key)
                sums[name][0] += time.perf_counter() - wall
                sums[name][1] += time.process_time() - cpu
        for name, (wall_s, cpu_s) in sums.items():
            passes[name].append((wall_s / len(chains), cpu_s / len(chains)))
    return passes
