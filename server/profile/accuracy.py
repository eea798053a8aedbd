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


@dataclass(frozen=True, slots=True)
class Yardstick:
    """The text as a model reads it, and what its weights make of it in float32; None where that is not known."""

    tokens: tuple[int, ...]
    reference: Reference | None


def yardstick(image: Image, most: int) -> Yardstick | None:
    """Of as much of the text as fits into the model's context; None if its tokenizer knows none of it.

    Imports torch.
    """
    tokenizer = ModelTokenizer(image.manifest.model, image.path)
    tokens = tokenizer.encode(TEXT)[: min(most, image.manifest.context_length - 1)]
    return Yardstick(tokens, reference(image, tokenizer, tokens)) if len(tokens) > 1 else None


def reference(image: Image, tokenizer: ModelTokenizer, tokens: Sequence[int]) -> Reference | None:
    """None where this machine has no memory for the weights."""
    widened = 1 if image.manifest.dtype == "float32" else 2
    wanted = sum(shard.nbytes for shard in image.manifest.shards) * (1 + widened)
    if wanted > psutil.virtual_memory().available:
        print(f"no comparison with float32, which would take {wanted >> 30} GiB of this machine's memory")
        return None
    from engine.reference import score

    logprobs, likeliest = score(image, tokens)
    spelled = tuple(tokenizer.vocabulary.bytes_of(token).decode(errors="replace") for token in likeliest)
    return Reference(math.exp(-sum(logprobs) / len(logprobs)), spelled)
