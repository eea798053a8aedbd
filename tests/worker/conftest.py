"""One private Ray and one event loop for all tests of this folder that need them: Ray takes seconds to start."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import uvloop

from worker.cluster import Cluster


@pytest.fixture(scope="session")
def loop() -> Iterator[asyncio.Runner]:
    """The daemon's kind of event loop; tests run coroutines on it."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        yield runner


@pytest.fixture(scope="session")
def cluster(loop: asyncio.Runner) -> Iterator[Cluster]:
    cluster = loop.run(Cluster.start())
    yield cluster
    loop.run(cluster.stop())
