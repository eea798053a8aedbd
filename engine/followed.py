"""One model of a rank that follows the leader: its module, its blocks, and the pass that its pages hold up."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Sequence

import torch

from engine.batch import StepBatch
from engine.batch_code import BatchDecoder
from engine.blocks import FollowedBlocks
from engine.kv_keeper import KvCopies
from engine.model import ModelRunnerProtocol, PageGate
from engine.streams import on_pass_stream
from swapper.errors import PageInAborted, WorkerError
from swapper.geometry import KV_BLOCK_TOKENS
from swapper.pager import PagedShard

PASS_TIMEOUT = 60.0
"""Seconds within which a segment, and whatever the leader was asked, must end."""


class Followed:
    """One model of a follower."""

    def __init__(self, model: ModelRunnerProtocol, shard: PagedShard, blocks: FollowedBlocks) -> None:
        self.model = model
        self.shard = shard
        self.blocks = blocks
        self.device = torch.device(blocks.region.device)
        self.kv = model.kv_cache(blocks.region)
        self._copies = KvCopies(blocks.region, KV_BLOCK_TOKENS * model.kv_bytes_per_token)
        self.kept: dict[int, torch.Tensor] = {}  # keys and values of suspended requests, by the leader's number
        self.ends = [extent.end for extent in shard.shard.layers]
        self.decoder = BatchDecoder()
        self.streamed: StreamedPass | None = None  # the pass whose pages are still coming
        self.question = 0  # the latest that the leader has asked

    def run(self, batch: StepBatch, gate: PageGate, tokens: torch.Tensor | None) -> None:
        with on_pass_stream(self.device):
            self.model.forward(batch, self.kv, gate, tokens)

    def keep(self, number: int, blocks: Sequence[int]) -> None:
        with on_pass_stream(self.device):
            self.kept[number] = self._copies.out(blocks)

    def restore(self, number: int, blocks: Sequence[int]) -> None:
        with on_pass_stream(self.device):
            self._copies.back(self.kept.pop(number), blocks)

    def check(self, nbytes: int) -> None:
        """The gate of a layer that the leader has granted."""
        if not self.shard.is_ready(nbytes):
            raise WorkerError(f"The leader has {self.model.name} run on pages that are not in.")


class StreamedPass:
    """A pass in a thread of its own, which waits at the end of each segment."""

    def __init__(
        self, followed: Followed, batch: StepBatch, tokens: torch.Tensor | None, is_first: bool, threads: int
    ) -> None:
        self._followed = followed
        self._is_first = is_first  # of the stages: the others wait for everything
        self._changed = threading.Condition()
        self._limit: int | None = 0
        self._waiting = False
        self._given_up = False
        self._error: Exception | None = None
        self.ended = False
        self._thread = threading.Thread(
            target=self._run, args=(batch, tokens, threads), name=f"pass of {followed.model.name}", daemon=True
        )

    def go_on(self, limit: int | None) -> None:
        """Let it run as far as unit `limit` (None: to its end), and return when it is there. Raises what it raises."""
        with self._changed:
            self._limit, self._waiting = limit, False
            if self._thread.ident is None:
                self._thread.start()
            self._changed.notify_all()
            self._await(lambda: self._waiting or self.ended)

    def give_up(self) -> None:
        """End it where it waits, and return when it has ended."""
        self.abandon()
        with self._changed:
            self._await(lambda: self.ended)

    def abandon(self) -> None:
        with self._changed:
            self._given_up = True
            self._changed.notify_all()

    def _await(self, condition: Callable[[], bool]) -> None:
        if not self._changed.wait_for(condition, PASS_TIMEOUT):
            raise WorkerError(f"A segment of {self._followed.model.name} has not ended for {PASS_TIMEOUT:g} s.")
        if self._error is not None:
            raise self._error

    def _run(self, batch: StepBatch, tokens: torch.Tensor | None, threads: int) -> None:
        torch.set_num_threads(threads)
        error: Exception | None = None
        try:
            self._followed.run(batch, self._at_layer, tokens)
        except PageInAborted:
            pass  # given up
        except Exception as caught:  # noqa: BLE001 - for the thread that waits
            error = caught
        with self._changed:
            self._error, self.ended = error, True
            self._changed.notify_all()

    def _at_layer(self, nbytes: int) -> None:
        unit = bisect_left(self._followed.ends, nbytes)
        with self._changed:
            while not self._is_granted(unit):
                if self._given_up:
                    raise PageInAborted("The leader gave the pass up.")
                self._waiting = True
                self._changed.notify_all()
                self._changed.wait()  # whoever lets it go on, or gives it up, bounds this
        self._followed.check(nbytes)

    def _is_granted(self, unit: int) -> bool:
        return self._limit is None or (self._is_first and unit < self._limit)
