"""Masks of grammars, over a vocabulary of bytes and an end of sequence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers

from disagg.engine.plan import NO_TOKEN
from disagg.engine.request import Sequence, SequenceState
from disagg.engine.runner.logits import of_grammars
from disagg.engine.runner.sampler import Sampler
from disagg.engine.runner.token_masks import MAX_FORCED, TokenMasks
from disagg.kernels.dispatch import argmax_rows
from disagg.proto.ids import GatewayId, RequestId
from disagg.proto.messages import Sampling, SequenceSpec
from disagg.proto.token_ids import pack_token_ids

EOS = 256
VOCAB = 257


@pytest.fixture(scope="module")
def masks(tmp_path_factory: pytest.TempPathFactory) -> TokenMasks:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(alphabet)}, merges=[]))
    backend.add_special_tokens(["<|end|>"])
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    file: Path = tmp_path_factory.mktemp("model") / "tokenizer.json"
    backend.save(str(file))
    made = TokenMasks(file, VOCAB, (EOS,))
    made.backend = backend  # type: ignore[attr-defined]
    return made


def ids(masks: TokenMasks, text: str) -> list[int]:
    return list(masks.backend.encode(text).ids)  # type: ignore[attr-defined]


def sequence(masks: TokenMasks, lark: str, output: str = "", **sampling: Any) -> Sequence:
    grammar = json.dumps({"grammars": [{"lark_grammar": lark}]})
    spec = SequenceSpec(
        request_id=RequestId("r"),
        attempt=1,
        gateway_id=GatewayId("g"),
        prompt_token_ids=pack_token_ids([0]),
        sampling=Sampling(**{"grammar": grammar, "stop_token_ids": (EOS,), "temperature": 0.0, **sampling}),
    )
    return Sequence(spec, SequenceState.RUNNING, token_ids=[0, *ids(masks, output)])


def allowed(masks: TokenMasks, of: Sequence) -> set[int]:
    return set(np.flatnonzero(masks.allowed([of])[0]).tolist())


def test_only_what_the_grammar_allows_may_come(masks: TokenMasks) -> None:
    assert allowed(masks, sequence(masks, 'start: "ab" | "cd"')) == set(ids(masks, "ac"))
    assert allowed(masks, sequence(masks, "start: /a+/", "a")) == {*ids(masks, "a"), EOS}
    assert allowed(masks, sequence(masks, 'start: "ab"', "ab")) == {EOS}


@pytest.mark.parametrize("text", ["<|end|>", "a<|end|>", "<|end|>b", "x<|end|><|end|>y"])
def test_a_special_token_that_is_spelled_out_is_text(masks: TokenMasks, text: str) -> None:
    masks.backend.encode_special_tokens = True  # type: ignore[attr-defined]
    try:
        for end in range(len(text)):
            row = sequence(masks, f"start: {json.dumps(text)}", text[:end])
            assert allowed(masks, row) == set(ids(masks, text[end]))
        assert allowed(masks, sequence(masks, f"start: {json.dumps(text)}", text)) == {EOS}
        assert forced(masks, sequence(masks, f"start: {json.dumps(text)}"), text[0]).removesuffix("$") == text[1:]
    finally:
        masks.backend.encode_special_tokens = False  # type: ignore[attr-defined]


def test_a_grammar_names_a_special_token_by_its_id(masks: TokenMasks) -> None:
    assert allowed(masks, sequence(masks, f'start: <[{EOS}]> "a"')) == {EOS}
    assert allowed(masks, sequence(masks, 'start: <|end|> "a"')) == set()


def test_the_state_is_the_same_token_by_token_and_made_anew(masks: TokenMasks) -> None:
    text = "x1yx22y"
    going = sequence(masks, 'start: ("x" /[0-9]+/ "y")+')
    for i, token in enumerate(ids(masks, text)):
        anew = sequence(masks, 'start: ("x" /[0-9]+/ "y")+', text[:i])
        assert allowed(masks, going) == allowed(masks, anew)
        going.token_ids.append(token)


def test_a_batch_computes_each_row_for_itself(masks: TokenMasks) -> None:
    rows = [sequence(masks, 'start: "ab"', "a"), sequence(masks, 'start: "cd"'), sequence(masks, "start: /e*/")]
    masks.start(rows)
    assert [allowed(masks, row) for row in rows] == [
        set(ids(masks, "b")),
        set(ids(masks, "c")),
        {*ids(masks, "e"), EOS},
    ]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_bias_and_no_draw_leaves_the_grammar(masks: TokenMasks, temperature: float) -> None:
    (b,), (a,) = ids(masks, "b"), ids(masks, "a")
    row = sequence(masks, 'start: "a"', temperature=temperature, logit_bias=((b, 100.0),))
    assert Sampler(VOCAB, None, masks).sample(torch.zeros(1, VOCAB), [row]) == [a]


def test_rows_without_a_grammar_are_not_masked(masks: TokenMasks) -> None:
    (b,), (a,) = ids(masks, "b"), ids(masks, "a")
    logits = torch.zeros(2, VOCAB)
    logits[:, b] = 1.0
    rows = [sequence(masks, 'start: "a"'), sequence(masks, "", grammar="")]
    assert Sampler(VOCAB, None, masks).sample(logits, rows) == [a, b]


@pytest.mark.parametrize(("lark", "output"), [("start: (", ""), ('start: "a"', "b")])
def test_what_the_grammar_cannot_be_or_follow_gets_no_token(masks: TokenMasks, lark: str, output: str) -> None:
    assert Sampler(VOCAB, None, masks).sample(torch.zeros(1, VOCAB), [sequence(masks, lark, output)]) == [NO_TOKEN]
    assert Sampler(VOCAB).sample(torch.zeros(1, VOCAB), [sequence(masks, lark, output)]) == [NO_TOKEN]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_row_has_the_same_token_beside_others(masks: TokenMasks, dtype: torch.dtype) -> None:
    logits = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(3)).to(dtype)
    rows = [
        sequence(masks, "start: /[a-m]+/", "ab"),
        sequence(masks, "start: /[0-9]{3}/"),
        sequence(masks, "start: /[0-9]{3}/", logit_bias=((ids(masks, "7")[0], 50.0),)),
        sequence(masks, "start: /[a-z]+/", "zz", repetition_penalty=1.5),
        sequence(masks, "start: /[a-z]+/", temperature=0.7, seed=5, top_p=0.9),
        sequence(masks, "", grammar=""),
    ]
    sampler = Sampler(VOCAB, None, masks)
    alone = [sampler.sample(logits[row : row + 1], [rows[row]])[0] for row in range(6)]
    assert sampler.sample(logits, rows) == alone
    assert sampler.sample(logits[:2], rows[:2]) == alone[:2]
    for row, within in ((0, "abcdefghijklm"), (1, "0123456789"), (2, "7")):
        assert masks.backend.decode([alone[row]]) in within  # type: ignore[attr-defined]


def test_a_known_largest_logit_changes_no_choice(masks: TokenMasks) -> None:
    """It is allowed, it is not, there is none, and rows that do not take it."""
    logits = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(4))
    (x, y) = ids(masks, "xy")
    logits[0, x] = logits[1, y] = logits[4, x] = logits[5, x] = 9.0
    logits[2] = float("nan")
    rows = [sequence(masks, "start: /x+/") for _ in range(4)]
    rows += [sequence(masks, "start: /[xy]/", logit_bias=((y, 50.0),)), sequence(masks, "", grammar="")]
    sampler = Sampler(VOCAB, None, masks)
    expected = [x, x, NO_TOKEN, x, y, x]
    assert sampler.sample(logits, rows) == expected
    assert sampler.sample(logits, rows, argmax_rows(logits, VOCAB)) == expected
    assert masks.allow(rows[:4], [x, y, NO_TOKEN, EOS]) == [True, False, False, False]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_allowed_logits_stay_and_others_are_minus_infinity(masks: TokenMasks, dtype: torch.dtype) -> None:
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(5)).to(dtype)
    rows = [sequence(masks, "start: /[a-m]+/", "ab"), sequence(masks, "start: /[0-9]{3}/")]
    forbidden = torch.from_numpy(~masks.allowed(rows))
    found = of_grammars(logits, rows, masks)
    assert torch.equal(found, logits.masked_fill(forbidden, float("-inf")))
    assert found.dtype == dtype


# ---------------------------------------------------------------- forced tokens


def forced(masks: TokenMasks, of: Sequence, token: str) -> str:
    """What must follow a token that was just sampled; it and that are appended."""
    (token_id,) = ids(masks, token)
    masks.allowed([of])
    found = masks.take_forced([of], [token_id]).get(0, ())
    of.token_ids += [token_id, *found]
    assert of.grammar_state.num_taken <= of.num_output_tokens
    return "".join("$" if it == EOS else masks.backend.decode([it]) for it in found)  # type: ignore[attr-defined]


def test_what_must_follow_comes_with_the_sampled_token(masks: TokenMasks) -> None:
    going = sequence(masks, 'start: ("ab" | "cd") "ef" /[0-9]/ "gh"')
    assert forced(masks, going, "c") == "def"
    assert allowed(masks, going) == set(ids(masks, "0123456789"))
    assert forced(masks, going, "7") == "gh$"


def test_what_follows_is_what_each_mask_allows_alone(masks: TokenMasks) -> None:
    lark = 'start: ("name" | "nation") ": " /[xy]{1,3}/ ";" ("tail" | "tool")?'
    for text in ("ntail", "nation: xx;tool", "name: y;", "name: xyx;tail"):
        skipping, plain = sequence(masks, lark), sequence(masks, lark)
        for token in ids(masks, text):
            if token not in allowed(masks, plain):
                break
            position = plain.num_output_tokens
            plain.token_ids.append(token)
            if position == skipping.num_output_tokens:
                forced(masks, skipping, masks.backend.decode([token]))  # type: ignore[attr-defined]
            while len(found := allowed(masks, plain)) == 1:
                plain.token_ids += found
                if found == {EOS}:
                    break
            assert skipping.token_ids == plain.token_ids


def test_a_long_forced_text_is_sampled_until_the_rest_is_short(masks: TokenMasks) -> None:
    text = "".join(chr(ord("a") + i % 23) for i in range(MAX_FORCED + 5))
    going = sequence(masks, f'start: "{text}" /[0-9]/', max_tokens=100)
    assert [forced(masks, going, letter) for letter in text[:5]] == ["", "", "", "", text[5:]]
    assert allowed(masks, going) == set(ids(masks, "0123456789"))


def test_no_more_is_forced_than_the_answer_may_have(masks: TokenMasks) -> None:
    assert forced(masks, sequence(masks, 'start: "abcdef"', max_tokens=4), "a") == "bcd"
    assert forced(masks, sequence(masks, 'start: "abcdef"', max_tokens=1), "a") == ""


@pytest.mark.parametrize(
    "changes", [{"logprobs": 0}, {"min_tokens": 2}, {"hold_after_prefill": True}, {"is_leaving": True}]
)
def test_nothing_is_forced_where_each_token_needs_its_step(masks: TokenMasks, changes: dict[str, Any]) -> None:
    of_sequence = {name: changes[name] for name in changes if name in ("hold_after_prefill", "is_leaving")}
    row = sequence(masks, 'start: "abc"', **{name: changes[name] for name in changes if name not in of_sequence})
    for name, value in of_sequence.items():
        setattr(row, name, value)
    assert forced(masks, row, "a") == ""
    assert allowed(masks, row) == set(ids(masks, "b"))


def test_an_end_that_is_no_stop_id_and_one_of_several_are_sampled(masks: TokenMasks, tmp_path: Path) -> None:
    assert forced(masks, sequence(masks, 'start: "ab"', stop_token_ids=()), "a") == "b"
    file = tmp_path / "tokenizer.json"
    masks.backend.save(str(file))  # type: ignore[attr-defined]
    of_two = TokenMasks(file, VOCAB, (EOS, 0))
    of_two.backend = masks.backend  # type: ignore[attr-defined]
    assert forced(of_two, sequence(of_two, 'start: "ab"', stop_token_ids=(EOS, 0)), "a") == "b"


def test_a_stop_id_and_a_row_without_a_token_force_nothing(masks: TokenMasks) -> None:
    (a,) = ids(masks, "a")
    rows = [sequence(masks, 'start: "ab"', stop_token_ids=(a, EOS)), sequence(masks, 'start: "ab"')]
    rows.append(sequence(masks, "", grammar=""))
    masks.allowed(rows[:2])
    assert masks.take_forced(rows, [a, NO_TOKEN, a]) == {}


def test_skipping_can_be_turned_off(masks: TokenMasks, tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    masks.backend.save(str(file))  # type: ignore[attr-defined]
    off = TokenMasks(file, VOCAB, (EOS,), skips_forced=False)
    row = sequence(masks, 'start: "ab"')
    off.allowed([row])
    assert off.take_forced([row], ids(masks, "a")) == {}
