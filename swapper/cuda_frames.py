"""Frames on a GPU: physical memory that is created once and mapped where it is needed, by CUDA's virtual memory.

A region is a range of reserved addresses: it costs nothing, and a kernel that touches a page of it without a frame ends
the process's CUDA context. `map` puts frames behind a run of pages, and gives access to the whole run in one call:
while many threads use the driver, as kvikio's do, each call waits for its turn. `unmap` takes a run away in one.
Frames are made so that network cards and NVMe drives may reach them (where the device can), and so that they can be
handed to other processes.

The driver does not wait for kernels before it unmaps, so `unmap` does: by the guard of whoever computes on the region,
so that nobody waits for another model's passes or pages, and where there is none, for the whole device.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from swapper import libc
from swapper.base_pool import BasePool
from swapper.cuda_driver import CudaDevice, call, driver
from swapper.errors import ConfigError, DeviceError, OutOfFrames
from swapper.frames import Frame, Region
from swapper.geometry import pages
from swapper.peer_protocol import DESCRIPTORS_AT_ONCE

HANDLE_TYPE = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


@dataclass(frozen=True, slots=True)
class _Staging:
    """One thread's way to look at bytes on the device."""

    stream: Any
    buffer: int  # the address of a page's worth of pinned memory


class CudaFramePool(BasePool):
    """A `FramePool` of one GPU's memory."""

    def __init__(self, device: CudaDevice, frames: int, page_bytes: int) -> None:
        """Raises ConfigError if the GPU has not that much free memory, or cannot map pages of that size."""
        if frames <= 0:
            raise ConfigError(f"A frame pool needs at least one frame, not {frames}.")
        self._properties = _properties(device)
        granularity = int(
            call(
                driver.cuMemGetAllocationGranularity,
                self._properties,
                driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM,
            )
        )
        if page_bytes <= 0 or page_bytes % granularity:
            raise ConfigError(
                f"{device.name} maps memory in pieces of {granularity:,} bytes: the page size must be a multiple "
                f"of that, not {page_bytes:,}."
            )
        super().__init__(frames, page_bytes)
        self.device = f"cuda:{device.ordinal}"
        self._device = device
        self._access = driver.CUmemAccessDesc()
        self._access.location = self._properties.location
        self._access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self._staging = threading.local()
        self._stagings: list[_Staging] = []
        self._handles = self._create(frames)

    def peek(self, address: int, nbytes: int) -> memoryview:
        self._device.enter()
        staging: _Staging | None = getattr(self._staging, "mine", None)
        if staging is None:
            staging = self._staging.mine = self._make_staging()
        call(driver.cuMemcpyDtoHAsync, staging.buffer, address, nbytes, staging.stream)
        call(driver.cuStreamSynchronize, staging.stream)
        return libc.view(staging.buffer, nbytes)

    def export(self) -> Iterator[Sequence[int]]:
        for first in range(0, self.frames, DESCRIPTORS_AT_ONCE):
            self._device.enter()
            yield [
                int(call(driver.cuMemExportToShareableHandle, handle, HANDLE_TYPE, 0))
                for handle in self._handles[first : first + DESCRIPTORS_AT_ONCE]
            ]

    @contextmanager
    def blank(self, nbytes: int) -> Iterator[Region]:
        """A region all of whose pages show one page of zeros, which is no frame of the pool's.

        For running what only needs addresses that can be touched. Whoever does has waited for its end.
        """
        self._device.enter()
        count = max(1, pages(nbytes, self.page_bytes))
        address = self._reserve(count * self.page_bytes)
        handle = call(driver.cuMemCreate, self.page_bytes, self._properties, 0)
        mapped = 0
        try:
            for page in range(count):
                call(driver.cuMemMap, address + page * self.page_bytes, self.page_bytes, 0, handle, 0)
                mapped += 1
            call(driver.cuMemSetAccess, address, count * self.page_bytes, [self._access], 1)
            call(driver.cuMemsetD8, address, 0, self.page_bytes)
            yield Region(address, count * self.page_bytes, self.device)
        finally:
            if mapped:
                call(driver.cuMemUnmap, address, mapped * self.page_bytes)
            call(driver.cuMemRelease, handle)
            self._unreserve(address, count * self.page_bytes)

    def close(self) -> None:
        self._device.fence()
        for region, mapped in self._forget_regions():
            for page in mapped:
                call(driver.cuMemUnmap, region.address + page * self.page_bytes, self.page_bytes)
            self._unreserve(region.address, region.nbytes)
        while self._handles:
            call(driver.cuMemRelease, self._handles.pop())
        while self._stagings:
            staging = self._stagings.pop()
            call(driver.cuMemFreeHost, staging.buffer)
            call(driver.cuStreamDestroy, staging.stream)

    def _create(self, frames: int) -> list[Any]:
        free = self._device.free_bytes()
        wanted = frames * self.page_bytes
        handles: list[Any] = []
        try:
            if wanted > free:
                raise DeviceError("There is too little memory.")
            for _ in range(frames):
                handles.append(call(driver.cuMemCreate, self.page_bytes, self._properties, 0))
        except DeviceError as error:
            for handle in handles:
                call(driver.cuMemRelease, handle)
            raise ConfigError(
                f"The frame pool wants {wanted:,} bytes of GPU memory, but only {free:,} are free on "
                f"{self._device.name}. Make memory.pool smaller, or end other programs that use this GPU."
            ) from error
        return handles

    def _reserve(self, nbytes: int) -> int:
        self._device.enter()
        return int(call(driver.cuMemAddressReserve, nbytes, 0, 0, 0))

    def _unreserve(self, address: int, nbytes: int) -> None:
        self._device.enter()
        call(driver.cuMemAddressFree, address, nbytes)

    def _map(self, address: int, frames: Sequence[Frame]) -> None:
        self._device.enter()
        end = address
        try:
            for frame in frames:
                call(driver.cuMemMap, end, self.page_bytes, 0, self._handles[frame.index], 0)
                end += self.page_bytes
            call(driver.cuMemSetAccess, address, end - address, [self._access], 1)
        except DeviceError as error:
            if end > address:
                with suppress(DeviceError):
                    call(driver.cuMemUnmap, address, end - address)
            raise OutOfFrames(f"A frame cannot be mapped on {self._device.name}: {error}") from error

    def _settle(self) -> None:
        self._device.fence()

    def _unmap(self, address: int, count: int) -> None:
        self._device.enter()
        call(driver.cuMemUnmap, address, count * self.page_bytes)

    def _make_staging(self) -> _Staging:
        stream = call(driver.cuStreamCreate, driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
        staging = _Staging(stream, int(call(driver.cuMemHostAlloc, self.page_bytes, 0)))
        self._stagings.append(staging)
        return staging


def _properties(device: CudaDevice) -> Any:
    properties = driver.CUmemAllocationProp()
    properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = device.ordinal
    if device.has("HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED"):
        properties.requestedHandleTypes = HANDLE_TYPE
    if device.has("GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED"):
        properties.allocFlags.gpuDirectRDMACapable = 1
    return properties
