"""A live scheduler over scripted groups, in virtual time, with clients that read and an observer that remembers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from hashlib import blake2b

from engine.request import GenerationRequest, SamplingParams
from scheduler.answers import LiveAnswer
from scheduler.core.config import CoreConfig
from scheduler.core.core import SchedulerCore
from scheduler.core.invariants import check
from scheduler.interface import LoadRecord, ModelStatus, ServedModel
from scheduler.journal import Journal
from scheduler.live import LiveScheduler
from swapper.errors import Refused
from tests.scheduler.fake_group import PAGE_BYTES, FakeGroup
from tests.scheduler.virtual_time import settle
from worker.protocol import Serve

TOKENS_A_FRAME = 64
MAX_TOKENS = 8
WALL = 1_700_000_000.0
"""What the wall clock shows when the virtual one shows 0."""


def served(name: str, pages: int, shared: int = 0) -> ServedModel:
    """A model of one rank, whose first `shared` pages are the same as those of every other such model."""
    hashes = [_hash(f"shared {page}") for page in range(shared)]
    hashes += [_hash(f"{name} {page}") for page in range(shared, pages)]
    return ServedModel(
        name=name,
        path=f"/models/{name}",
        identity=f"identity of {name}",
        page_bytes=PAGE_BYTES,
        page_hashes=(tuple(hashes),),
        nbytes=pages * PAGE_BYTES,
        kv_bytes_per_token=PAGE_BYTES // TOKENS_A_FRAME,
        context_length=1024,
    )


def request(id: str, model: str, max_tokens: int = MAX_TOKENS) -> GenerationRequest:
    return GenerationRequest(id, model, (1, 2, 3), SamplingParams(max_tokens=max_tokens))


def _hash(text: str) -> str:
    return blake2b(text.encode(), digest_size=32).hexdigest()


@dataclass
class Client:
    """Somebody who reads an answer to its end."""

    answer: LiveAnswer
    tokens: list[int] = field(default_factory=list)
    finish: str | None = None
    error: Refused | None = None
    task: asyncio.Task[None] | None = None

    async def read(self) -> None:
        try:
            async for chunk in self.answer:
                assert chunk.index == len(self.tokens), "a token is delivered twice, or is missing"
                self.tokens += chunk.tokens
                self.finish = chunk.finish
        except Refused as error:
            self.error = error

    @property
    def is_done(self) -> bool:
        return self.task is not None and self.task.done()


class Diary:
    """An Observer that writes everything down."""

    def __init__(self) -> None:
        self.loads: list[LoadRecord] = []
        self.page_outs: list[tuple[str, int, int, str, float]] = []
        self.suspensions: list[tuple[str, int, int]] = []
        self.starts: list[tuple[str, float]] = []
        self.ends: list[tuple[str, str]] = []
        self.restarts: list[str] = []

    def loaded(self, record: LoadRecord) -> None:
        self.loads.append(record)

    def paged_out(self, model: str, pages: int, frames: int, seconds: float, reason: str, age: float) -> None:
        self.page_outs.append((model, pages, frames, reason, age))

    def suspended(self, model: str, kept_bytes: int, lost_tokens: int, seconds: float) -> None:
        self.suspensions.append((model, kept_bytes, lost_tokens))

    def request_started(self, model: str, waited: float, cold: bool) -> None:
        self.starts.append((model, waited))

    def request_ended(self, model: str, outcome: str, seconds: float) -> None:
        self.ends.append((model, outcome))

    def worker_restarted(self, group: str) -> None:
        self.restarts.append(group)


class House:
    def __init__(
        self,
        groups: Sequence[FakeGroup],
        config: CoreConfig,
        inbox_limit: int = 4096,
        after_turn: Callable[[SchedulerCore], None] = check,
        journal: Journal | None = None,
    ) -> None:
        loop = asyncio.get_running_loop()
        self.groups = groups
        self.diary = Diary()
        self.scheduler = LiveScheduler(
            groups, config, self.diary, loop.time, lambda: WALL + loop.time(), inbox_limit, after_turn, journal
        )
        self._numbers = 0

    @property
    def group(self) -> FakeGroup:
        return self.groups[0]

    def ask(self, model: str, id: str | None = None, max_tokens: int = MAX_TOKENS, timeout: float = 60.0) -> Client:
        if id is None:
            self._numbers += 1
            id = f"r{self._numbers}"
        client = Client(self.scheduler.submit(request(id, model, max_tokens), timeout))
        client.task = asyncio.get_running_loop().create_task(client.read())
        return client

    async def work(self) -> None:
        """The groups carry out whatever page and KV commands they are given, until nothing more is asked of them."""
        await settle()
        while any(group.todo for group in self.groups):
            for group in self.groups:
                if group.todo:
                    group.do(group.todo[0])
            await settle()

    async def finish(self, client: Client, *tokens: int) -> None:
        """The worker that serves a request answers the rest of it with these tokens."""
        id = client.answer.request.id
        serve = self.serving(id)
        group = next(group for group in self.groups if id in group.serving)
        group.started(id)
        group.tokens(id, len(serve.request.answer), *tokens, finish="stop")
        await settle()

    async def answered(self, model: str) -> None:
        """A request comes and is answered."""
        client = self.ask(model)
        await self.work()
        await self.finish(client, 1)
        assert client.tokens == [1]

    async def obeyed(self, job: Coroutine[None, None, None]) -> None:
        """Wait for a job while the groups do what it takes."""
        task = asyncio.ensure_future(job)
        await self.work()
        await asyncio.wait_for(task, 60.0)

    def serving(self, id: str) -> Serve:
        found = [group.serving[id] for group in self.groups if id in group.serving]
        assert len(found) == 1, f"{id} is served by {len(found)} groups"
        return found[0]

    def is_served(self, client: Client) -> bool:
        return any(client.answer.request.id in group.serving for group in self.groups)

    def status(self, model: str) -> ModelStatus:
        return next(status for status in self.scheduler.models() if status.name == model)


@asynccontextmanager
async def house(
    *models: ServedModel,
    frames: int = 8,
    groups: Sequence[FakeGroup] | None = None,
    config: CoreConfig | None = None,
    inbox_limit: int = 4096,
    after_turn: Callable[[SchedulerCore], None] = check,
    journal: Journal | None = None,
) -> AsyncIterator[House]:
    """A started scheduler with these models; it is stopped at the end, and must then be whole."""
    config = config or CoreConfig(page_bytes=PAGE_BYTES, extent_pages=2)
    here = House(groups or [FakeGroup(frames=frames)], config, inbox_limit, after_turn, journal)
    for model in models:
        here.scheduler.add_model(model)
    await here.scheduler.start()
    await settle()
    try:
        yield here
    finally:
        await here.scheduler.stop()
