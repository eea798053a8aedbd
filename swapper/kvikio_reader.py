"""The reader for GPUs: kvikio, by GPUDirect Storage where the host has it, through pinned bounce buffers where not.

kvikio cuts each read into tasks for its own thread pool and hands out futures of its own, which can only be waited
for. So each read in flight is waited for by a thread of ours, without the GIL. It reads to GPU or host addresses,
and needs the CUDA driver (`libcuda.so.1`) for both.

Through bounce buffers, what the page cache holds is read from there and anything else with `O_DIRECT`, as `PreadReader`
does. kvikio has one switch for that, which a task looks at when it begins: pages of both kinds at once may be read the
slower way, never wrongly.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

from swapper import libc
from swapper.errors import ConfigError, ReadError
from swapper.gds import has_gds
from swapper.page_cache import CacheProbe
from swapper.readers import ReadResult

TASK_BYTES = 8 << 20
"""What one of kvikio's threads reads at a time. 14 or 16 threads × 8 MiB gave the most (49 GB/s) into an H200."""


class KvikioReader:
    """A `Reader` to addresses of one device: "cpu" or "cuda:N".

    `threads` are kvikio's, `waiters` bounds the reads in flight here. kvikio's settings belong to the whole process:
    there is one KvikioReader in it.
    """

    def __init__(self, threads: int = 16, *, device: str = "cpu", waiters: int = 8) -> None:
        """Raises ConfigError if kvikio cannot be used here."""
        self._kvikio = _load()
        self._device = device
        # Compatibility mode is never forced OFF: without a driver kvikio then hangs. AUTO takes GDS if it works.
        self._kvikio.defaults.set({"num_threads": threads, "task_size": TASK_BYTES, "bounce_buffer_size": TASK_BYTES})
        self.source = "gds" if device != "cpu" and has_gds(self._kvikio) else "posix"
        self._direct: bool | None = None  # kvikio's switch, as far as we know
        self._switch = threading.Lock()
        self._waiters = ThreadPoolExecutor(waiters, thread_name_prefix="kvikio")

    def open(self, path: Path) -> KvikioFile:
        try:
            return KvikioFile(path, self._kvikio.CuFile(path, "r"), self)
        except (OSError, RuntimeError) as error:
            raise ReadError(f"{path} cannot be opened by kvikio: {error}") from error

    def submit(self, file: KvikioFile, offset: int, address: int, nbytes: int) -> Future[ReadResult]:
        memory = libc.view(address, nbytes) if self._device == "cpu" else _DeviceMemory(address, nbytes)
        return self._waiters.submit(file.read_now, offset, memory, nbytes)

    def read_directly(self, direct: bool) -> None:
        """Have tasks that begin from now on read past the page cache, or through it."""
        with self._switch:
            if direct != self._direct:
                self._kvikio.defaults.set("auto_direct_io_read", direct)
                self._direct = direct

    def close(self) -> None:
        self._waiters.shutdown()


class KvikioFile:
    """One open shard file. kvikio's handle lives as long as its reads: they hold on to it through this object."""

    def __init__(self, path: Path, file: Any, reader: KvikioReader) -> None:
        self._path = path
        self._file = file
        self._reader = reader
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._cache = CacheProbe(fd)
        finally:
            os.close(fd)

    def read(self, offset: int, address: int, nbytes: int) -> Future[ReadResult]:
        return self._reader.submit(self, offset, address, nbytes)

    def read_now(self, offset: int, memory: memoryview | _DeviceMemory, nbytes: int) -> ReadResult:
        begun = time.perf_counter()
        try:
            if self._reader.source == "posix":
                self._reader.read_directly(not self._cache.holds(offset, nbytes))
            got = self._file.pread(memory, nbytes, offset).get()
        except (OSError, RuntimeError) as error:
            raise ReadError(f"{self._path} cannot be read at offset {offset} by kvikio: {error}") from error
        if got != nbytes:
            raise ReadError(
                f"{self._path} ends at offset {offset + got}, {nbytes - got} bytes short of what was packed: "
                "add the model again."
            )
        return ReadResult(self._reader.source, nbytes, time.perf_counter() - begun)

    def close(self) -> None:
        self._cache.close()
        self._file.close()


class _DeviceMemory:
    """Bytes at an address of a GPU, as kvikio wants to be told of them."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {"data": (address, False), "shape": (nbytes,), "typestr": "|u1", "version": 3}


def _load() -> ModuleType:
    """kvikio, imported only when it is wanted: most hosts without a GPU do not have it."""
    try:
        import kvikio
        import kvikio.cufile_driver
        import kvikio.defaults
    except ImportError as error:
        raise ConfigError(
            f"The reader `kvikio` is not installed ({error}). Install it with: pip install 'gswapd[gpu]', "
            "or set the reader to `pread`."
        ) from error
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise ConfigError(
            f"The reader `kvikio` needs NVIDIA's driver, and this host has none ({error}). Set the reader to `pread`."
        ) from error
    module: ModuleType = kvikio
    return module
