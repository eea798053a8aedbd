"""The leader's side of the plan channel: followers are told what to run, and only what every rank can run.

A pass goes out in segments, the layers that are in on every rank so far. Followers run segments in the order of the
channel, and the leader sends one only while it holds the turn, so collectives have one order over all models. How far
a follower's pages are in is asked when it is not known, and remembered until the follower recalls it, which it does
before it gives pages up: what was sent before the recall was answered runs on pages that are still there, and nothing
is sent after it.

The leader's layers are the units in which progress is counted. Its last one stands for everything: with stages, it is
granted when all the later stages' layers are in, too.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import torch

from engine.batch import StepBatch
from engine.batch_code import BatchEncoder
from engine.blocks import BlockChanges
from engine.mesh import Mesh, MeshRank
from swapper.errors import WorkerError
from swapper.pager import PagedShard

SYNC_TIMEOUT = 60.0
"""Seconds that followers have to end what they were told."""


class Leader:
    """What the models of a leader's engine have in common. Thread-safe."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._changed = threading.Condition()  # guards everything below
        self._models: dict[str, LedModel] = {}
        self._numbers = count(1)
        self._synced = dict.fromkeys(range(1, mesh.rank.size), 0)
        mesh.when_broken(self._wake)
        mesh.start(self._hear)

    @property
    def mesh(self) -> Mesh:
        return self._mesh

    def lead(self, model: str, shard: PagedShard, changes: BlockChanges) -> LedModel:
        """Begin to lead a model, whose blocks' changes are told on."""
        led = LedModel(self, model, shard, changes)
        with self._changed:
            self._models[model] = led
        return led

    def forget(self, model: str) -> None:
        with self._changed:
            del self._models[model]

    def next_number(self) -> int:
        return next(self._numbers)

    def sync(self) -> None:
        """Return when followers have done all that they were told. Raises WorkerError if they do not."""
        number = self.next_number()
        self._mesh.tell(["sync", number])
        with self._changed:
            done = self._changed.wait_for(
                lambda: self._mesh.broken is not None or min(self._synced.values()) >= number, SYNC_TIMEOUT
            )
        if not done:
            self._mesh.break_(f"Followers have not done what they were told for {SYNC_TIMEOUT:g} s.")
        if self._mesh.broken is not None:
            raise WorkerError(self._mesh.broken)

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()
            models = list(self._models.values())
        for led in models:
            led.wake()

    def _hear(self, rank: int, message: list[Any]) -> None:
        match message:
            case ["synced", number]:
                with self._changed:
                    self._synced[rank] = number
                    self._changed.notify_all()
            case ["ready", model, number, units, whole]:
                if (led := self._find(model)) is not None:
                    led.hear(rank, number, units, whole)
            case ["recall", model, number]:
                if (led := self._find(model)) is not None:
                    led.recall(rank)
                self._mesh.tell(["recalled", number], rank)
            case _:
                raise WorkerError(f"Rank {rank} says what nobody understands: {message[0]!r}.")

    def _find(self, model: str) -> LedModel | None:
        with self._changed:
            return self._models.get(model)


class LedModel:
    """One model's passes on a mesh. Its thread calls everything but `hear`, `recall` and `wake`."""

    def __init__(self, leader: Leader, name: str, shard: PagedShard, changes: BlockChanges) -> None:
        self._leader = leader
        self._mesh = leader.mesh
        self._name = name
        self._shard = shard
        self._changes = changes
        changes.are_noted = True
        self._ends = [extent.end for extent in shard.shard.layers]
        self._encoder = BatchEncoder()
        self._batch: StepBatch | None = None  # of the pass under way, until followers know of it
        self._tokens: torch.Tensor | None = None  # of it, if they are not in the batch
        self._told = False  # followers are in this pass
        self._granted = 0  # units of it
        self._lock = threading.Lock()  # guards the rest: what is known must hold when a segment is sent
        self._known = dict.fromkeys(range(1, self._mesh.rank.size), 0)  # units that are in, by follower
        self._asked: dict[int, tuple[int, int]] = {}  # the open question's number and unit, by follower
        self._lost = False  # what is waited for cannot come in on another rank, or has gone

    # ---- a pass

    def begin(self, batch: StepBatch, tokens: torch.Tensor | None = None) -> StepBatch:
        """A pass begins; returns its batch as all ranks are to run it. With `tokens`, on this rank's device, it is
        launched ahead, and whoever needs them gets them from device to device."""
        self.flush()
        self._told, self._granted, self._lost = False, 0, False
        self._tokens = tokens
        end = self._ends[-1]
        self._batch = replace(batch, in_one=self._shard.is_ready(end) and self.are_in(end))
        return self._batch

    def is_granted(self, nbytes: int) -> bool:
        """Whether all ranks are running up to the end of the layer that ends at `nbytes`."""
        return self._unit(nbytes) < self._granted

    def go_on(self, nbytes: int) -> bool:
        """Tell followers to run that layer, and those behind it as far as they are in on every rank. False if it is
        not."""
        unit = self._unit(nbytes)
        here = self._granted
        while here < len(self._ends) and self._shard.is_ready(self._ends[here]):
            here += 1
        with self._lock:
            stop = min(here, *self._known.values())
            if stop <= unit:
                return False
            limit = None if stop == len(self._ends) else stop
            if self._batch is not None:
                is_ahead = self._tokens is not None
                self._mesh.tell(["step", self._name, self._encoder.encode(self._batch), limit, is_ahead])
            else:
                self._mesh.tell(["on", self._name, limit])
        if self._tokens is not None:
            self._mesh.broadcast(self._tokens)
        self._batch, self._tokens, self._told, self._granted = None, None, True, stop
        return True

    def wait(self, nbytes: int, given_up: Callable[[], bool]) -> None:
        """Return once that layer is in on every rank. Raises PageInAborted as `PagedShard.wait` does, and also when it
        cannot come in on another rank."""
        self._ask(nbytes)
        self._shard.wait(
            nbytes, lambda: given_up() or self._lost or not self._mesh.is_whole, lambda: self.are_in(nbytes)
        )

    def _ask(self, nbytes: int) -> None:
        """Have followers say when that layer is in."""
        unit = self._unit(nbytes)
        is_last = unit == len(self._ends) - 1
        with self._lock:
            self._lost = False
            for rank, known in self._known.items():
                if known <= unit and rank not in self._asked:
                    number = self._leader.next_number()
                    self._asked[rank] = number, unit
                    self._mesh.tell(["ask", self._name, number, unit, is_last], rank)

    def are_in(self, nbytes: int) -> bool:
        """Whether all followers have said so. Takes no lock."""
        return min(self._known.values()) > self._unit(nbytes)

    def give_up(self) -> None:
        """End the pass where it is, on all ranks. Raises WorkerError."""
        if self._told:
            self._mesh.tell(["give_up", self._name])
        self._batch, self._tokens, self._told = None, None, False

    def break_down(self, error: Exception) -> None:
        """The pass failed here, while followers are in it: the mesh cannot go on. Raises WorkerError."""
        self._mesh.break_(f"A forward pass of {self._name} failed: {error!r}")
        raise WorkerError(f"{self._mesh.broken}") from error

    # ---- between passes

    def flush(self, *, wait: bool = False) -> None:
        """Tell followers which blocks were taken and given back; with `wait`, return when they have done the same."""
        taken, returned = self._changes.pop()
        if taken or returned:
            self._mesh.tell(["blocks", self._name, taken, returned])
        if wait:
            self._leader.sync()

    # ---- keys and values that are kept, as `engine.kv_keeper.Followers` has it

    @property
    def ranks(self) -> int:
        return self._mesh.rank.size

    def keep(self, blocks: Sequence[int]) -> int:
        number = self._leader.next_number()
        self._mesh.tell(["keep", self._name, number, blocks])
        return number

    def restore(self, number: int, blocks: Sequence[int]) -> None:
        self.flush()  # they must have these blocks
        self._mesh.tell(["restore", self._name, number, blocks])

    def drop(self, number: int) -> None:
        if self._mesh.is_whole:
            self._mesh.tell(["drop", self._name, number])

    def close(self) -> None:
        """The model is removed, its blocks are given back."""
        if self._mesh.broken is None:
            self.flush()
        self._leader.forget(self._name)

    # ---- from the threads of the mesh

    def hear(self, rank: int, number: int, units: int, whole: bool) -> None:
        with self._lock:
            asked, unit = self._asked.get(rank, (0, 0))
            if asked != number:
                return  # it was asked before the last recall
            del self._asked[rank]
            least = len(self._ends) - 1
            if not whole and MeshRank(self._mesh.rank.tp, self._mesh.rank.pp, rank).is_first:
                least = min(least, units)
            self._known[rank] = least + whole
            self._lost |= self._known[rank] <= unit  # it answers so when its page-in failed
        self.wake()

    def recall(self, rank: int) -> None:
        """Forget what is known of a follower's pages: from now on, nothing that needs them is sent."""
        with self._lock:
            self._known[rank] = 0
            self._asked.pop(rank, None)
            self._lost = True
        self.wake()

    def wake(self) -> None:
        self._shard.wake()

    def _unit(self, nbytes: int) -> int:
        return bisect_left(self._ends, nbytes)
