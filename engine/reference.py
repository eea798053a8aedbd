"""An image's weights computed in float32 by transformers alone, none of our attention or paging: what is right."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from safetensors.torch import load_file

from engine.architecture import build, read_config
from engine.support import no_progress_bar
from swapper.image import Image
from swapper.layout import PAD_PREFIX


def score(image: Image, tokens: Sequence[int]) -> tuple[list[float], list[int]]:
    """Of each token from the second on: its log-probability, and which one was the likeliest there.

    Takes memory for the whole model in float32. For images of one rank.
    """
    kind = type(build(read_config(image.path), torch.float32))
    weights = {name: its for name, its in load_file(image.shard_path(0)).items() if not name.startswith(PAD_PREFIX)}
    with no_progress_bar(), torch.inference_mode():
        module = kind.from_pretrained(
            None,
            config=read_config(image.path),
            state_dict=weights,
            dtype=torch.float32,
            attn_implementation="eager",
        ).eval()
        logits = module(torch.tensor([list(tokens)]), use_cache=False).logits[0, :-1]
        logprobs = logits.float().log_softmax(-1)
        given = logprobs.gather(1, torch.tensor(list(tokens[1:]))[:, None])
    return given[:, 0].tolist(), logprobs.argmax(-1).tolist()
