"""How few tokens a text can have, without tokenizing it: a prompt that is hopelessly long is refused in no time.

A token stands for at most as many bytes as the longest one has, so a text of B bytes has at least B / longest tokens.
That holds only where no byte of a text is dropped or shared, and it is claimed only of tokenizers that are known, step
by step, to do neither: BPE that is byte-level or falls back to bytes, which is what nearly all language models have. Of
anything else (lower-casing, accents that are stripped, unknown words of any length that become one
token) no bound is known, and tokenizing has to tell.

- A byte that has no token is dropped by byte-level BPE (SmolLM2 has none for some control characters): not counted.
- An added token may swallow all the white space beside it: where there is such a token, white space is not counted.
- Unicode normalisation may shorten a text, at most by `NORMALISED`; it leaves ASCII alone.
"""

from __future__ import annotations

import json
from typing import Any

from tokenizers import Tokenizer

from server.detokenize import BYTE_ALPHABET

NORMALISED = 8
"""By what a Unicode normal form can shorten a text. A character of the result comes from one code point of 4 bytes at
most, or is composed of up to four; then it is not ASCII, and has 2 bytes at least: 16 / 2."""

_UTF8_BYTES = frozenset(range(256)) - {0xC0, 0xC1, *range(0xF5, 256)}
_NORMAL_FORMS = frozenset(("NFC", "NFD", "NFKC", "NFKD"))
_LOSSLESS = frozenset(("ByteLevel", "Metaspace", "Digits", "Prepend", *_NORMAL_FORMS))


class TokenBound:
    """Of one tokenizer. `known` is whether there is a bound at all."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        steps = _steps(tokenizer.normalizer) + _steps(tokenizer.pre_tokenizer)
        kinds = {step["type"] for step in steps}
        vocabulary = tokenizer.get_vocab(with_added_tokens=False)
        added = tokenizer.get_added_tokens_decoder().values()
        byte_level = "ByteLevel" in kinds and type(tokenizer.model).__name__ == "BPE"
        self.known = all(map(_is_lossless, steps)) and (byte_level or _falls_back_to_bytes(tokenizer, vocabulary))
        # A byte-level token has one character for each byte. Others are text: a space is spelt ▁, which is no shorter.
        sizes = (len(token) if byte_level else len(token.encode()) for token in vocabulary)
        self._longest = max((*sizes, *(len(token.content.encode()) for token in added)), default=1)
        self._dropped = bytes(b for c, b in BYTE_ALPHABET.items() if c not in vocabulary) if byte_level else b""
        self._drops_characters = any(b in _UTF8_BYTES for b in self._dropped)
        self._normalises = bool(kinds & _NORMAL_FORMS)
        self._swallows_space = any(token.lstrip or token.rstrip for token in added)

    def least_tokens(self, text: str) -> int:
        """`text` has at least so many tokens, special ones around it not counted."""
        if not self.known:
            return 0
        longest = self._longest
        if self._normalises and not text.isascii():
            if self._drops_characters:
                return 0  # what is counted here might become a character that is dropped
            longest *= NORMALISED
        if self._swallows_space:
            text = "".join(text.split())
        counted = text.encode(errors="replace").translate(None, self._dropped)
        return -(-len(counted) // longest)


def _steps(part: Any) -> list[dict[str, Any]]:
    """A normalizer or pre-tokenizer as a flat list."""
    return [] if part is None else _flatten(json.loads(part.__getstate__()))


def _flatten(step: dict[str, Any]) -> list[dict[str, Any]]:
    if step["type"] != "Sequence":
        return [step]
    return [s for part in step.get("normalizers", step.get("pretokenizers", ())) for s in _flatten(part)]


def _is_lossless(step: dict[str, Any]) -> bool:
    if step["type"] == "Split":
        return bool(step["behavior"] != "Removed")
    if step["type"] == "Replace":
        pattern = step["pattern"].get("String")
        return pattern is not None and len(step["content"].encode()) >= len(pattern.encode())
    return step["type"] in _LOSSLESS


def _falls_back_to_bytes(tokenizer: Tokenizer, vocabulary: dict[str, int]) -> bool:
    return getattr(tokenizer.model, "byte_fallback", False) and all(
        f"<0x{byte:02X}>" in vocabulary for byte in range(256)
    )
