"""NVIDIA's driver, through cuda-bindings: one place that loads it, checks every answer, and names the device.

Only what serves a GPU imports this module. Everything happens in the device's primary context, which torch uses too.
cuda-bindings lets go of the GIL for the length of a call.
"""

from __future__ import annotations

import threading
from typing import Any

from swapper.errors import ConfigError, DeviceError

try:
    from cuda.bindings import driver
except ImportError as error:
    raise ConfigError(
        f"cuda-bindings is not installed ({error}). Install it with: pip install 'gswapd[gpu]', "
        "or set cluster.device to cpu."
    ) from error

__all__ = ["CudaDevice", "call", "capture_lock", "driver"]

capture_lock = threading.RLock()
"""Held while a CUDA graph is captured, and while the context is waited for: the driver cannot do both at once, and the
capture would be lost."""


class CudaDevice:
    """A GPU with its primary context."""

    def __init__(self, ordinal: int = 0) -> None:
        """Raises ConfigError if there is no such GPU."""
        try:
            call(driver.cuInit, 0)
            self._device = call(driver.cuDeviceGet, ordinal)
            self._context = call(driver.cuDevicePrimaryCtxRetain, self._device)
        except (DeviceError, RuntimeError) as error:  # RuntimeError: there is no driver library
            raise ConfigError(
                f"GPU {ordinal} cannot be used: {error} See what `nvidia-smi` says, or set cluster.device to cpu."
            ) from error
        self.ordinal = ordinal
        self._entered = threading.local()
        self.enter()
        self.name: str = call(driver.cuDeviceGetName, 256, self._device).split(b"\0", 1)[0].decode()

    def enter(self) -> None:
        """Make the context this thread's. Calls that need one are preceded by this, whatever thread they are in."""
        if not getattr(self._entered, "here", False):
            call(driver.cuCtxSetCurrent, self._context)
            self._entered.here = True

    def has(self, attribute: str) -> bool:
        """Whether a capability, by its name in `CUdevice_attribute`, is there."""
        name = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{attribute}")
        return bool(call(driver.cuDeviceGetAttribute, name, self._device))

    def free_bytes(self) -> int:
        self.enter()
        free, _ = call(driver.cuMemGetInfo)
        return int(free)

    def fence(self) -> None:
        """Return once all work that was submitted so far is done, in whatever stream."""
        self.enter()
        with capture_lock:
            call(driver.cuCtxSynchronize)

    def close(self) -> None:
        call(driver.cuDevicePrimaryCtxRelease, self._device)


def call(function: Any, *arguments: Any) -> Any:
    """What a driver function returns besides its status. Raises DeviceError where the status is not success."""
    status, *values = function(*arguments)
    if status != driver.CUresult.CUDA_SUCCESS:
        name = status.name.removeprefix("CUDA_ERROR_").replace("_", " ").lower()
        raise DeviceError(f"{function.__name__} failed: {name}.")
    return values[0] if len(values) == 1 else tuple(values)
