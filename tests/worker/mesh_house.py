"""Groups of ranks as processes, each with a real shard: pool, pager, engine and its place in a mesh; no Ray.

Processes are forked from a server that has imported torch and transformers once, so a group is up in a second.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.request import GenerationRequest, KvReleased, Resumed, SamplingParams, Suspended, Tokens
from swapper.errors import WorkerError
from swapper.geometry import GRANULE_BYTES
from swapper.image import Image
from tests.engine.test_mesh import free_port
from worker.merge import ReportMerger
from worker.protocol import (
    AddModel,
    Command,
    GrantKv,
    Heartbeat,
    PagedIn,
    PagedOut,
    PageIn,
    PageInFailed,
    PageOut,
    RemoveModel,
    Report,
    Resume,
    Serve,
    Suspend,
    WorkerSpec,
)

if TYPE_CHECKING:
    from worker.shard import Shard

PATIENCE = 30.0  # seconds after which a wait is a failed test
PAGE = GRANULE_BYTES

_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["tests.worker.mesh_house", "worker.assembly", "tests.swapper.paging"])


class MeshHouse:
    """A group as the daemon has it: commands go to every rank, reports of all ranks become the group's."""

    def __init__(self, tp: int, pp: int, frames: int = 24, device: str = "cpu", **spec: int) -> None:
        rendezvous = f"127.0.0.1:{free_port()}"
        self.size = tp * pp
        self.heard: list[Report] = []
        self.frames = frames
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        for rank in range(self.size):
            own, its = _processes.Pipe()
            one = WorkerSpec("g", rank, frames, PAGE, tp=tp, pp=pp, rendezvous=rendezvous, device=device, **spec)
            live = _live if device == "cpu" else _live_on_gpu
            process = _processes.Process(target=live, args=(one, its), daemon=True)
            process.start()
            its.close()
            self._pipes.append(own)
            self._processes.append(process)
        for rank in range(self.size):
            self._answer_of(rank)
        self._merger = ReportMerger(self.size)
        self._cursors = [0] * self.size
        self._heartbeats: list[Heartbeat | None] = [None] * self.size
        self._epochs = 0

    # ---- ranks

    def ask(self, rank: int, what: str, *arguments: object) -> Any:
        self._pipes[rank].send((what, *arguments))
        return self._answer_of(rank)

    def kill(self, rank: int) -> None:
        self._processes[rank].kill()
        self._processes[rank].join(PATIENCE)

    def close(self) -> None:
        for rank in range(self.size):  # the leader first
            self.ask(rank, "close")
            self._processes[rank].join(PATIENCE)
            assert self._processes[rank].exitcode == 0

    def end(self) -> None:
        """Of a group that is broken."""
        for process in self._processes:
            process.kill()
            process.join(PATIENCE)

    def _answer_of(self, rank: int) -> Any:
        assert self._pipes[rank].poll(PATIENCE), f"rank {rank} does not answer"
        answer = self._pipes[rank].recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    # ---- the group

    def post(self, *commands: Command, but: int | None = None) -> None:
        for rank in range(self.size):
            if rank != but:
                self.ask(rank, "post", commands)

    def pump(self, ranks: Iterable[int] | None = None) -> None:
        """Hear what ranks have to say, and do what a group does with it. Raises WorkerError as a group would."""
        for rank in range(self.size) if ranks is None else ranks:
            batch = self.ask(rank, "poll", self._cursors[rank])
            self._cursors[rank] += len(batch.reports)
            self._heartbeats[rank] = batch.heartbeat
            merged, undo = self._merger.merge(rank, batch.reports)
            self.heard += merged
            if undo:
                self.post(*undo, but=rank)

    def listen(self, rank: int) -> None:
        """Hear one rank until it says that it is broken. Raises WorkerError."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            self.pump([rank])

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < deadline, f"not in {PATIENCE:g} s: {self.heard[-10:]}"
            self.pump()

    def answer_to(self, epoch: int) -> Report:
        found: list[Report] = []

        def is_there() -> bool:
            found.extend(report for report in self.heard if getattr(report, "epoch", None) == epoch)
            return bool(found)

        self.until(is_there)
        return found[0]

    # ---- models

    def add(self, image: Image, tokens_kv: int = 4) -> None:
        """Know a model, and let it have so many KV frames."""
        name = image.manifest.model
        self.post(AddModel(name, str(image.path), image.identity))
        self.grant(name, tokens_kv, wait=False)

    def grant(self, model: str, frames: int, wait: bool = True) -> None:
        self._epochs += 1
        self.post(GrantKv(model, frames, self._epochs))
        if wait:
            assert isinstance(self.answer_to(self._epochs), KvReleased)

    def begin_page_in(self, image: Image) -> int:
        """All pages; returns the epoch."""
        self._epochs += 1
        most = max(shard.page_count(PAGE) for shard in image.manifest.shards)
        self.post(PageIn(image.manifest.model, 0, most, self._epochs))
        return self._epochs

    def page_in(self, image: Image) -> None:
        assert isinstance(self.answer_to(self.begin_page_in(image)), PagedIn)

    def page_out(self, model: str, keep: int = 0) -> None:
        self._epochs += 1
        self.post(PageOut(model, keep, self._epochs))
        assert isinstance(self.answer_to(self._epochs), PagedOut)

    def suspend(self, model: str) -> Suspended:
        self._epochs += 1
        self.post(Suspend(model, self._epochs))
        suspended = self.answer_to(self._epochs)
        assert isinstance(suspended, Suspended)
        return suspended

    def resume(self, model: str, kv_frames: int) -> None:
        self._epochs += 1
        self.post(Resume(model, kv_frames, self._epochs))
        assert isinstance(self.answer_to(self._epochs), Resumed)

    def run_ahead(self, model: str) -> None:
        """Have a model that is bound launch passes ahead, as on a GPU."""
        self.ask(0, "ahead", model)

    def fails(self, epoch: int) -> None:
        assert isinstance(self.answer_to(epoch), PageInFailed)

    def remove(self, model: str) -> None:
        self.grant(model, 0)
        self.page_out(model)
        self.post(RemoveModel(model))

    def serve(self, name: str, model: str, prompt: Sequence[int], length: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=length)
        self.post(Serve(GenerationRequest(name, model, tuple(prompt), params)))

    def tokens(self, name: str) -> tuple[int, ...]:
        """A request's whole answer, once it is there."""
        self.until(lambda: self.is_answered(name))
        return tuple(token for report in self._of(name) for token in report.tokens)

    def is_answered(self, name: str) -> bool:
        return any(report.finish is not None for report in self._of(name))

    def _of(self, name: str) -> list[Tokens]:
        return [report for report in self.heard if isinstance(report, Tokens) and report.request == name]

    def check_frames(self) -> None:
        """Every frame of every rank is free, as it is when nothing is in."""
        self.until(lambda: all(beat is not None and beat.frames_free == beat.frames for beat in self._heartbeats))


class _Reader:
    """Reads at once, but for pages that are held back, and pages that fail."""

    def __init__(self) -> None:
        from tests.swapper.paging import FaultyReader

        self.held_from = 1 << 30
        self.failing = 1 << 30
        self._held: list[Any] = []
        self._reader = FaultyReader(lambda path, page: page >= self.failing)

    def open(self, path: Path) -> _File:
        return _File(self, self._reader.open(path))

    def release(self) -> None:
        self.held_from = 1 << 30
        held, self._held = self._held, []
        for read in held:
            read.fail() if read.page >= self.failing else read.finish()

    def hold(self, read: Any) -> None:
        self._held.append(read)

    def close(self) -> None: ...


class _File:
    def __init__(self, reader: _Reader, file: Any) -> None:
        self._reader = reader
        self._file = file

    def read(self, offset: int, address: int, nbytes: int) -> Any:
        from tests.swapper.paging import PendingRead

        read = PendingRead(self._file._path, offset, address, nbytes)
        if read.page < self._reader.held_from:
            return self._file.read(offset, address, nbytes)
        self._reader.hold(read)
        return read.future

    def close(self) -> None:
        self._file.close()


def _live(spec: WorkerSpec, pipe: Connection) -> None:
    """A rank's process."""
    import torch

    from engine.engine import open_engine
    from engine.mesh import Mesh, MeshRank
    from engine.model import BoundModel
    from swapper.host_frames import HostFramePool
    from worker.shard import Shard

    reader = _Reader()
    pool = HostFramePool(spec.frames, spec.page_bytes)
    mesh = Mesh.join(MeshRank(spec.tp, spec.pp, spec.rank), spec.rendezvous, torch.device("cpu"), PATIENCE)
    engine = partial(
        open_engine,
        pool,
        mesh=mesh,
        max_batch_tokens=spec.max_batch_tokens,
        max_batch_sequences=spec.max_batch_sequences,
        suspended_bytes=spec.suspended_bytes,
    )
    _serve(Shard(spec, pool, reader, engine, partial(BoundModel.bind, mesh=mesh)), reader, pipe)


def _live_on_gpu(spec: WorkerSpec, pipe: Connection) -> None:
    """The same on a GPU of its own, as the daemon's workers are made; where there is only one, all ranks share it."""
    if Path("/dev/nvidia1").exists():
        os.environ["CUDA_VISIBLE_DEVICES"] = str(spec.rank)  # as Ray does; CUDA has not begun here yet
    else:  # NCCL refuses two ranks of one host on one GPU: each says that it is a host of its own, and they use sockets
        os.environ |= {"NCCL_HOSTID": f"rank {spec.rank}", "NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo"}
    from worker.assembly import open_shard

    _serve(open_shard(spec)[0], _Reader(), pipe)


def _serve(shard: Shard, reader: _Reader, pipe: Connection) -> None:
    """Do what the test asks for, until it says that it is over."""
    import torch

    pipe.send("up")
    while True:
        answer: Any = None
        what, *arguments = pipe.recv()
        try:
            match what:
                case "post":
                    shard.post(arguments[0])
                case "poll":
                    answer = shard.poll(arguments[0], 0.005)
                case "hold":
                    (reader.held_from,) = arguments
                case "fail":
                    (reader.failing,) = arguments
                case "release":
                    reader.release()
                case "ahead":
                    shard._engine._model(arguments[0]).runs_ahead = True
                case "kept":
                    answer = len(shard._engine._model(arguments[0]).kept)
                case "traffic":
                    answer = shard._engine.traffic
                case "graphs":
                    from engine.graphs import graphs_of

                    answer = len(graphs_of(torch.device(shard._pool.device)))
                case "close":
                    shard.close()
                    pool = shard._pool
                    assert pool.free == pool.frames, "frames were lost"
        except WorkerError as error:
            answer = error
        pipe.send(answer)
        if what == "close":
            return
