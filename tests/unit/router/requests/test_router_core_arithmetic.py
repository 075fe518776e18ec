"""Workers of two arithmetics at once, such as AVX2 and AVX512-BF16: an answer that was begun goes on where it can do so
to the bit, and elsewhere only if nothing else has room."""

from __future__ import annotations

import pytest

from disagg.proto.messages import WorkerInfo
from disagg.router.config import RouterConfig
from tests.support.router import MOVING, Scenario, routed_request, tokens_update, worker_info

CONFIG = RouterConfig(policy="round_robin", watermark=0.0)


def of(arithmetic: str, name: str, max_num_seqs: int = 8) -> WorkerInfo:
    return worker_info(name, arithmetic=arithmetic, max_num_seqs=max_num_seqs)


def placed(lines: list[str]) -> str:
    (line,) = [line for line in lines if line.startswith("dispatch")]
    return line


@pytest.mark.parametrize("other", ["d1", "d2"])
def test_a_begun_answer_goes_on_in_its_own_arithmetic(other: str) -> None:
    """Whichever of the others is first in turn."""
    names = {"d1": "bf16", "d2": "fma"} if other == "d1" else {"d1": "fma", "d2": "bf16"}
    it = Scenario(of("fma", "p0"), of("fma", "d0"), config=CONFIG)
    it.start(routed_request("r0"), "p0", "d0")
    for name, arithmetic in names.items():
        it.up(of(arithmetic, name))
    it.update("p0", tokens_update("r0", 0, 0, 7))
    own = next(name for name, arithmetic in names.items() if arithmetic == "fma")
    assert placed(it.lost("d0")) == f"dispatch p0 r0/1 -> {own}"
    assert placed(it.lost(own)) == f"dispatch p0 r0/2 -> {other}", "better another one than none"


def test_a_prefill_worker_of_another_arithmetic_is_the_second_choice_too() -> None:
    it = Scenario(of("fma", "p0"), of("fma", "d0"), config=CONFIG)
    it.start(routed_request("r0"), "p0", "d0")
    for info in (of("bf16", "p1"), of("bf16", "d1"), of("fma", "p2"), of("fma", "d2")):
        it.up(info)
    it.update("p0", tokens_update("r0", 0, 0, 7))
    assert placed(it.lost("p0")) == "dispatch p2 r0/1 -> d2"


def test_without_a_token_any_arithmetic_will_do() -> None:
    it = Scenario(of("fma", "p0"), of("fma", "d0"), config=CONFIG)
    it.start(routed_request("r0"), "p0", "d0")
    it.up(of("bf16", "d1"))
    assert placed(it.lost("d0")) == "dispatch p0 r0/1 -> d1"
    it.update("p0", tokens_update("r0", 1, 0, 7))
    it.up(of("fma", "d2"))
    it.up(of("bf16", "d3"))
    assert placed(it.lost("d1")) == "dispatch p0 r0/2 -> d3", "it was to be decoded by bf16"


@pytest.mark.parametrize(("d1", "d2", "target"), [("bf16", "fma", "d2"), ("fma", "bf16", "d1"), ("bf16", "bf16", "d1")])
def test_a_sequence_moves_to_a_worker_of_its_arithmetic_if_one_has_room(d1: str, d2: str, target: str) -> None:
    it = Scenario(of("fma", "p0"), of("fma", "d0"), config=MOVING)
    it.start(routed_request("r0", max_tokens=100), "p0", "d0")
    it.hand_over("r0", "p0", "d0", 7)
    it.update("d0", tokens_update("r0", 0, 1, 8))
    it.up(of(d1, "d1"))
    it.up(of(d2, "d2"))
    assert it.drain("d0") == [f"move d0 r0/0 #1 -> {target}"]
