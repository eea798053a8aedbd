"""Jobs that go on after the request that started them was answered."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from swapper.errors import Refused

logger = logging.getLogger(__name__)

Act = Callable[[str], Awaitable[None]]


class Background:
    """At most one job of each name runs at a time, which bounds them."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def start(self, name: str, act: Act, model: str) -> None:
        if name in self._tasks:
            return

        async def run() -> None:
            try:
                await act(model)
            except Refused as refusal:
                logger.warning("%s was refused: %s", name, refusal)
            finally:
                del self._tasks[name]

        self._tasks[name] = asyncio.create_task(run(), name=name)

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
