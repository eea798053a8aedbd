"""An event loop whose clock only moves by jumping to the next timer: an hour passes in no time, always the same way."""

from __future__ import annotations

import asyncio
import functools
import selectors
from collections.abc import Callable, Coroutine

LIMIT = 24 * 3600.0
"""Virtual seconds after which a test that waits for something has waited in vain."""


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.now = 1000.0
        super().__init__(_JumpingSelector(self))

    def time(self) -> float:
        return self.now


class _JumpingSelector(selectors.SelectSelector):
    def __init__(self, loop: VirtualTimeLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("nothing will ever happen again: the test waits for what nobody will do")
        self._loop.now += max(0.0, timeout)
        return super().select(0)


def virtual_time(test: Callable[..., Coroutine[None, None, None]]) -> Callable[..., None]:
    """Run a coroutine test on a loop of its own."""

    @functools.wraps(test)
    def run(*args: object, **kwargs: object) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(LIMIT):
                await test(*args, **kwargs)

        with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
            runner.run(bounded())

    return run


async def settle() -> None:
    """Let everything that can happen without time passing happen."""
    for _ in range(50):
        await asyncio.sleep(0)


async def pass_time(seconds: float) -> None:
    await asyncio.sleep(seconds)
    await settle()
