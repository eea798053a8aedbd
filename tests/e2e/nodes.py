"""A Ray of several nodes, on one machine: each node's processes can be killed all at once, as if its power failed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from pathlib import Path
from types import TracebackType

from worker import reaper

PATIENCE = 60.0

ENVIRONMENT = {
    **os.environ,
    "SPT_NOENV": "1",
    "RAY_AUTH_MODE": "disabled",
    "RAY_memory_monitor_refresh_ms": "0",
    # A node that is gone without a word is missed after two seconds, not after fifteen.
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "500",
    "RAY_health_check_failure_threshold": "3",
}


class Node:
    """A node with an address of its own on the loopback interface, as a context manager."""

    def __init__(self, number: int, directory: Path | None = None, head: str | None = None) -> None:
        """The first one has a `directory`, the others the address of the `head`."""
        self.ip = f"127.0.0.{10 + number}"
        self._directory = directory
        self._head = head
        self._instance = uuid.uuid4().hex

    @property
    def address(self) -> str:
        """Where a head is joined."""
        assert self._directory is not None
        return (self._directory / "ray_current_cluster").read_text().strip()

    def start(self) -> None:
        role = (
            [f"--address={self._head}"]
            if self._head is not None
            else ["--head", "--port=0", "--include-dashboard=false", f"--temp-dir={self._directory}"]
        )
        subprocess.run(
            [
                *(sys.executable, "-m", "ray.scripts.scripts", "start", *role),
                *(f"--node-ip-address={self.ip}", "--num-cpus=1"),
                *("--disable-usage-stats", "--object-store-memory=80000000"),
            ],
            env={**ENVIRONMENT, reaper.VARIABLE: self._instance},
            check=True,
            capture_output=True,
            timeout=PATIENCE,
        )

    def kill(self) -> None:
        reaper.reap(self._instance, time.monotonic() + PATIENCE)

    def __enter__(self) -> Node:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.kill()
