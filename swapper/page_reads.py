"""How pages get their bytes: frames are mapped, and filled from a neighbour, from the host tier or from storage.

The pager's thread starts all this; threads of the reader, of copiers and of neighbours' connections bring it to its
end, check the bytes, and say what came of it through the two functions that `PageReads` was given.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import groupby
from pathlib import Path

from swapper.errors import CorruptImage, GswapdError
from swapper.frames import FramePool
from swapper.host_tier import HostTier
from swapper.image import Shard
from swapper.page_work import Alias, Read
from swapper.paged_shard import PagedShard
from swapper.peer_link import PeerLink
from swapper.peers import Holders
from swapper.readers import Reader, ReadResult, ShardFile
from swapper.verify import check_granules

Arrived = Callable[[Sequence[Alias | Read], str, Mapping[str, float]], None]
"""Called with pages that hold their bytes, the source of them, and the seconds that each page took by stage."""

Lost = Callable[[Sequence[Alias | Read], Exception], None]
"""Called with adjacent pages that could not be brought in, and are not mapped any more."""


class PageReads:
    """Brings pages in, for one pager."""

    def __init__(
        self, pool: FramePool, reader: Reader, tier: HostTier | None, verify: bool, arrived: Arrived, lost: Lost
    ) -> None:
        self._pool = pool
        self._reader = reader
        self._tier = tier
        self._verify = verify
        self._arrived = arrived
        self._lost = lost
        self._opening = threading.Lock()

    def start(self, run: Sequence[Alias | Read]) -> None:
        """Map a run of pages; those whose frames do not hold their bytes already are then filled."""
        shard, first = run[0].task.job.shard, run[0].task.page
        begun = time.perf_counter()
        try:
            self._pool.map(shard.region, first, *(page.content.frame for page in run))
        except (GswapdError, OSError) as error:
            self._lost(run, error)
            return
        mapping = (time.perf_counter() - begun) / len(run)
        holders = run[0].task.job.holders
        for kind, its in groupby(run, lambda page: _way_of(page, holders)):
            if kind == "fill":
                self._fill([page for page in its if isinstance(page, Read)], mapping)
            elif isinstance(kind, str):
                self._arrived(tuple(its), "alias", {"map": mapping})
            else:
                self._borrow(kind, [page for page in its if isinstance(page, Read)], mapping)

    def _borrow(self, link: PeerLink, reads: Sequence[Read], mapping: float) -> None:
        """Copy adjacent pages from a neighbour's frames."""
        shard = reads[0].task.job.shard
        targets = [shard.region.address + shard.extent(read.task.page)[0] for read in reads]
        copy = link.borrow([read.content.key for read in reads], targets)
        copy.add_done_callback(partial(self._borrowed, reads, mapping))

    def _borrowed(self, reads: Sequence[Read], mapping: float, copy: Future[float]) -> None:
        if copy.exception() is not None:  # it holds them no more, or does not answer
            self._fill(reads, mapping)
        else:
            nbytes = sum(read.content.key[1] for read in reads)
            self._came(reads, mapping, ReadResult("peer", nbytes, copy.result()))

    def _fill(self, reads: Sequence[Read], mapping: float) -> None:
        """Have each of a run of pages copied from the host tier, or those beside one another read at once."""
        stored: list[Read] = []
        for read in reads:
            if not self._start_copy(read, mapping):
                stored.append(read)
                continue
            self._start_read(stored, mapping)
            stored = []
        self._start_read(stored, mapping)

    def _start_copy(self, read: Read, mapping: float) -> bool:
        """Copy a page from the host tier, if it is there."""
        if self._tier is None:
            return False
        shard = read.task.job.shard
        address = shard.region.address + shard.extent(read.task.page)[0]
        try:
            copy = self._tier.read(read.content.key, address)
        except (GswapdError, RuntimeError) as error:  # RuntimeError: the tier was closed
            self._unmap_and_lose([read], error)
            return True
        if copy is not None:
            copy.add_done_callback(partial(self._read_back, [read], mapping))
        return copy is not None

    def _start_read(self, reads: Sequence[Read], mapping: float) -> None:
        """Read adjacent pages from storage."""
        if not reads:
            return
        shard = reads[0].task.job.shard
        start, _ = shard.extent(reads[0].task.page)
        nbytes = sum(shard.extent(read.task.page)[1] for read in reads)
        try:
            file = self._open_file(shard)
            future = file.read(shard.shard.data_start + start, shard.region.address + start, nbytes)
        except (GswapdError, OSError, RuntimeError) as error:  # RuntimeError: the reader was closed
            self._unmap_and_lose(reads, error)
        else:
            future.add_done_callback(partial(self._read_back, reads, mapping))

    def _open_file(self, shard: PagedShard) -> ShardFile:
        """Opened for each run of page-ins: idle models hold no descriptors, and a repaired file is found."""
        with self._opening:
            if shard.file is None:
                check_file(shard.shard, shard.path)
                shard.file = self._reader.open(shard.path)
            return shard.file

    # ---- threads of readers and copiers

    def _read_back(self, reads: Sequence[Read], mapping: float, future: Future[ReadResult]) -> None:
        try:
            result = future.result()
        except Exception as error:  # noqa: BLE001 - whatever ended the read, the page-in ends with it
            self._unmap_and_lose(reads, error)
        else:
            self._came(reads, mapping, result)

    def _came(self, reads: Sequence[Read], mapping: float, result: ReadResult) -> None:
        stages = {"map": mapping, "read": result.seconds / len(reads)}
        if self._verify and result.source != "host":
            begun = time.perf_counter()
            try:
                for read in reads:
                    self._check(read)
            except Exception as error:  # noqa: BLE001 - as above
                self._unmap_and_lose(reads, error)
                return
            stages["verify"] = (time.perf_counter() - begun) / len(reads)
        self._arrived(reads, result.source, stages)

    def _check(self, read: Read) -> None:
        """Raises HashMismatch unless a page holds what was packed."""
        shard = read.task.job.shard
        start, nbytes = shard.extent(read.task.page)
        check_granules(shard.shard, shard.path, start, self._pool.peek(shard.region.address + start, nbytes))

    def _unmap_and_lose(self, reads: Sequence[Read], error: Exception) -> None:
        # Before the frames are given up: nobody else may be handed one while a page still shows it.
        self._pool.unmap(reads[0].task.job.shard.region, reads[0].task.page, len(reads))
        self._lost(reads, error)


def _way_of(page: Alias | Read, holders: Holders | None) -> PeerLink | str:
    """How a mapped page gets its bytes: "alias", it has them; from a neighbour; or "fill"."""
    if isinstance(page, Alias):
        return "alias"
    return (holders.find(page.content.key) if holders is not None else None) or "fill"


def check_file(shard: Shard, path: Path) -> None:
    """Raises CorruptImage if a shard's file is not there, or shorter than its manifest says."""
    wanted = shard.data_start + shard.nbytes
    try:
        size = path.stat().st_size
    except OSError as error:
        raise CorruptImage(f"{path} cannot be read ({error.strerror}). Add the model again.") from error
    if size < wanted:
        raise CorruptImage(f"{path} has {size:,} bytes, but its manifest says {wanted:,}. Add the model again.")
