"""What the core is told once, at its start."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

PolicyName = Literal["gswapd", "lru", "computron"]


@dataclass(frozen=True, slots=True)
class CoreConfig:
    """Limits and times of the scheduler. Times are in seconds.

    `extent_pages` should take about 25 ms to read: one extent is read while the next is queued behind it, so that the
    link never waits for a decision and little is read in vain.
    """

    page_bytes: int  # for messages that name bytes; decisions are made in frames
    max_queue: int = 64  # waiting requests of one model
    max_queue_total: int = 256  # waiting requests in all, and unfinished jobs in all
    max_running: int = 64  # requests of one model that run at once
    extent_pages: int = 8  # pages of one PageIn
    wait_bound: float = 5.0  # a request that waited so long for memory goes before everything younger
    load_backoff: float = 1.0  # pause after a failed page-in or page-out; doubles with each further failure
    load_backoff_max: float = 60.0
    policy: PolicyName = "gswapd"
    time_slice: float | None = None  # a model runs for so long before it is suspended for another's sake; None: never

    def __post_init__(self) -> None:
        for name in ("page_bytes", "max_queue", "max_queue_total", "max_running", "extent_pages"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.policy not in get_args(PolicyName):
            raise ValueError(f"policy is {self.policy!r}; there are {', '.join(get_args(PolicyName))}")
        if self.wait_bound < 0 or not 0 < self.load_backoff <= self.load_backoff_max:
            raise ValueError("times must be positive, and load_backoff at most load_backoff_max")

    def backoff(self, failures: int) -> float:
        """The pause after the `failures`-th failure in a row."""
        return min(self.load_backoff_max, self.load_backoff * 2.0 ** min(failures - 1, 32))
