"""Making the real parts of a shard and putting them together. Imported in the worker's process only.

Importing this module imports torch and transformers, which takes seconds: a worker does it before it says that it is
ready, and not when the first request waits.
"""

from __future__ import annotations

from functools import partial

from engine.engine import Engine
from engine.model import BoundModel
from swapper.errors import ConfigError
from swapper.host_frames import HostFramePool
from swapper.pread import PreadReader
from swapper.readers import Reader
from worker.protocol import WorkerReady, WorkerSpec
from worker.shard import Shard


def open_shard(spec: WorkerSpec) -> tuple[Shard, WorkerReady]:
    """Raises ConfigError when the machine cannot give what the spec asks for."""
    pool = HostFramePool(spec.frames, spec.page_bytes)
    make_engine = partial(
        Engine,
        pool,
        max_batch_tokens=spec.max_batch_tokens,
        max_batch_sequences=spec.max_batch_sequences,
        compute_threads=spec.compute_threads,
    )
    shard = Shard(spec, pool, _make_reader(spec), make_engine, BoundModel.bind)
    return shard, WorkerReady(device="cpu", reader=spec.reader, frames=pool.frames)


def _make_reader(spec: WorkerSpec) -> Reader:
    if spec.reader == "pread":
        return PreadReader(spec.read_threads)
    if spec.reader == "kvikio":
        from swapper.kvikio_reader import KvikioReader

        return KvikioReader(spec.read_threads)
    raise ConfigError(f"There is no reader {spec.reader!r}; use pread or kvikio.")
