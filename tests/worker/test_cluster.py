"""A Ray that is there already can be joined instead, and outlives the daemon."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from swapper.errors import WorkerError
from worker import reaper
from worker.cluster import Cluster

PATIENCE = 60.0

DRIVER = """
import asyncio, sys
from functools import partial
from worker.cluster import Cluster
from worker.group import WorkerGroup
from worker.place import Place
from worker.protocol import WorkerSpec

async def main():
    cluster = await Cluster.start(sys.argv[1])
    group = WorkerGroup("g", [WorkerSpec("g", 0, frames=4, page_bytes=2 << 20)], partial(Place.take, cluster))
    await group.start()
    print(group.workers[0].pid, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await group.stop()
    await cluster.stop()

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Somebody else's Ray, with one CPU to give."""
    instance = uuid.uuid4().hex
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as directory:
        ray = [sys.executable, "-m", "ray.scripts.scripts"]
        subprocess.run(
            [
                *ray,
                "start",
                "--head",
                "--num-cpus=1",
                "--port=0",
                f"--temp-dir={directory}",
                "--include-dashboard=false",
                "--disable-usage-stats",
                "--object-store-memory=80000000",
            ],
            env={**os.environ, reaper.VARIABLE: instance, "SPT_NOENV": "1", "RAY_AUTH_MODE": "disabled"},
            check=True,
            capture_output=True,
            timeout=PATIENCE,
        )
        yield Path(directory, "ray_current_cluster").read_text().strip()
        reaper.reap(instance, time.monotonic() + PATIENCE)


def join(address: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", DRIVER, address],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "RAY_AUTH_MODE": "disabled"},
    )


@pytest.mark.parametrize("end", ["stop", "SIGKILL"])
def test_a_joined_ray_loses_the_worker_and_nothing_else(address: str, end: str) -> None:
    with join(address) as driver:
        assert driver.stdout is not None
        worker = psutil.Process(int(driver.stdout.readline()))
        raylet = worker.parent()
        assert raylet is not None
        if end == "stop":
            assert driver.communicate("", timeout=PATIENCE) == ("", "")
            assert driver.returncode == 0
        else:
            driver.kill()
        _, alive = psutil.wait_procs([worker], timeout=10.0)
        assert not alive
        assert raylet.is_running()


def test_an_address_where_no_ray_is_fails_with_a_sentence() -> None:
    with join("127.0.0.1:9") as driver:
        _, err = driver.communicate("", timeout=PATIENCE)
    assert driver.returncode != 0
    assert "WorkerError: Ray at 127.0.0.1:9 could not be joined" in err


def test_a_second_ray_in_one_process_is_refused(cluster: Cluster, loop: asyncio.Runner) -> None:
    with pytest.raises(WorkerError, match="connected to a Ray already"):
        loop.run(Cluster.start())
