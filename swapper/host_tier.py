"""The host tier: pages in pinned host memory, one bus transfer away from the GPU.

Pages are known by their hash, so siblings share them here too. A page gets here behind a read: once it is in frames
and nobody is waiting for the link, it is copied out of them, its hash is checked, and from then on it is found. When
all slots are taken, the page that was used longest ago makes way; one that is being copied never does. Where there are
neighbours, they share the work: a page that their links bring is one less for ours.

Memory is allocated and pinned once, at start, in the background, and slots come into use as that proceeds. The arena
(`swapper/tier_arena.py`) outlives a crash: the pages it holds are adopted at the next start, each after its hash was
checked, as if it had just been copied.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from swapper import libc
from swapper.contents import ContentKey
from swapper.copier import Copier
from swapper.errors import DeviceError
from swapper.granules import identity_of
from swapper.peers import Peers
from swapper.readers import ReadResult
from swapper.tier_arena import Arena

CHUNK_BYTES = 512 << 20
"""How much is allocated and pinned at a time."""

PREPARING_THREADS = 4
CHECKING_THREADS = 2

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TierStatus:
    """How full the host tier is, and what it was good for."""

    slots: int
    ready: int  # slots that are allocated and pinned
    used: int  # slots with a page that can be read
    page_bytes: int
    hits: int  # pages read from here
    misses: int  # pages asked for in vain


@dataclass(slots=True, eq=False)
class _Slot:
    """A slot that holds a page. `users` counts the copies out of it that are under way."""

    index: int
    users: int = 0


class HostTier:
    """Every method may be called from any thread.

    Invariant: a slot of the arena is not ready yet, in `_free`, in `_pages`, or being filled or checked.
    """

    def __init__(self, arena: Arena, copier: Copier, peers: Peers | None = None) -> None:
        """The tier closes the arena and the copier. Its start-up work goes on in the background."""
        self.slots = arena.slots
        self._arena = arena
        self._copier = copier
        self._peers = peers
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._own_reads = 0  # pages on their way over our own link
        self._free: list[int] = []
        self._pages: OrderedDict[ContentKey, _Slot] = OrderedDict()  # the one used longest ago first
        self._coming: set[ContentKey] = set()  # being filled or checked
        self._users = 0  # copies from and to slots, and checks, that are under way
        self._ready = 0
        self._hits = 0
        self._misses = 0
        self._stopping = threading.Event()
        self._prepared = threading.Event()
        self._tell_ready: list[Callable[[], None]] = []
        self._pinned: list[int] = []  # addresses
        self._preparing = ThreadPoolExecutor(PREPARING_THREADS, thread_name_prefix="host-tier")
        self._checking = ThreadPoolExecutor(CHECKING_THREADS, thread_name_prefix="host-tier-check")
        self._begun = time.monotonic()
        step = max(1, CHUNK_BYTES // arena.page_bytes)
        self._chunks = [(first, min(step, self.slots - first)) for first in range(0, self.slots, step)]
        self._left = len(self._chunks)
        for first, count in self._chunks:
            self._preparing.submit(self._prepare, first, count)

    @property
    def status(self) -> TierStatus:
        with self._lock:
            return TierStatus(
                slots=self.slots,
                ready=self._ready,
                used=len(self._pages),
                page_bytes=self._arena.page_bytes,
                hits=self._hits,
                misses=self._misses,
            )

    @property
    def is_ready(self) -> bool:
        """Whether all of it is allocated and pinned."""
        return self._prepared.is_set()

    def when_ready(self, tell: Callable[[], None]) -> None:
        """Have `tell` called once the tier is ready: now, or from a thread of its own."""
        with self._lock:
            if not self._prepared.is_set():
                self._tell_ready.append(tell)
                return
        tell()

    def read(self, key: ContentKey, address: int) -> Future[ReadResult] | None:
        """Copy a page to mapped frames at `address`. None if the page is not here."""
        with self._lock:
            slot = self._pages.get(key)
            if slot is None:
                self._misses += 1
                return None
            self._hits += 1
            self._pages.move_to_end(key)
            slot.users += 1
            self._users += 1
        result: Future[ReadResult] = Future()
        try:
            if not self._start_fan_in(slot, address, key[1], result):
                self._start_read(slot, address, key[1], result)
        except BaseException:
            self._let_go(slot)
            raise
        return result

    def wants(self, key: ContentKey) -> bool:
        """Whether `fill` would take this page now."""
        with self._lock:
            return key not in self._pages and key not in self._coming and self._has_room()

    def fill(self, key: ContentKey, address: int) -> Future[float] | None:
        """Copy a page from mapped frames at `address`, which stay as they are until the future is done.

        None if the page is here, or every slot is in use.
        """
        index = self._claim(key)
        if index is None:
            return None
        try:
            self._arena.wipe(index)
            copy = self._copier.fetch(address, self._arena.address(index), key[1])
        except BaseException:
            self._give_up(index, key)
            raise
        copy.add_done_callback(partial(self._filled, index, key))
        return copy

    def wait_settled(self, timeout: float, pages: int = 0) -> bool:
        """Wait until all slots are ready, nothing is being copied or checked, and at least `pages` pages are here.

        Returns whether that is so.
        """
        deadline = time.monotonic() + timeout
        if not self._prepared.wait(timeout):
            return False
        with self._changed:
            return self._changed.wait_for(
                lambda: not self._users and len(self._pages) >= pages, max(0.0, deadline - time.monotonic())
            )

    def close(self) -> None:
        """Finish what is under way and give the memory back, pages and all."""
        self._stopping.set()
        self._preparing.shutdown()
        self._copier.close()
        self._checking.shutdown()
        for address in self._pinned:
            self._copier.unpin(address)
        self._arena.close()

    # ---- start-up

    def _prepare(self, first: int, count: int) -> None:
        """Allocate and pin a run of slots, and put them to use."""
        if self._stopping.is_set():
            return
        try:
            address = self._arena.address(first)
            self._arena.populate(first, count)
            self._copier.pin(address, count * self._arena.page_bytes)
        except (OSError, DeviceError) as error:
            logger.error("The host tier goes without %d of its %d slots: %s", count, self.slots, error)
            self._chunk_done(None, ())
            return
        self._chunk_done(address, range(first, first + count))

    def _chunk_done(self, address: int | None, slots: range | tuple[()]) -> None:
        with self._lock:
            if address is not None:
                self._pinned.append(address)
            self._ready += len(slots)
            self._left -= 1
            left = self._left
            for slot in slots:
                self._adopt(slot)
        self._progressed(left)

    def _adopt(self, slot: int) -> None:
        """Have a slot checked that the last owner left a page in; any other is free."""
        key = self._arena.entry(slot)
        if key is None or key in self._coming or key in self._pages:
            self._free.append(slot)
            return
        self._coming.add(key)
        self._users += 1
        self._checking.submit(self._check, slot, key)

    def _progressed(self, left: int) -> None:
        done = len(self._chunks) - left
        if left and done % max(1, len(self._chunks) // 10):
            return
        logger.info("Host tier: %d of %d pages are allocated and pinned.", self._ready, self.slots)
        if not left:
            logger.info("The host tier is ready after %.1f s.", time.monotonic() - self._begun)
            with self._lock:
                self._prepared.set()
            if self._peers is not None and self._ready == self.slots:
                self._peers.offer(self._arena.path, self._arena.data_start, self.slots * self._arena.page_bytes)
            for tell in self._tell_ready:
                tell()

    # ---- copies

    def _start_read(self, slot: _Slot, address: int, nbytes: int, result: Future[ReadResult]) -> None:
        """Copy a page over our own link."""
        copy = self._copier.put(self._arena.address(slot.index), address, nbytes)
        with self._lock:
            self._own_reads += 1
        copy.add_done_callback(partial(self._read_back, slot, nbytes, result))

    def _read_back(self, slot: _Slot, nbytes: int, result: Future[ReadResult], copy: Future[float]) -> None:
        with self._lock:
            self._own_reads -= 1
        self._let_go(slot)
        error = copy.exception()
        if error is None:
            result.set_result(ReadResult("host", nbytes, copy.result()))
        else:
            result.set_exception(error)

    def _start_fan_in(self, slot: _Slot, address: int, nbytes: int, result: Future[ReadResult]) -> bool:
        """Have a page come over a neighbour's link, if one has less to do than our own."""
        if self._peers is None:
            return False
        copy = self._peers.stage(self._arena.offset(slot.index), nbytes, address, self._own_reads)
        if copy is not None:
            copy.add_done_callback(partial(self._fanned_in, slot, address, nbytes, result))
        return copy is not None

    def _fanned_in(
        self, slot: _Slot, address: int, nbytes: int, result: Future[ReadResult], copy: Future[float]
    ) -> None:
        if copy.exception() is None:
            self._let_go(slot)
            result.set_result(ReadResult("fan_in", nbytes, copy.result()))
            return
        try:
            self._start_read(slot, address, nbytes, result)
        except Exception as error:  # noqa: BLE001 - it belongs to who waits for the page
            self._let_go(slot)
            result.set_exception(error)

    def _let_go(self, slot: _Slot) -> None:
        with self._changed:
            slot.users -= 1
            self._users -= 1
            self._changed.notify_all()

    def _claim(self, key: ContentKey) -> int | None:
        """A slot to fill: a free one, or that of the page which was used longest ago."""
        with self._lock:
            if key in self._pages or key in self._coming or not self._has_room():
                return None
            index = self._free.pop() if self._free else self._evict()
            self._coming.add(key)
            self._users += 1
            return index

    def _has_room(self) -> bool:
        return bool(self._free) or any(not slot.users for slot in self._pages.values())

    def _evict(self) -> int:
        key, slot = next((key, slot) for key, slot in self._pages.items() if not slot.users)
        del self._pages[key]
        return slot.index

    def _filled(self, index: int, key: ContentKey, copy: Future[float]) -> None:
        if copy.exception() is not None:
            self._give_up(index, key)
        else:
            self._checking.submit(self._check, index, key)

    def _check(self, index: int, key: ContentKey) -> None:
        """Let a page be found, if its bytes are what its hash says."""
        if self._stopping.is_set():
            self._give_up(index, key)
            return
        if identity_of(libc.view(self._arena.address(index), key[1])) != key[0]:
            logger.warning("A page in the host tier does not match its hash, and is dropped.")
            self._arena.wipe(index)
            self._give_up(index, key)
            return
        self._arena.enter(index, key)
        with self._changed:
            self._coming.discard(key)
            self._users -= 1
            self._pages[key] = _Slot(index)
            self._changed.notify_all()

    def _give_up(self, index: int, key: ContentKey) -> None:
        with self._changed:
            self._coming.discard(key)
            self._users -= 1
            self._free.append(index)
            self._changed.notify_all()
