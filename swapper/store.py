"""The model store: a directory of images, shared by `add`, `rm`, `gc` and the daemons that serve from it.

    models/NAME/    published images; a daemon only ever looks here
    incoming/NAME/  what an `add` is writing; published by one rename
    trash/NAME/     what a `rm` is unlinking; taken away by one rename
    .lock           held (flock) by whoever changes the store; its text is the holder's process id

Readers take no lock: a rename shows them all of an image or nothing, and files that they hold open outlive
an unlink. The kernel drops the lock of a process that dies, so what a crash leaves in incoming/ and trash/ is
swept by the next change and blocks nothing.
"""

from __future__ import annotations

import difflib
import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import quote, unquote

from swapper.durable import move, sync_file
from swapper.errors import CorruptImage, ModelExists, ModelNotFound, StoreBusy, StoreError
from swapper.image import Image

_PART = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_NAME = re.compile(f"{_PART}(/{_PART})?")
_NAME_LIMIT = 128

StoreVersion = tuple[int, frozenset[tuple[str, int]]]
"""Equal as long as no model came or went; means nothing else."""


def check_name(name: str) -> None:
    """Raises StoreError unless `name` can name a model."""
    if len(name) > _NAME_LIMIT or not _NAME.fullmatch(name):
        raise StoreError(
            f"{name!r} cannot name a model. Use letters, digits, '.', '_' and '-', beginning with a letter or digit, "
            f"with at most one '/' between two such parts, and at most {_NAME_LIMIT} characters."
        )


class Store:
    """One store. Any number of processes may have it open; objects of this class keep nothing in memory."""

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root)
        self._models = self.root / "models"
        self._incoming = self.root / "incoming"
        self._trash = self.root / "trash"

    def list(self) -> tuple[str, ...]:
        """Names of all models, sorted."""
        return tuple(sorted(unquote(entry) for entry, _ in self._entries()))

    def open(self, name: str) -> Image:
        """Raises ModelNotFound, naming models with names like it, or CorruptImage."""
        check_name(name)
        path = self._models / _directory(name)
        try:
            return Image.open(path)
        except CorruptImage:
            if path.exists():
                raise
        raise self._not_found(name)

    def identities(self) -> dict[str, str]:
        """The identity of each image that can be read: stores are copies of one another if these are equal."""
        found = {}
        for entry, _ in self._entries():
            with suppress(CorruptImage):
                found[unquote(entry)] = Image.identity_at(self._models / entry)
        return found

    def version(self) -> StoreVersion:
        """A cheap token that changes whenever a model comes or goes.

        The directory's time alone would miss a second change within one tick of the kernel's clock; inodes
        alone would miss a removal and an addition that reuses one.
        """
        try:
            return self._models.stat().st_mtime_ns, frozenset(self._entries())
        except FileNotFoundError:
            return 0, frozenset()

    @contextmanager
    def adding(self, name: str) -> Iterator[Path]:
        """Hold the store while an image is written into the directory given; publish it at the end.

        The directory is empty, and on the store's disk. It vanishes again if the block raises. Raises ModelExists or
        StoreBusy before the block runs, CorruptImage after it if it left no whole image.
        """
        check_name(name)
        with self._lock():
            target = self._models / _directory(name)
            if target.exists():
                raise ModelExists(
                    f"A model named {name} is in the store {self.root}. Choose another name, or remove it first with "
                    f"`gswapd rm {name}`."
                )
            self._sweep()
            directory = self._incoming / _directory(name)
            with self._writing():
                directory.mkdir()
            try:
                yield directory
                Image.open(directory)
                with self._writing():
                    move(directory, target)
            except BaseException:
                # An interrupt too; only a kill leaves the directory, to the next sweep.
                shutil.rmtree(directory, ignore_errors=True)
                raise

    def remove(self, name: str) -> None:
        """Take a model away; files that a daemon holds open stay readable to it. Raises ModelNotFound or StoreBusy."""
        check_name(name)
        with self._lock():
            source = self._models / _directory(name)
            if not source.exists():
                raise self._not_found(name)
            self._sweep()  # an image of that name may lie in the trash
            with self._writing():
                move(source, self._trash / source.name)
            self._sweep()

    def gc(self) -> int:
        """Delete what crashed commands left behind; returns the bytes that became free. Raises StoreBusy."""
        with self._lock():
            return self._sweep()

    def _entries(self) -> Iterator[tuple[str, int]]:
        """Directory name and inode of each published image."""
        try:
            with os.scandir(self._models) as entries:
                for entry in entries:
                    if entry.is_dir() and _NAME.fullmatch(unquote(entry.name)):
                        yield entry.name, entry.inode()
        except FileNotFoundError:
            return

    def _not_found(self, name: str) -> ModelNotFound:
        known = self.list()
        near = difflib.get_close_matches(name, known, n=3)
        if near:
            hint = f"Did you mean {' or '.join(near)}?"
        elif known:
            hint = f"It has {', '.join(known[:5])}{' and others' if len(known) > 5 else ''}."
        else:
            hint = "It is empty: add a model with `gswapd add`."
        return ModelNotFound(f"No model named {name} is in the store {self.root}. {hint}")

    @contextmanager
    def _lock(self) -> Iterator[None]:
        """Hold the store's lock, or raise StoreBusy at once: whoever has it may take minutes."""
        with self._writing():
            for directory in (self._models, self._incoming, self._trash):
                directory.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.root / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip()
                raise StoreBusy(
                    f"The store {self.root} is being changed by process {holder or 'unknown'}. "
                    "Try again when that has ended."
                ) from None
            os.ftruncate(descriptor, 0)
            with suppress(OSError):  # a full disk has no room for it, and must not keep `rm` and `gc` from their work
                os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
            yield
        finally:
            os.close(descriptor)  # releases the lock

    def _sweep(self) -> int:
        """Delete everything in incoming/ and trash/. The lock is held, so nobody works there."""
        freed = 0
        with self._writing():
            for directory in (self._incoming, self._trash):
                for leftover in directory.iterdir():
                    freed += _disk_bytes(leftover)
                    shutil.rmtree(leftover)
                sync_file(directory)
        return freed

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StoreError(
                f"The store {self.root} cannot be written: {error}. Check its permissions and its disk."
            ) from error


def _directory(name: str) -> str:
    """The name of a model's directory: its slash becomes %2F, so that all models lie side by side."""
    return quote(name, safe="")


def _disk_bytes(path: Path) -> int:
    return sum(file.lstat().st_blocks * 512 for file in path.rglob("*"))
