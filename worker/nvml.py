"""What a GPU itself tells, by NVIDIA's management library: memory in use, by whomever; how busy it was; its energy.

Ray shows a worker one GPU, and NVML knows nothing of that, so the GPU is found by its UUID.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

logger = logging.getLogger(__name__)


class GpuMeter:
    """Readings since `reset`. A library that does not know one of them, or is not there, leaves it out."""

    def __init__(self, device: torch.device) -> None:
        self._nvml, self._gpu = _open(device)
        self._millijoules: int | None = None
        self._seen = 0  # microseconds of the last sample before the reset

    def reset(self) -> None:
        self._millijoules = self._read("nvmlDeviceGetTotalEnergyConsumption")
        self._seen = max((sample.timeStamp for sample in self._samples()), default=self._seen)

    def readings(self) -> Mapping[str, float]:
        """`nvml` bytes in use, `joules`, and `gpu_busy`, the share of time in which a kernel ran, sampled."""
        found: dict[str, float] = {}
        if (memory := self._read("nvmlDeviceGetMemoryInfo")) is not None:
            found["nvml"] = memory.used
        millijoules = self._read("nvmlDeviceGetTotalEnergyConsumption")
        if millijoules is not None and self._millijoules is not None:
            found["joules"] = (millijoules - self._millijoules) / 1e3
        if samples := [sample.sampleValue.uiVal for sample in self._samples()]:
            found["gpu_busy"] = sum(samples) / len(samples) / 100
        return found

    def _samples(self) -> list[Any]:
        if self._nvml is None:
            return []
        found = self._read("nvmlDeviceGetSamples", self._nvml.NVML_GPU_UTILIZATION_SAMPLES, self._seen)
        return [sample for sample in found[1] if sample.timeStamp > self._seen] if found is not None else []

    def _read(self, name: str, *arguments: Any) -> Any:
        if self._nvml is None:
            return None
        try:
            return getattr(self._nvml, name)(self._gpu, *arguments)
        except self._nvml.NVMLError as error:  # not supported, or no sample yet
            logger.debug("%s: %s", name, error)
            return None


def _open(device: torch.device) -> tuple[Any, Any]:
    """The library and the GPU's handle; nothing, with a warning, where it cannot be had."""
    try:
        import pynvml
    except ImportError:
        logger.warning("nvidia-ml-py is not installed: profiles tell nothing of energy, nor how busy the GPU was.")
        return None, None
    try:
        pynvml.nvmlInit()
        uuid = torch.cuda.get_device_properties(device).uuid
        return pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    except pynvml.NVMLError as error:
        logger.warning("NVML does not answer (%s): profiles tell nothing of energy, nor how busy the GPU was.", error)
        return None, None
