"""The pager and the host tier: pages are kept behind page-ins, and come from there the next time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from swapper.host_frames import HostFramePool
from swapper.host_tier import HostTier
from swapper.pager import PagedShard, PageInResult, Pager
from swapper.pread import PreadReader
from tests.swapper.paging import (
    PAGE,
    PATIENCE,
    FaultyReader,
    GatedReader,
    Outcome,
    data_of,
    page_in,
    resident_bytes,
    write_shard,
)
from tests.swapper.tiers import GatedCopier, open_tier


@pytest.fixture
def pool() -> Iterator[HostFramePool]:
    pool = HostFramePool(8, PAGE)
    yield pool
    assert pool.free == 8
    pool.close()


def open_shard(pager: Pager, model: str, tags: list[int], directory: Path) -> PagedShard:
    path = directory / f"{model}.safetensors"
    return pager.open(model, write_shard(path, tags, tail=8192), path)


def pages_of(result: PageInResult) -> dict[str, int]:
    return {source: its.pages for source, its in result.sources.items()}


def settle(tier: HostTier, used: int) -> None:
    """Wait until the tier holds that many pages."""
    assert tier.wait_settled(PATIENCE, used)
    assert tier.status.used == used


def test_pages_that_were_read_once_come_from_the_host_tier(pool: HostFramePool, tmp_path: Path) -> None:
    reader = PreadReader(2)
    with open_tier(4, tmp_path) as tier:
        pager = Pager(pool, reader, tier=tier, verify=True)
        paged = open_shard(pager, "model", [1, 2, 1, 3], tmp_path)
        assert "host" not in page_in(pager, "model", 0, 4).sources
        settle(tier, 3)
        pager.page_out("model", 0)
        paged.path.write_bytes(paged.path.read_bytes()[: PAGE // 2])  # storage is not asked
        assert pages_of(page_in(pager, "model", 0, 4)) == {"host": 3, "alias": 1}
        assert resident_bytes(paged) == data_of([1, 2, 1, 3], tail=8192)
        pager.shutdown()
    reader.close()


def test_a_sibling_finds_the_pages_that_it_shares(pool: HostFramePool, tmp_path: Path) -> None:
    reader = PreadReader(2)
    with open_tier(4, tmp_path) as tier:
        pager = Pager(pool, reader, tier=tier)
        open_shard(pager, "first", [1, 2, 3], tmp_path)
        sibling = open_shard(pager, "sibling", [1, 9, 3], tmp_path)
        page_in(pager, "first", 0, 3)
        settle(tier, 3)
        pager.page_out("first", 0)
        result = page_in(pager, "sibling", 0, 3)
        assert pages_of(result)["host"] == 2
        assert resident_bytes(sibling) == data_of([1, 9, 3], tail=8192)
        pager.shutdown()
    reader.close()


def test_nothing_is_saved_while_pages_are_read(pool: HostFramePool, tmp_path: Path) -> None:
    reader, copier = GatedReader(), GatedCopier()
    with open_tier(4, tmp_path, copier=copier) as tier:
        pager = Pager(pool, reader, tier=tier, depth=2)
        open_shard(pager, "model", [1, 2, 3], tmp_path)
        outcome = Outcome()
        pager.page_in("model", 0, 3, outcome)
        reads = [reader.next(), reader.next()]
        reads[0].finish()
        reads.append(reader.next())  # asked for behind the first one's end, so the pager has looked for work since
        reads[1].finish()
        assert copier.pending.empty()
        reads[2].finish()
        outcome.result()
        for _ in range(3):
            copier.next().finish()
        settle(tier, 3)
        pager.shutdown()


def test_a_page_out_waits_for_pages_that_are_being_saved(pool: HostFramePool, tmp_path: Path) -> None:
    reader, copier = FaultyReader(lambda path, page: False), GatedCopier()
    with open_tier(4, tmp_path, copier=copier) as tier:
        pager = Pager(pool, reader, tier=tier)
        paged = open_shard(pager, "model", [1, 2, 3], tmp_path)
        page_in(pager, "model", 0, 3)
        saves = [copier.next(), copier.next()]
        out = threading.Thread(target=pager.page_out, args=("model", 0))
        out.start()
        with paged._changed:
            assert paged._changed.wait_for(lambda: paged.leaving, PATIENCE)
            assert pool.free == 5
        for save in saves:
            save.finish()
        out.join(PATIENCE)
        assert pool.free == 8
        settle(tier, 2)  # what had left was not saved
        assert copier.pending.empty()
        pager.shutdown()


def test_a_page_in_can_fail_while_pages_are_being_saved(pool: HostFramePool, tmp_path: Path) -> None:
    reader, copier = FaultyReader(lambda path, page: page == 2), GatedCopier()
    with open_tier(4, tmp_path, copier=copier) as tier:
        pager = Pager(pool, reader, tier=tier)
        paged = open_shard(pager, "model", [1, 2, 3], tmp_path)
        page_in(pager, "model", 0, 2)
        saves = [copier.next(), copier.next()]
        outcome = Outcome()
        pager.page_in("model", 2, 3, outcome)
        with paged._changed:
            assert paged._changed.wait_for(lambda: paged.failure is not None, PATIENCE)
        assert not outcome.came
        for save in saves:
            save.finish()
        assert "cannot be read" in str(outcome.get())
        assert pool.free == 8
        pager.shutdown()


def test_shutting_down_saves_nothing_more(pool: HostFramePool, tmp_path: Path) -> None:
    copier = GatedCopier()
    with open_tier(4, tmp_path, copier=copier) as tier:
        pager = Pager(pool, FaultyReader(lambda path, page: False), tier=tier)
        open_shard(pager, "model", [1, 2, 3, 4], tmp_path)
        page_in(pager, "model", 0, 4)
        saves = [copier.next(), copier.next()]
        stopping = threading.Thread(target=pager.shutdown)
        stopping.start()
        pager._thread.join(PATIENCE)
        for save in saves:
            save.finish()
        stopping.join(PATIENCE)
        assert not stopping.is_alive()
        assert copier.pending.empty()
