"""A daemon over a scripted scheduler, as a process of its own: `python -m tests.server.daemon_process STORE MODE`."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from pathlib import Path

from server.config import Config
from server.daemon import bind, serve
from server.observers import Observers
from swapper.errors import WorkerError
from tests.server.fakes import FakeScheduler


class ScriptedBackend:
    """Drains like the real one: what was admitted ends first. It says so on standard output."""

    def __init__(self, mode: str) -> None:
        self.scheduler = DrainingScheduler(mode)
        self._mode = mode

    async def start(self) -> None:
        if self._mode == "broken":
            raise WorkerError("The workers cannot be started.")
        if self._mode == "slow":
            print("starting", flush=True)
            await asyncio.Event().wait()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # as Ray puts a handler of its own in place

    async def watch(self) -> None:
        await asyncio.Event().wait()

    async def stop(self) -> None:
        print("stopped", flush=True)


class DrainingScheduler(FakeScheduler):
    def __init__(self, mode: str) -> None:
        super().__init__()
        self._finish = asyncio.Event()
        self.script = [[500], self._finish, [501], "stop"]
        self._mode = mode

    async def drain(self, timeout: float) -> None:
        print("draining", flush=True)
        if self._mode == "stuck":
            await asyncio.Event().wait()
        self._finish.set()


async def main() -> None:
    logging.basicConfig(level=logging.INFO)
    config = Config(store=Path(sys.argv[1]), server={"port": 0}, memory={"pool": "64MiB", "page": "2MiB"})  # type: ignore[arg-type]

    def load() -> Config:
        print("read", flush=True)
        return config

    await serve(config, bind(config.server), ScriptedBackend(sys.argv[2]), Observers(), load)


if __name__ == "__main__":
    try:
        asyncio.run(main())
    except WorkerError as error:
        sys.exit(str(error))
