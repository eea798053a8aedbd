"""The host tier's memory: a named file in shared memory, which outlives the process that filled it.

    header | one entry a slot | slots of one page each, aligned to 2 MiB

An entry tells which page a slot holds, with a checksum over its fields. It is written after the page, and wiped before
the slot is filled again; so whenever a process is killed, every entry that reads as valid is one that was written
whole. Whoever adopts an arena checks the pages themselves too, so not even that has to be believed.

The file is owned through a lock (`flock`) that the kernel takes back when its owner dies. An arena that nobody owns is
adopted by a worker of the same name, and removed by any other of the same user.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from collections.abc import Collection
from pathlib import Path

from blake3 import blake3

from swapper import libc
from swapper.contents import ContentKey
from swapper.errors import ConfigError
from swapper.geometry import GRANULE_BYTES

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "gswapd-tier-"

_HEADER = struct.Struct("<16sQQ")  # magic, page size, slots
_HEADER_BYTES = 4096
_MAGIC = b"gswapd tier v1\0\0"
_ENTRY = struct.Struct("<32sQ")  # the page's hash, its length
_CHECKSUM_BYTES = 16
_ENTRY_BYTES = 64


class Arena:
    """One arena, open and owned by this process. Its methods are not to be called for one slot by two threads."""

    def __init__(self, name: str, slots: int, page_bytes: int, directory: Path = SHARED_MEMORY) -> None:
        """Open the arena of that name, or make it. An arena of another shape is made anew.

        Raises ConfigError if another process owns it, or there is not enough shared memory.
        """
        self.slots = slots
        self.page_bytes = page_bytes
        self.path = directory / f"{PREFIX}{name}"
        self.data_start = -(-(_HEADER_BYTES + slots * _ENTRY_BYTES) // GRANULE_BYTES) * GRANULE_BYTES
        self._nbytes = self.data_start + slots * page_bytes
        self._fd = _own(self.path)
        try:
            self._shape()
            self._base = libc.mmap(0, self._nbytes, libc.PROT_READ | libc.PROT_WRITE, libc.MAP_SHARED, self._fd)
        except BaseException:
            os.close(self._fd)
            raise
        self._entries = libc.view(self._base + _HEADER_BYTES, slots * _ENTRY_BYTES)

    def address(self, slot: int) -> int:
        return self._base + self.data_start + self.offset(slot)

    def offset(self, slot: int) -> int:
        """Where a slot begins, counted from the first one."""
        return slot * self.page_bytes

    def populate(self, first: int, count: int) -> None:
        """Put memory behind slots. Raises OSError if there is none."""
        offset = self.data_start + first * self.page_bytes
        try:
            libc.populate(self._base + offset, count * self.page_bytes)
        except OSError as error:
            if error.errno != errno.EINVAL:  # an older kernel
                raise
            os.posix_fallocate(self._fd, offset, count * self.page_bytes)

    def entry(self, slot: int) -> ContentKey | None:
        """Which page a slot holds, as far as its entry can be believed."""
        at = slot * _ENTRY_BYTES
        fields = bytes(self._entries[at : at + _ENTRY.size])
        if bytes(self._entries[at + _ENTRY.size :][:_CHECKSUM_BYTES]) != _checksum(slot, fields):
            return None
        digest, nbytes = _ENTRY.unpack(fields)
        return (digest.hex(), nbytes) if 0 < nbytes <= self.page_bytes else None

    def enter(self, slot: int, key: ContentKey) -> None:
        """Say that a slot holds a page, which it does."""
        fields = _ENTRY.pack(bytes.fromhex(key[0]), key[1])
        at = slot * _ENTRY_BYTES
        self._entries[at : at + _ENTRY.size] = fields
        self._entries[at + _ENTRY.size :][:_CHECKSUM_BYTES] = _checksum(slot, fields)

    def wipe(self, slot: int) -> None:
        """Say that a slot holds nothing: before it is written to."""
        at = slot * _ENTRY_BYTES
        self._entries[at : at + _ENTRY_BYTES] = bytes(_ENTRY_BYTES)

    def close(self) -> None:
        """Remove the arena and give its memory back. A process that ends without this leaves it to be adopted."""
        self.path.unlink(missing_ok=True)
        self._entries.release()
        libc.munmap(self._base, self._nbytes)
        os.close(self._fd)

    def _shape(self) -> None:
        """Make the file this arena's size and form, unless it is."""
        header = _HEADER.pack(_MAGIC, self.page_bytes, self.slots)
        if os.fstat(self._fd).st_size != self._nbytes or os.pread(self._fd, _HEADER.size, 0) != header:
            os.ftruncate(self._fd, 0)
        room = os.fstatvfs(self._fd)
        available = room.f_bavail * room.f_frsize + os.fstat(self._fd).st_blocks * 512
        if self._nbytes > available:
            self.path.unlink(missing_ok=True)
            raise ConfigError(
                f"The host tier wants {self._nbytes:,} bytes of shared memory, but {self.path.parent} has only "
                f"{available:,} free. Make memory.host_tier smaller, or {self.path.parent} larger "
                f"(mount -o remount,size=… {self.path.parent})."
            )
        os.ftruncate(self._fd, self._nbytes)
        os.pwrite(self._fd, header, 0)


def remove_orphans(keep: Collection[str], directory: Path = SHARED_MEMORY) -> list[Path]:
    """Remove this user's arenas that no process owns, but for those named in `keep`; returns them."""
    arenas = directory.glob(f"{PREFIX}*")
    return [path for path in arenas if path.name.removeprefix(PREFIX) not in keep and _remove(path)]


def remove_arena(name: str, directory: Path = SHARED_MEMORY) -> bool:
    """Remove an arena that no process owns any more. False: there is none, or it is owned."""
    return _remove(directory / f"{PREFIX}{name}")


def _remove(path: Path) -> bool:
    try:
        if path.stat().st_uid != os.getuid():
            return False
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:  # gone meanwhile
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink(missing_ok=True)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True


def _own(path: Path) -> int:
    """A descriptor of the file at `path`, locked. Raises ConfigError if somebody else holds the lock."""
    while True:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise ConfigError(f"The host tier's memory {path} cannot be opened: {error.strerror}.") from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            raise ConfigError(
                f"The host tier's memory {path} is in use by another worker; does a second daemon run on this store?"
            ) from None
        if os.fstat(fd).st_nlink:
            return fd
        os.close(fd)  # it was removed between the two calls


def _checksum(slot: int, fields: bytes) -> bytes:
    return blake3(slot.to_bytes(8, "little") + fields).digest(_CHECKSUM_BYTES)
