"""A shard with a real pool, pager and log, a reader that tests steer, and an engine and a bind that they fake."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from engine.request import GenerationRequest, SamplingParams
from swapper.host_frames import HostFramePool
from swapper.image import MANIFEST, Image, Manifest
from swapper.pager import PagedShard
from swapper.readers import Reader
from tests.swapper.paging import PAGE, GatedReader, PendingRead, write_shard
from tests.worker.fake_engine import FakeEngine, FakeModule
from worker.protocol import AddModel, Batch, Command, Report, WorkerSpec
from worker.shard import Shard

PATIENCE = 20.0  # seconds after which a wait is a failed test


def write_image(directory: Path, name: str, tags: Sequence[int]) -> Path:
    """An image of one page a tag; equal tags are equal pages."""
    path = directory / name
    path.mkdir()
    shard = write_shard(path / "rank-0.safetensors", tags)
    manifest = Manifest(1, name, "f" * 64, "LlamaForCausalLM", "float32", 1, 1, 64, 128, (shard,))
    (path / MANIFEST).write_text(manifest.to_json())
    return path


def request(name: str, model: str = "a") -> GenerationRequest:
    return GenerationRequest(name, model, (1, 2, 3), SamplingParams())


class Gate(GatedReader):
    """A reader whose reads end when the test says so, and all at once when the test is over."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: list[PendingRead] = []

    def next(self) -> PendingRead:
        self._seen.append(super().next())
        return self._seen[-1]

    def shut(self) -> None:
        before, self.pending = self.pending, _NoMoreReads()
        while not before.empty():
            self._seen.append(before.get())
        for read in self._seen:
            if not read.future.done():
                read.fail("The test is over.")


class _NoMoreReads:
    def put(self, read: PendingRead) -> None:
        read.fail("The test is over.")


class House:
    def __init__(self, directory: Path, reader: Reader, frames: int = 8) -> None:
        self.directory = directory
        self.pool = HostFramePool(frames, PAGE)
        self.may_bind = threading.Event()
        self.may_bind.set()
        self.bind_error: Exception | None = None
        self.binds = 0
        self.engine: FakeEngine
        self.shard = Shard(WorkerSpec("g", 0, frames, PAGE), self.pool, reader, self._make_engine, self._bind)
        self.cursor = 0

    def _make_engine(self, emit: object) -> FakeEngine:
        self.engine = FakeEngine(emit)
        return self.engine

    def _bind(self, image: Image, paged: PagedShard) -> FakeModule:
        self.binds += 1
        assert self.may_bind.wait(PATIENCE)
        if self.bind_error is not None:
            raise self.bind_error
        return FakeModule(image.manifest.model)

    def add(self, name: str = "a", tags: Sequence[int] = (1, 2, 3)) -> Path:
        path = write_image(self.directory, name, tags)
        self.post(AddModel(name, str(path), Image.open(path).identity))
        return path

    def post(self, *commands: Command) -> None:
        self.shard.post(commands)

    def poll(self, timeout: float = PATIENCE) -> Batch:
        batch = self.shard.poll(self.cursor, timeout)
        self.cursor += len(batch.reports)
        return batch

    def hear(self, count: int = 1) -> list[Report]:
        """The next `count` reports, once they are there; it is an error if more have come with them."""
        reports: list[Report] = []
        while len(reports) < count:
            batch = self.poll()
            assert batch.reports, f"only {reports} came"
            reports += batch.reports
        assert len(reports) == count, reports
        return reports

    def until(self, condition: Callable[[], bool]) -> None:
        """Return once something is so that no report tells; what is reported meanwhile is not kept."""
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < deadline
            self.poll(timeout=0.01)

    def until_idle(self) -> None:
        self.until(self._is_idle)

    def _is_idle(self) -> bool:
        heartbeat = self.shard.poll(self.cursor, 0).heartbeat
        return not heartbeat.computing and not heartbeat.paging

    def close(self) -> None:
        self.may_bind.set()
        self.shard.close()
        assert self.pool.free == self.pool.frames, "frames were lost"
        self.pool.close()
