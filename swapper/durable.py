"""Writing files so that a crash of the machine leaves the old state or the new one."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def sync_file(path: Path) -> None:
    """Return once the file's bytes, or a directory's entries, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def copy_file(source: Path, target: Path) -> None:
    """Copy contents (a link's target, not the link) and sync them."""
    shutil.copyfile(source, target)
    sync_file(target)


def write_file(path: Path, text: str) -> None:
    """Create or replace a file in one step: readers see all of it or what was there before."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    sync_file(partial)
    partial.replace(path)
    sync_file(path.parent)


def move(source: Path, target: Path) -> None:
    """Rename within a file system, and sync both directories."""
    source.rename(target)
    sync_file(target.parent)
    sync_file(source.parent)
