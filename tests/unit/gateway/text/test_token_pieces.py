"""The bytes of single tokens, for the two kinds of vocabularies."""

from __future__ import annotations

import tokenizers
from tokenizers import decoders, models

from disagg.gateway.text.token_pieces import TokenPieces
from disagg.gateway.text.tokenizer import ServedModel, fake_model
from tests.support.gateway import EOS, NUM_TOKENS


def test_a_byte_level_vocabulary(model: ServedModel) -> None:
    tokenizer = model.tokenizer
    for text in ("hello there", "  a\n\tb", "🙂 ü", "\x00\x7f"):
        ids = tokenizer.encode_text(text, special=False)
        assert b"".join(tokenizer.token_bytes(token_id) for token_id in ids) == text.encode()
    parts = [tokenizer.token_bytes(token_id) for token_id in tokenizer.encode_text("🙂", special=False)]
    assert parts == [b"\xf0", b"\x9f", b"\x99", b"\x82"]
    assert tokenizer.token_bytes(EOS) == b"</s>"
    assert tokenizer.token_bytes(NUM_TOKENS) == b""


def test_the_model_without_weights() -> None:
    tokenizer = fake_model("fake", 64).tokenizer
    assert [tokenizer.token_bytes(token_id) for token_id in (65, 255, 256)] == [b"A", b"\xff", b" t256"]


def test_a_vocabulary_with_byte_fallback() -> None:
    vocab = {"<unk>": 0, "<0x0A>": 1, "\u2581hello": 2, "ü": 3}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    pieces = TokenPieces(backend)
    assert [pieces.bytes_of(i) for i in range(1, 5)] == [b"\n", b" hello", "ü".encode(), b""]


def test_a_vocabulary_without_a_decoder() -> None:
    pieces = TokenPieces(tokenizers.Tokenizer(models.WordLevel(vocab={"<0x0A>": 0, "a": 1}, unk_token="a")))
    assert [pieces.bytes_of(i) for i in range(2)] == [b"<0x0A>", b"a"]
