"""KV blocks: each is handed out once, and memory is behind exactly those that are."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.blocks import BlockManager
from swapper.errors import OutOfFrames
from swapper.frames import Frame, FramePool, Region
from swapper.geometry import KV_BLOCK_TOKENS
from swapper.host_frames import HostFramePool

PAGE = 4096
FRAMES = 12


@pytest.fixture(scope="module")
def pool() -> Iterator[FramePool]:
    pool = HostFramePool(FRAMES, PAGE)
    yield pool
    assert pool.free == FRAMES, "a test kept frames"
    pool.close()


def manager(pool: FramePool, block_bytes: int, granted: int, max_blocks: int = 1000) -> BlockManager:
    blocks = BlockManager(pool, block_bytes // KV_BLOCK_TOKENS, max_blocks)
    blocks.grant(granted)
    return blocks


def test_a_grant_opens_the_blocks_that_lie_whole_in_its_frames(pool: FramePool) -> None:
    blocks = manager(pool, 1536, granted=2)  # 8192 bytes hold five blocks of 1536
    assert blocks.take(6) is None
    assert blocks.take(5) == (0, 1, 2, 3, 4)
    assert blocks.available == 0
    blocks.close()


def test_frames_are_mapped_when_a_block_first_needs_them_and_go_with_the_last_block(pool: FramePool) -> None:
    blocks = manager(pool, 1536, granted=3)
    assert blocks.frames_held == 0
    first = blocks.take(2)
    assert first == (0, 1)
    assert blocks.frames_held == 1
    straddling = blocks.take(1)
    assert straddling == (2,)  # bytes 3072 to 4608: the first and the second frame
    assert blocks.frames_held == 2
    blocks.give_back(first)
    assert blocks.frames_held == 2  # block 2 still lies in both
    blocks.give_back(straddling)
    assert blocks.frames_held == 0
    assert pool.free == FRAMES
    blocks.close()


def test_the_lowest_free_block_comes_first(pool: FramePool) -> None:
    blocks = manager(pool, 1024, granted=3)
    assert blocks.take(6) == (0, 1, 2, 3, 4, 5)
    blocks.give_back((4, 1))
    assert blocks.take(3) == (1, 4, 6)
    blocks.close()


def test_a_block_may_be_larger_than_a_frame(pool: FramePool) -> None:
    blocks = manager(pool, 3 * PAGE, granted=7)
    assert blocks.take(2) == (0, 1)
    assert blocks.frames_held == 6
    assert blocks.take(1) is None
    blocks.close()


def test_an_empty_pool_means_no_block_now_and_nothing_leaks(pool: FramePool) -> None:
    others = [pool.take() for _ in range(FRAMES - 2)]
    blocks = manager(pool, 3 * PAGE, granted=FRAMES)
    assert blocks.take(1) is None  # its third frame was not there
    assert blocks.frames_held == 0
    assert pool.free == 2
    blocks.check()
    pool.release(others.pop())
    assert blocks.take(1) == (0,)
    for frame in others:
        pool.release(frame)
    blocks.close()


def test_a_frame_that_cannot_be_mapped_is_given_back(pool: FramePool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel bounds how many mappings a process may have."""

    def refuse(region: Region, page: int, frame: Frame) -> None:
        raise OutOfFrames("out of mappings")

    blocks = manager(pool, PAGE, granted=FRAMES)
    with monkeypatch.context() as patch:
        patch.setattr(pool, "map", refuse)
        assert blocks.take(1) is None
    assert pool.free == FRAMES
    assert blocks.take(1) == (0,)
    blocks.close()


def test_a_smaller_grant_keeps_only_blocks_in_its_own_frames(pool: FramePool) -> None:
    blocks = manager(pool, 1024, granted=3)
    low, high = blocks.take(4), blocks.take(8)
    assert low is not None
    assert high is not None
    assert blocks.fits(low, 1)
    assert not blocks.fits(high, 2)
    assert blocks.fits((), 0)
    blocks.give_back(high)
    blocks.grant(1)
    assert blocks.available == 0
    assert blocks.frames_held == 1
    blocks.close()


def test_a_region_is_no_larger_than_the_pool(pool: FramePool) -> None:
    blocks = manager(pool, 1024, granted=1_000_000, max_blocks=1_000_000)
    assert blocks.region.nbytes == FRAMES * PAGE
    assert blocks.frames_for(1_000_000) == FRAMES
    assert blocks.capacity == FRAMES * PAGE // 1024
    blocks.close()


Moves = st.lists(
    st.one_of(
        st.tuples(st.just("take"), st.integers(1, 6)),
        st.tuples(st.just("give back"), st.integers(0, 50)),
        st.tuples(st.just("grant"), st.integers(0, FRAMES + 2)),
        st.tuples(st.just("others take"), st.integers(0, 0)),
        st.tuples(st.just("others release"), st.integers(0, 0)),
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(block_bytes=st.sampled_from([512, 1040, 1536, 4096, 5008, 10_240]), moves=Moves)
def test_whatever_happens_no_block_is_given_twice_and_no_frame_is_lost(
    pool: FramePool, block_bytes: int, moves: list[tuple[str, int]]
) -> None:
    blocks = manager(pool, block_bytes, granted=4)
    owners: list[tuple[int, ...]] = []
    others = []
    for move, number in moves:
        if move == "take":
            taken = blocks.take(number)
            if taken is not None:
                assert len(taken) == number
                owners.append(taken)
        elif move == "give back" and owners:
            blocks.give_back(owners.pop(number % len(owners)))
        elif move == "grant":
            for owner in [o for o in owners if not blocks.fits(o, number)]:
                blocks.give_back(owner)
                owners.remove(owner)
            blocks.grant(number)
        elif move == "others take" and pool.free:
            others.append(pool.take())
        elif move == "others release" and others:
            pool.release(others.pop())
        held = [block for owner in owners for block in owner]
        assert len(held) == len(set(held))
        assert pool.free + blocks.frames_held + len(others) == FRAMES
        blocks.check()
    blocks.close()
    for frame in others:
        pool.release(frame)
    assert pool.free == FRAMES
