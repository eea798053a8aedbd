"""What a GPU tells by NVML, with a library that stands in for it: sums and shares since a reset, or nothing at all."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from worker.nvml import GpuMeter

DEVICE = torch.device("cuda:0")


class FakeNvml:
    """A GPU that used 5 J, and was busy at 50 and 100 % in the last two samples."""

    NVML_GPU_UTILIZATION_SAMPLES = 1

    class NVMLError(Exception): ...

    def __init__(self) -> None:
        self.millijoules = 1000
        self.samples = [(1, 10)]

    def nvmlInit(self) -> None: ...

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        return uuid

    def nvmlDeviceGetMemoryInfo(self, gpu: str) -> Any:
        assert gpu == "GPU-abc"
        return SimpleNamespace(used=7 << 30)

    def nvmlDeviceGetTotalEnergyConsumption(self, gpu: str) -> int:
        return self.millijoules

    def nvmlDeviceGetSamples(self, gpu: str, kind: int, since: int) -> Any:
        return 1, [
            SimpleNamespace(timeStamp=at, sampleValue=SimpleNamespace(uiVal=value)) for at, value in self.samples
        ]


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    nvml = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)  # type: ignore[arg-type]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="abc"))
    return nvml


def test_readings_are_of_the_time_since_the_reset(nvml: FakeNvml) -> None:
    meter = GpuMeter(DEVICE)
    meter.reset()
    nvml.millijoules = 6000
    nvml.samples += [(2, 50), (3, 100)]
    assert meter.readings() == {"nvml": 7 << 30, "joules": 5.0, "gpu_busy": 0.75}


def test_what_a_gpu_does_not_know_is_left_out(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_: object) -> None:
        raise FakeNvml.NVMLError

    for name in ("nvmlDeviceGetTotalEnergyConsumption", "nvmlDeviceGetSamples"):
        monkeypatch.setattr(FakeNvml, name, unsupported)
    meter = GpuMeter(DEVICE)
    meter.reset()
    assert meter.readings() == {"nvml": 7 << 30}


def test_without_the_library_nothing_is_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    meter = GpuMeter(DEVICE)
    meter.reset()
    assert meter.readings() == {}
    assert "nvidia-ml-py" in caplog.text
