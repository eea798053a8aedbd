"""The correctness bar on a GPU: greedy answers are, token for token, those of transformers' `generate` in float32."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch

from engine.engine import Engine
from engine.model import BoundModel
from engine.support import MemoryShard
from swapper.base_pool import BasePool
from swapper.frames import Frame
from swapper.geometry import kv_frames
from swapper.image import Image
from tests.engine.fakes import Reports, request
from tests.engine.memory import pack_image
from tests.engine.serving import KV_PAGE, generate
from tests.engine.test_answers import BATCH_TOKENS, LENGTH, PROMPTS
from tests.models import SUPPORTED, make_checkpoint, random_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.filterwarnings("default"),
]

DEVICE = "cuda:0"


class ResidentShard(MemoryShard):
    """A shard whose pages are all in."""

    def __init__(self, image: Image) -> None:
        super().__init__(image, DEVICE)
        self.load(self.shard.nbytes)

    def wait(self, nbytes: int, given_up: Callable[[], bool] | None = None) -> None:
        assert self.is_ready(nbytes)

    def wake(self) -> None:
        """Nobody waits."""


class PlainPool(BasePool):
    """Regions of plain memory, as NaN until they are mapped: frames smaller than a GPU can map."""

    device = DEVICE

    def __init__(self, frames: int, page_bytes: int) -> None:
        super().__init__(frames, page_bytes)
        self._memory: dict[int, torch.Tensor] = {}

    def _reserve(self, nbytes: int) -> int:
        memory = torch.full((nbytes,), 0xFF, dtype=torch.uint8, device=DEVICE)
        torch.cuda.synchronize()
        self._memory[memory.data_ptr()] = memory
        return memory.data_ptr()

    def _unreserve(self, address: int, nbytes: int) -> None:
        del self._memory[address]

    def _map(self, address: int, frame: Frame) -> None:
        """It is there."""

    def _unmap(self, address: int, count: int) -> None:
        for start, memory in self._memory.items():
            if start <= address < start + memory.numel():
                memory[address - start : address - start + count * self.page_bytes] = 0xFF

    def peek(self, address: int, nbytes: int) -> memoryview:
        raise NotImplementedError

    def close(self) -> None:
        self._memory.clear()


@dataclass
class Parts:
    pool: PlainPool
    reports: Reports
    engine: Engine
    epochs: int = 0

    def grant(self, model: BoundModel, tokens: int) -> None:
        self.epochs += 1
        self.engine.grant_kv(model.name, kv_frames(tokens, model.kv_bytes_per_token, KV_PAGE), self.epochs)
        self.reports.wait_for_grant(self.epochs)


@dataclass
class Served:
    parts: Parts
    model: BoundModel
    expected: list[tuple[int, ...]]

    def submit(self, number: int, tag: str, **sampling: object) -> str:
        name = f"{self.model.name} {tag} {number}"
        self.parts.engine.submit(request(name, PROMPTS[number], LENGTH, self.model.name, **sampling))
        return name

    def answers(self, *names: str) -> list[tuple[int, ...]]:
        self.parts.reports.wait_for(*names)
        assert not self.parts.reports.failed
        return [self.parts.reports.answer(name) for name in names]


@pytest.fixture(scope="module")
def parts() -> Iterator[Parts]:
    pool, reports = PlainPool(2048, KV_PAGE), Reports()
    engine = Engine(pool, reports.emit, max_batch_tokens=BATCH_TOKENS, max_batch_sequences=4)
    yield Parts(pool, reports, engine)
    engine.close()
    assert pool.free == pool.frames, "the engine kept frames"


@pytest.fixture(scope="module", params=SUPPORTED)
def served(request: pytest.FixtureRequest, parts: Parts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp(request.param)
    checkpoint = make_checkpoint(directory / "checkpoint", request.param)
    image = pack_image(checkpoint, directory / request.param)
    shard = ResidentShard(image)
    model = BoundModel.bind(image, shard)
    parts.engine.add(model, shard)  # type: ignore[arg-type]
    with torch.inference_mode():
        reference = random_model(request.param)
        expected = [generate(reference, tokens, LENGTH) for tokens in PROMPTS]
    yield Served(parts, model, expected)
    parts.engine.remove(model.name)


def test_in_a_mixed_batch_with_staggered_arrivals(served: Served) -> None:
    served.parts.grant(served.model, 10_000)
    names: list[str] = []
    for number in range(len(PROMPTS)):
        names.append(served.submit(number, "mixed"))
        if number % 2:
            served.parts.reports.wait_until(lambda: names[-1] in served.parts.reports.answers)
    assert served.answers(*names) == served.expected


def test_when_blocks_are_short(served: Served) -> None:
    """The others are preempted and computed again."""
    served.parts.grant(served.model, max(map(len, PROMPTS)) + LENGTH)
    names = [served.submit(number, "short") for number in range(len(PROMPTS))]
    assert served.answers(*names) == served.expected


def test_sampled_answers_do_not_depend_on_the_batch(served: Served) -> None:
    served.parts.grant(served.model, 10_000)
    params = {"temperature": 0.8, "top_p": 0.95, "seed": 7}
    alone = [served.answers(served.submit(number, "alone", **params))[0] for number in range(len(PROMPTS))]
    together = served.answers(*(served.submit(number, "together", **params) for number in range(len(PROMPTS))))
    assert together == alone
