"""The stream that forward passes of a GPU run on: one of their own, for all models.

One stream keeps passes in the order in which they were launched, also those that give way to one another, and leaves
the pager's copies, which are on other streams, to run beside them. The CPU has none.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch


@cache
def pass_stream(device: torch.device) -> torch.cuda.Stream | None:
    """The stream that all passes of a device run on; None for the CPU."""
    return torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None  # type: ignore[no-untyped-call]


@contextmanager
def on_pass_stream(device: torch.device) -> Iterator[None]:
    """Where a thread runs passes, or what has its order among them."""
    with torch.inference_mode(), torch.cuda.stream(pass_stream(device)):
        yield
