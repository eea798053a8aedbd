"""One shard's page table and its readiness, and the page-ins that were asked of it.

`PagedShard` is what a forward pass looks at: how far the resident prefix reaches, and a wait for it to grow. The
pager writes it, under the pager's lock; reading `resident` or calling `is_ready` takes no lock.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from swapper.contents import Content, ContentKey
from swapper.errors import PageInAborted
from swapper.frames import Region
from swapper.image import Shard
from swapper.peers import Holders
from swapper.readers import ShardFile


@dataclass(frozen=True, slots=True)
class SourceBytes:
    """How much of a page-in one source gave."""

    pages: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class PageInResult:
    """What a finished page-in moved. `stages` are seconds of work by stage (map, read, verify), summed over threads."""

    first: int
    last: int  # exclusive
    seconds: float  # wall time from request to the last page
    sources: Mapping[str, SourceBytes]  # alias, peer, host, fan_in, page_cache, disk, gds, posix
    stages: Mapping[str, float]


Done = Callable[[PageInResult | Exception], None]


@dataclass(slots=True, eq=False)
class PageIn:
    """A request to bring pages `[first, last)` of a shard in, and what came of it so far."""

    shard: PagedShard
    first: int
    last: int
    done: Done
    begun: float
    next: int  # pages `[first, next)` were started
    holders: Holders | None = None  # the neighbours' answers, which its first page waits for
    failed: bool = False  # pages of it that still wait their turn are not started any more
    pages: dict[str, int] = field(default_factory=dict)  # by source
    nbytes: dict[str, int] = field(default_factory=dict)  # by source
    stages: dict[str, float] = field(default_factory=dict)

    def count(self, source: str, nbytes: int, stages: Mapping[str, float]) -> None:
        self.pages[source] = self.pages.get(source, 0) + 1
        self.nbytes[source] = self.nbytes.get(source, 0) + nbytes
        for stage, seconds in stages.items():
            self.stages[stage] = self.stages.get(stage, 0.0) + seconds

    def result(self, now: float) -> PageInResult:
        sources = {source: SourceBytes(count, self.nbytes[source]) for source, count in self.pages.items()}
        return PageInResult(self.first, self.last, now - self.begun, sources, self.stages)


@dataclass(frozen=True, slots=True)
class PageTask:
    """One page of a page-in."""

    job: PageIn
    page: int


class PagedShard:
    """One shard with its region. Attributes may be read from any thread.

    Invariants: pages `[0, resident)` are in `table`; `table` holds every page that is mapped and read; `jobs` are in
    page order and adjacent, the first of them starting at or below `resident`, and `in_flight` counts pages that are
    being mapped, read, or copied to the host tier.
    """

    def __init__(
        self, model: str, shard: Shard, path: Path, region: Region, page_bytes: int, lock: threading.Lock
    ) -> None:
        self.model = model
        self.shard = shard
        self.path = path
        self.region = region
        self.page_bytes = page_bytes
        self.page_count = shard.page_count(page_bytes)
        self.hashes = shard.page_hashes(page_bytes)
        self.table: dict[int, Content[PageTask]] = {}
        self.jobs: deque[PageIn] = deque()
        self.in_flight = 0
        self.file: ShardFile | None = None  # open while there are jobs; only the pager's thread opens and closes it
        self.failure: Exception | None = None  # set from a failure until everything is unmapped again
        self.leaving = False  # a page-out is under way
        self.waits_end: str | None = None  # why waiting is in vain until a new page-in is asked for
        self._resident = 0
        self._changed = threading.Condition(lock)
        self._losses = 0  # how often waits were ended
        self._awaited: list[int] = []  # of bytes, by those who wait

    @property
    def resident(self) -> int:
        """Pages `[0, resident)` are in and stay in until a page-out or a failed page-in."""
        return self._resident

    def is_ready(self, nbytes: int) -> bool:
        """Whether data bytes `[0, nbytes)` are in."""
        return nbytes <= self._resident * self.page_bytes

    def wait(
        self, nbytes: int, given_up: Callable[[], bool] | None = None, also: Callable[[], bool] | None = None
    ) -> None:
        """Return once data bytes `[0, nbytes)` are in; with `also`, once that is true as well.

        Raises PageInAborted as soon as that cannot happen without a new page-in being asked for after a
        failure, an `abort`, or a close; and once `given_up()` is true. `wake` has both functions looked at again. Being
        not yet asked for is no reason to raise: extents are asked for one after another. Callers bound the wait by
        aborting (the worker's stall timer does).
        """
        with self._changed:
            losses = self._losses
            self._awaited.append(nbytes)
            try:
                self._wait(nbytes, losses, given_up, also)
            finally:
                self._awaited.remove(nbytes)

    def _wait(
        self, nbytes: int, losses: int, given_up: Callable[[], bool] | None, also: Callable[[], bool] | None
    ) -> None:
        while not (self.is_ready(nbytes) and (also is None or also())):
            # Losses are counted because a retry may have been asked for before this thread ran again.
            if self.waits_end is not None or self._losses != losses:
                raise PageInAborted(self.waits_end or f"The page-in of {self.model} failed.")
            if given_up is not None and given_up():
                raise PageInAborted(f"Waiting for pages of {self.model} was given up.")
            self._changed.wait()

    def wake(self) -> None:
        """Have waits look at their `given_up` and `also` again."""
        with self._changed:
            self._changed.notify_all()

    # ---- for the pager, with its lock held

    @property
    def asked(self) -> int:
        """Where the next page-in must start."""
        return self.jobs[-1].last if self.jobs else self._resident

    def extent(self, page: int) -> tuple[int, int]:
        """Start and length of a page in the shard's data."""
        start = page * self.page_bytes
        return start, min(self.page_bytes, self.shard.nbytes - start)

    def key(self, page: int) -> ContentKey:
        return self.hashes[page], self.extent(page)[1]

    def publish(self, resident: int) -> None:
        """Move the end of the resident prefix and tell those who wait, if it is far enough for one of them."""
        self._resident = resident
        if any(map(self.is_ready, self._awaited)):
            self._changed.notify_all()

    def wait_still(self, timeout: float) -> bool:
        """Wait until no page is in flight; returns whether that is so."""
        return self._changed.wait_for(lambda: not self.in_flight, timeout)

    def landed(self) -> None:
        """A page is not in flight any more."""
        self.in_flight -= 1
        if not self.in_flight:
            self._changed.notify_all()

    def end_waits(self, reason: str) -> None:
        """Waits for pages that are not in end now, and new ones at once, until a page-in is asked for."""
        self.waits_end = reason
        self._losses += 1
        self._changed.notify_all()
