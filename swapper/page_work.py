"""What the pager has to do next, and what became of what it did: its tables, without threads, memory or files.

`next_work` hands out one piece of work; whoever has done it says so with `arrived`, `lost`, or `taken_apart`. The
pager's lock is held around every call. Work comes in this order: tell who asked how a page-in ended; map pages that
waited for another page's read; take failed shards apart; then pages, oldest page-in first, each shard's in order, with
at most `depth` of them being read. While none is being read, pages that came from storage are saved to the host tier.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from swapper.contents import Content, ContentKey, ContentTable, Loan
from swapper.errors import OutOfFrames
from swapper.frames import FramePool
from swapper.paged_shard import PagedShard, PageIn, PageInResult, PageTask


@dataclass(frozen=True, slots=True)
class Tell:
    """Say how a page-in ended."""

    job: PageIn
    outcome: PageInResult | Exception


@dataclass(frozen=True, slots=True)
class TakeApart:
    """Unmap all of a shard whose page-in failed; nothing of it is in flight."""

    shard: PagedShard


@dataclass(frozen=True, slots=True)
class Alias:
    """Map a frame that holds the page's bytes already."""

    task: PageTask
    content: Content[PageTask]


@dataclass(frozen=True, slots=True)
class Read:
    """Map a frame that was just taken, and read the page into it."""

    task: PageTask
    content: Content[PageTask]


@dataclass(frozen=True, slots=True)
class Run:
    """Adjacent pages of one shard: their frames can be mapped together."""

    pages: tuple[Alias | Read, ...]


@dataclass(frozen=True, slots=True)
class Save:
    """Copy a page that is in to the host tier. Nobody waits for it."""

    shard: PagedShard
    page: int
    content: Content[PageTask]


Work = Tell | TakeApart | Run | Save

SAVES_AT_ONCE = 2
"""Enough to keep a copy engine busy, and few enough to be out of the way when a page-in is asked for."""


class SavedPages(Protocol):
    """What the tables ask the host tier."""

    slots: int

    @property
    def is_ready(self) -> bool: ...

    def wants(self, key: ContentKey) -> bool: ...


class PageWork:
    """The pager's tables.

    Invariants: `_reading` counts the contents that are not ready, and is at most `depth`; a page in `_again` or among
    a content's waiters holds no frame.
    """

    def __init__(self, pool: FramePool, depth: int, run: int = 1, tier: SavedPages | None = None) -> None:
        """Pages are handed out in runs of up to `run`, once there is room for that many in `depth`."""
        if not 1 <= run <= depth:
            raise ValueError(f"Pages cannot be read in runs of {run} with {depth} in flight.")
        self._pool = pool
        self._depth = depth
        self._run = run
        self._tier = tier
        # Pages from storage, the latest of as many as the tier could hold.
        self._unsaved: deque[tuple[PagedShard, int]] = deque(maxlen=tier.slots if tier is not None else 0)
        self._saving = 0
        self._contents: ContentTable[PageTask] = ContentTable(pool)
        self._queue: deque[PageIn] = deque()  # page-ins with pages to start, oldest first
        self._again: deque[PageTask] = deque()  # pages that waited for a read that has ended
        self._ended: deque[Tell] = deque()
        self._broken: deque[PagedShard] = deque()  # failed, and nothing in flight any more
        self._reading = 0
        self.progress = 0  # pages that ever arrived

    def ask(self, job: PageIn) -> None:
        """Queue a page-in behind those of its shard. Behind a failed one it fails too."""
        shard = job.shard
        shard.jobs.append(job)
        if shard.failure is not None:
            job.failed = True  # told with the others when the shard has been taken apart
            return
        shard.waits_end = None
        self._queue.append(job)
        self._publish(shard)  # an empty page-in has ended already

    def refuse(self, job: PageIn, error: Exception) -> None:
        """End a page-in that never began."""
        self._ended.append(Tell(job, error))

    def next_work(self) -> Work | None:
        """None: nothing to do until a read comes back or something is asked for."""
        while True:
            if self._ended:
                return self._ended.popleft()
            can_read = self._reading <= self._depth - self._run
            # Before shards are taken apart: one that was given up may hold what another page waited for.
            task = self._next_waiter() if can_read else None
            if task is None and self._broken:
                return TakeApart(self._broken.popleft())
            if task is None and can_read:
                task = self._next_page()
            if task is None:
                return self._next_save()
            work = self._find_frame(task)
            if work is not None:
                return self._run_from(work)

    def arrived(self, work: Alias | Read, source: str, stages: Mapping[str, float]) -> None:
        """A page is mapped and holds its bytes."""
        task, shard = work.task, work.task.job.shard
        if isinstance(work, Read):
            work.content.ready = True
            self._end_read(work.content)
            if source not in ("host", "fan_in"):
                self._unsaved.append((shard, task.page))
        shard.table[task.page] = work.content
        self.progress += 1
        task.job.count(source, shard.extent(task.page)[1], stages)
        if shard.failure is None:
            self._publish(shard)
        self._settle(shard)

    def lost(self, work: Alias | Read, error: Exception) -> None:
        """A page could not be brought in, and is not mapped any more: its whole shard fails."""
        if isinstance(work, Read):
            self._end_read(work.content)
        self._contents.release(work.content)
        self.fail(work.task.job.shard, error)
        self._settle(work.task.job.shard)

    def fail(self, shard: PagedShard, error: Exception) -> None:
        """Begin to make a shard absent: no page is ready any more, and none is started. The first error counts."""
        if shard.failure is not None:
            return
        shard.failure = error
        for job in shard.jobs:
            job.failed = True
        shard.publish(0)
        shard.end_waits(f"The page-in of {shard.model} failed: {error}")
        if shard.in_flight == 0:
            self._broken.append(shard)

    def taken_apart(self, shard: PagedShard) -> None:
        """Every page of a failed shard is unmapped."""
        assert shard.failure is not None
        self.release(shard, list(shard.table))
        self._ended.extend(Tell(job, shard.failure) for job in shard.jobs)
        shard.jobs.clear()
        shard.failure = None

    def saved(self, work: Save) -> None:
        """A page's copy to the host tier has ended, well or not."""
        self._saving -= 1
        self._settle(work.shard)

    def stop_saving(self) -> None:
        self._unsaved.clear()

    def release(self, shard: PagedShard, pages: Iterable[int]) -> int:
        """Give up the holds of pages that are unmapped; returns how many frames became free."""
        return sum(self._contents.release(shard.table.pop(page)) for page in pages)

    def recall(self, shard: PagedShard, keep: int) -> list[Content[PageTask]]:
        """Lend a shard's pages from `keep` on no more; returns what they hold."""
        contents = [content for page, content in shard.table.items() if page >= keep]
        for content in contents:
            content.leaving += 1
        return contents

    def stays(self, contents: Iterable[Content[PageTask]]) -> None:
        """Undo `recall`."""
        for content in contents:
            content.leaving -= 1

    def held(self, keys: Sequence[ContentKey]) -> list[int]:
        """Which of these pages, by their places, could be lent."""
        found = ((place, self._contents.find(key)) for place, key in enumerate(keys))
        return [place for place, content in found if content is not None and content.ready and not content.leaving]

    def lend(self, keys: Sequence[ContentKey]) -> Loan[PageTask] | None:
        return self._contents.lend(keys)

    def take_back(self, loan: Loan[PageTask]) -> None:
        self._contents.take_back(loan)

    def _next_waiter(self) -> PageTask | None:
        while self._again:
            task = self._again.popleft()
            if not task.job.failed:
                return task
        return None

    def _next_page(self) -> PageTask | None:
        while self._queue:
            job = self._queue[0]
            if job.holders is not None and not job.holders.is_complete and not job.failed:
                return None  # they answer in a moment
            if not job.failed and job.next < job.last:
                job.next += 1
                return PageTask(job, job.next - 1)
            self._queue.popleft()
        return None

    def _run_from(self, first: Alias | Read) -> Run:
        """A page, and those behind it that can go with it."""
        run = [first]
        job, page = first.task.job, first.task.page + 1
        while len(run) < self._run and job.next == page < job.last and not job.failed:
            content = self._contents.find(job.shard.key(page))
            if (not content.ready) if content is not None else (self._reading == self._depth or not self._pool.free):
                break
            job.next += 1
            following = self._find_frame(PageTask(job, page))
            if following is None:  # the last frame was taken meanwhile, and the page-in has failed
                break
            run.append(following)
            page += 1
        return Run(tuple(run))

    def _next_save(self) -> Save | None:
        if self._tier is None or not self._tier.is_ready:
            return None
        while self._unsaved and not self._reading and self._saving < SAVES_AT_ONCE:
            shard, page = self._unsaved.popleft()
            content = shard.table.get(page)
            if content is None or shard.leaving or shard.failure is not None or not self._tier.wants(content.key):
                continue
            shard.in_flight += 1
            self._saving += 1
            return Save(shard, page, content)
        return None

    def _find_frame(self, task: PageTask) -> Alias | Read | None:
        """One that holds the page's bytes, or a free one. None: the page waits for a read, or its shard has failed."""
        shard = task.job.shard
        key = shard.key(task.page)
        content = self._contents.find(key)
        if content is not None and not content.ready:
            content.waiters.append(task)
            return None
        if content is not None:
            self._contents.retain(content)
            shard.in_flight += 1
            return Alias(task, content)
        try:
            content = self._contents.add(key)
        except OutOfFrames as error:
            self.fail(shard, error)
            return None
        shard.in_flight += 1
        self._reading += 1
        return Read(task, content)

    def _end_read(self, content: Content[PageTask]) -> None:
        """Pages that waited for this read alias its frame now; or one of them reads for itself, if it failed."""
        self._reading -= 1
        self._again.extend(content.waiters)
        content.waiters.clear()

    def _publish(self, shard: PagedShard) -> None:
        """Let the resident prefix reach as far as pages have arrived; end the page-ins that it covers."""
        resident = shard.resident
        while resident in shard.table:
            resident += 1
        shard.publish(resident)
        now = time.perf_counter()
        while shard.jobs and shard.jobs[0].last <= resident:
            job = shard.jobs.popleft()
            self._ended.append(Tell(job, job.result(now)))

    def _settle(self, shard: PagedShard) -> None:
        """A page of the shard is not in flight any more."""
        shard.landed()
        if shard.failure is not None and shard.in_flight == 0:
            self._broken.append(shard)
