"""What workers of one machine take from each other, in times that can be worked out by hand."""

from __future__ import annotations

import pytest

from disagg.proto.ids import WorkerId
from disagg.simulator.durations.overheads import Sharing
from disagg.simulator.world.clock import EventLoop
from disagg.simulator.world.machine import Kind, Machine

A, B, C = map(WorkerId, "ABC")
SHARING = Sharing(
    prefill_by_prefill=0.1,
    prefill_by_decode=0.2,
    decode_by_prefill=0.25,
    decode_by_decode=0.5,
    update_s=0.01,
    token_s=0.001,
)


class World:
    def __init__(self, neighbour: WorkerId | None = None) -> None:
        self.loop = EventLoop()
        self.machine = Machine(self.loop, SHARING, neighbour)
        self.ended: dict[WorkerId, float] = {}

    def step(self, begin_s: float, worker_id: WorkerId, kind: Kind, alone_s: float) -> None:
        self.loop.at(begin_s, self._begin, worker_id, kind, alone_s)

    def _begin(self, worker_id: WorkerId, kind: Kind, alone_s: float) -> None:
        running = self.machine.begin(worker_id, kind, alone_s)

        def look() -> None:
            if behind_s := self.machine.behind_s(running):
                self.loop.after(behind_s, look)
                return
            self.machine.end(running)
            self.ended[worker_id] = self.loop.now

        self.loop.after(alone_s, look)


def test_a_step_without_neighbours_takes_its_own_time() -> None:
    world = World()
    world.step(1.0, A, "prefill", 2.0)
    world.loop.run()
    assert world.ended == {A: 3.0}


def test_a_step_falls_behind_by_a_share_of_what_others_compute_meanwhile() -> None:
    world = World()
    world.step(0.0, A, "prefill", 2.0)
    world.step(1.0, B, "decode", 0.6)
    world.loop.run()
    # B is always beside A's prefill: t = 0.6 + 0.25 t. A is beside B's decode for that long: 0.2 of it.
    assert world.ended == pytest.approx({B: 1.8, A: 2.0 + 0.2 * 0.8}, abs=5e-5)


def test_shares_of_several_neighbours_add_up() -> None:
    world = World()
    world.step(0.0, A, "prefill", 10.0)
    world.step(0.0, B, "prefill", 10.0)
    world.step(1.0, C, "decode", 0.5)
    world.loop.run()
    # C: t = 0.5 + 2 * 0.25 t = 1. A and B: t = 10 + 0.1 t + 0.2.
    assert world.ended == pytest.approx({C: 2.0, A: 10.2 / 0.9, B: 10.2 / 0.9}, abs=5e-5)


def test_the_gateway_takes_time_of_its_neighbour_only() -> None:
    world = World(neighbour=A)
    world.step(0.0, A, "decode", 1.0)
    world.loop.at(0.5, world.machine.gateway_worked, B, 5)
    world.loop.run()
    world.step(10.0, B, "decode", 1.0)
    world.loop.at(10.5, world.machine.gateway_worked, B, 5)
    world.loop.run()
    assert world.ended == pytest.approx({A: 1.015, B: 11.0})


def test_the_neighbours_own_messages_are_taken_between_its_steps() -> None:
    world = World(neighbour=A)
    world.step(0.0, A, "decode", 1.0)
    world.loop.at(0.5, world.machine.gateway_worked, A, 5)
    world.loop.run()
    assert world.ended == pytest.approx({A: 1.0})
    assert world.machine.gap_s(A, 5) == pytest.approx(0.015)
    assert world.machine.gap_s(B, 5) == 0.0


def test_the_pace_of_many_decode_steps_follows_what_neighbours_do() -> None:
    machine = World(neighbour=A).machine
    changes: list[WorkerId] = []
    machine.listen(A, lambda: changes.append(A))
    machine.listen(B, lambda: changes.append(B))
    assert machine.stretch(A) == machine.stretch(B) == 1.0
    machine.occupy(B, "decode", num_decodes=2, step_s=0.12)
    assert machine.stretch(A) == pytest.approx(1.0 / (1.0 - 0.5 - 0.1))  # 0.012 s of the gateway for 0.12 s of B
    machine.occupy(B, "prefill")
    assert machine.stretch(A) == pytest.approx(1.0 / (1.0 - 0.25))
    machine.occupy(B, "prefill")
    assert changes == [A, A]  # at each change of what B does, for all others
    machine.forget(B)
    assert machine.stretch(A) == 1.0
    assert changes == [A, A, A]
