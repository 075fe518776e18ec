"""`DISAGG_KERNELS`: what it may say, and what each part is answered."""

from __future__ import annotations

import re

import pytest

from disagg.kernels.ops import Ops
from disagg.kernels.settings.switches import TRITON_OPS, Switches, parse, switches


def test_nothing_is_switched_off_unless_the_variable_says_so() -> None:
    assert switches({}) == switches({"DISAGG_KERNELS": "auto"}) == Switches("auto", ())
    assert str(switches({})) == ""
    assert all(switches({}).has_kernel(op) for op in TRITON_OPS)


def test_ops_are_switched_off_one_by_one() -> None:
    found = parse("auto, -paged_prefill_attention,-draw_rows,-draw_rows")
    assert found == Switches("auto", ("draw_rows", "paged_prefill_attention"))
    assert str(found) == "without draw_rows, paged_prefill_attention (DISAGG_KERNELS)"
    assert [op for op in TRITON_OPS if not found.has_kernel(op)] == ["draw_rows", "paged_prefill_attention"]
    assert parse("triton,-embed") == Switches("triton", ("embed",))


def test_the_reference_has_no_kernel() -> None:
    assert [op for op in TRITON_OPS if parse("reference").has_kernel(op)] == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fast", "DISAGG_KERNELS: 'fast' is not one of 'auto', 'reference', 'triton'"),
        ("-draw_rows", "DISAGG_KERNELS: '-draw_rows' is not one of 'auto', 'reference', 'triton'"),
        ("", "DISAGG_KERNELS: '' is not one of 'auto', 'reference', 'triton'"),
        ("auto,draw_rows", "DISAGG_KERNELS: 'draw_rows': what follows the mode is switched off, as in 'auto,-draw_"),
        ("auto,", "DISAGG_KERNELS: '': what follows the mode is switched off"),
        ("auto,-draw", "DISAGG_KERNELS: 'draw' is not one of add, add_rms_norm, argmax_rows, "),
    ],
)
def test_what_is_not_known_is_refused_by_name(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        parse(text)


def test_every_op_with_a_kernel_can_be_switched_off() -> None:
    ops = {name for name in vars(Ops) if not name.startswith("_")}
    by_torch = {"take_rows", "draw_unfiltered", "linear_by_head"}
    assert set(TRITON_OPS) == ops - by_torch | {"draw_rows", "quantize_rows"}
