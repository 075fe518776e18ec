"""Requests that end the workers that compute them: which, how many workers, and what becomes of those beside them."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import pytest

from disagg.proto.errors import SuspectRequestError, UnavailableError, retry_after_s
from disagg.proto.ids import RequestId
from disagg.router.config import RouterConfig
from tests.support.router import (
    EMPTY,
    PLAIN,
    Scenario,
    end_update,
    handed_over_update,
    prefilled_update,
    routed_request,
    tokens_update,
    worker_info,
)

CONFIG = msgspec.structs.replace(PLAIN, failure_pause_s=0.001)


class Pool:
    """Workers that decode a token of each of their sequences at a time, and end where one of these is a bad one.

    Args:
        bad: requests, by the token of their answers that ends a worker.
    """

    def __init__(self, num_decode: int, bad: dict[str, int], config: RouterConfig = CONFIG) -> None:
        self.it = Scenario("p0", *(f"d{i}" for i in range(num_decode)), config=config)
        self.bad = bad
        self.running: dict[str, dict[str, tuple[int, int]]] = {f"d{i}": {} for i in range(num_decode)}
        """By worker and request: attempt and tokens."""
        self.ended: dict[str, str] = {}
        self.num_lost = 0

    def take(self, lines: Iterable[str]) -> None:
        """Begin what was dispatched."""
        for line in lines:
            match line.split():
                case ["dispatch", _, key, "->", worker]:
                    name, attempt = key.split("/")
                    num_tokens = len(self.it.dispatched[key].message.spec.emitted_token_ids)
                    self.running[worker][name] = (int(attempt), num_tokens)
                    self.take(self.it.update("p0", prefilled_update(name, int(attempt))))
                    self.take(self.it.update(worker, handed_over_update(name, int(attempt))))
                case ["fail" | "finish", name, *_]:
                    self.ended[name] = line

    def ask(self, *names: str) -> None:
        for name in names:
            self.take(self.it.submit(routed_request(name, 20, max_tokens=40)))

    def step(self) -> None:
        """One token everywhere. What ended is back a moment later."""
        self.it.now += 0.1
        for worker, sequences in self.running.items():
            if any(num_tokens == self.bad.get(name, -1) for name, (_, num_tokens) in sequences.items()):
                self.num_lost += 1
                sequences.clear()
                self.take(self.it.lost(worker))
                self.take(self.it.up(worker_info(worker, incarnation=f"x{self.num_lost}")))
                continue
            for name, (attempt, num_tokens) in list(sequences.items()):
                sequences[name] = (attempt, num_tokens + 1)
                updates = [tokens_update(name, attempt, num_tokens, 7)]
                if num_tokens + 1 == 40:
                    del sequences[name]
                    updates.append(end_update(name, attempt, "length"))
                self.take(self.it.update(worker, *updates))
        self.take(self.it.at(self.it.now))

    def run(self, num_steps: int = 800) -> None:
        for _ in range(num_steps):
            self.step()


@pytest.mark.parametrize("num_decode", [1, 2, 4])
def test_a_request_that_comes_alone_ends_two_workers(num_decode: int) -> None:
    pool = Pool(num_decode, {"bad": 5})
    pool.ask("bad")
    pool.run(100)
    assert (pool.num_lost, pool.ended) == (2, {"bad": "fail bad SuspectRequestError"})
    error = pool.it.errors["bad"]
    assert isinstance(error, SuspectRequestError)
    assert (error.code, error.http_status, retry_after_s(error)) == ("workers_lost", 500, None)
    assert "2 workers were lost while they computed this request" in error.detail
    assert pool.it.core.counters["suspect_requests"] == 1


@pytest.mark.parametrize("num_decode", [1, 2, 4])
@pytest.mark.parametrize("at_token", [0, 5, 30])
def test_what_is_computed_beside_it_is_answered(num_decode: int, at_token: int) -> None:
    pool = Pool(num_decode, {"bad": at_token})
    names = [f"r{i}" for i in range(31)]
    pool.ask(*names[:15], "bad", *names[15:])
    pool.run()
    assert pool.num_lost <= 3
    assert pool.ended.pop("bad") == "fail bad SuspectRequestError"
    assert pool.ended == {name: f"finish {name} length 40 cached=0" for name in names}
    assert pool.it.core.holdings() == EMPTY


def test_several_of_them_end_no_other_request() -> None:
    pool = Pool(2, {"bad0": 3, "bad1": 9})
    names = [f"r{i}" for i in range(12)]
    pool.ask("bad0", *names, "bad1")
    pool.run()
    assert [name for name, line in pool.ended.items() if line.startswith("fail")] == ["bad0", "bad1"]
    assert len(pool.ended) == 14
    assert pool.it.core.holdings() == EMPTY


def test_new_requests_pass_those_that_wait_for_their_turn_alone() -> None:
    pool = Pool(1, {"bad": 0})
    pool.ask("bad", *(f"r{i}" for i in range(7)))
    while pool.num_lost < 2:
        pool.step()
    assert (list(pool.running["d0"]), pool.it.core.num_queued) == (["bad"], 7)
    pool.ask("new")
    assert "new" in pool.running["d0"]
    pool.run()
    assert sum(line.startswith("finish") for line in pool.ended.values()) == 8


def isolated(*, num_decode: int = 3) -> Scenario:
    """r0 is tried alone on d0, and r1 waits for its turn: both were on two workers that ended."""
    it = Scenario("p0", *(f"d{i}" for i in range(num_decode)), config=CONFIG)
    it.submit(routed_request("r0", max_tokens=40))
    for attempt in range(2):
        if not attempt:
            for worker in ("d1", "d2"):
                it.lost(worker)
            it.submit("r1")
        for name in ("r0", "r1"):
            it.update("p0", prefilled_update(name, attempt))
            it.update("d0", handed_over_update(name, attempt))
        it.lost("d0")
        lines = it.up(worker_info("d0", incarnation=f"x{attempt}"))
    assert lines == ["dispatch p0 r0/2 -> d0"]
    assert it.core.num_queued == 1
    return it


def test_one_that_goes_on_makes_room_for_the_next() -> None:
    it = isolated()
    it.update("p0", prefilled_update("r0", 2))
    it.update("d0", handed_over_update("r0", 2))
    assert it.update("d0", tokens_update("r0", 2, 0, *range(15))) == [f"emit r0 {list(range(15))}"]
    assert it.update("d0", tokens_update("r0", 2, 15, 15)) == ["emit r0 [15]", "dispatch p0 r1/2 -> d0"]


@pytest.mark.parametrize("how", ["cancel", "end"])
def test_one_that_ends_makes_room_for_the_next(how: str) -> None:
    it = isolated()
    lines = it.cancel("r0") if how == "cancel" else it.update("p0", end_update("r0", 2, "stop"))
    lines += it.at(it.now)
    assert lines[-1] == "dispatch p0 r1/2 -> d0"


def test_one_that_waits_for_its_turn_may_be_cancelled() -> None:
    it = isolated()
    assert it.cancel("r1") == ["fail r1 RequestCancelledError"]
    assert it.cancel("r0")[-1] == "fail r0 RequestCancelledError"
    assert it.core.holdings() == EMPTY


def test_only_the_isolated_one_is_suspected_of_what_happens_to_its_worker() -> None:
    it = isolated()
    assert it.submit("new") == ["dispatch p0 new/0 -> d0"]
    for name, attempt in (("r0", 2), ("new", 0)):
        it.update("p0", prefilled_update(name, attempt))
        it.update("d0", handed_over_update(name, attempt))
    assert "fail r0 SuspectRequestError" in it.lost("d0")
    assert it.core._requests[RequestId("new")].num_losses == 0


def test_an_answer_that_got_further_was_not_the_cause() -> None:
    """It is past the place where the first worker was lost."""
    it = Scenario("p0", "d0", "d1", "d2", config=CONFIG)
    lines = it.submit(routed_request("r0", max_tokens=500))
    for attempt in range(3):
        worker = lines[-1].split(" -> ")[1]
        it.update("p0", prefilled_update("r0", attempt))
        it.update(worker, handed_over_update("r0", attempt))
        it.update(worker, tokens_update("r0", attempt, 16 * attempt, *range(16)))
        lines = it.lost(worker)
    assert lines == ["fail r0 UnavailableError worker_lost"]


def test_workers_of_one_node_accuse_nobody() -> None:
    """The second one was lost with the first, and said nothing since."""
    it = Scenario("p0", "p1", "d0", "d1", config=CONFIG)
    it.start("r0", "p0", "d0")
    it.update("p0", prefilled_update("r0", 0))
    it.update("d0", handed_over_update("r0", 0))
    it.now = 1.0
    assert it.lost("d0") == ["dispatch p0 r0/1 -> d1"]
    it.now = 1.1
    assert it.lost("p0") == ["cancel d1 r0/1", "dispatch p1 r0/2 -> d1"]


@pytest.mark.parametrize(("is_stuck", "num_lost"), [(True, 2), (False, 3)])
def test_a_step_that_does_not_end_is_suspicious_and_silence_is_not(is_stuck: bool, num_lost: int) -> None:
    it = Scenario("p0", "d0", "d1", "d2", config=CONFIG)
    lines = it.submit("r0")
    for attempt in range(num_lost):
        worker = lines[-1].split(" -> ")[1]
        it.update("p0", prefilled_update("r0", attempt))
        it.update(worker, handed_over_update("r0", attempt))
        lines = it.suspected(worker, is_stuck=is_stuck)
    assert any(line.startswith("fail r0") for line in lines)
    assert isinstance(it.errors["r0"], SuspectRequestError if is_stuck else UnavailableError)


def test_an_answer_that_was_only_to_come_to_the_worker_is_not_suspected() -> None:
    it = Scenario("p0", "d0", config=CONFIG)
    it.start("computed", "p0", "d0")
    it.update("p0", prefilled_update("computed", 0))
    it.update("d0", handed_over_update("computed", 0))
    it.start("comes", "p0", "d0")
    it.lost("d0")
    losses = {name: it.core._requests[RequestId(name)].num_losses for name in ("computed", "comes")}
    assert losses == {"computed": 1, "comes": 0}
