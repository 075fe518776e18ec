from __future__ import annotations

import itertools

import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import decoders, models

from disagg.gateway.text.detokenizer import (
    MAX_PENDING_TOKENS,
    IncrementalDecoder,
    Piece,
    StopMatcher,
    TextStream,
)
from disagg.gateway.text.tokenizer import ServedModel, Tokenizer
from tests.support.gateway import EOS, IM_END, NUM_TOKENS

CUT = "\ufffd"


def encode(model: ServedModel, text: str) -> list[int]:
    """Ids without the leading special token."""
    return model.tokenizer.encode_text(text)[1:]


def steps(model: ServedModel, ids: list[int]) -> list[str]:
    decoder = IncrementalDecoder(model.tokenizer)
    return [*(decoder.step(token_id) for token_id in ids), decoder.finish()]


# ---------------------------------------------------------------- detokenizing


def test_a_character_is_never_cut(model: ServedModel) -> None:
    ids = encode(model, "é🙂")
    assert len(ids) == 6
    assert steps(model, ids) == ["", "é", "", "", "", "🙂", ""]


def test_a_character_that_stays_cut_comes_at_the_end(model: ServedModel) -> None:
    ids = encode(model, "a🙂")
    assert steps(model, ids[:-1]) == ["a", "", "", "", CUT]


def test_a_character_that_goes_wrong_comes_with_the_next_one(model: ServedModel) -> None:
    ids = encode(model, "🙂")[:2] + encode(model, "b")
    assert steps(model, ids) == ["", "", f"{CUT}b", ""]


def test_special_tokens_have_no_text_wherever_they_are(model: ServedModel) -> None:
    first, second = encode(model, "é")
    assert steps(model, [EOS, first, IM_END, second, EOS]) == ["", "", "", "é", "", ""]


def test_special_tokens_do_not_count_as_broken_bytes(model: ServedModel) -> None:
    first, second = encode(model, "é")
    assert "".join(steps(model, [first, *[EOS] * (2 * MAX_PENDING_TOKENS), second])) == "é"


def test_ids_without_text_have_none(model: ServedModel) -> None:
    assert "".join(steps(model, [NUM_TOKENS + 5, *encode(model, "hi"), NUM_TOKENS + 5])) == "hi"


def test_bytes_that_are_no_text_are_not_held_for_long(model: ServedModel) -> None:
    broken = encode(model, "🙂")[0]
    pieces = steps(model, [broken] * (MAX_PENDING_TOKENS + 1) + encode(model, " hello"))
    assert pieces[: MAX_PENDING_TOKENS + 1] == [""] * (MAX_PENDING_TOKENS - 1) + [CUT * MAX_PENDING_TOKENS, ""]
    assert "".join(pieces) == CUT * (MAX_PENDING_TOKENS + 1) + " hello"


@given(st.lists(st.integers(0, NUM_TOKENS - 1), max_size=MAX_PENDING_TOKENS - 1))
def test_any_ids_read_as_when_decoded_at_once(model: ServedModel, ids: list[int]) -> None:
    assert "".join(steps(model, ids)) == model.tokenizer.decode(ids)


@given(st.text(max_size=40))
def test_any_text_comes_back(model: ServedModel, text: str) -> None:
    ids = model.tokenizer.encode_text(text)
    assert "".join(steps(model, ids)) == model.tokenizer.decode(ids)


@given(st.text(alphabet="aé 🙂z", max_size=40))
def test_plain_text_comes_back_exactly(model: ServedModel, text: str) -> None:
    assert "".join(steps(model, model.tokenizer.encode_text(text))) == text


def sentencepiece_like() -> Tokenizer:
    """Words with a leading `▁`, whose first space is stripped; the rest in byte tokens, as Llama 2 has them."""
    pieces = ["<unk>", "▁a", "▁b", "c", *(f"<0x{byte:02X}>" for byte in range(256))]
    backend = tokenizers.Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[]))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(backend, None)


def fallback(data: bytes) -> list[int]:
    return [4 + byte for byte in data]


@pytest.mark.parametrize(
    ("ids", "pieces"),
    [
        ([1, 2, 3], ["a", " b", "c", ""]),
        ([1, *fallback("é".encode()), 2], ["a", "", "é", " b", ""]),
        ([*fallback("🙂".encode()), 1], ["", "", "", "🙂", " a", ""]),
        ([1, *fallback(b"\xc3")], ["a", "", CUT]),
        ([1, *fallback(b"\xff"), 2], ["a", "", f"{CUT} b", ""]),
    ],
)
def test_byte_fallback_and_word_starts(ids: list[int], pieces: list[str]) -> None:
    decoder = IncrementalDecoder(sentencepiece_like())
    assert [*(decoder.step(token_id) for token_id in ids), decoder.finish()] == pieces


def test_a_word_start_keeps_its_space_after_broken_bytes() -> None:
    decoder = IncrementalDecoder(sentencepiece_like())
    ids = [1, *fallback(b"\xff" * MAX_PENDING_TOKENS), 2, 3]
    assert "".join(decoder.step(token_id) for token_id in ids) + decoder.finish() == f"a{CUT * MAX_PENDING_TOKENS} bc"


def test_a_word_after_broken_bytes_at_the_start_keeps_its_space() -> None:
    decoder = IncrementalDecoder(sentencepiece_like())
    ids = [*fallback(b"\xff" * MAX_PENDING_TOKENS), 2, 3]
    assert "".join(decoder.step(token_id) for token_id in ids) + decoder.finish() == f"{CUT * MAX_PENDING_TOKENS} bc"


@given(st.lists(st.integers(1, 259), max_size=60))
@example([132, *[4] * 15, 2])
def test_byte_fallback_takes_any_ids(ids: list[int]) -> None:
    """Where broken bytes make the library change its mind, every whole word is still there, in order."""
    decoder = IncrementalDecoder(sentencepiece_like())
    text = "".join(decoder.step(token_id) for token_id in ids) + decoder.finish()
    assert text.count(" b") + text.startswith("b") >= ids.count(2)


# ---------------------------------------------------------------- stop strings


@pytest.mark.parametrize(
    ("stop", "pieces", "expected"),
    [
        (["END"], ["one EN", "D two"], ["one ", ("", True)]),
        (["END"], ["one EN", "E"], ["one ", "EN"]),
        (["END"], ["E", "N", "D"], ["", "", ("", True)]),
        (["aab"], ["a", "a", "a", "b"], ["", "", "a", ("", True)]),
        (["\n\n"], ["x\n", "y\n", "\nz"], ["x", "\ny", ("", True)]),
        (["bc", "abcd"], ["abcd"], [("a", True)]),
        (["bc", "abc"], ["xabcd"], [("x", True)]),
        (["b"], ["ab", "c"], [("a", True), "c"]),
        ([], ["a", "b"], ["a", "b"]),
    ],
)
def test_stop_strings(stop: list[str], pieces: list[str], expected: list[str | tuple[str, bool]]) -> None:
    matcher = StopMatcher(stop)
    wanted = [one if isinstance(one, tuple) else (one, False) for one in expected]
    assert [matcher.push(piece, may_stop=True) for piece in pieces] == wanted


def test_what_is_held_comes_at_the_end() -> None:
    matcher = StopMatcher(["stop"])
    assert matcher.push("do not sto", may_stop=True) == ("do not ", False)
    assert matcher.finish() == "sto"
    assert matcher.finish() == ""


def cut_at_first_stop(text: str, stops: list[str]) -> str:
    """Character by character, the definition: the text before the longest stop string that ends first."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))]
    return text


AB = st.text(alphabet="ab", max_size=12)


@given(
    st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(AB, max_size=6),
)
def test_the_cut_does_not_depend_on_the_pieces(stops: list[str], pieces: list[str]) -> None:
    matcher = StopMatcher(stops)
    out = ""
    for piece in pieces:
        text, stopped = matcher.push(piece, may_stop=True)
        out += text
        if stopped:
            break
    else:
        out += matcher.finish()
    assert out == cut_at_first_stop("".join(pieces), stops)


# ---------------------------------------------------------------- both


def test_ids_after_the_stop_string_are_dropped(model: ServedModel) -> None:
    ids = [encode(model, one)[0] for one in "abcde"]
    stream = TextStream(model.tokenizer, ["c"])
    assert stream.push(ids) == Piece(tuple(ids[:3]), "ab", stopped=True)
    assert stream.num_tokens == 3


@pytest.mark.parametrize(
    ("stop", "found"), [(["cd", "bc"], "bc"), (["c", "bc"], "bc"), (["bc", "c"], "bc"), (["x"], ""), ([], "")]
)
def test_which_stop_string_ended_it(model: ServedModel, stop: list[str], found: str) -> None:
    """The one that ends first; of several that end there, the longest."""
    stream = TextStream(model.tokenizer, stop)
    stream.push([encode(model, one)[0] for one in "abcd"])
    stream.finish()
    assert stream.stop_string == found


def test_a_stop_string_across_batches_and_tokens(model: ServedModel) -> None:
    stream = TextStream(model.tokenizer, ["xyz"])
    first, second = encode(model, "qxy"), encode(model, "zq")
    assert stream.push(first) == Piece(tuple(first), "q", stopped=False)
    assert stream.push(second) == Piece(tuple(second[:1]), "", stopped=True)


@pytest.mark.parametrize(
    ("min_tokens", "text"), [(0, ""), (1, ""), (2, "x"), (3, "xx"), (4, "xxx"), (5, "xxxx"), (6, "xxxxx")]
)
def test_no_stop_string_before_min_tokens(model: ServedModel, min_tokens: int, text: str) -> None:
    ids = [encode(model, "x")[0]] * 5
    stream = TextStream(model.tokenizer, ["x"], min_tokens=min_tokens)
    piece = stream.push(ids)
    assert (piece.text, piece.stopped) == (text, min_tokens <= 5)
    assert stream.num_tokens == min(5, max(1, min_tokens))


def test_a_stop_string_that_began_before_min_tokens_counts_when_it_ends_after(model: ServedModel) -> None:
    ids = [encode(model, one)[0] for one in "ab"]
    stream = TextStream(model.tokenizer, ["ab"], min_tokens=2)
    assert stream.push(ids) == Piece(tuple(ids), "", stopped=True)


def test_a_stop_id_has_no_text(model: ServedModel) -> None:
    x, y = encode(model, "x")[0], encode(model, "y")[0]
    stream = TextStream(model.tokenizer, [], stop_token_ids=[y])
    assert stream.push([x, y]) == Piece((x, y), "x", stopped=False)
    assert stream.finish() == Piece((), "", stopped=False)
    assert stream.num_tokens == 2


def test_the_end_lets_both_held_parts_go(model: ServedModel) -> None:
    stream = TextStream(model.tokenizer, ["quit"])
    ids = encode(model, "qu") + encode(model, "🙂")[:2]
    assert stream.push(ids).text == ""
    assert stream.finish() == Piece((), f"qu{CUT}", stopped=False)


def test_a_stop_string_may_be_completed_by_the_end(model: ServedModel) -> None:
    stream = TextStream(model.tokenizer, [f"a{CUT}"])
    assert stream.push(encode(model, "xa") + encode(model, "🙂")[:1]).text == "x"
    assert stream.finish() == Piece((), "", stopped=True)


@given(
    st.lists(st.integers(0, NUM_TOKENS - 1), max_size=30),
    st.lists(st.integers(0, 30), max_size=4),
    st.lists(st.sampled_from(["e", "th", "he", " ", CUT]), max_size=2),
    st.integers(0, 8),
)
def test_batches_make_no_difference(
    model: ServedModel, ids: list[int], cuts: list[int], stops: list[str], min_tokens: int
) -> None:
    def run(batches: list[list[int]]) -> tuple[str, int, bool]:
        stream = TextStream(model.tokenizer, stops, min_tokens=min_tokens)
        text = ""
        for batch in batches:
            piece = stream.push(batch)
            text += piece.text
            if piece.stopped:
                return text, stream.num_tokens, True
        tail = stream.finish()
        return text + tail.text, stream.num_tokens, tail.stopped

    borders = [0, *sorted(cut for cut in cuts if cut < len(ids)), len(ids)]
    assert run([ids[a:b] for a, b in itertools.pairwise(borders)]) == run([[one] for one in ids])
