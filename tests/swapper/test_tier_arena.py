"""Arenas have one owner; those of the dead are removed."""

from __future__ import annotations

from pathlib import Path

import pytest

from swapper.errors import ConfigError
from swapper.tier_arena import Arena, remove_arena, remove_orphans
from tests.swapper.paging import PAGE
from tests.swapper.tiers import key_of


def test_an_arena_that_is_in_use_is_refused(tmp_path: Path) -> None:
    arena = Arena("a", 1, PAGE, tmp_path)
    with pytest.raises(ConfigError, match="in use by another worker"):
        Arena("a", 1, PAGE, tmp_path)
    arena.close()
    Arena("a", 1, PAGE, tmp_path).close()


def test_closing_removes_it(tmp_path: Path) -> None:
    arena = Arena("a", 1, PAGE, tmp_path)
    assert arena.path.stat().st_mode & 0o777 == 0o600
    arena.close()
    assert not list(tmp_path.iterdir())


def test_more_than_there_is_is_refused_with_both_numbers(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"wants [\d,]+ bytes of shared memory, but .* has only [\d,]+ free"):
        Arena("a", 1 << 30, PAGE, tmp_path)
    assert not list(tmp_path.iterdir())


def test_an_entry_is_what_was_entered_until_it_is_wiped(tmp_path: Path) -> None:
    arena = Arena("a", 2, PAGE, tmp_path)
    assert arena.entry(0) is None
    arena.enter(1, key_of(1, 8192))
    assert (arena.entry(0), arena.entry(1)) == (None, key_of(1, 8192))
    arena.wipe(1)
    assert arena.entry(1) is None
    arena.close()


def test_only_arenas_without_an_owner_are_removed(tmp_path: Path) -> None:
    owned = Arena("owned", 1, PAGE, tmp_path)
    for name in ("gswapd-tier-dead", "gswapd-tier-mine", "something-else"):
        (tmp_path / name).touch()
    assert [path.name for path in remove_orphans({"mine"}, tmp_path)] == ["gswapd-tier-dead"]
    assert {path.name for path in tmp_path.iterdir()} == {"gswapd-tier-owned", "gswapd-tier-mine", "something-else"}
    assert remove_arena("mine", tmp_path)
    assert not remove_arena("owned", tmp_path)
    assert not remove_arena("mine", tmp_path)
    owned.close()
