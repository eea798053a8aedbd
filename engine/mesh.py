"""A mesh: the ranks that hold one model together, tp × pp of them, each in a process of its own.

`MeshRank` says where a rank is. `Mesh` is its connection to the others: collectives among the ranks of a stage, hidden
states from one stage to the next, and the plan channel between the leader (rank 0) and its followers. Its process
groups are its own: torch's global default group is left alone, so one process may be in several meshes.

Whoever notices that a rank is lost `break`s the mesh. A broken mesh never works again: every wait in it ends with a
WorkerError, the engine over it is broken too, and the workers' group is rebuilt.
"""

from __future__ import annotations

import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    BroadcastOptions,
    PrefixStore,
    ProcessGroupGloo,
    Store,
    TCPStore,
)

from engine.channel import Channel, Message, accept, connect, listen
from engine.recorder import Recorder
from swapper.errors import WorkerError

logger = logging.getLogger(__name__)

_BYE = "bye"

COLLECTIVE_TIMEOUT = 60.0
"""Seconds that a collective on a CPU waits for the other ranks."""

ProcessGroup = Any  # Gloo's and NCCL's have the same methods, and no base class that torch's types know

Handler = Callable[[int, list[Any]], None]


@dataclass(frozen=True, slots=True)
class MeshRank:
    """One place in a mesh of `pp` stages of `tp` ranks. `rank` counts the places, stage after stage."""

    tp: int = 1
    pp: int = 1
    rank: int = 0

    @property
    def size(self) -> int:
        return self.tp * self.pp

    @property
    def tp_rank(self) -> int:
        return self.rank % self.tp

    @property
    def stage(self) -> int:
        return self.rank // self.tp

    @property
    def is_leader(self) -> bool:
        return self.rank == 0

    @property
    def is_first(self) -> bool:
        """Whether its stage has the embedding."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether its stage has the head."""
        return self.stage == self.pp - 1


@dataclass(slots=True)
class Moved:
    calls: int = 0
    nbytes: int = 0  # of the tensors that this rank put in or got


@dataclass(slots=True)
class Traffic:
    """What a rank's collectives moved, by kind: all_reduce, all_gather, broadcast, send, receive."""

    kinds: dict[str, Moved] = field(default_factory=dict)

    def count(self, kind: str, nbytes: int, calls: int = 1) -> None:
        moved = self.kinds.setdefault(kind, Moved())
        moved.calls += calls
        moved.nbytes += nbytes

    def add(self, other: Traffic, sign: int = 1) -> None:
        for kind, moved in other.kinds.items():
            self.count(kind, sign * moved.nbytes, sign * moved.calls)

    def copy(self) -> Traffic:
        return Traffic({kind: replace(moved) for kind, moved in self.kinds.items()})

    def since(self, before: Traffic) -> Traffic:
        """What was moved after a copy was made."""
        moved = self.copy()
        moved.add(before, -1)
        return moved


class Mesh:
    """One rank's connection to the others. Collectives are for one thread at a time, in the same order on all ranks."""

    def __init__(
        self,
        rank: MeshRank,
        device: torch.device,
        store: Store,
        channels: dict[int, Channel],
        stage: ProcessGroup | None,
        world: ProcessGroup | None,
    ) -> None:
        """Use `join`. `channels` lead to the followers, or to the leader alone."""
        self.rank = rank
        self.device = device
        self.traffic = Traffic()
        self.recorder = Recorder()  # the engine's takes its place
        self._store = store  # must outlive the groups
        self._stage = stage
        self._world = world
        self._channels = channels
        self._lock = threading.Lock()  # guards the rest; messages go to all followers in one order
        self._broken: str | None = None
        self._closed = False
        self._when_broken: list[Callable[[], None]] = []
        self._readers: list[threading.Thread] = []

    @staticmethod
    def join(rank: MeshRank, rendezvous: str, device: torch.device, timeout: float) -> Mesh:
        """Meet the other ranks at "host:port", where the leader listens; returns when all are there.

        Raises WorkerError if that takes longer than `timeout` seconds.
        """
        try:
            return _join(rank, rendezvous, device, timeout)
        except (OSError, RuntimeError) as error:  # torch's errors are RuntimeErrors
            raise WorkerError(
                f"Rank {rank.rank} of a mesh of {rank.tp} × {rank.pp} did not meet the others at {rendezvous}: {error}"
            ) from error

    # ---- messages

    def start(self, handler: Handler) -> None:
        """Receive messages: `handler(rank, message)` is called in a thread for each peer, in the order they came."""
        for peer, channel in self._channels.items():
            reader = threading.Thread(
                target=self._read, args=(peer, channel, handler), name=f"mesh {peer}", daemon=True
            )
            self._readers.append(reader)
            reader.start()

    def tell(self, message: Message, rank: int | None = None) -> None:
        """Send to the leader, or from the leader to a follower, or to all of them. Raises WorkerError if broken."""
        with self._lock:
            self._raise_if_broken()
            try:
                for peer, channel in self._channels.items():
                    if rank is None or rank == peer:
                        channel.send(message)
                return
            except OSError as error:
                lost = f"Rank {peer} of the mesh is lost: {error}"
        self.break_(lost)
        raise WorkerError(lost)

    @property
    def broken(self) -> str | None:
        """Why the mesh cannot work any more."""
        return self._broken

    @property
    def is_whole(self) -> bool:
        """Whether it is neither broken nor closed."""
        return self._broken is None and not self._closed

    def break_(self, reason: str, level: int = logging.ERROR) -> None:
        """Give the mesh up: the other ranks learn of it by the end of their channels."""
        with self._lock:
            if self._broken is not None or self._closed:
                return
            self._broken = reason
            callbacks = list(self._when_broken)
            for channel in self._channels.values():
                channel.close()
        self._abort_collectives()
        logger.log(level, "The mesh of rank %d is broken: %s", self.rank.rank, reason)
        for callback in callbacks:
            callback()

    def when_broken(self, callback: Callable[[], None]) -> None:
        """Have `callback` called, in any thread, when the mesh breaks; at once if it is broken."""
        with self._lock:
            self._when_broken.append(callback)
            is_broken = self._broken is not None
        if is_broken:
            callback()

    def close(self) -> None:
        """Leave the mesh, which is broken then for the others."""
        with self._lock:
            if not self._closed and self._broken is None:
                for channel in self._channels.values():
                    with suppress(OSError):
                        channel.send([_BYE])
            self._closed = True
            for channel in self._channels.values():
                channel.close()
        for reader in self._readers:
            if reader is not threading.current_thread():
                reader.join(COLLECTIVE_TIMEOUT)
        self._abort_collectives()
        self._stage = self._world = None

    def _read(self, peer: int, channel: Channel, handler: Handler) -> None:
        try:
            while True:
                message = channel.receive()
                if message[0] == _BYE:
                    self.break_(f"Rank {peer} has left the mesh.", logging.INFO)
                    return
                handler(peer, message)
        except OSError as error:
            self.break_(f"Rank {peer} of the mesh is lost: {error}")
        except WorkerError as error:
            self.break_(str(error))
        except Exception as error:
            logger.exception("A message of rank %d could not be handled.", peer)
            self.break_(f"A message of rank {peer} could not be handled: {error!r}")

    def _abort_collectives(self) -> None:
        """End what is under way on the GPU. Gloo's end when the other rank's process does, or after their time-out."""
        if self.device.type == "cuda":
            for group in (self._stage, self._world):
                if group is not None:
                    group.abort()

    def _raise_if_broken(self) -> None:
        if self._broken is not None or self._closed:
            raise WorkerError(self._broken or "The mesh is closed.")

    # ---- collectives

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over the ranks of the stage, in place."""
        if self._stage is not None:
            options = AllreduceOptions()
            options.asyncOp = False
            with self._moving("all_reduce", tensor):
                _wait(self._stage.allreduce([tensor], options))
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Stack equal tensors of the stage's ranks along a new first dimension."""
        if self._stage is None:
            return tensor[None]
        gathered = tensor.new_empty(self.rank.tp * tensor.numel())
        options = AllgatherOptions()
        options.asyncOp = False
        with self._moving("all_gather", gathered):
            _wait(self._stage._allgather_base(gathered, tensor.flatten(), options))
        return gathered.view(self.rank.tp, *tensor.shape)

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """Fill a tensor of each of the stage's ranks with what its first rank has in it."""
        if self._stage is not None:
            options = BroadcastOptions()
            options.rootRank = 0
            options.asyncOp = False
            with self._moving("broadcast", tensor):
                _wait(self._stage.broadcast([tensor], options))
        return tensor

    def send(self, tensor: torch.Tensor, rank: int) -> None:
        assert self._world is not None
        with self._moving("send", tensor):
            _wait(self._world.send([tensor.contiguous()], rank, 0))

    def receive(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        """Fill a tensor with what a rank sends."""
        assert self._world is not None
        with self._moving("receive", tensor):
            _wait(self._world.recv([tensor], rank, 0))
        return tensor

    @contextmanager
    def _moving(self, kind: str, tensor: torch.Tensor) -> Iterator[None]:
        """Count a collective, and record its time; but on a GPU it is only launched here."""
        self.traffic.count(kind, tensor.nbytes)
        began = time.perf_counter()
        yield
        if self.recorder.on and tensor.device.type == "cpu":
            self.recorder.add(kind, "", began, time.perf_counter() - began, nbytes=tensor.nbytes)


def _wait(work: Any) -> None:
    """Gloo's work is done here; NCCL's goes to the current stream, and has nothing to wait for if it was put there."""
    if work is not None:
        work.wait()


def _join(rank: MeshRank, rendezvous: str, device: torch.device, timeout: float) -> Mesh:
    host, _, port = rendezvous.rpartition(":")
    store = _store(rank, host, int(port), timeout)
    if rank.is_leader:
        with listen(host) as listener:
            token = secrets.token_hex(16)
            store.set("channel", f"{listener.getsockname()[1]} {token}")
            channels = accept(listener, token, rank.size, timeout)
    else:
        leader_port, token = store.get("channel").decode().split()
        channels = {0: connect(host, int(leader_port), token, rank.rank, timeout)}
    stage = world = None
    if rank.tp > 1:
        stage = _group(store, f"stage {rank.stage}", rank.tp_rank, rank.tp, device, host, timeout)
    if rank.pp > 1:
        world = _group(store, "world", rank.rank, rank.size, device, host, timeout)
    mesh = Mesh(rank, device, store, channels, stage, world)
    _warm_up(mesh)
    return mesh


def _store(rank: MeshRank, host: str, port: int, timeout: float) -> Store:
    """The store where process groups meet. Torch's would listen on every interface if it were not given a socket."""
    limit = timedelta(seconds=timeout)
    if not rank.is_leader:
        return TCPStore(host, port, is_master=False, timeout=limit)
    listener = listen(host, port).detach()  # the store's from now on
    return TCPStore(host, port, is_master=True, timeout=limit, wait_for_workers=False, master_listen_fd=listener)


def _group(
    store: Store, name: str, rank: int, size: int, device: torch.device, host: str, timeout: float
) -> ProcessGroup:
    own = PrefixStore(name, store)
    if device.type == "cuda":
        from torch._C._distributed_c10d import ProcessGroupNCCL  # builds for CPUs do not have it

        nccl = ProcessGroupNCCL.Options()
        nccl.is_high_priority_stream = True
        nccl._timeout = timedelta(seconds=COLLECTIVE_TIMEOUT)
        return ProcessGroupNCCL(own, rank, size, nccl)
    gloo = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    gloo._devices = [ProcessGroupGloo.create_device(hostname=_own_address(host))]
    gloo._timeout = timedelta(seconds=min(timeout, COLLECTIVE_TIMEOUT))
    return ProcessGroupGloo(own, rank, size, gloo)


def _own_address(host: str) -> str:
    """This host's address on the way to another; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 1))
        address: str = probe.getsockname()[0]
        return address


def _warm_up(mesh: Mesh) -> None:
    """Make every connection that passes will use: NCCL makes them at their first use, which must not be a recording."""
    rank, one = mesh.rank, torch.ones(1, device=mesh.device)
    mesh.all_reduce(one)
    mesh.all_gather(one)
    mesh.broadcast(one)
    if not rank.is_first:
        mesh.receive(one, rank.rank - rank.tp)
    if not rank.is_last:
        mesh.send(one, rank.rank + rank.tp)
    last = rank.size - rank.tp
    if rank.pp > 1 and rank.rank == last:
        mesh.send(one, 0)
    if rank.pp > 1 and rank.is_leader:
        mesh.receive(one, last)
    if mesh.device.type == "cuda":
        torch.cuda.synchronize(mesh.device)
    mesh.traffic = Traffic()
