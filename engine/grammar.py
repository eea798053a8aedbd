"""Answers that must match a grammar: which tokens may come next.

The library is llguidance. A matcher walks along an answer's tokens and depends on nothing else, so a rerun or a
resumption repeats it. Its tokenizer takes half a second to make, and is made when a model is first asked for a
grammar, by the thread that runs its batches.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from swapper.errors import GswapdError

Mask = npt.NDArray[np.int32]
"""A bit for each token of the vocabulary, lowest first: whether it is allowed."""


class GrammarError(GswapdError):
    """A grammar cannot be used with this model, or an answer does not match it."""


class Matcher(Protocol):
    """One answer on its way through a grammar."""

    def consume(self, token: int) -> None:
        """The answer's next token. Raises GrammarError if the grammar does not allow it."""

    def mask(self) -> Mask:
        """What may come next. End tokens may where the answer may end."""


class Grammars(Protocol):
    def matcher(self, grammar: str, stop_tokens: frozenset[int]) -> Matcher:
        """A walk that has not begun. Raises GrammarError."""


class ImageGrammars:
    """The grammars of one model, whose tokenizer is in its image. Not for several threads at once."""

    def __init__(self, image: Path, vocab_size: int) -> None:
        self._image = image
        self._vocab_size = vocab_size
        self._tokenizer: Any = None
        self._stop_tokens: frozenset[int] = frozenset()

    def matcher(self, grammar: str, stop_tokens: frozenset[int]) -> Matcher:
        from llguidance import LLMatcher

        if self._tokenizer is None or stop_tokens != self._stop_tokens:
            self._tokenizer = self._load(stop_tokens)
            self._stop_tokens = stop_tokens
        matcher = LLMatcher(self._tokenizer, grammar)
        if matcher.is_error():
            raise GrammarError(f"The grammar cannot be used: {matcher.get_error()}")
        return _Matcher(matcher, self._vocab_size)

    def _load(self, stop_tokens: frozenset[int]) -> Any:
        from llguidance.hf import from_tokenizer
        from transformers import AutoTokenizer, PreTrainedTokenizerFast

        # The class that a tokenizer names is looked for a second, and adds nothing to its file.
        loader = PreTrainedTokenizerFast if (self._image / "tokenizer.json").exists() else AutoTokenizer
        try:
            own = loader.from_pretrained(self._image, local_files_only=True, trust_remote_code=False)
            return from_tokenizer(own, eos_token=sorted(t for t in stop_tokens if t < len(own)) or None)
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise GrammarError(f"The model's tokenizer cannot be used with grammars: {error}") from error


class _Matcher:
    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher = matcher
        self._words = -(-vocab_size // 32)

    def consume(self, token: int) -> None:
        if not self._matcher.consume_token(token):
            raise GrammarError(f"The answer does not match its grammar: {self._matcher.get_error()}")

    def mask(self) -> Mask:
        # Of a matcher that gives up (a grammar too complex), which takes no further token, this has the end tokens.
        known = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.int32)[: self._words]
        return np.pad(known, (0, self._words - len(known)))  # models have room for more tokens than there are
