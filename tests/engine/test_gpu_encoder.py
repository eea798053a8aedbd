"""An encoder on a GPU: the vectors of the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from engine.batch import SequenceSlice, StepBatch
from engine.encoder import EncoderModel
from engine.support import MemoryShard
from swapper.frames import Region
from swapper.store import Store
from tests.encoders import TEXTS, minilm, reference
from tests.engine.serving import pack_image

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.filterwarnings("default"),
]


def test_vectors_are_those_of_the_cpu(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(minilm() / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    texts = [tokenizer.encode(text).ids for text in TEXTS]
    starts = [sum(map(len, texts[:index])) for index in range(len(texts))]
    slices = tuple(SequenceSlice(at, len(text), len(text), ()) for at, text in zip(starts, texts, strict=True))
    tokens = tuple(token for text in texts for token in text)
    batch = StepBatch(tokens, tuple(place for text in texts for place in range(len(text))), slices, ())
    image = pack_image(Store(tmp_path), minilm(), "minilm")
    shard = MemoryShard(image, "cuda")
    vectors = EncoderModel.bind(image, shard).forward(batch, _Kv(shard.region), shard.load)
    assert (vectors.cpu() - reference(TEXTS)).abs().max() < 1e-4


class _Kv:
    def __init__(self, region: Region) -> None:
        self.region = region
