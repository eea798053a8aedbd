"""KV blocks of one model: which are taken, and which frames are mapped behind them.

A KV region is block-major: block `i` lies at `[i * block_bytes, (i + 1) * block_bytes)` and may straddle frames.
A grant of `n` frames opens the blocks that lie whole in the region's first `n` pages. Blocks are handed out lowest
index first, a page is mapped when the first block that touches it is taken, and unmapped the moment the last one is
given back: the model never holds a frame that no block needs, nor more frames than it was granted.

On a mesh, the leader alone hands out blocks. Other ranks have the same blocks in the same pages of a region of their
own, and follow what the leader takes and gives back.

Not thread-safe: one thread, between forward passes, calls every method.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

from swapper.errors import OutOfFrames
from swapper.frames import Frame, FramePool, Region
from swapper.geometry import KV_BLOCK_TOKENS, kv_capacity_blocks, pages


class BlockChanges:
    """What has become of blocks since followers were last told; nothing is noted where there are none."""

    def __init__(self) -> None:
        self.are_noted = False
        self._is_taken: dict[int, bool] = {}

    def take(self, blocks: Iterable[int]) -> None:
        if self.are_noted:
            self._is_taken.update(dict.fromkeys(blocks, True))

    def give_back(self, blocks: Iterable[int]) -> None:
        if self.are_noted:
            self._is_taken.update(dict.fromkeys(blocks, False))

    def pop(self) -> tuple[list[int], list[int]]:
        """Blocks that are taken now, and blocks that are not."""
        changed, self._is_taken = self._is_taken, {}
        return [block for block, taken in changed.items() if taken], [b for b, taken in changed.items() if not taken]


class MappedBlocks:
    """A KV region, and the frames behind those of its blocks that are in use."""

    def __init__(self, pool: FramePool, kv_bytes_per_token: int, max_blocks: int) -> None:
        """Reserve addresses for `max_blocks` blocks, or for as many as the whole pool can hold, if that is less."""
        self._pool = pool
        self._block_bytes = KV_BLOCK_TOKENS * kv_bytes_per_token
        self.max_frames = min(pages(max_blocks * self._block_bytes, pool.page_bytes), pool.frames)
        self.region: Region = pool.reserve(self.max_frames * pool.page_bytes)
        self._taken: set[int] = set()
        self._frames: dict[int, Frame] = {}  # page → the frame mapped there
        self._users: dict[int, int] = {}  # page → taken blocks that touch it

    @property
    def bytes_taken(self) -> int:
        return len(self._taken) * self._block_bytes

    @property
    def frames_held(self) -> int:
        return len(self._frames)

    def _give_back(self, block: int) -> None:
        """Frames that no other block touches go back to the pool at once."""
        self._taken.remove(block)
        for page in self._pages(block):
            self._drop(page)

    def _pages(self, block: int) -> range:
        start = block * self._block_bytes
        return range(start // self._pool.page_bytes, pages(start + self._block_bytes, self._pool.page_bytes))

    def _map(self, block: int) -> None:
        """Put frames behind a block. Raises OutOfFrames, and then nothing is mapped that was not."""
        mapped: list[int] = []
        try:
            for page in self._pages(block):
                if page not in self._frames:
                    self._frames[page] = self._mapped_frame(page)
                self._users[page] = self._users.get(page, 0) + 1
                mapped.append(page)
        except OutOfFrames:
            for page in mapped:
                self._drop(page)
            raise

    def _mapped_frame(self, page: int) -> Frame:
        frame = self._pool.take()
        try:
            self._pool.map(self.region, page, frame)
        except BaseException:
            self._pool.release(frame)
            raise
        return frame

    def _drop(self, page: int) -> None:
        """One block less touches this page."""
        self._users[page] -= 1
        if not self._users[page]:
            del self._users[page]
            self._pool.unmap(self.region, page)
            self._pool.release(self._frames.pop(page))


class FollowedBlocks(MappedBlocks):
    """The blocks of a rank that follows the leader's. Not thread-safe."""

    def follow(self, taken: Iterable[int], returned: Iterable[int]) -> None:
        """Take and give back what the leader did since the last time, as far as it is not so. Raises OutOfFrames."""
        for block in self._taken.intersection(returned):
            self._give_back(block)
        for block in taken:
            if block not in self._taken:
                self._map(block)
                self._taken.add(block)

    def close(self) -> None:
        """Give back everything, addresses included."""
        self.follow((), list(self._taken))
        self._pool.unreserve(self.region)


class BlockManager(MappedBlocks):
    """Hands out the KV blocks of one region within a grant of frames.

    Invariants (`check` proves them): a block is free or taken once; a page is mapped exactly while a taken block
    touches it; every taken block lies below `capacity`, so that at most `granted` frames are held.
    """

    def __init__(self, pool: FramePool, kv_bytes_per_token: int, max_blocks: int) -> None:
        super().__init__(pool, kv_bytes_per_token, max_blocks)
        self._kv_bytes_per_token = kv_bytes_per_token
        self.granted = 0
        self.capacity = 0  # blocks `[0, capacity)` are open
        self._fresh = 0  # blocks `[_fresh, …)` were never taken; those below are taken or in `_returned`
        self._returned: list[int] = []  # heap
        self.changes = BlockChanges()

    @property
    def available(self) -> int:
        """Blocks of the grant that are not taken."""
        return self.capacity - len(self._taken)

    def frames_for(self, blocks: int) -> int:
        """Frames of a grant that opens this many blocks; never more than the region has pages."""
        return min(pages(blocks * self._block_bytes, self._pool.page_bytes), self.max_frames)

    def grant(self, frames: int) -> None:
        """Change the grant. The caller has given back every block that `fits` says no to."""
        self.granted = frames
        self.capacity = self._capacity_of(frames)

    def fits(self, blocks: Sequence[int], frames: int) -> bool:
        """Whether blocks that are taken may stay under a grant of `frames` frames."""
        return not blocks or max(blocks) < self._capacity_of(frames)

    def take(self, count: int) -> tuple[int, ...] | None:
        """`count` blocks with memory behind them; None, and nothing changed, if the grant or the pool has too few."""
        if count > self.available:
            return None
        taken: list[int] = []
        try:
            for _ in range(count):
                block = self._lowest_free()
                self._map(block)
                self._taken.add(block)
                taken.append(block)
        except OutOfFrames:
            heapq.heappush(self._returned, block)
            self.give_back(taken)
            return None
        self.changes.take(taken)
        return tuple(taken)

    def give_back(self, blocks: Sequence[int]) -> None:
        """Return blocks; frames that no other block touches go back to the pool at once."""
        for block in blocks:
            self._give_back(block)
            heapq.heappush(self._returned, block)
        self.changes.give_back(blocks)

    def close(self) -> None:
        """Give back everything, addresses included."""
        self.give_back(list(self._taken))
        self._pool.unreserve(self.region)

    def check(self) -> None:
        """Raise AssertionError unless the invariants hold."""
        assert len(set(self._returned)) == len(self._returned), "a block was returned twice"
        assert self._taken.isdisjoint(self._returned), "a block is free and taken"
        assert self._taken.union(self._returned) == set(range(self._fresh)), "a block was lost"
        touched: dict[int, int] = {}
        for block in self._taken:
            for page in self._pages(block):
                touched[page] = touched.get(page, 0) + 1
        assert touched == self._users, "pages and the blocks that touch them disagree"
        assert self._users.keys() == self._frames.keys(), "a page is mapped without need, or needed and not mapped"
        assert all(block < self.capacity for block in self._taken), "a block lies outside the grant"
        assert self.frames_held <= self.granted, "more frames are held than granted"

    def _capacity_of(self, frames: int) -> int:
        return kv_capacity_blocks(min(frames, self.max_frames), self._kv_bytes_per_token, self._pool.page_bytes)

    def _lowest_free(self) -> int:
        """Of the blocks of the grant, of which one is free; those that were returned lie below those never taken."""
        if self._returned:
            return heapq.heappop(self._returned)
        self._fresh += 1
        return self._fresh - 1
