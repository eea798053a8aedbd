"""However the daemon ends, nothing that it started is left 10 s later."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import psutil
import pytest

from worker import reaper

DRIVER = """
import asyncio, sys
from functools import partial
from worker.place import Place
from worker.cluster import Cluster
from worker.group import WorkerGroup
from worker.protocol import WorkerSpec

async def main():
    cluster = await Cluster.start()
    group = WorkerGroup("g", [WorkerSpec("g", 0, frames=4, page_bytes=2 << 20)], partial(Place.take, cluster))
    await group.start()
    print(cluster._private.instance, cluster._private.directory, group.workers[0].pid, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await group.stop()
    await cluster.stop()

asyncio.run(main())
"""


def processes_of(instance: str) -> list[psutil.Process]:
    def is_its(process: psutil.Process) -> bool:
        try:
            return process.environ().get(reaper.VARIABLE) == instance
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            return False

    return [process for process in psutil.process_iter() if is_its(process)]


@pytest.fixture
def driver() -> subprocess.Popen[str]:
    """A small daemon with a Ray and a worker, in a process of its own."""
    with subprocess.Popen(
        [sys.executable, "-c", DRIVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        yield process
        process.kill()


def up(driver: subprocess.Popen[str]) -> tuple[str, Path, list[psutil.Process], psutil.Process]:
    """The driver's instance id, Ray's directory, all processes of it, and the worker among them, once that is up."""
    assert driver.stdout is not None
    instance, directory, pid = driver.stdout.readline().split()
    processes = processes_of(instance)
    worker = psutil.Process(int(pid))
    assert worker in processes
    assert "raylet" in {process.name() for process in processes}
    assert worker.cmdline()[0].startswith("ray::gswapd worker g/0")
    return instance, Path(directory), processes, worker


def test_after_sigkill_of_the_daemon_nothing_is_left_within_10_seconds(driver: subprocess.Popen[str]) -> None:
    instance, directory, processes, worker = up(driver)
    worker.suspend()  # even a worker that cannot notice anything
    began = time.monotonic()
    driver.kill()
    _, alive = psutil.wait_procs(processes, timeout=10.0)
    assert not alive
    assert not processes_of(instance)
    deadline = began + 10.0
    while directory.exists() and time.monotonic() < deadline:
        psutil.wait_procs(processes, timeout=0.05)
    assert not directory.exists()


def test_a_clean_stop_is_silent_and_leaves_nothing(driver: subprocess.Popen[str]) -> None:
    instance, directory, _, _ = up(driver)
    out, err = driver.communicate("", timeout=60)
    assert driver.returncode == 0
    assert (out, err) == ("", "")
    assert not processes_of(instance)
    assert not directory.exists()


def test_only_processes_of_the_instance_are_killed(tmp_path: Path) -> None:
    instance = uuid.uuid4().hex
    sleep = ["sleep", "60"]
    ours = [subprocess.Popen(sleep, env={**os.environ, reaper.VARIABLE: instance}) for _ in range(2)]
    strangers = [
        subprocess.Popen(sleep),
        subprocess.Popen(sleep, env={**os.environ, reaper.VARIABLE: uuid.uuid4().hex}),
    ]
    watchdog = subprocess.Popen(
        [sys.executable, "-I", "-S", reaper.__file__, instance, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert watchdog.stdout is not None
        assert watchdog.stdout.readline() == b"ready\n"
        for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            watchdog.send_signal(ignored)
        assert all(process.poll() is None for process in ours)
        watchdog.communicate(timeout=20)
        assert [process.wait(20) for process in ours] == [-signal.SIGKILL] * 2
        assert all(process.poll() is None for process in strangers)
        assert not tmp_path.exists()
    finally:
        for process in [*ours, *strangers, watchdog]:
            process.kill()
            process.wait()
