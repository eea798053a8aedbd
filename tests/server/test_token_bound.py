"""A bound is one: no text has fewer tokens. Where none is known, none is claimed."""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Sequence

import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from server.token_bound import NORMALISED, TokenBound

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
TEXTS = (
    "",
    "aaaa " * 50,
    "Once upon a time\n\n\n   there was",
    "한국어 텍스트 " * 9,
    unicodedata.normalize("NFD", "한국어 Việt ᾂ") * 9,
    "\u212a\u212b\u1fef" * 9,
    "\x04\x06\U00040000" * 40,
    "<end>" + " \u3000\t" * 80 + "<end>",
    "𝐊" * 30,
)


def byte_level(tokens: Sequence[str] = ("aa", "aaaa"), missing: str = "") -> Tokenizer:
    vocabulary = [c for c in ALPHABET if c not in missing] + list(tokens)
    merges = [(token[: len(token) // 2], token[len(token) // 2 :]) for token in tokens]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(vocabulary)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer


def byte_fallback(*more: str) -> Tokenizer:
    vocabulary = {token: i for i, token in enumerate([*BYTES, "▁", "a", "▁a", *more])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("▁", "a")], byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return tokenizer


def with_normalizer(tokenizer: Tokenizer, *steps: normalizers.Normalizer) -> Tokenizer:
    tokenizer.normalizer = normalizers.Sequence(list(steps))
    return tokenizer


def with_added(tokenizer: Tokenizer, **options: bool) -> Tokenizer:
    tokenizer.add_tokens([AddedToken("<end>", **options)])
    return tokenizer


def word_piece() -> Tokenizer:
    return Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))


def splitting() -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split("z", "removed"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return tokenizer


KNOWN = {
    "byte level": byte_level(),
    "without some bytes": byte_level(missing="ĄĆ"),
    "normal form": with_normalizer(byte_level(), normalizers.NFC()),
    "compatible normal form": with_normalizer(byte_level(), normalizers.NFKC()),
    "normal form without some bytes": with_normalizer(byte_level((), missing="a"), normalizers.NFKC()),
    "byte fallback": byte_fallback(),
    "swallowing space": with_added(byte_level(), rstrip=True, lstrip=True),
}
UNKNOWN = {
    "lower case": with_normalizer(byte_level(), normalizers.Lowercase()),
    "stripped": with_normalizer(byte_level(), normalizers.Strip()),
    "shortened": with_normalizer(byte_fallback(), normalizers.Replace("aaaa", "a")),
    "unknown words": word_piece(),
    "split": splitting(),
}


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("kind", KNOWN)
def test_no_text_has_fewer_tokens(kind: str, text: str) -> None:
    bound = TokenBound(KNOWN[kind])
    assert bound.known
    assert bound.least_tokens(text) <= len(KNOWN[kind].encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("kind", UNKNOWN)
def test_no_bound_is_claimed(kind: str) -> None:
    assert not TokenBound(UNKNOWN[kind]).known
    assert TokenBound(UNKNOWN[kind]).least_tokens("a" * 1000) == 0


@pytest.mark.parametrize(("kind", "longest"), [("byte level", 4), ("normal form", 4), ("byte fallback", 6)])
def test_the_bound_grows_with_the_text(kind: str, longest: int) -> None:
    assert TokenBound(KNOWN[kind]).least_tokens("x" * 6000) == 6000 / longest


def test_a_real_one(tokenizer: Tokenizer) -> None:
    bound = TokenBound(tokenizer)
    assert bound.known
    longest = max(len(token) for token in tokenizer.get_vocab())
    assert bound.least_tokens("a" * longest * 10) == 10


@pytest.mark.parametrize("form", ["NFC", "NFD", "NFKC", "NFKD"])
def test_no_normal_form_shortens_a_character_by_more(form: str) -> None:
    normalize = unicodedata.normalize
    for code in range(sys.maxunicode + 1):
        if 0xD800 <= code < 0xE000:
            continue
        character = chr(code)
        result = normalize(form, character)  # type: ignore[arg-type]
        assert NORMALISED * len(result.encode()) >= 4, f"U+{code:04X} may vanish"
        composed = normalize("NFC", result)
        parts = normalize("NFD", composed)
        assert len(composed) > 1 or len(composed.encode()) * NORMALISED >= 4 * len(parts), f"U+{code:04X}"
