"""Tokens to text as they come: what is returned piece by piece adds up to exactly what decoding all at once gives.

A character may be spread over several tokens, so a piece of text is returned once no later token can change it. The
two decoders that nearly all language models have are done here byte by byte, in constant time a token:

- **byte level** (GPT-2's family: Llama 3, Qwen, SmolLM): every token is some bytes of UTF-8;
- **byte fallback** (SentencePiece's family: Llama 2, Gemma, Phi-3): a token is text, or one byte of a run that
  is text only if the whole run is UTF-8, so a run is held until it ends.

Any other decoder is asked itself, about a short window of tokens.
"""

from __future__ import annotations

import codecs
import json
from typing import Any, Protocol

from tokenizers import Tokenizer

REPLACEMENT = "\ufffd"
SHOWN = frozenset(("<tool_call>", "</tool_call>", "[TOOL_CALLS]"))
"""Special tokens that are text all the same: calls of tools are found by them (`server/openai/tools.py`)."""
WINDOW = 16  # tokens after which an unknown decoder's replacement character is taken for final


class Detokenizer(Protocol):
    """Turns one answer's tokens into text."""

    def push(self, token: int) -> str:
        """The text that became certain with this token; often empty in the middle of a character."""

    def flush(self) -> str:
        """The answer has ended: what was still held back."""


class Vocabulary:
    """What each token of a tokenizer stands for. Shared by all answers of a model; `detokenizer()` starts one."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self.special = frozenset(i for i, token in added.items() if token.special and token.content not in SHOWN)
        self._steps = _decoder_steps(tokenizer)
        kinds = [step["type"] for step in self._steps]
        self._byte_level = kinds == ["ByteLevel"]
        self._byte_fallback = kinds[:3] == ["Replace", "ByteFallback", "Fuse"] and kinds[3:] in ([], ["Strip"])
        self._cache: dict[int, bytes | str | int] = {}

    def detokenizer(self) -> Detokenizer:
        if self._byte_level:
            return _ByteLevel(self)
        if self._byte_fallback:
            return _ByteFallback(self, self._steps[3:])
        return _Windowed(self)

    def leaves_out(self, token: int) -> bool:
        """Whether decoding passes over this token: a special one, or no token at all."""
        return token in self.special or self.tokenizer.id_to_token(token) is None

    def bytes_of(self, token: int) -> bytes:
        """The UTF-8 bytes one token stands for, wherever it stands; special tokens are spelt out."""
        if token in self.special or not (self._byte_level or self._byte_fallback):
            return (self.tokenizer.id_to_token(token) or "").encode()
        piece = self.piece(token)
        if isinstance(piece, int):
            return bytes((piece,))
        return piece if isinstance(piece, bytes) else piece.encode()

    def piece(self, token: int) -> bytes | str | int:
        """Bytes (byte level), or text or one byte's value (byte fallback). Empty for what decoding leaves out."""
        if token not in self._cache:
            self._cache[token] = self._piece(token)
        return self._cache[token]

    def _piece(self, token: int) -> bytes | str | int:
        text = None if token in self.special else self.tokenizer.id_to_token(token)
        if self._byte_level:
            return _unmapped(text or "")
        text = (text or "").replace(self._steps[0]["pattern"]["String"], self._steps[0]["content"])
        if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
            try:
                return int(text[3:5], 16)
            except ValueError:
                return text
        return text


def _decoder_steps(tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """The tokenizer's decoder as a flat list. An unusual variant of a known step is renamed: it is then not known."""
    if tokenizer.decoder is None:
        return []
    steps = _flatten(json.loads(tokenizer.decoder.__getstate__()))
    for step in steps:
        plain_replace = step["type"] != "Replace" or "String" in step["pattern"]
        plain_strip = step["type"] != "Strip" or step["stop"] == 0
        if not (plain_replace and plain_strip):
            step["type"] = "unusual"
    return steps


def _flatten(step: dict[str, Any]) -> list[dict[str, Any]]:
    return [s for part in step["decoders"] for s in _flatten(part)] if step["type"] == "Sequence" else [step]


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes: themselves where printable, else from U+0100 upwards."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(0x100 + i): b for i, b in enumerate(rest)}


BYTE_ALPHABET = _byte_alphabet()


def _unmapped(text: str) -> bytes:
    """Byte-level spelling to bytes; a token with any other character in it (an added one) stands for itself."""
    try:
        return bytes(BYTE_ALPHABET[c] for c in text)
    except KeyError:
        return text.encode()


class _ByteLevel:
    def __init__(self, vocabulary: Vocabulary) -> None:
        self._piece = vocabulary.piece
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def push(self, token: int) -> str:
        return self._decode(self._piece(token))  # type: ignore[arg-type]

    def flush(self) -> str:
        return self._decode(b"", True)


class _ByteFallback:
    def __init__(self, vocabulary: Vocabulary, strips: list[dict[str, Any]]) -> None:
        self._vocabulary = vocabulary
        self._run = bytearray()
        self._strip: str = strips[0]["content"] if strips else ""
        self._to_strip: int = strips[0]["start"] if strips else 0  # leading characters that may still be cut off

    def push(self, token: int) -> str:
        piece = self._vocabulary.piece(token)
        if isinstance(piece, int):
            self._run.append(piece)
            return ""
        if self._vocabulary.leaves_out(token):
            return ""  # it does not end a run
        return self._stripped(self._end_run() + piece)  # type: ignore[operator]

    def flush(self) -> str:
        return self._stripped(self._end_run())

    def _end_run(self) -> str:
        run, self._run = self._run, bytearray()
        try:
            return run.decode()
        except UnicodeDecodeError:
            return REPLACEMENT * len(run)

    def _stripped(self, text: str) -> str:
        while self._to_strip and text:
            if not text.startswith(self._strip):
                self._to_strip = 0
                break
            text = text[len(self._strip) :]
            self._to_strip -= 1
        return text


class _Windowed:
    """Decodes the last tokens again with each new one, behind an anchor: decoders treat a first token differently."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._decode = vocabulary.tokenizer.decode
        self._anchor: list[int] = []
        self._pending: list[int] = []

    def push(self, token: int) -> str:
        if self._vocabulary.leaves_out(token):
            return ""
        self._pending.append(token)
        text = self._text()
        if text.endswith(REPLACEMENT) and len(self._pending) < WINDOW:
            return ""
        self._anchor, self._pending = self._pending, []
        return text

    def flush(self) -> str:
        return self._text()

    def _text(self) -> str:
        known = len(self._decode(self._anchor))
        return self._decode(self._anchor + self._pending)[known:]
