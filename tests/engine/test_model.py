"""A bound model: views of a region that may be unmapped, and a pass that waits for each layer's bytes."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.batch import SequenceSlice, StepBatch
from engine.model import BoundModel
from engine.support import MemoryShard
from swapper.errors import CorruptImage, PageInAborted
from swapper.host_frames import HostFramePool
from swapper.image import Image
from tests.engine.memory import Sequences, bind, pack_image
from tests.models import SUPPORTED, VOCABULARY, make_checkpoint, random_model

PROMPT = [int(token) for token in torch.randint(3, VOCABULARY, (30,), generator=torch.Generator().manual_seed(2))]


def image_of(directory: Path, architecture: str, dtype: str | None = None, **overrides: object) -> Image:
    make_checkpoint(directory / "checkpoint", architecture, **overrides)
    return pack_image(directory / "checkpoint", directory / "image", dtype)


def eager(architecture: str, **overrides: object) -> torch.Tensor:
    with torch.no_grad():
        return random_model(architecture, **overrides)(input_ids=torch.tensor([PROMPT]), use_cache=False).logits[0]


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "gpt2", "mixtral"])
def test_binding_touches_no_page(tmp_path: Path, architecture: str) -> None:
    """The region is reserved and has no frame at all: whoever touched it would be killed."""
    image = image_of(tmp_path, architecture)
    shard = MemoryShard(image)
    shard.region = HostFramePool(1, 4096).reserve(image.manifest.shards[0].nbytes)
    model = BoundModel.bind(image, shard)
    assert model.vocab_size == VOCABULARY
    assert model.name == image.manifest.model
    assert model.context_length == image.manifest.context_length
    assert model.kv_bytes_per_token == image.manifest.kv_bytes_per_token


@pytest.mark.parametrize("architecture", SUPPORTED)
def test_no_weight_is_used_before_its_layer_was_waited_for(tmp_path: Path, architecture: str) -> None:
    """Bytes come in as they are waited for, and are NaN until then."""
    model, shard = bind(image_of(tmp_path, architecture), load=False)
    waits: list[int] = []

    def gate(nbytes: int) -> None:
        waits.append(nbytes)
        shard.load(nbytes)

    sequences = Sequences(model, [PROMPT])
    sequences.step({0: len(PROMPT)}, gate)
    assert waits == [extent.end for extent in shard.shard.layers]
    torch.testing.assert_close(sequences.result(0), eager(architecture), atol=1e-4, rtol=0)


def test_the_bytes_of_a_tied_head_are_the_embeddings(tmp_path: Path) -> None:
    tied = image_of(tmp_path / "tied", "llama", tie_word_embeddings=True).manifest.shards[0]
    untied = image_of(tmp_path / "untied", "llama", tie_word_embeddings=False).manifest.shards[0]
    assert [extent.name for extent in tied.layers][-1] == "model.norm"
    assert [extent.name for extent in untied.layers][-2:] == ["model.norm", "lm_head"]


def test_a_pass_that_was_given_up_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    model, shard = bind(image_of(tmp_path, "qwen2"))
    third = shard.shard.layers[2].end

    def gate(nbytes: int) -> None:
        if nbytes >= third:
            raise PageInAborted("the page-in was given up")

    sequences = Sequences(model, [PROMPT])
    sequences.step({0: 11})
    with pytest.raises(PageInAborted):
        sequences.step({0: 19}, gate)
    sequences.step({0: 19})
    torch.testing.assert_close(sequences.result(0), eager("qwen2"), atol=1e-4, rtol=0)


def test_two_models_run_in_two_threads_at_once(tmp_path: Path) -> None:
    """Each waits in the middle of its pass until the other is in the middle of its own."""
    bound = {name: bind(image_of(tmp_path / name, name)) for name in ("mistral", "gpt2")}
    both = threading.Barrier(2, timeout=60)
    results: dict[str, torch.Tensor] = {}

    def run(name: str) -> None:
        model, shard = bound[name]
        three = [extent.end for extent in shard.shard.layers][1:4]

        def gate(nbytes: int) -> None:
            if nbytes in three:
                both.wait()

        sequences = Sequences(model, [PROMPT])
        for length in (17, 1, 12):
            sequences.step({0: length}, gate)
        results[name] = sequences.result(0)

    threads = [threading.Thread(target=run, args=(name,)) for name in bound]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for name in bound:
        torch.testing.assert_close(results[name], eager(name), atol=1e-4, rtol=0)


def test_logits_are_those_of_the_sampled_rows_in_their_order(tmp_path: Path) -> None:
    model, _shard = bind(image_of(tmp_path, "llama"))
    expected = eager("llama")
    sequences = Sequences(model, [PROMPT])

    def run(sampled: tuple[int, ...]) -> torch.Tensor:
        slices = (SequenceSlice(0, 30, 30, (4, 2)),)
        return model.forward(StepBatch(tuple(PROMPT), tuple(range(30)), slices, sampled), sequences.cache, print)

    torch.testing.assert_close(run((29, 3)), expected[[29, 3]], atol=1e-4, rtol=0)
    assert run(()).shape == (0, VOCABULARY)


def test_logits_are_float32_and_may_be_written_to(tmp_path: Path) -> None:
    model, _shard = bind(image_of(tmp_path, "llama", "bfloat16"))
    sequences = Sequences(model, [PROMPT])
    sequences.step({0: 30})
    logits = sequences.result(0)
    assert logits.dtype == torch.float32
    sequences.logits[0][0].div_(2)  # in place, as a sampler would


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "gpt_oss", "deepseek_v3"])
def test_bfloat16_is_as_close_as_transformers_own(tmp_path: Path, architecture: str) -> None:
    model, _shard = bind(image_of(tmp_path, architecture, "bfloat16"))
    sequences = Sequences(model, [PROMPT])
    sequences.step({0: 30})
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path / "checkpoint", dtype=torch.bfloat16, attn_implementation="eager"
    )
    with torch.no_grad():
        other = theirs(input_ids=torch.tensor([PROMPT]), use_cache=False).logits[0].float()
    exact = eager(architecture)
    ours_off, theirs_off = (float((logits - exact).square().mean()) for logits in (sequences.result(0), other))
    assert ours_off < 2 * theirs_off + 1e-6


def test_frequencies_stay_as_they_are_whatever_lengths_come(tmp_path: Path) -> None:
    """Rotary scaling that looks at the longest sequence of a batch would make sequences depend on their neighbours."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 6, "long_factor": [4.0] * 6}
    overrides = {"rope_parameters": rope, "original_max_position_embeddings": 64}
    model, _shard = bind(image_of(tmp_path, "phi3", **overrides))
    sequences = Sequences(model, [PROMPT, PROMPT * 3])
    sequences.step({0: 10, 1: 80})
    sequences.step({0: 20, 1: 10})
    torch.testing.assert_close(sequences.result(0), eager("phi3", **overrides), atol=1e-4, rtol=0)


def test_an_image_that_does_not_fit_its_configuration_is_refused(tmp_path: Path) -> None:
    image = image_of(tmp_path, "llama")
    shard = MemoryShard(image)
    other = dataclasses.replace(image.manifest, kv_bytes_per_token=1)
    with pytest.raises(CorruptImage, match="Add the model again"):
        BoundModel.bind(dataclasses.replace(image, manifest=other), shard)
    shard.shard = dataclasses.replace(shard.shard, tensors=shard.shard.tensors[:-1])
    with pytest.raises(CorruptImage, match="does not hold"):
        BoundModel.bind(image, shard)
