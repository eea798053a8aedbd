"""Encoders: vectors equal to those of the model by itself, whatever shares a pass; and which encoders are served."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModel

from engine.encoder import EncoderModel
from engine.encoder_support import check_encoder
from engine.plan import pack_plan
from engine.pooling import pool, read_embedding
from engine.request import EmbeddingRequest, Tokens
from engine.support import spread
from swapper.checkpoint import Checkpoint
from swapper.errors import SourceError, UnsupportedModel
from swapper.image import Embedding, Image, Pooling
from swapper.store import Store
from tests.encoders import TEXTS, minilm, reference
from tests.engine.serving import Serving, pack_image, serving
from tests.swapper.paging import page_in

PAGE = 2 << 20
_SMALL = {
    "vocab_size": 300,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 80,
    "pad_token_id": 1,
}
_DISTILBERT = {"vocab_size": 300, "dim": 48, "hidden_dim": 96, "n_layers": 3, "n_heads": 4}


def make_encoder(directory: Path, architecture: str, pooling: str = "pooling_mode_mean_tokens") -> Path:
    """A small random encoder as sentence-transformers saves it."""
    values = _DISTILBERT if architecture == "distilbert" else _SMALL
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModel.from_config(AutoConfig.for_model(architecture, **values), dtype=torch.float32)
        spread(model)
    model.save_pretrained(directory)
    return describe(directory, pooling)


def describe(directory: Path, pooling: str, *more: str) -> Path:
    """Say how a checkpoint pools; `more` are modules behind the pooling."""
    kinds = ("Transformer", "Pooling", *more)
    modules = [{"path": "" if not i else f"{i}_{kind}", "type": f"x.{kind}"} for i, kind in enumerate(kinds)]
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_Pooling").mkdir(exist_ok=True)
    config = {"word_embedding_dimension": 48, "pooling_mode_max_tokens": False} | {pooling: True}
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(config))
    return directory


# ---- a real model, paged and batched


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Image:
    return pack_image(Store(tmp_path_factory.mktemp("store")), minilm(), "minilm")


@pytest.fixture
def parts(image: Image) -> Iterator[Serving]:
    with serving(image.manifest.shards[0].page_count(PAGE), max_batch_tokens=128, max_batch_sequences=3) as parts:
        paged = parts.pager.open("minilm", image.manifest.shards[0], image.shard_path(0))
        parts.engine.add(EncoderModel.bind(image, paged), paged)
        yield parts


@pytest.fixture(scope="module")
def inputs() -> tuple[tuple[int, ...], ...]:
    tokenizer = Tokenizer.from_file(str(minilm() / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tuple(tuple(tokenizer.encode(text).ids) for text in TEXTS)


def vectors_of(parts: Serving, name: str) -> torch.Tensor:
    parts.reports.wait_for(name)
    (report,) = [report for report in parts.reports.of(name) if isinstance(report, Tokens)]
    assert (report.finish, report.tokens) == ("stop", ())
    return torch.from_numpy(np.stack([np.frombuffer(raw, "<f4") for raw in report.vectors or ()]))


def test_vectors_are_those_of_the_model(parts: Serving, image: Image, inputs: tuple[tuple[int, ...], ...]) -> None:
    """Several requests at once, in passes of a few texts, while the weights come in."""
    manifest = image.manifest
    assert (manifest.context_length, manifest.kv_bytes_per_token) == (256, 0)
    parts.engine.submit(EmbeddingRequest("all", "minilm", inputs))
    parts.engine.submit(EmbeddingRequest("one", "minilm", inputs[:1]))
    page_in(parts.pager, "minilm", 0, manifest.shards[0].page_count(PAGE))
    expected = reference(TEXTS)
    assert (vectors_of(parts, "all") - expected).abs().max() < 1e-5
    assert (vectors_of(parts, "one") - expected[:1]).abs().max() < 1e-5
    assert parts.reports.all[-1].request == "all"  # type: ignore[union-attr]  # the short one did not wait for it


def test_what_cannot_be_encoded_fails(parts: Serving) -> None:
    for name, texts, why in (
        ("long", ((5,) * 257,), "257 tokens"),
        ("empty", ((),), "without tokens"),
        ("foreign", ((40_000,),), "vocabulary"),
    ):
        parts.engine.submit(EmbeddingRequest(name, "minilm", texts))
        parts.reports.wait_for(name)
        assert why in parts.reports.failed[name]


def test_a_page_in_that_fails_leaves_nothing_behind(parts: Serving, inputs: tuple[tuple[int, ...], ...]) -> None:
    parts.engine.submit(EmbeddingRequest("gone", "minilm", inputs))
    parts.engine.abort("minilm")
    parts.engine.submit(EmbeddingRequest("gone", "minilm", inputs))  # its name is free
    parts.engine.cancel("gone")
    parts.reports.wait_for("gone")
    assert parts.reports.finished["gone"] == "cancelled"


# ---- which encoders


@pytest.mark.parametrize("architecture", ["bert", "roberta", "xlm-roberta", "distilbert", "electra"])
def test_encoders_are_served_that_prove_themselves(architecture: str, tmp_path: Path) -> None:
    check_encoder(Checkpoint(make_encoder(tmp_path, architecture)))


def test_positions_that_begin_behind_the_padding_token_are_not_context(tmp_path: Path) -> None:
    assert pack_plan(Checkpoint(make_encoder(tmp_path, "roberta"))).context_length == 78


@pytest.mark.parametrize("architecture", ["modernbert", "mpnet", "llama"])
def test_an_attention_that_is_not_this_one_is_refused(architecture: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel):
        check_encoder(Checkpoint(make_encoder(tmp_path, architecture)))


def test_a_pooler_is_left_out(tmp_path: Path) -> None:
    names = {tensor.name for tensor in pack_plan(Checkpoint(make_encoder(tmp_path, "bert"))).ranks[0]}
    assert not any("pooler" in name for name in names)


def test_there_is_no_mesh_for_encoders(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="one GPU"):
        pack_plan(Checkpoint(make_encoder(tmp_path, "bert")), tp=2)


# ---- pooling


def test_a_checkpoint_says_how_it_pools(tmp_path: Path) -> None:
    assert read_embedding(minilm()) == Embedding("mean", True, 384, 256)
    assert read_embedding(tmp_path) is None
    assert read_embedding(describe(tmp_path, "pooling_mode_cls_token")) == Embedding("cls", False, 48)
    assert read_embedding(describe(tmp_path, "pooling_mode_lasttoken", "Normalize")) == Embedding("last", True, 48)


def test_other_ways_to_embed_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="Dense"):
        read_embedding(describe(tmp_path, "pooling_mode_mean_tokens", "Dense"))
    with pytest.raises(UnsupportedModel, match="pooling_mode_weightedmean"):
        read_embedding(describe(tmp_path, "pooling_mode_weightedmean_tokens"))
    (tmp_path / "modules.json").write_text("{")
    with pytest.raises(SourceError):
        read_embedding(tmp_path)


@pytest.mark.parametrize(
    ("pooling", "expected"),
    [
        ("cls", [[1.0, -2.0], [0.0, 8.0]]),
        ("mean", [[2.0, 1.0], [0.0, 8.0]]),
        ("max", [[3.0, 4.0], [0.0, 8.0]]),
        ("last", [[3.0, 4.0], [0.0, 8.0]]),
    ],
)
def test_pooling(pooling: Pooling, expected: list[list[float]]) -> None:
    hidden = torch.tensor([[1.0, -2.0], [3.0, 4.0], [0.0, 8.0]])
    starts, lengths = torch.tensor([0, 2]), torch.tensor([2, 1])
    assert pool(hidden, starts, lengths, Embedding(pooling, False, 2)).tolist() == expected
    unit = pool(hidden, starts, lengths, Embedding(pooling, True, 2))
    assert unit.norm(dim=1).tolist() == pytest.approx([1, 1])


def test_a_manifest_remembers_how(image: Image, tmp_path: Path) -> None:
    assert image.manifest.embedding == Embedding("mean", True, 384, 256)
    assert (image.path / "1_Pooling" / "config.json").exists()
    shutil.copytree(image.path, tmp_path / "copy")
    assert Image.open(tmp_path / "copy").manifest == image.manifest
