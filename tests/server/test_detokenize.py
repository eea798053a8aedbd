"""Text comes out piece by piece, and adds up to what decoding everything at once gives."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from server.detokenize import Vocabulary

TEXTS = [
    "Hello, world",
    "  leading and trailing  ",
    "naïve café, Zoë — “quotes” …",
    "👩‍👩‍👧‍👦 family, 🇫🇷 flag, 👍🏽 thumb, 🤷🏿‍♀️",
    "日本語のテキスト、한국어, ไทย, עברית, བོད་སྐད་",
    "tabs\tand\nnew\r\nlines\0",
    "<|im_start|>user\nspecial <|im_end|> inside",
]


def sentencepiece_like(strip: bool) -> Tokenizer:
    """A small tokenizer with Llama 2's decoder (or Gemma's, without the strip)."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "a", "b", "▁the", "é", "▁▁", "<0xZZ>"]
    tokenizer = Tokenizer(models.BPE({p: i for i, p in enumerate(pieces)}, [], byte_fallback=True, unk_token="<unk>"))
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.add_tokens([AddedToken("<tool>", special=False)])
    tail = [decoders.Strip(" ", 1, 0)] if strip else []
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *tail])
    return tokenizer


def word_level(decoder: decoders.Decoder | None) -> Tokenizer:
    pieces = ["[UNK]", "▁hello", "▁", "world", "##ing", "!", "play</w>", "ed</w>", "▁x"]
    tokenizer = Tokenizer(models.WordLevel({p: i for i, p in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.add_special_tokens(["[UNK]"])
    if decoder is not None:
        tokenizer.decoder = decoder
    return tokenizer


SMALL = {
    "byte fallback with strip": sentencepiece_like(True),
    "byte fallback": sentencepiece_like(False),
    "metaspace": word_level(decoders.Metaspace()),
    "word piece": word_level(decoders.WordPiece()),
    "word suffix": word_level(decoders.BPEDecoder()),
    "none": word_level(None),
}


def pieces(vocabulary: Vocabulary, tokens: list[int]) -> str:
    detokenizer = vocabulary.detokenizer()
    return "".join([*(detokenizer.push(token) for token in tokens), detokenizer.flush()])


@pytest.fixture(scope="module")
def real(smollm2: Path) -> Vocabulary:
    return Vocabulary(Tokenizer.from_file(str(smollm2 / "tokenizer.json")))


@pytest.mark.parametrize("text", TEXTS)
def test_real_text_comes_back_whole(real: Vocabulary, text: str) -> None:
    tokens = real.tokenizer.encode(text).ids
    assert pieces(real, tokens) == real.tokenizer.decode(tokens)


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_byte_level_pieces_of_any_tokens_add_up(real: Vocabulary, data: st.DataObject) -> None:
    # Plain bytes come early in the vocabulary, so half of the draws are mostly broken UTF-8.
    token = st.integers(0, 300) | st.integers(0, real.tokenizer.get_vocab_size() - 1)
    tokens = data.draw(st.lists(token, max_size=60))
    assert pieces(real, tokens) == real.tokenizer.decode(tokens)


@pytest.mark.parametrize("name", SMALL)
@given(st.data())
@settings(max_examples=300, deadline=None)
def test_pieces_of_any_tokens_add_up_for_every_kind_of_decoder(name: str, data: st.DataObject) -> None:
    tokenizer = SMALL[name]
    # One id beyond the vocabulary: models whose embedding is padded can sample it.
    tokens = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size()), max_size=40))
    assert pieces(Vocabulary(tokenizer), tokens) == tokenizer.decode(tokens)


@given(st.text(max_size=40))
@settings(deadline=None)
def test_any_text_survives_byte_fallback(text: str) -> None:
    tokens = [3 + byte for byte in text.encode()]
    assert pieces(Vocabulary(SMALL["byte fallback"]), tokens) == text


def test_a_character_is_shown_with_its_last_byte_and_not_before(real: Vocabulary) -> None:
    tokens = real.tokenizer.encode("a👩").ids
    assert len(tokens) > 2
    detokenizer = real.detokenizer()
    shown = [detokenizer.push(token) for token in tokens]
    assert shown == ["a", *[""] * (len(tokens) - 2), "👩"]
    assert detokenizer.flush() == ""


def test_half_a_character_at_the_end_is_shown_as_a_replacement(real: Vocabulary) -> None:
    tokens = real.tokenizer.encode("👩").ids[:-1]
    assert pieces(real, tokens) == "\ufffd"


def test_bytes_of_tokens_join_to_the_text(real: Vocabulary) -> None:
    for text in TEXTS:
        tokens = real.tokenizer.encode(text).ids
        assert b"".join(real.bytes_of(token) for token in tokens) == text.encode()


def test_a_byte_level_decoder_inside_a_sequence_is_recognised(real: Vocabulary) -> None:
    tokenizer = Tokenizer.from_str(real.tokenizer.to_str())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel()])
    assert type(Vocabulary(tokenizer).detokenizer()) is type(real.detokenizer())
