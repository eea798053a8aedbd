"""The Ray actor around a shard: one process, one shard, no logic.

Control and polls have a thread each, so that a poll that waits for reports never holds up a command. Ray runs an
actor's calls in the order they were made as long as the actor itself is not concurrent, which concurrency groups
do not make it: commands keep their order.
"""

from __future__ import annotations

import gc
import os
import socket
import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

import ray

from engine.recorder import Recording, TorchProfiler
from worker.protocol import Batch, Command, WorkerReady, WorkerSpec

if TYPE_CHECKING:
    from worker.shard import Shard

SWITCH_INTERVAL = 0.0005
"""Seconds after which a thread that computes in Python lets another one in: a tenth of the default, so that reports
do not queue behind the engine's threads."""

Method = TypeVar("Method", bound=Callable[..., Any])


def _in_group(name: str, **options: Any) -> Callable[[Method], Method]:
    """`ray.method`, with types."""
    decorate: Callable[[Method], Method] = ray.method(concurrency_group=name, **options)
    return decorate


class GswapdWorker:
    def __init__(self) -> None:
        sys.setswitchinterval(SWITCH_INTERVAL)
        self._shard: Shard

    @_in_group("control")
    def identify(self) -> tuple[int, str, str]:
        """This process's id, its Ray node's id, and an address here at which nobody listens.

        Asked first: one that hangs in `open` must be killed, and `open` wants to know where the leader listens.
        """
        host = ray.util.get_node_ip_address()
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.bind((host, 0))
            return os.getpid(), ray.get_runtime_context().get_node_id(), f"{host}:{probe.getsockname()[1]}"

    @_in_group("control")
    def open(self, spec: WorkerSpec) -> WorkerReady:
        """Make the shard. Apart from the constructor, because Ray wraps a constructor's error in a page of text."""
        from worker.assembly import open_shard

        self._shard, ready = open_shard(spec)
        gc.collect()
        gc.freeze()  # the libraries' hundreds of thousands of objects: looking through them takes a tenth of a second
        return ready

    @_in_group("control", num_returns=0)
    def post(self, commands: Sequence[Command]) -> None:
        self._shard.post(commands)

    @_in_group("control")
    def record(self, on: bool, torch_profiler: TorchProfiler) -> Recording | None:
        return self._shard.record(on, torch_profiler)

    @_in_group("poll")
    def poll(self, cursor: int, timeout: float) -> Batch:
        return self._shard.poll(cursor, timeout)


@cache
def actor_class(group: str, rank: int) -> Any:
    """The class to start a rank's worker from: Ray makes its name the process's title, so each rank has its own."""
    named = type(f"gswapd worker {group}/{rank}", (GswapdWorker,), {})
    return ray.remote(
        concurrency_groups={"control": 1, "poll": 1},
        max_restarts=0,  # groups restart their workers: Ray notices a death a second late when it may restart the actor
        max_task_retries=0,
        max_pending_calls=10_000,
    )(named)
