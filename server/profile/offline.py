"""Profiling without a daemon: a private one is started for the model's mesh, once for each setting of the engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from server.config import Config
from server.demo.daemon import DaemonProcess
from swapper.image import Image

GROUP = "profile"
WAIT = 600.0
"""Seconds: a batch larger than memory waits in the queue on purpose."""

SWITCHES: Mapping[str, Mapping[str, Any]] = {
    "chunk-128": {"max_batch_tokens": 128},
    "chunk-2048": {"max_batch_tokens": 2048},
    "no-graphs": {"graphs": False},
}
"""Settings of `cluster` that a sweep may be repeated with."""


@contextmanager
def private_daemon(config: Config, store: Path, image: Image, most: int, switch: Mapping[str, Any]) -> Iterator[str]:
    """A daemon with one group of the model's shape; yields its URL. `most` requests may come at once."""
    manifest = image.manifest
    settings = config.model_dump(mode="json", include={"memory", "storage", "timeouts"}, exclude_unset=True)
    cluster = config.cluster.model_dump(mode="json", exclude={"groups", "ray_address"}, exclude_unset=True)
    if "pool" in settings.get("memory", {}) and config.memory.gpu_share is not None:
        settings["memory"]["pool"] = f"{config.memory.gpu_share:.0%}"  # of whatever the worker is on
    settings |= {
        "store": str(store),
        "timeouts": {**settings.get("timeouts", {}), "request": WAIT},
        "server": {"max_requests": max(most, config.server.max_requests)},
        "scheduler": {"max_queue": most, "max_queue_total": most},
        "cluster": {**cluster, "groups": [{"name": GROUP, "tp": manifest.tp, "pp": manifest.pp}], **switch},
    }
    with TemporaryDirectory(prefix="gswapd-profile-") as directory, DaemonProcess(Path(directory), settings) as daemon:
        yield daemon.url
