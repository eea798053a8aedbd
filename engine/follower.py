"""The engine of a rank that follows the leader: it plans nothing, samples nothing, and reports nothing of requests.

One thread, the reader of the plan channel, obeys messages in their order. A pass of which everything is in runs in that
thread. One whose pages are still coming runs in a thread of its own, which the reader lets run to the end of a segment
and no further, so that segments of other models come in between where the leader put them.

On a GPU passes are launched, and nobody waits for their end here but who is about to take memory from under them. The
leader launches no more than one ahead, so no more are under way here.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from typing import Any

import torch

from engine.blocks import FollowedBlocks
from engine.followed import PASS_TIMEOUT, Followed, StreamedPass
from engine.mesh import Mesh, Traffic
from engine.model import ModelRunnerProtocol
from engine.recorder import Recorder
from engine.request import EngineReport, KvReleased, Request, Resumed, Suspended
from engine.streams import on_pass_stream, pass_stream
from swapper.errors import PageInAborted, WorkerError
from swapper.frames import FramePool
from swapper.geometry import kv_blocks
from swapper.pager import PagedShard

logger = logging.getLogger(__name__)


class FollowerEngine:
    """Has an `Engine`'s methods. What is asked of requests is the leader's to answer."""

    def __init__(
        self,
        pool: FramePool,
        emit: Callable[[Sequence[EngineReport]], None],
        mesh: Mesh,
        *,
        max_batch_sequences: int = 64,
        compute_threads: int = 1,
        recorder: Recorder | None = None,
    ) -> None:
        self.recorder = mesh.recorder = recorder or Recorder()
        self._pool = pool
        self._emit = emit
        self._mesh = mesh
        self._max_batch_sequences = max_batch_sequences
        self._compute_threads = compute_threads
        self.steps = 0
        self._numbers = count(1)
        self._changed = threading.Condition()  # guards everything below
        self._models: dict[str, Followed] = {}
        # What was said of models that are not here yet:
        self._questions: dict[str, tuple[int, int, bool]] = {}
        self._blocks: dict[str, set[int]] = {}  # taken
        self._recalled = 0  # the leader's latest answer
        self._computing = False
        self._prepared = False
        mesh.when_broken(self._wake)
        mesh.start(self._obey)

    # ---- from the worker

    def add(self, model: ModelRunnerProtocol, shard: PagedShard) -> None:
        """See `Engine.add`."""
        if model.name in self._models:
            raise ValueError(f"The engine has a model {model.name} already.")
        blocks = FollowedBlocks(
            self._pool, model.kv_bytes_per_token, kv_blocks(model.context_length) * self._max_batch_sequences
        )
        followed = Followed(model, shard, blocks)
        # Pages that go were published as gone before: nothing that the leader is told from now on is about them.
        self._pool.guard(shard.region, lambda: self._settle(model.name))
        self._pool.guard(blocks.region, lambda: self._synchronize(blocks.region.device))
        with self._changed:
            self._models[model.name] = followed
            blocks.follow(self._blocks.pop(model.name, ()), ())
            question = self._questions.pop(model.name, None)
        if question is not None:
            self._answer_later(followed, *question)

    def remove(self, name: str, timeout: float = PASS_TIMEOUT) -> None:
        """See `Engine.remove`."""
        followed = self._model(name)
        self._settle(name, timeout)
        with self._changed:
            del self._models[name]
            followed.question = -1
        followed.shard.wake()
        if followed.streamed is not None:
            followed.streamed.give_up()
        followed.model.close()
        followed.blocks.close()

    def submit(self, request: Request) -> None:
        """Nothing: followers take plans, not requests."""

    def cancel(self, request: str) -> None:
        """Nothing."""

    def grant_kv(self, model: str, frames: int, epoch: int) -> None:
        """Say yes: the leader, who changes what followers hold, says so only when they have done the same."""
        self._model(model)
        self._emit([KvReleased(model, frames, epoch)])

    def suspend(self, model: str, epoch: int) -> None:
        self._model(model)
        self._emit([Suspended(model, 0, epoch)])

    def resume(self, model: str, kv_frames: int, epoch: int) -> None:
        self._model(model)
        self._emit([Resumed(model, epoch)])

    def abort(self, model: str, timeout: float = PASS_TIMEOUT) -> None:
        """Return once no pass runs on the model's pages. Its sequences are the leader's to drop."""
        self._model(model)
        self._settle(model, timeout)

    def fence(self, model: str, timeout: float = PASS_TIMEOUT) -> None:
        """See `Engine.fence`."""
        self._settle(model, timeout)

    @property
    def busy(self) -> bool:
        """Whether a segment is running. Raises WorkerError once the mesh is broken."""
        if self._mesh.broken is not None:
            raise WorkerError(self._mesh.broken)
        return self._computing

    @property
    def traffic(self) -> Traffic:
        """See `Engine.traffic`."""
        return self._mesh.traffic

    def close(self, timeout: float = PASS_TIMEOUT) -> None:
        self._mesh.close()
        for name in list(self._models):
            self.remove(name, timeout)

    def _model(self, name: str) -> Followed:
        with self._changed:
            return self._models[name]

    def _settle(self, name: str, timeout: float = PASS_TIMEOUT) -> None:
        """Return once nothing that the leader has sent so far touches a model's pages, and it knows of none of them.

        Raises TimeoutError.
        """
        number = next(self._numbers)
        try:
            self._mesh.tell(["recall", name, number])
        except WorkerError:  # nobody leads any more
            number = 0
        with self._changed:
            followed = self._models.get(name)

            def is_settled() -> bool:
                return self._recalled >= number if number and self._mesh.is_whole else not self._computing

            if not self._changed.wait_for(is_settled, timeout):
                raise TimeoutError(f"The leader has not left the pages of {name} alone for {timeout:g} s.")
        if followed is not None:
            self._synchronize(followed.shard.region.device)

    def _synchronize(self, device: str) -> None:
        stream = pass_stream(torch.device(device))
        if stream is not None:
            stream.synchronize()

    def _wake(self) -> None:
        """The mesh is broken: nobody is waited for any more."""
        with self._changed:
            self._changed.notify_all()
            models = list(self._models.values())
        for followed in models:
            followed.shard.wake()
            if (streamed := followed.streamed) is not None:
                streamed.abandon()

    # ---- the reader of the channel

    def _obey(self, rank: int, message: list[Any]) -> None:
        if not self._prepared:
            torch.set_num_threads(self._compute_threads)
            self._prepared = True
        match message:
            case ["step", name, code, limit, is_ahead]:
                self._compute(self._begin, self._led(name), code, limit, is_ahead)
            case ["on", name, limit]:
                self._compute(self._continue, self._led(name), limit)
            case ["give_up", name]:
                self._give_up(name)
            case ["blocks", name, taken, returned]:
                self._follow(name, taken, returned)
            case ["keep", name, number, blocks]:
                self._led(name).keep(number, blocks)
            case ["restore", name, number, blocks]:
                self._led(name).restore(number, blocks)
            case ["drop", name, number]:
                if (followed := self._find(name)) is not None:
                    del followed.kept[number]
            case ["ask", name, number, unit, is_last]:
                self._hear_question(name, number, unit, is_last)
            case ["sync", number]:
                self._mesh.tell(["synced", number])
            case ["recalled", number]:
                with self._changed:
                    self._recalled = max(self._recalled, number)
                    self._changed.notify_all()
            case _:
                raise WorkerError(f"The leader says what nobody understands: {message[0]!r}.")

    def _follow(self, name: str, taken: list[int], returned: list[int]) -> None:
        with self._changed:
            if (followed := self._models.get(name)) is not None:
                followed.blocks.follow(taken, returned)
            elif left := self._blocks.pop(name, set()).difference(returned).union(taken):
                self._blocks[name] = left

    def _find(self, name: str) -> Followed | None:
        with self._changed:
            return self._models.get(name)

    def _led(self, name: str) -> Followed:
        followed = self._find(name)
        if followed is None:
            raise WorkerError(f"The leader runs {name}, which this rank does not have.")
        return followed

    def _compute(self, run: Callable[..., None], followed: Followed, *arguments: Any) -> None:
        began = time.perf_counter()
        with self._changed:
            self._computing = True
        try:
            run(followed, *arguments)
            if self.recorder.on:
                self.recorder.add("pass", followed.model.name, began, time.perf_counter() - began)
        except WorkerError:
            raise
        except Exception as error:
            raise WorkerError(f"A forward pass of {followed.model.name} failed: {error}") from error
        finally:
            with self._changed:
                self._computing = False
                self._changed.notify_all()

    def _begin(self, followed: Followed, code: list[Any], limit: int | None, is_ahead: bool) -> None:
        batch, is_first = followed.decoder.decode(code), self._mesh.rank.is_first
        tokens = None
        if is_ahead and is_first:  # later stages look at none
            with on_pass_stream(followed.device):
                tokens = self._mesh.broadcast(torch.empty(len(batch.tokens), dtype=torch.int64, device=followed.device))
        if limit is None:
            followed.run(batch, followed.check, tokens)
            self._ended(followed)
        else:
            followed.streamed = StreamedPass(followed, batch, tokens, is_first, self._compute_threads)
            self._continue(followed, limit)

    def _continue(self, followed: Followed, limit: int | None) -> None:
        streamed = followed.streamed
        if streamed is None:
            raise WorkerError(f"The leader goes on with a pass of {followed.model.name} that was not begun.")
        streamed.go_on(limit)
        if streamed.ended:
            followed.streamed = None
            self._ended(followed)

    def _ended(self, followed: Followed) -> None:
        """A pass has run to its end."""
        self.steps += 1
        if self.recorder.on:
            self.recorder.peak(kv_frames=followed.blocks.frames_held, kv_bytes=followed.blocks.bytes_taken)

    def _give_up(self, name: str) -> None:
        followed = self._find(name)
        if followed is not None and followed.streamed is not None:
            streamed, followed.streamed = followed.streamed, None
            streamed.give_up()

    # ---- how far pages are in

    def _hear_question(self, name: str, number: int, unit: int, is_last: bool) -> None:
        with self._changed:
            followed = self._models.get(name)
            if followed is None:
                self._questions[name] = (number, unit, is_last)
                return
        self._answer_later(followed, number, unit, is_last)

    def _answer_later(self, followed: Followed, number: int, unit: int, is_last: bool) -> None:
        followed.question = number
        followed.shard.wake()  # whoever waits to answer an earlier question need not any more
        threading.Thread(
            target=self._answer,
            args=(followed, number, unit, is_last),
            name=f"pages of {followed.model.name}",
            daemon=True,
        ).start()

    def _answer(self, followed: Followed, number: int, unit: int, is_last: bool) -> None:
        """Say how far a model's pages are in, as soon as that is beyond the unit that was asked for."""
        is_first = self._mesh.rank.is_first
        needed = followed.ends[-1] if is_last else followed.ends[unit] if is_first else 0
        with suppress(PageInAborted):  # the leader sees by the answer that it has not come in
            followed.shard.wait(needed, lambda: followed.question != number or not self._mesh.is_whole)
        if followed.question != number:
            return
        units = 0
        while units < len(followed.ends) and followed.shard.is_ready(followed.ends[units]):
            units += 1
        try:
            self._mesh.tell(["ready", followed.model.name, number, units, units == len(followed.ends)])
        except WorkerError as error:
            logger.info("The leader asked about %s, and is gone: %s", followed.model.name, error)
