"""Whether the engine serves an encoder rightly: found out by trying, before a model is added, like decoders are.

A random model of the same configuration, with two layers and few tokens, is packed and bound as a real one would be.
Texts of several lengths in one pass must come out as each by itself from transformers' eager attention.
"""

from __future__ import annotations

import shutil
import tempfile
from copy import deepcopy
from pathlib import Path

import torch
from transformers import AutoModel, PreTrainedModel

from engine.architecture import MODEL_ERRORS, build_encoder, read_config, trace
from engine.batch import SequenceSlice, StepBatch
from engine.encoder import EncoderModel
from engine.plan import pack_plan
from engine.pooling import MODULES
from engine.support import TOLERANCE, MemoryShard, no_progress_bar, spread
from swapper.checkpoint import Checkpoint
from swapper.errors import GswapdError, UnsupportedModel
from swapper.image import Image
from swapper.packer import pack

_LAYERS = 2
_VOCABULARY = 256
_LENGTHS = (5, 19, 1, 17, 32)


def check_encoder(checkpoint: Checkpoint) -> None:
    """Raises UnsupportedModel, with the reason, if the engine cannot serve an encoder's architecture."""
    config = read_config(checkpoint.path)
    if config.is_encoder_decoder:
        raise UnsupportedModel(f"{config.model_type} models are encoder-decoders, which are not supported.")
    module = build_encoder(config, torch.float32)
    trace(module, encodes=True)
    cut = deepcopy(config)
    cut.num_hidden_layers = min(_LAYERS, cut.num_hidden_layers)
    cut.vocab_size = min(_VOCABULARY, cut.vocab_size)
    with tempfile.TemporaryDirectory(prefix="gswapd-check-") as scratch, no_progress_bar():
        try:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                model = AutoModel.from_config(cut, dtype=torch.float32, attn_implementation="eager").eval()
                spread(model)
            model.save_pretrained(Path(scratch) / "checkpoint")
            for file in (checkpoint.path / MODULES, *checkpoint.path.glob("*_Pooling/config.json")):
                target = Path(scratch) / "checkpoint" / file.relative_to(checkpoint.path)
                target.parent.mkdir(exist_ok=True)
                shutil.copy(file, target)
            difference = _difference(model, Path(scratch))
        except (GswapdError, *MODEL_ERRORS) as error:
            raise UnsupportedModel(f"A small random {type(module).__name__} does not run: {error}") from error
    if not difference <= TOLERANCE:  # NaN is no proof either
        raise UnsupportedModel(
            f"{type(module).__name__} does not compute the same over paged memory as with transformers' own attention "
            f"(a small random model's hidden states differ by {difference:.1%}), so it is not served."
        )


def _difference(model: PreTrainedModel, scratch: Path) -> float:
    """The largest difference of a hidden state, as a part of the largest."""
    checkpoint = Checkpoint(scratch / "checkpoint")
    directory = scratch / "image"
    directory.mkdir()
    pack(pack_plan(checkpoint, "float32"), checkpoint, "check", directory)
    image = Image.open(directory)
    shard = MemoryShard(image)
    bound = EncoderModel.bind(image, shard)
    generator = torch.Generator().manual_seed(0)
    first = (model.config.pad_token_id or 0) + 1  # a text holds no padding
    texts = [torch.randint(first, bound.vocab_size, (length,), generator=generator) for length in _LENGTHS]
    tokens: list[int] = []
    slices: list[SequenceSlice] = []
    for text in texts:
        slices.append(SequenceSlice(len(tokens), len(text), len(text), ()))
        tokens += text.tolist()
    positions = [place for text in texts for place in range(len(text))]
    with torch.inference_mode():
        expected = torch.cat([model(input_ids=text[None]).last_hidden_state[0] for text in texts])
        found = bound.hidden(StepBatch(tuple(tokens), tuple(positions), tuple(slices), ()), shard.load)
    return float((found - expected).abs().max() / expected.abs().max())
