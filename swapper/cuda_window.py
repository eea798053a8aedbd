"""A neighbouring GPU's frames, mapped on this one to be read: over NVLink, or over the bus where there is none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from swapper.cuda_driver import CudaDevice, call, driver
from swapper.cuda_frames import HANDLE_TYPE


class CudaWindow:
    """A `Window` of a `CudaFramePool`. The memory lives as long as anybody has it mapped, even if its owner is dead."""

    def __init__(self, device: CudaDevice, frames: int, page_bytes: int) -> None:
        self._device = device
        self._page_bytes = page_bytes
        self._nbytes = frames * page_bytes
        self._handles: list[Any] = []
        device.enter()
        self._base = int(call(driver.cuMemAddressReserve, self._nbytes, 0, 0, 0))
        self._access = driver.CUmemAccessDesc()
        self._access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._access.location.id = device.ordinal
        self._access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READ

    def add(self, descriptors: Sequence[int]) -> None:
        self._device.enter()
        begin = end = self.address(len(self._handles))
        for descriptor in descriptors:
            handle = call(driver.cuMemImportFromShareableHandle, descriptor, HANDLE_TYPE)
            try:
                call(driver.cuMemMap, end, self._page_bytes, 0, handle, 0)
            except BaseException:
                call(driver.cuMemRelease, handle)
                raise
            self._handles.append(handle)
            end += self._page_bytes
        call(driver.cuMemSetAccess, begin, end - begin, [self._access], 1)

    def address(self, frame: int) -> int:
        return self._base + frame * self._page_bytes

    def close(self) -> None:
        self._device.enter()
        if self._handles:
            call(driver.cuMemUnmap, self._base, len(self._handles) * self._page_bytes)
        while self._handles:
            call(driver.cuMemRelease, self._handles.pop())
        call(driver.cuMemAddressFree, self._base, self._nbytes)
