"""An image's weights put together again, and computed in float32 by transformers alone: what is right.

None of our attention or paging takes part.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from engine.architecture import build, read_config
from engine.mesh import MeshRank
from engine.partition import OnMeta, cut_module
from engine.plan import pack_plan
from engine.support import no_progress_bar
from swapper.checkpoint import Checkpoint
from swapper.image import MANIFEST, Image
from swapper.layout import PAD_PREFIX
from swapper.packer import pack
from swapper.store import Store


def whole_weights(image: Image) -> dict[str, torch.Tensor]:
    """The tensors that ranks have parts of, by name. Takes memory for all of them."""
    manifest = image.manifest
    shapes = {name: its.shape for name, its in build(read_config(image.path), torch.float32).state_dict().items()}
    weights: dict[str, torch.Tensor] = {}
    for number in range(len(manifest.shards)):
        rank = MeshRank(manifest.tp, 1, number % manifest.tp)
        cuts = cut_module(build(read_config(image.path), torch.float32), OnMeta(rank))
        with safe_open(image.shard_path(number), "pt") as file:
            for name in file.keys():  # noqa: SIM118 - it is no mapping
                if name.startswith(PAD_PREFIX):
                    continue
                part, cut = file.get_tensor(name), cuts.get(name)
                if cut is None:
                    weights[name] = part
                    continue
                whole = weights.setdefault(name, part.new_empty(shapes[name]))
                sizes = [stop - start for start, stop in cut.pieces]
                for (start, stop), piece in zip(cut.pieces, part.split(sizes, cut.dim), strict=True):
                    whole.narrow(cut.dim, start, stop - start).copy_(piece)
    return weights


def score(image: Image, tokens: Sequence[int]) -> tuple[list[float], list[int]]:
    """Of each token from the second on: its log-probability, and which one was the likeliest there.

    Takes memory for the whole model as it is, and in float32.
    """
    kind = type(build(read_config(image.path), torch.float32))
    with no_progress_bar(), torch.inference_mode():
        module = kind.from_pretrained(
            None,
            config=read_config(image.path),
            state_dict=whole_weights(image),
            dtype=torch.float32,
            attn_implementation="eager",
        ).eval()
        logits = module(torch.tensor([list(tokens)]), use_cache=False).logits[0, :-1]
        logprobs = logits.float().log_softmax(-1)
        given = logprobs.gather(1, torch.tensor(list(tokens[1:]))[:, None])
    return given[:, 0].tolist(), logprobs.argmax(-1).tolist()


def recast(image: Image, dtype: str, store: Store, scratch: Path) -> Image:
    """The same model with weights of another type, for the same mesh, published in `store`."""
    manifest = image.manifest
    others = {MANIFEST, *(shard.file for shard in manifest.shards)}
    shutil.copytree(image.path, scratch, ignore=lambda _, names: others & set(names))
    save_file(whole_weights(image), scratch / "model.safetensors")
    checkpoint = Checkpoint(scratch)
    with store.adding(manifest.model) as directory:
        pack(pack_plan(checkpoint, dtype, manifest.tp, manifest.pp), checkpoint, manifest.model, directory)
    return store.open(manifest.model)
