"""The host tier keeps pages by their hash, forgets the one used longest ago, and believes nothing unchecked."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from swapper.host_tier import HostTier
from tests.swapper.paging import PAGE, PATIENCE, page_bytes
from tests.swapper.tiers import Buffer, GatedCopier, key_of, open_tier

ROOT = Path(__file__).parents[2]


def fill(tier: HostTier, tag: int, nbytes: int = PAGE) -> None:
    copy = tier.fill(key_of(tag, nbytes), Buffer(tag).address)
    assert copy is not None
    copy.result(PATIENCE)
    assert tier.wait_settled(PATIENCE)


def has(tier: HostTier, tag: int, nbytes: int = PAGE) -> bool:
    """Whether the tier gives the page; what it gives is right."""
    buffer = Buffer()
    read = tier.read(key_of(tag, nbytes), buffer.address)
    if read is None:
        return False
    assert read.result(PATIENCE).source == "host"
    assert buffer.holds(tag, nbytes)
    return True


def test_a_page_is_found_by_its_hash_and_length(tmp_path: Path) -> None:
    with open_tier(2, tmp_path) as tier:
        fill(tier, 1)
        fill(tier, 2, nbytes=8192)
        assert has(tier, 1)
        assert has(tier, 2, nbytes=8192)
        assert not has(tier, 3)
        status = tier.status
        assert (status.slots, status.ready, status.used, status.hits, status.misses) == (2, 2, 2, 2, 1)


def test_the_page_that_was_used_longest_ago_makes_way(tmp_path: Path) -> None:
    with open_tier(2, tmp_path) as tier:
        fill(tier, 1)
        fill(tier, 2)
        assert has(tier, 1)
        fill(tier, 3)
        assert not has(tier, 2)
        assert has(tier, 1)
        assert has(tier, 3)


def test_a_page_that_is_here_or_coming_is_not_wanted_again(tmp_path: Path) -> None:
    copier = GatedCopier()
    with open_tier(2, tmp_path, copier=copier) as tier:
        source = Buffer(1)
        assert tier.wants(key_of(1))
        assert tier.fill(key_of(1), source.address) is not None
        assert not tier.wants(key_of(1))
        assert tier.fill(key_of(1), source.address) is None
        copier.next().finish()
        assert tier.wait_settled(PATIENCE)
        assert not tier.wants(key_of(1))


def test_a_page_that_is_being_copied_keeps_its_slot(tmp_path: Path) -> None:
    copier = GatedCopier()
    with open_tier(1, tmp_path, copier=copier) as tier:
        source, target = Buffer(1), Buffer()
        tier.fill(key_of(1), source.address)
        copier.next().finish()
        assert tier.wait_settled(PATIENCE)
        read = tier.read(key_of(1), target.address)
        assert read is not None
        assert tier.fill(key_of(2), source.address) is None
        copier.next().finish()
        assert read.result(PATIENCE).seconds == 0.25
        assert target.holds(1)
        assert tier.wants(key_of(2))


def test_bytes_that_are_not_what_their_hash_says_are_not_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with open_tier(1, tmp_path) as tier, caplog.at_level(logging.WARNING):
        copy = tier.fill(key_of(1), Buffer(2).address)
        assert copy is not None
        copy.result(PATIENCE)
        assert tier.wait_settled(PATIENCE)
        assert not has(tier, 1)
        assert tier.status.used == 0
        assert "does not match its hash" in caplog.text


def test_progress_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), open_tier(3, tmp_path):
        assert "3 of 3 pages are allocated and pinned" in caplog.text
        assert "The host tier is ready after" in caplog.text


# ---- adoption: the owner is killed, in a process of its own

OWNER = """
import os, signal, sys
from pathlib import Path
from tests.swapper.test_host_tier import fill
from tests.swapper.tiers import open_tier
with open_tier(4, Path(sys.argv[1])) as tier:
    for tag in (1, 2, 3):
        fill(tier, tag)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def left_behind(tmp_path: Path) -> Path:
    """The directory of an arena with pages 1, 2 and 3, whose owner was killed."""
    ended = subprocess.run([sys.executable, "-c", OWNER, tmp_path], cwd=ROOT, capture_output=True, timeout=60)
    assert ended.returncode == -9, ended.stderr
    return tmp_path


def slot_of(arena: Path, tag: int) -> int:
    """The offset in the file where a page lies."""
    content = arena.read_bytes()
    offset = content.find(page_bytes(tag))
    assert offset > 0
    return offset


def overwrite(arena: Path, offset: int) -> None:
    with arena.open("r+b") as file:
        file.seek(offset)
        was = file.read(1)
        file.seek(offset)
        file.write(bytes([was[0] ^ 1]))


def test_pages_outlive_a_killed_owner(left_behind: Path) -> None:
    with open_tier(4, left_behind) as tier:
        assert tier.status.used == 3
        assert all(has(tier, tag) for tag in (1, 2, 3))
        fill(tier, 4)
        assert has(tier, 4)


def test_a_page_that_changed_meanwhile_is_dropped(left_behind: Path) -> None:
    arena = left_behind / "gswapd-tier-tier"
    overwrite(arena, slot_of(arena, 2) + 12345)
    with open_tier(4, left_behind) as tier:
        assert [tag for tag in (1, 2, 3) if has(tier, tag)] == [1, 3]
        fill(tier, 2)  # its slot is of use again
        fill(tier, 4)
        assert has(tier, 2)


def test_a_torn_entry_is_ignored(left_behind: Path) -> None:
    arena = left_behind / "gswapd-tier-tier"
    digest = bytes.fromhex(key_of(3)[0])
    overwrite(arena, arena.read_bytes().find(digest) + len(digest) + 10)  # in its checksum
    with open_tier(4, left_behind) as tier:
        assert [tag for tag in (1, 2, 3) if has(tier, tag)] == [1, 2]
        fill(tier, 3)
        assert has(tier, 3)


def test_an_arena_of_another_shape_is_made_anew(left_behind: Path) -> None:
    with open_tier(3, left_behind) as tier:
        assert tier.status.used == 0
        fill(tier, 1)
        assert has(tier, 1)
