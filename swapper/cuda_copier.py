"""Copies to a GPU's frames and from them by its copy engines: one lane of traffic for each way they take.

A lane is a stream of its own, so copies run beside the engine's kernels and beside the other lanes, and a thread that
waits for the copies in their order. Streams are non-blocking: no kernel of the legacy stream ever waits for a copy.
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from swapper.copier import Piece
from swapper.cuda_driver import CudaDevice, call, driver
from swapper.errors import DeviceError

LANES_ACROSS = 2
"""Between two H200, copies of a page each ran at 350 GB/s in one stream and at 369 in two; more gave no more."""


class CudaCopier:
    """A `Copier` for a `CudaFramePool`."""

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._up = _Lane(device, "copy-up", driver.cuMemcpyHtoDAsync)
        self._down = _Lane(device, "copy-down", driver.cuMemcpyDtoHAsync)
        self._across = [_Lane(device, f"copy-across-{lane}", driver.cuMemcpyDtoDAsync) for lane in range(LANES_ACROSS)]
        self._turns = itertools.cycle(self._across)

    def pin(self, address: int, nbytes: int) -> None:
        self._device.enter()
        call(driver.cuMemHostRegister, address, nbytes, driver.CU_MEMHOSTREGISTER_PORTABLE)

    def unpin(self, address: int) -> None:
        self._device.enter()
        call(driver.cuMemHostUnregister, address)

    def put(self, source: int, target: int, nbytes: int) -> Future[float]:
        return self._up.copy([(source, target, nbytes)])

    def fetch(self, source: int, target: int, nbytes: int) -> Future[float]:
        return self._down.copy([(source, target, nbytes)])

    def across(self, pieces: Sequence[Piece]) -> Future[float]:
        return next(self._turns).copy(pieces)

    def close(self) -> None:
        for lane in (self._up, self._down, *self._across):
            lane.close()


class _Lane:
    """Copies in one direction, in the order they were asked for."""

    def __init__(self, device: CudaDevice, name: str, copy: Any) -> None:
        self._device = device
        self._copy = copy
        device.enter()
        self._stream = call(driver.cuStreamCreate, driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
        # Whoever asks for copies bounds them: the pager has `depth` reads and a few fills under way.
        self._under_way: queue.SimpleQueue[tuple[Future[float], Any, Any] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # copies are queued in the order of the stream
        self._spare: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()  # pairs of events, of copies that ended
        self._thread = threading.Thread(target=self._wait, name=name, daemon=True)
        self._thread.start()

    def copy(self, pieces: Sequence[Piece]) -> Future[float]:
        future: Future[float] = Future()
        self._device.enter()
        begin, end = self._events()
        with self._lock:
            call(driver.cuEventRecord, begin, self._stream)
            for source, target, nbytes in pieces:
                call(self._copy, target, source, nbytes, self._stream)
            call(driver.cuEventRecord, end, self._stream)
            self._under_way.put((future, begin, end))
        return future

    def _events(self) -> tuple[Any, Any]:
        try:
            return self._spare.get_nowait()
        except queue.Empty:
            flag = driver.CUevent_flags.CU_EVENT_BLOCKING_SYNC
            return call(driver.cuEventCreate, flag), call(driver.cuEventCreate, flag)

    def close(self) -> None:
        self._under_way.put(None)
        self._thread.join()
        self._device.enter()
        while not self._spare.empty():
            for event in self._spare.get():
                call(driver.cuEventDestroy, event)
        call(driver.cuStreamDestroy, self._stream)

    def _wait(self) -> None:
        self._device.enter()
        while (item := self._under_way.get()) is not None:
            future, begin, end = item
            try:
                call(driver.cuEventSynchronize, end)
                seconds = call(driver.cuEventElapsedTime, begin, end) / 1e3
                self._spare.put((begin, end))
            except DeviceError as error:
                future.set_exception(error)
            else:
                future.set_result(seconds)
