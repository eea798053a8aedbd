"""Answering while pages arrive: a layer runs as soon as its own pages are in, and nobody else waits for them.

Real models, pager and engine; only the reader is the test's, so that each page arrives when the test says so.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from engine.model import BoundModel
from engine.request import KvReleased
from swapper.errors import ReadError
from swapper.image import Image, LayerExtent
from swapper.store import Store
from tests.engine.fakes import TIMEOUT, request
from tests.engine.serving import Serving, generate, pack_image, serving
from tests.models import make_checkpoint, random_model
from tests.swapper.paging import GatedReader, Outcome, page_in

LARGE = {"hidden_size": 192, "intermediate_size": 768, "num_hidden_layers": 4}  # 2.4 MB a layer, in pages of 2 MiB
PROMPT = [5, 6, 7, 8, 9]
LENGTH = 8


@dataclass(frozen=True)
class Packed:
    image: Image
    answer: tuple[int, ...]  # of transformers, to PROMPT

    @property
    def pages(self) -> int:
        return self.image.manifest.shards[0].page_count(2 << 20)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return Store(tmp_path_factory.mktemp("streaming") / "store")


def packed(store: Store, tmp: pytest.TempPathFactory, name: str, **sizes: int) -> Packed:
    image = pack_image(store, make_checkpoint(tmp.mktemp(name), "llama", **sizes), name)
    with torch.inference_mode():
        return Packed(image, generate(random_model("llama", **sizes), PROMPT, LENGTH))


@pytest.fixture(scope="module")
def cold(store: Store, tmp_path_factory: pytest.TempPathFactory) -> Packed:
    return packed(store, tmp_path_factory, "cold", **LARGE)


@pytest.fixture(scope="module")
def warm(store: Store, tmp_path_factory: pytest.TempPathFactory) -> Packed:
    return packed(store, tmp_path_factory, "warm")


class Stage:
    """A warm model that is in, and a cold one whose page-in has begun."""

    def __init__(self, parts: Serving, reader: GatedReader, cold: Packed, warm: Packed) -> None:
        self.parts, self.reader, self.cold = parts, reader, cold
        self.cold_model = self._add(cold)
        self._add(warm)
        came = Outcome()
        parts.pager.page_in("warm", 0, warm.pages, came)
        for _ in range(warm.pages):
            reader.next().finish()
        came.result()
        self.outcome = self.begin()

    def _add(self, model: Packed) -> BoundModel:
        bound = self.parts.add(model.image)
        self.parts.grant(bound, 512)
        return bound

    def begin(self) -> Outcome:
        outcome = Outcome()
        self.parts.pager.page_in("cold", 0, self.cold.pages, outcome)
        return outcome

    def finish(self, pages: int) -> None:
        for _ in range(pages):
            self.reader.next().finish()

    def pages_for(self, layer: str) -> int:
        """Pages that this layer and those before it need."""
        extent: LayerExtent = next(e for e in self.cold.image.manifest.shards[0].layers if e.name == layer)
        return -(-extent.end // self.parts.pool.page_bytes)

    def after(self, layer: str) -> threading.Event:
        """Set once this layer of the cold model has run."""
        done = threading.Event()
        module = self.cold_model._module.get_submodule(layer)
        module.register_forward_hook(lambda *_: done.set())
        return done


@pytest.fixture
def stage(cold: Packed, warm: Packed) -> Iterator[Stage]:
    reader = GatedReader()
    with serving(cold.pages + warm.pages, reader) as parts:
        yield Stage(parts, reader, cold, warm)


def test_a_layer_runs_before_later_pages_are_read_and_others_decode_meanwhile(stage: Stage, warm: Packed) -> None:
    reports = stage.parts.reports
    first_layer, second_layer = stage.after("model.layers.0"), stage.after("model.layers.1")
    stage.parts.engine.submit(request("c", PROMPT, LENGTH, "cold"))
    needed = stage.pages_for("model.layers.0")
    assert needed < stage.pages_for("model.layers.1") < stage.cold.pages
    stage.finish(needed)
    assert first_layer.wait(TIMEOUT)
    assert not second_layer.is_set()
    assert not stage.outcome.came

    steps = stage.parts.engine.steps
    stage.parts.engine.submit(request("w", PROMPT, LENGTH, "warm"))
    reports.wait_for("w")
    assert reports.answer("w") == warm.answer
    assert stage.parts.engine.steps == steps + LENGTH
    assert reports.of("c") == []

    stage.finish(stage.cold.pages - needed)
    stage.outcome.result()
    reports.wait_for("c")
    assert reports.answer("c") == stage.cold.answer


def test_extents_may_come_one_by_one(cold: Packed) -> None:
    """A pass waits on for pages that nobody has asked for yet."""
    reader = GatedReader()
    with serving(cold.pages, reader) as parts:
        bound = parts.add(cold.image)
        parts.grant(bound, 512)
        parts.engine.submit(request("c", PROMPT, LENGTH, "cold"))
        for page in range(cold.pages):
            outcome = Outcome()
            parts.pager.page_in("cold", page, page + 1, outcome)
            reader.next().finish()
            outcome.result()
        parts.reports.wait_for("c")
        assert parts.reports.answer("c") == cold.answer


def test_a_cancel_while_pages_are_missing_frees_the_sequence_at_once(stage: Stage) -> None:
    first_layer = stage.after("model.layers.0")
    stage.parts.engine.submit(request("c", PROMPT, LENGTH, "cold"))
    stage.finish(stage.pages_for("model.layers.0"))
    assert first_layer.wait(TIMEOUT)
    stage.parts.engine.cancel("c")
    stage.parts.reports.wait_for("c")
    assert stage.parts.reports.finished["c"] == "cancelled"
    assert stage.parts.kv_pool.free == stage.parts.kv_pool.frames
    stage.parts.engine.fence("cold", TIMEOUT)
    stage.finish(stage.cold.pages - stage.pages_for("model.layers.0"))
    stage.outcome.result()


def test_a_page_in_that_fails_under_a_running_pass_harms_nobody(stage: Stage, warm: Packed) -> None:
    reports = stage.parts.reports
    first_layer = stage.after("model.layers.0")
    stage.parts.engine.submit(request("c", PROMPT, LENGTH, "cold"))
    reads = [stage.reader.next() for _ in range(stage.cold.pages)]
    needed = stage.pages_for("model.layers.0")
    for read in reads[:needed]:
        read.finish()
    assert first_layer.wait(TIMEOUT)
    reads[needed].fail()
    for read in reads[needed + 1 :]:
        read.finish()
    assert isinstance(stage.outcome.get(), ReadError)
    stage.parts.engine.abort("cold", TIMEOUT)
    assert stage.parts.pool.free == stage.cold.pages
    assert stage.parts.kv_pool.free == stage.parts.kv_pool.frames
    assert all(isinstance(report, KvReleased) for report in reports.all)

    again = stage.begin()
    stage.parts.engine.submit(request("c", PROMPT, LENGTH, "cold"))  # the scheduler serves it again
    stage.finish(stage.cold.pages)
    again.result()
    reports.wait_for("c")
    assert reports.answer("c") == stage.cold.answer
    stage.parts.engine.submit(request("w", PROMPT, LENGTH, "warm"))
    reports.wait_for("w")
    assert reports.answer("w") == warm.answer


def test_answers_are_the_same_after_pages_went_and_came_back(cold: Packed) -> None:
    with serving(cold.pages) as parts:
        bound = parts.add(cold.image)
        parts.grant(bound, 512)
        page_in(parts.pager, "cold", 0, cold.pages)
        for keep in (0, 2, cold.pages - 1):
            parts.engine.submit(request(f"c{keep}", PROMPT, LENGTH, "cold"))
            parts.reports.wait_for(f"c{keep}")
            assert parts.reports.answer(f"c{keep}") == cold.answer
            parts.engine.fence("cold", TIMEOUT)
            parts.pager.page_out("cold", keep)
            parts.engine.submit(request(f"d{keep}", PROMPT, LENGTH, "cold"))  # comes before its pages
            page_in(parts.pager, "cold", keep, cold.pages)
            parts.reports.wait_for(f"d{keep}")
            assert parts.reports.answer(f"d{keep}") == cold.answer
