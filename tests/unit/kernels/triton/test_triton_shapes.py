"""`DISAGG_TRITON_SHAPES`: what it may say, what is launched then, and that results stay what they were."""

from __future__ import annotations

import re

import pytest
import torch

from disagg.kernels.settings.triton_shapes import VARIABLE, Changes, DecodeChange, PrefillChange, changes, parse
from disagg.kernels.triton import attention
from disagg.kernels.triton.decode_attention import DecodeShape, decode_shape
from disagg.kernels.triton.prefill_attention import PrefillShape, prefill_shape
from tests.support.paged import PagedCase
from tests.unit.kernels.triton.test_attention import assert_close, assert_prefill, expected_decode

WHOLE = """{"decode": {"tile": 64, "programs": 2, "warps": 4, "stages": 7},
            "prefill": {"rows": 128, "tile": 64, "warps": 4, "stages": 2, "boxes": true}}"""


def test_nothing_changes_unless_the_variable_says_so() -> None:
    assert changes({}) == changes({VARIABLE: ""}) == changes({VARIABLE: "{}"}) == Changes()


def test_all_fields_or_some_of_them() -> None:
    assert parse(WHOLE) == Changes(DecodeChange(64, 2, 4, 7), PrefillChange(128, 64, 4, 2, True))
    assert parse('{"prefill": {"boxes": false}}') == Changes(prefill=PrefillChange(boxes=False))
    assert parse('{"decode": {"stages": 3}}') == Changes(decode=DecodeChange(stages=3))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tile=64", "not JSON: Expecting value"),
        ("[1]", "not an object of decode, prefill"),
        ('{"drafts": {}}', "drafts: not known; known are decode, prefill"),
        ('{"decode": 64}', "decode: not an object of tile, programs, warps, stages"),
        ('{"decode": {"tiles": 64}}', "decode.tiles: not known; known are tile, programs, warps, stages"),
        ('{"decode": {"tile": 48}}', "decode.tile: 48 is not one of 16, 32, 64, 128, 256"),
        ('{"decode": {"tile": "64"}}', 'decode.tile: "64" is not one of 16'),
        ('{"decode": {"programs": true}}', "decode.programs: true is not one of 1, 2"),
        ('{"prefill": {"warps": 3}}', "prefill.warps: 3 is not one of 1, 2, 4, 8, 16"),
        ('{"prefill": {"stages": 0}}', "prefill.stages: 0 is not one of 1, 2"),
        ('{"prefill": {"boxes": 1}}', "prefill.boxes: 1 is not one of true, false"),
    ],
)
def test_what_is_wrong_is_named(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(f'{VARIABLE}: {message}')}"):
        parse(text)


def test_decodes_are_launched_as_it_says() -> None:
    built_in = DecodeShape(tile=64, num_programs=264, num_warps=4, num_stages=7)
    assert decode_shape(torch.bfloat16, 128, 132) == built_in
    assert decode_shape(torch.bfloat16, 128, 132, parse(WHOLE).decode) == built_in
    changed = decode_shape(torch.bfloat16, 128, 132, DecodeChange(tile=32, programs=3))
    assert changed == DecodeShape(tile=32, num_programs=396, num_warps=4, num_stages=7)


BOXED = PrefillShape(rows=128, tile=64, num_warps=4, num_stages=2, boxes=True)
LOADED = PrefillShape(rows=128, tile=128, num_warps=8, num_stages=3, boxes=False)


@pytest.mark.parametrize(
    ("change", "block_size", "expected"),
    [
        (PrefillChange(), 64, BOXED),
        (parse(WHOLE).prefill, 64, BOXED),
        (PrefillChange(boxes=False), 64, LOADED),
        (PrefillChange(stages=4, warps=8), 64, PrefillShape(rows=128, tile=64, num_warps=8, num_stages=4, boxes=True)),
        (
            PrefillChange(boxes=True, tile=128),
            128,
            PrefillShape(rows=128, tile=128, num_warps=4, num_stages=2, boxes=True),
        ),
        (PrefillChange(boxes=True, tile=128), 64, LOADED),  # a tile of 128 is not within a block of 64
        (PrefillChange(boxes=True), 16, LOADED),
        (PrefillChange(rows=64), 64, PrefillShape(rows=64, tile=64, num_warps=4, num_stages=2, boxes=True)),
        (PrefillChange(rows=16), 64, PrefillShape(rows=32, tile=64, num_warps=4, num_stages=2, boxes=True)),
    ],
)
def test_long_prompts_are_launched_as_it_says(change: PrefillChange, block_size: int, expected: PrefillShape) -> None:
    """With 32 query heads of a KV head, which are the fewest rows that a program can have."""
    assert prefill_shape(torch.bfloat16, torch.bfloat16, 128, block_size, 32, 512, change) == expected


def test_short_prompts_and_fp32_keep_their_shapes() -> None:
    change = PrefillChange(rows=128, tile=64, warps=8, stages=2)
    for dtype, num_tokens in ((torch.bfloat16, 4), (torch.float32, 512)):
        arguments = (dtype, dtype, 128, 64, 4, num_tokens)
        assert prefill_shape(*arguments, change) == prefill_shape(*arguments)


@pytest.mark.parametrize(
    "text",
    [
        '{"decode": {"tile": 32, "programs": 3, "stages": 3}, "prefill": {"boxes": false}}',
        '{"decode": {"tile": 128, "programs": 1}, "prefill": {"tile": 128, "warps": 8, "stages": 2}}',
        '{"decode": {"warps": 8}, "prefill": {"rows": 64, "stages": 4}}',
    ],
)
def test_results_stay_the_same(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, text)
    lengths = [200, 3, 65]
    case = PagedCase(lengths, heads=(8, 2), dim=64, block_size=64, dtype=torch.float16)
    q = case.queries(len(lengths))
    found = attention.paged_decode_attention(
        q, case.keys_NKBD, case.values_NKBD, case.poisoned_tables_SM, case.lens_S, case.form
    )
    assert_close(found, expected_decode(case, q))
    assert_prefill(case, [(100, 100), (0, 3), (0, 65)])
