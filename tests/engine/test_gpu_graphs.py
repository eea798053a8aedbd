"""Decode graphs: recorded once, they compute what a pass without one does, for any batch and after any swap."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engine.batch import StepBatch
from engine.model import BoundModel
from engine.step_inputs import decodes_only
from tests.engine.memory import Sequences
from tests.engine.test_attention import random_prompts
from tests.engine.test_gpu_attention import DEVICE, bound, largest_difference
from tests.models import random_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.filterwarnings("default"),
]


PATIENCE = 60.0


class Replays:
    """Counts the graphs that are replayed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from engine.graphs import DecodeGraph

        self.count = 0
        replay = DecodeGraph.replay

        def counted(graph: DecodeGraph) -> torch.Tensor:
            self.count += 1
            return replay(graph)

        monkeypatch.setattr(DecodeGraph, "replay", counted)


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> Replays:
    return Replays(monkeypatch)


@pytest.fixture
def llama(tmp_path: Path) -> Iterator[BoundModel]:
    model = bound(tmp_path, "llama")
    yield model
    model.close()


def decode(sequences: Sequences, count: int, *members: int) -> None:
    """So many passes. The first of a bucket runs without a graph, which is recorded before the next."""
    from engine.graphs import graphs_of

    for _ in range(count):
        sequences.step(dict.fromkeys(members, 1))
        assert graphs_of(torch.device(DEVICE)).wait_recorded(PATIENCE)


def test_only_passes_of_nothing_but_decodes_are_replayed(llama: BoundModel, replays: Replays) -> None:
    sequences = Sequences(llama, random_prompts(40, 20))
    sequences.step({0: 30, 1: 10})
    sequences.step({0: 1, 1: 5})
    assert replays.count == 0
    decode(sequences, 3, 0, 1)
    decode(sequences, 2, 1)
    assert replays.count == 2 + 1
    assert not decodes_only(StepBatch((1, 2), (0, 1), (), (1,)))


def test_replays_equal_eager_attention_in_float32(llama: BoundModel, replays: Replays) -> None:
    """Batches of every size up to nine, so that most are padded, in changing order."""
    lengths = [40, 33, 57, 24, 91, 30, 45, 28, 39]
    sequences = Sequences(llama, random_prompts(*lengths), blocks=80)
    sequences.step({index: length - 10 for index, length in enumerate(lengths)})
    for size in range(1, 10):
        decode(sequences, 1, *reversed(range(size)))
    for index in range(1, 9):
        decode(sequences, index, index)
    assert replays.count == 9 - 5 + sum(range(1, 9))  # five buckets
    sequences.step(dict.fromkeys(range(9), 1))
    assert largest_difference(random_model("llama").to(DEVICE), sequences) < 1e-3


def test_large_batches_are_replayed(llama: BoundModel, replays: Replays) -> None:
    sequences = Sequences(llama, random_prompts(*(20,) * 70), blocks=200)
    sequences.step(dict.fromkeys(range(70), 15))
    decode(sequences, 4, *range(70))
    assert replays.count == 3
    sequences.step(dict.fromkeys(range(70), 1))
    assert largest_difference(random_model("llama").to(DEVICE), sequences) < 1e-3


def test_experts_in_bfloat16_are_recorded(tmp_path: Path, replays: Replays) -> None:
    """In float32 they are not: which experts are needed is then looked up on the host."""
    model = bound(tmp_path, "mixtral", "bfloat16")
    sequences = Sequences(model, random_prompts(40))
    sequences.step({0: 30})
    decode(sequences, 3, 0)
    assert replays.count == 2
    model.close()


def test_padding_writes_nowhere(llama: BoundModel, replays: Replays) -> None:
    """Three of a bucket of four: but for the three new rows, the region stays as it was, bit by bit."""
    sequences = Sequences(llama, random_prompts(40, 20, 30))
    sequences.step({0: 20, 1: 10, 2: 14})
    decode(sequences, 1, 0, 1, 2)
    before = sequences.memory.clone()
    decode(sequences, 1, 0, 1, 2)
    assert replays.count == 1
    changed = int((before != sequences.memory).sum())
    assert 0 < changed <= 3 * llama.kv_bytes_per_token


def test_graphs_stay_right_when_weights_go_and_come(llama: BoundModel, replays: Replays) -> None:
    from engine.views import region_bytes

    sequences = Sequences(llama, random_prompts(40))
    sequences.step({0: 30})
    decode(sequences, 3, 0)
    weights = region_bytes(llama.weights.region)
    kept = weights.clone()
    weights.fill_(0xFF)
    torch.cuda.synchronize()
    weights.copy_(kept)
    decode(sequences, 7, 0)
    assert replays.count == 2 + 7
    assert largest_difference(random_model("llama").to(DEVICE), sequences) < 1e-3


def test_a_shard_that_is_not_all_in_runs_without_a_graph(tmp_path: Path, replays: Replays) -> None:
    from tests.engine.memory import bind, pack_image
    from tests.models import make_checkpoint

    make_checkpoint(tmp_path / "checkpoint", "qwen2")
    model, shard = bind(pack_image(tmp_path / "checkpoint", tmp_path / "image"), load=False, device=DEVICE)
    sequences = Sequences(model, random_prompts(20))
    sequences.step({0: 1}, shard.load)  # a decode while pages come
    assert replays.count == 0
    decode(sequences, 2, 0)
    assert replays.count == 1
    sequences.step({0: 17})
    assert largest_difference(random_model("qwen2").to(DEVICE), sequences) < 1e-3
    model.close()


def test_a_model_that_cannot_be_recorded_runs_all_the_same(
    tmp_path: Path, llama: BoundModel, replays: Replays, caplog: pytest.LogCaptureFixture
) -> None:
    """In float32, experts are chosen on the host. Another model's graphs, before and after, are none the worse."""
    other = Sequences(llama, random_prompts(40, 30))
    other.step({0: 30, 1: 20})
    decode(other, 2, 0)
    model = bound(tmp_path / "moe", "mixtral")
    sequences = Sequences(model, random_prompts(40))
    sequences.step({0: 30})
    decode(sequences, 3, 0)
    assert "cannot be recorded" in caplog.text
    assert replays.count == 1
    decode(other, 8, 0, 1)
    assert replays.count == 1 + 7
    sequences.step({0: 7})
    other.step({1: 2})
    assert largest_difference(random_model("mixtral").to(DEVICE), sequences) < 1e-3
    assert largest_difference(random_model("llama").to(DEVICE), other) < 1e-3
    model.close()


def test_graphs_are_counted_bounded_and_given_back(llama: BoundModel, monkeypatch: pytest.MonkeyPatch) -> None:
    from engine import graphs

    kept = graphs.graphs_of(torch.device(DEVICE))
    monkeypatch.setattr(graphs, "MAX_GRAPHS", 2)
    sequences = Sequences(llama, random_prompts(40, 40, 40))
    sequences.step({0: 10, 1: 10, 2: 10})
    for members in ((0,), (0, 1), (0, 1, 2), (0,)):
        decode(sequences, 2, *members)
        assert len(kept) <= 2
    assert graphs.graph_bytes(torch.device(DEVICE)) >= 0
    llama.close()
    assert len(kept) == 0


def test_other_threads_may_use_the_gpu_while_a_graph_is_recorded(tmp_path: Path, replays: Replays) -> None:
    """A pager does: it maps, copies and waits for streams of its own."""
    model = bound(tmp_path, "llama", num_hidden_layers=8)
    stop, failures = threading.Event(), []

    def copy() -> None:
        stream = torch.cuda.Stream()
        source = torch.ones(1 << 20, pin_memory=True)
        try:
            while not stop.is_set():
                with torch.cuda.stream(stream):
                    source.to(DEVICE, non_blocking=True)
                stream.synchronize()
        except RuntimeError as error:
            failures.append(error)

    thread = threading.Thread(target=copy)
    thread.start()
    sequences = Sequences(model, random_prompts(*[20] * 9))
    sequences.step(dict.fromkeys(range(9), 5))
    for size in (1, 2, 4, 8, 9):
        decode(sequences, 2, *range(size))
    stop.set()
    thread.join(60)
    assert not failures
    assert replays.count == 5
    model.close()
