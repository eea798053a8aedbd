"""The pager: which pages of which shard are in, and how they get in and out.

A `PagedShard` is one shard's region and its page table. Its resident pages are always a prefix: pages come
in from page 0 upwards, several in flight, and leave from the tail. Readiness is published page by page, in
order, so a forward pass can run layer *i* while layer *i + 1* is still being read.

A page's content is known by hash before it is read. When a frame of the pool already holds those bytes, or
is being filled with them, the page maps that frame instead of reading again (source `alias`). Next, neighbours are
asked (source `peer`; a page-in hears from them before its first page is started), then the host tier (source `host`,
or `fan_in` where a page came over a neighbour's link); storage comes last. What was not in the host tier is copied to
it behind the page-ins.

One thread of the pager takes pages in order, finds each a frame, maps it and has it read (`swapper/page_reads.py`),
with at most `depth` pages in flight: so it maps ahead while bytes move. The reader's threads come back with the bytes,
check their hashes and publish the pages. One lock guards all tables (`swapper/page_work.py`); it is never held while
memory is mapped, read or hashed. What must follow something else (telling who asked) is left to the
pager's thread, so it happens in order. A failed shard is taken apart in a thread of its own, because it first waits for
the forward pass that may still run on it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from swapper.contents import Content, ContentKey, Loan
from swapper.errors import GswapdError, PageInAborted, WorkerError
from swapper.frames import FramePool
from swapper.host_tier import HostTier
from swapper.image import Shard
from swapper.page_reads import PageReads, check_file
from swapper.page_work import Alias, PageWork, Read, Run, Save, TakeApart, Tell, Work
from swapper.paged_shard import Done, PagedShard, PageIn, PageInResult, PageTask, SourceBytes
from swapper.peers import Holders, Peers
from swapper.readers import Reader

__all__ = ["PageInResult", "PagedShard", "Pager", "SourceBytes"]

SAVE_TIMEOUT = 10.0
"""Seconds that a page-out waits for the copy of a page to the host tier, which takes milliseconds."""

LOAN_TIMEOUT = 10.0
"""Seconds that a page-out waits for a neighbour to return a frame: it is made to after two."""

log = logging.getLogger(__name__)


def _nothing_runs(model: str) -> None:
    """The default of `quiesce`, for those who run no forward passes."""


class Pager:
    """All shards of one frame pool. Every method may be called from any thread."""

    def __init__(
        self,
        pool: FramePool,
        reader: Reader,
        *,
        tier: HostTier | None = None,
        peers: Peers | None = None,
        depth: int = 8,
        run: int = 1,
        verify: bool = False,
        quiesce: Callable[[str], None] = _nothing_runs,
    ) -> None:
        """`depth` bounds the pages in flight; up to `run` adjacent ones are mapped together and read at once. `verify`
        checks every page from storage and from neighbours against the manifest's hashes (the host tier checks its own
        when it gets them). `peers` are opened, and closed by `shutdown`.

        `quiesce(model)` is called when a page-in has failed, after waits for its pages have ended and before pages that
        were in are unmapped. It returns once no forward pass touches them, and must not call the pager. Pages that
        are asked for from then on are not ready.
        """
        self._pool = pool
        self._tier = tier
        self._reads = PageReads(pool, reader, tier, verify, self._arrived, self._lost)
        self._quiesce = quiesce
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)  # there may be work
        self._work = PageWork(pool, depth, run, tier)
        self._shards: dict[str, PagedShard] = {}
        self._stopping = False
        self._returned = threading.Condition(self._lock)  # a loan was
        self._peers = peers
        if peers is not None:
            peers.open(self)
        self._thread = threading.Thread(target=self._run, name="pager", daemon=True)
        self._thread.start()
        if tier is not None:
            tier.when_ready(self._look_for_work)

    def open(self, model: str, shard: Shard, path: Path) -> PagedShard:
        """Reserve a region for a shard; nothing is read yet. Raises CorruptImage if the file is too short."""
        check_file(shard, path)
        with self._lock:
            if model in self._shards:
                raise ValueError(f"{model} is open already.")
            region = self._pool.reserve(shard.nbytes)
            paged = PagedShard(model, shard, path, region, self._pool.page_bytes, self._lock)
            self._shards[model] = paged
            return paged

    def close(self, model: str) -> None:
        """Page everything out and give the region back. Raises ValueError while a page-in is under way."""
        self.page_out(model, 0)
        with self._lock:
            shard = self._idle_shard(model)
            shard.end_waits(f"{model} was closed.")
            del self._shards[model]
        self._pool.unreserve(shard.region)

    def page_in(self, model: str, first: int, last: int, done: Done) -> None:
        """Start bringing pages `[first, last)` in, in order; `first` must be where the previous page-in ends.

        Returns at once. `done` is called once, from the pager's thread, and must not wait: with a PageInResult, or
        with the exception (ReadError, HashMismatch, OutOfFrames, CorruptImage, PageInAborted) after which the whole
        shard is absent and every frame it held was returned. Page-ins of one shard may be queued behind one another;
        a failure fails those behind it too, and those that were asked for before it was heard of.
        """
        holders = self._locate(model, first, last)
        with self._lock:
            shard = self._shard(model)
            if self._stopping or shard.leaving:
                raise ValueError(f"{model} cannot be paged in while it is paged out or the pager is shut down.")
            job = PageIn(shard, first, last, done, time.perf_counter(), first, holders)
            if first == shard.asked <= last <= shard.page_count or shard.failure is not None:
                self._work.ask(job)
            elif shard.asked < first <= last <= shard.page_count and shard.waits_end is not None:
                self._work.refuse(job, PageInAborted(f"{shard.waits_end} Its pages from {first} on cannot follow."))
            else:
                raise ValueError(
                    f"Pages [{first}, {last}) of {model} cannot be paged in: "
                    f"the next page is {shard.asked} of {shard.page_count}."
                )
            self._changed.notify()

    def page_out(self, model: str, keep: int) -> int:
        """Unmap pages `[keep, resident)`; returns how many frames became free (shared ones did not).

        Raises ValueError while a page-in of that shard is under way. The caller has made sure that
        nothing touches those pages any more; copies to the host tier and to neighbours are waited for.
        """
        with self._lock:
            shard = self._idle_shard(model)
            resident = shard.resident
            if not 0 <= keep < resident:
                return 0
            shard.publish(keep)
            shard.leaving = True
            contents = self._work.recall(shard, keep)
        try:
            self._wait_still(shard)
            self._wait_returned(contents)
            self._pool.unmap(shard.region, keep, resident - keep)
        except BaseException:  # nothing was unmapped
            with self._lock:
                shard.publish(resident)
                shard.leaving = False
                self._work.stays(contents)
            raise
        with self._lock:
            shard.leaving = False
            self._work.stays(contents)  # where others hold them too
            return self._work.release(shard, range(keep, resident))

    def abort(self, model: str) -> None:
        """Give up a page-in under way: it ends as failed, with PageInAborted, once its reads are back.

        With no page-in under way, waits for pages that are not in end with PageInAborted.
        """
        with self._lock:
            shard = self._shard(model)
            if shard.jobs:
                self._work.fail(shard, PageInAborted(f"The page-in of {model} was given up."))
                self._changed.notify()
            else:
                shard.end_waits(f"Waiting for {model} was given up.")

    # ---- for neighbours

    @property
    def is_paging(self) -> bool:
        return any(shard.jobs for shard in tuple(self._shards.values()))

    def held(self, keys: Sequence[ContentKey]) -> list[int]:
        with self._lock:
            return self._work.held(keys)

    def lend(self, keys: Sequence[ContentKey]) -> Loan[PageTask] | None:
        with self._lock:
            return self._work.lend(keys)

    def take_back(self, loan: Loan[PageTask]) -> None:
        with self._lock:
            self._work.take_back(loan)
            self._returned.notify_all()

    @property
    def progress(self) -> int:
        """Pages that ever arrived: moves as long as reading does."""
        return self._work.progress

    def shutdown(self, timeout: float = 30.0) -> None:
        """Give up what is under way, page everything out and stop. Raises WorkerError if reads do not come back."""
        with self._lock:
            self._stopping = True
            self._work.stop_saving()
            for shard in self._shards.values():
                if shard.jobs:
                    self._work.fail(shard, PageInAborted("The pager was shut down."))
            self._changed.notify()
        self._thread.join(timeout)
        if self._peers is not None:
            self._peers.close()
        if self._thread.is_alive():
            raise WorkerError(f"Reads in flight did not come back within {timeout:g} s; the file system may hang.")
        for model in list(self._shards):
            self.close(model)

    # ---- the pager's thread

    def _run(self) -> None:
        while (work := self._wait_for_work()) is not None:
            try:
                self._do(work)
            except Exception:  # a defect in a callback must not end the paging of all models
                log.exception("The pager could not finish: %r", work)

    def _wait_for_work(self) -> Work | None:
        """The next work. None when the pager is shut down and everything has ended."""
        with self._lock:
            while (work := self._work.next_work()) is None:
                if self._stopping and not any(shard.jobs for shard in self._shards.values()):
                    return None
                self._changed.wait()
            return work

    def _do(self, work: Work) -> None:
        match work:
            case Tell():
                self._close_file(work.job.shard)
                work.job.done(work.outcome)
            case TakeApart():
                # In a thread of its own: the forward pass that it waits for must not hold up other models' pages.
                apart = threading.Thread(target=self._take_apart, args=(work.shard,), name="take apart", daemon=True)
                apart.start()
            case Run():
                self._reads.start(work.pages)
            case Save():
                self._save(work)

    def _take_apart(self, shard: PagedShard) -> None:
        try:
            self._quiesce(shard.model)
            with self._lock:
                contents = self._work.recall(shard, 0)
            self._wait_returned(contents)
            for first, count in _runs(sorted(shard.table)):
                self._pool.unmap(shard.region, first, count)
        except Exception:  # its page-in then never ends, which the worker's stall timer notices
            log.exception("The pages of %s could not be taken back.", shard.model)
            return
        with self._lock:
            self._work.stays(contents)
            self._work.taken_apart(shard)
            self._changed.notify()

    def _save(self, work: Save) -> None:
        assert self._tier is not None
        address = work.shard.region.address + work.shard.extent(work.page)[0]
        try:
            copy = self._tier.fill(work.content.key, address)
        except (GswapdError, RuntimeError) as error:  # RuntimeError: the tier was closed
            log.warning("A page of %s was not saved to the host tier: %s", work.shard.model, error)
            copy = None
        if copy is None:
            self._saved(work)
        else:
            copy.add_done_callback(lambda _: self._saved(work))

    def _close_file(self, shard: PagedShard) -> None:
        with self._lock:
            if shard.jobs:
                return
            file, shard.file = shard.file, None
        if file is not None:
            file.close()

    # ---- any thread

    def _arrived(self, works: Sequence[Alias | Read], source: str, stages: Mapping[str, float]) -> None:
        with self._lock:
            for work in works:
                self._work.arrived(work, source, stages)
            self._changed.notify()

    def _lost(self, works: Sequence[Alias | Read], error: Exception) -> None:
        with self._lock:
            for work in works:
                self._work.lost(work, error)
            self._changed.notify()

    def _look_for_work(self) -> None:
        with self._lock:
            self._changed.notify()

    def _saved(self, work: Save) -> None:
        with self._lock:
            self._work.saved(work)
            self._changed.notify()

    def _wait_still(self, shard: PagedShard) -> None:
        with self._lock:
            if not shard.wait_still(SAVE_TIMEOUT):
                raise WorkerError(f"A page of {shard.model} is still being copied to the host tier.")

    def _wait_returned(self, contents: Sequence[Content[PageTask]]) -> None:
        with self._lock:
            if not self._returned.wait_for(lambda: not any(its.loans for its in contents), LOAN_TIMEOUT):
                raise WorkerError("A neighbour is still reading one of the pages.")

    def _locate(self, model: str, first: int, last: int) -> Holders | None:
        """Ask neighbours for pages. Without the lock: what they say is heard by threads that take it."""
        if self._peers is None:
            return None
        with self._lock:
            shard = self._shard(model)
            keys = [shard.key(page) for page in range(max(0, first), min(last, shard.page_count))]
        return self._peers.locate(keys, self._look_for_work)

    def _shard(self, model: str) -> PagedShard:
        try:
            return self._shards[model]
        except KeyError:
            raise ValueError(f"{model} is not open.") from None

    def _idle_shard(self, model: str) -> PagedShard:
        shard = self._shard(model)
        if shard.jobs or shard.leaving:
            raise ValueError(f"{model} is being paged {'in' if shard.jobs else 'out'}; wait, or abort it first.")
        return shard


def _runs(pages: list[int]) -> Iterator[tuple[int, int]]:
    """Start and length of each run of adjacent pages."""
    start = 0
    for index in range(1, len(pages) + 1):
        if index == len(pages) or pages[index] != pages[index - 1] + 1:
            yield pages[start], index - start
            start = index
