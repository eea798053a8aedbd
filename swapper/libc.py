"""The few calls into the C library that Python's own modules do not offer: `mmap` at a given address and its like.

They go through `ctypes.CDLL`, which lets go of the GIL for the length of a call, and raise OSError with the
kernel's reason.
"""

from __future__ import annotations

import ctypes
import os

PROT_NONE = 0
PROT_READ = 1
PROT_WRITE = 2
MAP_SHARED = 0x01
MAP_PRIVATE = 0x02
MAP_FIXED = 0x10
MAP_ANONYMOUS = 0x20
MAP_NORESERVE = 0x4000
MAP_POPULATE = 0x8000

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int64,
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)

MADV_POPULATE_WRITE = 23

_M_MMAP_THRESHOLD = -3  # of malloc.h
_MAP_FAILED = ctypes.c_void_p(-1).value


def mmap(address: int, nbytes: int, protection: int, flags: int, fd: int = -1, offset: int = 0) -> int:
    """Map memory; returns its address. `address` 0 lets the kernel choose."""
    result: int | None = _libc.mmap(address or None, nbytes, protection, flags, fd, offset)
    if result is None or result == _MAP_FAILED:
        raise _error("mmap")
    return result


def keep_no_large_blocks() -> None:
    """Have the allocator give every freed block of a megabyte or more back to the system at once, in this process.

    By default it learns to keep larger and larger ones, and their gaps with them.
    """
    _libc.mallopt(_M_MMAP_THRESHOLD, 1 << 20)


def munmap(address: int, nbytes: int) -> None:
    if _libc.munmap(address, nbytes):
        raise _error("munmap")


def populate(address: int, nbytes: int) -> None:
    """Put memory behind all of a mapping now, as writing to each page of it would (Linux 5.14)."""
    if _libc.madvise(address, nbytes, MADV_POPULATE_WRITE):
        raise _error("madvise")


def mincore(address: int, nbytes: int) -> bytes:
    """One byte for each memory page of a mapping: 1 if that page is in memory, 0 if it is not."""
    vector = ctypes.create_string_buffer(-(-nbytes // os.sysconf("SC_PAGE_SIZE")))
    if _libc.mincore(address, nbytes, vector):
        raise _error("mincore")
    return vector.raw


def view(address: int, nbytes: int) -> memoryview:
    """The bytes at an address, writable. They must stay mapped for as long as anything uses the view."""
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")


def _error(call: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{call}: {os.strerror(number)}")
