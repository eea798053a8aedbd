"""Real models, packed, paged and served by a worker: the way of a request without scheduler and server."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.engine import Engine
from engine.model import BoundModel
from engine.request import GenerationRequest, SamplingParams, Started, Tokens
from swapper.host_frames import HostFramePool
from swapper.image import Image
from swapper.store import Store
from tests.models import make_checkpoint
from tests.swapper.paging import FaultyReader
from tests.worker.ear import PATIENCE, Ear
from worker.add import add_model
from worker.cluster import Cluster
from worker.group import WorkerGroup
from worker.place import Place
from worker.protocol import (
    AddModel,
    Command,
    GrantKv,
    GroupUp,
    PagedIn,
    PagedOut,
    PageIn,
    PageInFailed,
    PageOut,
    Report,
    Serve,
    WorkerSpec,
)
from worker.shard import Shard

PAGE = 2 << 20
PROMPT = (5, 17, 3, 44, 8)
NEW_TOKENS = 12
SPEC = WorkerSpec("g", 0, frames=12, page_bytes=PAGE)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random Llama of a few pages."""
    return make_checkpoint(tmp_path_factory.mktemp("llama"), "llama", num_hidden_layers=24, intermediate_size=512)


@pytest.fixture(scope="module")
def image(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Image:
    return add_model(Store(tmp_path_factory.mktemp("store")), checkpoint, "llama")


@pytest.fixture(scope="module")
def pages(image: Image) -> int:
    count = image.manifest.shards[0].page_count(PAGE)
    assert count >= 3
    return count


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> tuple[int, ...]:
    """What transformers itself answers."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    output = model.generate(torch.tensor([PROMPT]), max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None)
    return tuple(output[0, len(PROMPT) :].tolist())


def introduction(image: Image) -> AddModel:
    return AddModel("llama", str(image.path), image.identity)


def ask(name: str) -> Serve:
    return Serve(GenerationRequest(name, "llama", PROMPT, SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS)))


def answer(reports: Sequence[Report | GroupUp], name: str) -> tuple[int, ...]:
    mine = [report for report in reports if isinstance(report, Tokens) and report.request == name]
    assert [report.index for report in mine] == list(range(len(mine))), "one token a step, each exactly once"
    return tuple(token for report in mine for token in report.tokens)


def test_a_model_answers_while_it_comes_in_and_again_after_it_was_out(
    image: Image, pages: int, expected: tuple[int, ...], cluster: Cluster, loop: asyncio.Runner
) -> None:
    async def scenario() -> None:
        group = WorkerGroup("g", [SPEC], partial(Place.take, cluster))
        ear = Ear(group)
        await group.start()
        assert isinstance(await ear.next(), GroupUp)
        try:
            heard = await hear(ear, group, introduction(image), PageIn("llama", 0, pages, 1),
                               GrantKv("llama", 2, 2), ask("first"))  # fmt: skip
            assert answer(heard, "first") == expected
            assert Started("first") in heard
            paged_in = next(report for report in heard if isinstance(report, PagedIn))
            assert sum(moved.pages for moved in paged_in.sources.values()) == pages
            assert paged_in.stages["bind"] > 0

            group.post([PageOut("llama", 1, 3)])
            paged_out = await ear.next()
            assert isinstance(paged_out, PagedOut)
            assert paged_out.frames == pages - 1

            heard = await hear(ear, group, PageIn("llama", 1, pages, 4), ask("second"))
            assert answer(heard, "second") == expected
        finally:
            await group.stop()

    async def hear(ear: Ear, group: WorkerGroup, *commands: Command) -> list[Report | GroupUp]:
        """Everything up to the end of a request and of a page-in."""
        group.post(commands)
        heard: list[Report | GroupUp] = []
        while not (
            any(isinstance(report, Tokens) and report.finish for report in heard)
            and any(isinstance(report, PagedIn) for report in heard)
        ):
            heard.append(await ear.next())  # type: ignore[arg-type]
        return heard

    loop.run(scenario())


def test_a_request_that_runs_into_a_failed_page_is_dropped_and_succeeds_when_sent_again(
    image: Image, pages: int, expected: tuple[int, ...]
) -> None:
    """Scenarios 14, 16 and 22: it never runs on a page that is not in, and the failure leaves nothing behind."""
    faults = {pages - 1}
    pool = HostFramePool(SPEC.frames, PAGE)
    shard = Shard(SPEC, pool, FaultyReader(lambda _, page: page in faults), partial(Engine, pool), BoundModel.bind)
    shard.post(
        [
            introduction(image),
            PageIn("llama", 0, pages - 1, 1),
            GrantKv("llama", 2, 2),
            ask("r"),
        ]
    )
    heard: list[Report] = []

    def hear_until(kind: type[Report], epoch: int) -> None:
        while not any(isinstance(report, kind) and report.epoch == epoch for report in heard):
            batch = shard.poll(len(heard), PATIENCE)
            assert batch.reports
            heard.extend(batch.reports)

    hear_until(PagedIn, 1)
    shard.post([PageIn("llama", pages - 1, pages, 3)])
    hear_until(PageInFailed, 3)
    assert not any(isinstance(report, Tokens) for report in heard), "the last layer's page never came"

    faults.clear()
    shard.post([PageIn("llama", 0, pages, 4), GrantKv("llama", 2, 5), ask("r")])
    while not any(isinstance(report, Tokens) and report.finish for report in heard):
        batch = shard.poll(len(heard), PATIENCE)
        assert batch.reports
        heard.extend(batch.reports)
    assert answer(heard, "r") == expected

    shard.close()
    assert pool.free == pool.frames
    pool.close()
