"""Numbers of the host on their way to a device, past the pages that are on theirs.

While a GPU's copy engine has copies of one stream to do, another stream's wait: a decode that needed a few hundred
bytes stood still until all of a neighbour's pages were in. So a kernel fetches them from pinned memory, in the order of
its stream.
"""

from __future__ import annotations

import threading
from collections import deque
from functools import cache

import numpy as np
import numpy.typing as npt
import torch

Numbers = npt.NDArray[np.int64]

_BLOCK = 1024
"""Numbers that one program of the kernel fetches."""

_lock = threading.Lock()  # guards what is under way


class Pinned:
    """Pinned memory in which numbers are put together. It is not written again before the device has them."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._fetched = torch.cuda.Event() if self._on_gpu else None  # type: ignore[no-untyped-call]
        self._memory = torch.empty(0, dtype=torch.int64)
        self.numbers(size)

    def numbers(self, size: int) -> Numbers:
        """The first numbers of it, to be written; there is room for so many."""
        if self._fetched is not None:
            self._fetched.synchronize()
        if size > self._memory.numel():
            self._memory = torch.empty(2 * size, dtype=torch.int64, pin_memory=self._on_gpu)
        host: Numbers = self._memory.numpy()[:size]
        return host

    def upload(self, target: torch.Tensor) -> None:
        """Have as many of its first numbers as fill `target` put there. Nobody waits for it."""
        _launch(self._memory[: target.numel()], target)
        if self._fetched is not None:
            self._fetched.record()


def upload(numbers: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the host, of numbers of eight bytes, on a device. Nobody waits for it."""
    if device.type == "cpu":
        return numbers
    pinned, target = numbers.pin_memory(), torch.empty_like(numbers, device=device)
    _launch(pinned, target)
    fetched = torch.cuda.Event()  # type: ignore[no-untyped-call]
    fetched.record()
    under_way = _under_way(device)
    with _lock:
        while under_way and under_way[0][0].query():  # type: ignore[no-untyped-call]
            under_way.popleft()
        under_way.append((fetched, pinned))
    return target


@cache
def _under_way(device: torch.device) -> deque[tuple[torch.cuda.Event, torch.Tensor]]:
    """Memory that kernels may still read: of rehearsals, and of as many passes as are launched ahead."""
    return deque()


def _launch(source: torch.Tensor, target: torch.Tensor) -> None:
    if target.device.type == "cpu":
        target.copy_(source)
        return
    from engine.triton_kernels import fetch_kernel

    count = source.numel()
    programs = -(-count // _BLOCK)
    if programs:
        # As integers, whatever they are: for each type there would be another kernel to compile.
        fetch_kernel[(programs,)](source.view(torch.int64), target.view(torch.int64), count, BLOCK=_BLOCK)
