"""Profiling without a daemon: a private one is started for the model's mesh, once for each setting of the engine."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from server.config import ENV_PREFIX, Config, GroupConfig, PoolSection
from server.demo.daemon import DaemonProcess
from swapper.image import Image

GROUP = "profile"
TOLD_LINES = 20
"""Of its log, if something goes wrong."""

WAIT = 600.0
"""Seconds: a batch larger than memory waits in the queue on purpose."""

DTYPES = ("float32", "float16", "bfloat16")

SWITCHES: Mapping[str, Mapping[str, Any]] = {
    "chunk-128": {"max_batch_tokens": 128},
    "chunk-2048": {"max_batch_tokens": 2048},
    "no-graphs": {"graphs": False},
    "plain-attention": {"attention": "plain"},
    **{dtype: {} for dtype in DTYPES},
}
"""What a sweep may be repeated with: settings of `cluster`, or another type of weights."""


@contextmanager
def private_daemon(
    config: Config, store: Path, image: Image, most: int, switch: Mapping[str, Any], one_pool: bool
) -> Iterator[str]:
    """A daemon with one group of the model's shape; yields its URL. `most` requests may come at once."""
    with TemporaryDirectory(prefix="gswapd-profile-") as directory:
        settings = private_settings(config, store, image, most, switch, one_pool)
        # What the environment says of the configuration is in `settings` already, and would go before them.
        env = {name: value for name, value in os.environ.items() if not name.upper().startswith(ENV_PREFIX)}
        with DaemonProcess(Path(directory), settings, env=env) as daemon:
            try:
                yield daemon.url
            except BaseException:
                print("The daemon's last lines:", *list(daemon.output)[-TOLD_LINES:], sep="\n", file=sys.stderr)
                raise


def private_settings(
    config: Config, store: Path, image: Image, most: int, switch: Mapping[str, Any], one_pool: bool
) -> dict[str, Any]:
    """The configuration in force, with one group: like the first that it has of the model's shape, if any; but with
    `one_pool`, `memory.pool` goes for it."""
    manifest = image.manifest
    settings = config.model_dump(mode="json", include={"storage", "timeouts"}, exclude_unset=True)
    cluster = config.cluster.model_dump(mode="json", exclude={"groups", "ray_address"}, exclude_unset=True)
    same_shape = (its for its in config.cluster.groups if (its.tp, its.pp) == (manifest.tp, manifest.pp))
    like = next(same_shape, GroupConfig())
    without = {"name", "node", "pool"} if one_pool else {"name", "node"}
    settings |= {
        "store": str(store),
        "timeouts": {**settings.get("timeouts", {}), "request": WAIT},
        "server": {"max_requests": max(most, config.server.max_requests)},
        "scheduler": {"max_queue": most, "max_queue_total": most},
        "memory": _section(config.memory, set()),
        "cluster": {
            **cluster,
            "groups": [{**_section(like, without), "name": GROUP, "tp": manifest.tp, "pp": manifest.pp}],
            **switch,
        },
    }
    return settings


def _section(section: PoolSection, without: set[str]) -> dict[str, Any]:
    """What was set in a section; a share of memory stays one, of whatever the worker is on."""
    settings = section.model_dump(mode="json", exclude=without, exclude_unset=True)
    if settings.get("pool") is not None and section.gpu_share is not None:
        settings["pool"] = f"{100 * section.gpu_share:g}%"
    return settings
