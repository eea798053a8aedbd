"""Adding a model: from a checkpoint directory to a published image."""

from __future__ import annotations

from pathlib import Path

from engine.encoder_support import check_encoder
from engine.plan import pack_plan
from engine.pooling import read_embedding
from engine.support import check_supported
from swapper.checkpoint import Checkpoint
from swapper.errors import SourceError, UnsupportedModel
from swapper.image import Image, Progress
from swapper.packer import pack
from swapper.store import Store


def add_model(
    store: Store,
    source: Path | str,
    name: str,
    *,
    dtype: str | None = None,
    tp: int = 1,
    pp: int = 1,
    progress: Progress | None = None,
) -> Image:
    """Pack the checkpoint at `source` and publish it as `name`; `dtype` None keeps the checkpoint's own.

    Raises SourceError (UnsupportedModel if it is the architecture that cannot be served) or StoreError; the store is
    then as it was.
    """
    if tp < 1 or pp < 1:
        raise SourceError(f"There is no mesh of tp={tp} × pp={pp}: both are 1 or more.")
    # The name is claimed first: checking and packing take long, and would be for nothing.
    with store.adding(name) as directory:
        checkpoint = Checkpoint(source)
        if read_embedding(checkpoint.path) is None:
            check_supported(checkpoint, tp, pp)
        elif tp * pp == 1:
            check_encoder(checkpoint)
        else:
            raise UnsupportedModel("Models of embeddings run on one GPU: add it with --tp 1 --pp 1.")
        pack(pack_plan(checkpoint, dtype, tp, pp), checkpoint, name, directory, progress)
    return store.open(name)
