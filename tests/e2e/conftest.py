"""One real daemon: SmolLM2 and two siblings, in memory that holds two thirds of their pages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI

from server.demo.daemon import DaemonProcess
from server.demo.run import PAGE_BYTES, add_models, pool_frames
from swapper.image import Image
from swapper.store import Store
from tests.e2e.client import Client

MAX_QUEUE = 32
IMPATIENT = "smollm2-middle"


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Image]:
    """The three models, packed: `smollm2`, `smollm2-middle` and `smollm2-late`."""
    scratch = tmp_path_factory.mktemp("models")
    return add_models(Store(scratch / "store"), scratch)


@pytest.fixture(scope="session")
def config(images: dict[str, Image]) -> dict[str, Any]:
    """A daemon's configuration in which two of the three models fit, about."""
    frames, _, _ = pool_frames(images)
    return {
        "store": str(images["smollm2"].path.parents[1]),
        "memory": {"pool": frames * PAGE_BYTES, "page": PAGE_BYTES},
        "scheduler": {"max_queue": MAX_QUEUE},
        "models": {IMPATIENT: {"max_wait": 0.5}},
    }


@pytest.fixture(scope="module")
def daemon(config: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    with DaemonProcess(tmp_path_factory.mktemp("daemon"), config) as running:
        yield running
        assert running.process.poll() is None, "the daemon died: " + "\n".join(running.output)


@pytest.fixture
def client(daemon: DaemonProcess) -> Iterator[Client]:
    """A client of the daemon, which is left with nothing pinned and nothing running."""
    with Client(daemon.url) as client:
        yield client
        for model in client.models().values():
            client.post(f"/admin/models/{model['name']}/unpin").raise_for_status()
        client.until(lambda: all(m["running"] == m["waiting"] == 0 for m in client.models().values()))


@pytest.fixture
def openai(daemon: DaemonProcess) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{daemon.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client
