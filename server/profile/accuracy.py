"""What a model's answers are compared with: the same weights, computed in float32 by transformers itself."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import psutil

from server.profile.document import ProfileError
from server.profile.text import TEXT
from server.tokens import ModelTokenizer
from swapper.image import Image


@dataclass(frozen=True, slots=True)
class Reference:
    perplexity: float
    likeliest: tuple[str, ...]  # the likeliest successor of each token, spelled as the daemon spells it

    def agreement(self, likeliest: Sequence[str]) -> float:
        if len(likeliest) != len(self.likeliest):
            raise ProfileError(f"{len(likeliest)} tokens were scored, but {len(self.likeliest)} in float32.")
        same = sum(ours == its for ours, its in zip(likeliest, self.likeliest, strict=True))
        return same / len(self.likeliest)


def text_tokens(image: Image, tokenizer: ModelTokenizer, most: int) -> tuple[int, ...]:
    """The text as the model reads it, as much as fits into its context."""
    return tokenizer.encode(TEXT)[: min(most, image.manifest.context_length - 1)]


def reference(image: Image, tokenizer: ModelTokenizer, tokens: Sequence[int]) -> Reference | None:
    """None for an image of several ranks, which has the whole weights nowhere, and where this machine has no memory
    for them. Imports torch."""
    if len(image.manifest.shards) > 1:
        return None
    widened = 1 if image.manifest.dtype == "float32" else 2
    if (wanted := image.manifest.shards[0].nbytes * (1 + widened)) > psutil.virtual_memory().available:
        print(f"no comparison with float32, which would take {wanted >> 30} GiB of this machine's memory")
        return None
    from engine.reference import score

    logprobs, likeliest = score(image, tokens)
    spelled = tuple(tokenizer.vocabulary.bytes_of(token).decode(errors="replace") for token in likeliest)
    return Reference(math.exp(-sum(logprobs) / len(logprobs)), spelled)
