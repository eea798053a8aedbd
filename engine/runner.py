"""One model's thread: takes commands, plans a forward pass, runs it in its turn, reports, and again.

Everything that touches the model's sequences and blocks happens in this thread, between two passes; other threads only
leave commands in its inbox. The thread starts with the first command, and waits for the next when there is nothing to
run.

On a GPU a pass is launched, not run: the next one goes behind it before its tokens are known, as long as it is the same
sequences' next token (`Batcher.plan_ahead`) and no command waits. Tokens then go from pass to pass on the GPU, which
never waits for the host. While a pass's tokens are waited for other models have the turn, and launch theirs behind it.
Between two calls of `_pass` nothing is under way.

On a mesh, the leader's runner leads the pass on all ranks (`engine/leader.py`), and a layer's pages must be in on each.

A pass that lacks a layer's pages gives its turn away and waits for them. A command that cannot wait that long (a
cancel, a grant, an abort) makes it give up: nothing of it is kept, and the next pass is planned anew.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from engine.batch import StepBatch
from engine.blocks import BlockManager
from engine.leader import LedModel
from engine.model import ModelRunnerProtocol
from engine.recorder import Recorder
from engine.request import EngineReport, KvReleased, Suspended
from engine.streams import pass_stream
from engine.turn import Turn
from swapper.errors import PageInAborted, WorkerError
from swapper.pager import PagedShard

logger = logging.getLogger(__name__)

Command = Callable[[], None]
Emit = Callable[[Sequence[EngineReport]], None]

LAUNCH_SLICE = 0.003
"""Seconds that a pass is launched for on a GPU, layer by layer, before another model's goes in between: less than a
step of the other takes there, so that it does not run dry."""

RETRY_SECONDS = 0.25
"""How long to wait for what no command announces: frames of the pool that others give back, a page-in begun again."""


class Results(Protocol):
    """What a pass makes, on its way to the host. `tokens` and `revised` are as `Choice` has them."""

    @property
    def tokens(self) -> torch.Tensor | None: ...

    @property
    def revised(self) -> bool: ...

    def take(self) -> list[Any]: ...


class Planned(Protocol):
    """A pass to be made: `Step`, or `EncoderStep`."""

    @property
    def batch(self) -> StepBatch: ...

    @property
    def is_awaited(self) -> bool: ...

    def choose(self, output: torch.Tensor, likeliest: torch.Tensor | None = None) -> Results: ...


@dataclass(frozen=True, slots=True)
class _Launched:
    """A step whose pass is under way, and its tokens to come."""

    step: Planned
    choice: Results


class AnyBatcher(Protocol):
    """What is to run: see `Batcher`, whose methods these are, and `EncoderBatcher`. Each knows its own steps only."""

    @property
    def is_idle(self) -> bool: ...

    def take_reports(self) -> list[EngineReport]: ...

    def add(self, request: Any, submitted: float) -> None: ...

    def cancel(self, request: str) -> None: ...

    def grant(self, frames: int, epoch: int) -> None: ...

    def suspend(self, epoch: int) -> None: ...

    def resume(self, frames: int, epoch: int) -> None: ...

    def clear(self) -> None: ...

    def plan(self) -> Planned | None: ...

    def plan_ahead(self, step: Any) -> Planned | None: ...

    def complete(self, step: Any, sampled: list[Any], computing: float, paging: float) -> None: ...

    def fail(self, step: Any, message: str) -> None: ...


class _PassFailed(Exception):
    """A model's code or its device raised the cause of this: it ends the requests of the pass, and only those."""


@contextmanager
def _blame() -> Iterator[None]:
    try:
        yield
    except (PageInAborted, WorkerError):  # a WorkerError breaks the loop
        raise
    except Exception as error:
        raise _PassFailed from error


class ModelRunner:
    """The batch loop of one model."""

    def __init__(
        self,
        model: ModelRunnerProtocol,
        shard: PagedShard,
        blocks: BlockManager,
        batcher: AnyBatcher,
        turn: Turn,
        emit: Emit,
        compute_threads: int,
        recorder: Recorder,
        led: LedModel | None = None,
    ) -> None:
        """`led` is the model on the other ranks of a mesh. `emit` is called from the model's thread, in order; it must
        neither wait nor call the engine.
        """
        self._model = model
        self._shard = shard
        self._blocks = blocks
        self._kv = model.kv_cache(blocks.region)
        self._stream = pass_stream(torch.device(blocks.region.device))
        on_gpu = self._stream is not None
        self._last_launch = torch.cuda.Event() if on_gpu else None  # type: ignore[no-untyped-call]
        self.runs_ahead = on_gpu
        self._led = led
        self._batcher = batcher
        self._turn = turn
        self._emit = emit
        self._compute_threads = compute_threads
        self._recorder = recorder
        self.steps = 0  # forward passes done; written by the model's thread only, like the next
        self.waits_for_gpu = False  # for the end of what it has launched, without the turn
        self._began = 0.0  # when the pass under way did, or the one before it ended
        self._at_gate: float | None = None  # when it passed the last layer's
        self._paging = 0.0  # seconds that the pass under way has waited for pages
        self._giving_way = 0.0  # and for another model's pass that could not wait
        self._is_urgent = False  # somebody waits for a first token of it
        self._may_give_way = False
        self._slice_began = 0.0  # when the pass under way last got the turn
        self.broken: Exception | None = None  # what ended the thread before its time
        self._changed = threading.Condition()  # guards everything below
        self._inbox: list[Command] = []
        self._thread: threading.Thread | None = None
        self._interrupted = False  # since commands were last taken
        self._in_pass = False
        self._closing = False

    @property
    def batcher(self) -> AnyBatcher:
        """For commands, which run in the model's thread."""
        return self._batcher

    # ---- from any thread

    def post(self, command: Command, *, interrupt: bool = False) -> bool:
        """Have the model's thread run `command` before its next pass, in order; False if the model is being closed.

        With `interrupt`, a pass that waits for pages gives up for it; one that computes is never cut short.
        """
        with self._changed:
            if self._closing:
                return False
            self._inbox.append(command)
            self._interrupted |= interrupt
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=f"model {self._model.name}", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        if interrupt:
            self._shard.wake()
        return True

    def call(self, command: Command, timeout: float) -> None:
        """Like `post` with `interrupt`, and return when it has run. Raises TimeoutError, WorkerError."""
        done = False

        def run() -> None:
            nonlocal done
            command()
            with self._changed:
                done = True
                self._changed.notify_all()

        if not self.post(run, interrupt=True):
            return
        with self._changed:
            if not self._changed.wait_for(lambda: done or self.broken is not None, timeout):
                raise TimeoutError(f"Model {self._model.name} is still in one forward pass after {timeout:g} s.")
        if not done:
            raise WorkerError(f"The batch loop of model {self._model.name} broke down: {self.broken!r}")

    def drop_all(self) -> None:
        """A command: say what is still to be said, then drop every sequence without a word."""
        self._report()
        self._batcher.clear()
        if self._led is not None:
            self._led.flush(wait=True)

    def fence(self, timeout: float) -> None:
        """Return once no pass is under way, and nothing else needs the pages. Raises TimeoutError."""
        with self._changed:
            if not self._changed.wait_for(lambda: not self._in_pass, timeout):
                raise TimeoutError(f"Model {self._model.name} is still in a forward pass after {timeout:g} s.")
        self._model.settle()

    def settle(self) -> None:
        """Return once nothing that was launched so far touches the model's memory."""
        if self._last_launch is not None:
            self._last_launch.synchronize()

    def stop(self) -> None:
        """Ask the thread to end after the pass it is in; what it still has is dropped without a word."""
        with self._changed:
            self._closing = self._interrupted = True
            self._changed.notify_all()
        self._shard.wake()

    def close(self, timeout: float) -> None:
        """Stop, wait for the thread's end, and give all KV memory back. Raises TimeoutError."""
        self.stop()
        if self._thread is not None:
            self._thread.join(timeout)
            if self._thread.is_alive():
                raise TimeoutError(f"Model {self._model.name} is still in a forward pass after {timeout:g} s.")
        self._batcher.clear()
        if self._led is not None:
            self._led.close()
        self._model.close()
        self._blocks.close()

    # ---- in the model's thread

    def _run(self) -> None:
        torch.set_num_threads(self._compute_threads)
        patience: float | None = 0.0
        try:
            with torch.inference_mode(), torch.cuda.stream(self._stream):
                while self._obey(patience):
                    patience = self._advance()
        except Exception as error:  # a defect of ours: requests of this model would never be answered
            with self._changed:
                self.broken = error
                self._changed.notify_all()
            logger.exception("The batch loop of model %s broke down.", self._model.name)

    def _obey(self, patience: float | None) -> bool:
        """Run the commands that came, waiting up to `patience` seconds for one (None: as long as it takes).

        False when it is time to end.
        """
        with self._changed:
            if patience != 0.0:
                self._changed.wait_for(lambda: self._inbox or self._closing, patience)
            commands, self._inbox = self._inbox, []
            self._interrupted = closing = self._closing
        for command in commands:
            command()
        return not closing

    def _advance(self) -> float | None:
        """Make one forward pass, if there is one to make. Returns how long to wait for a command before the next."""
        step = self._batcher.plan()
        self._report()
        if step is None:
            return None if self._batcher.is_idle else RETRY_SECONDS
        try:
            self._pass(step)
        except PageInAborted:  # given up for a command, or the page-in failed and an abort is on its way
            return RETRY_SECONDS
        except _PassFailed as failed:
            error = failed.__cause__
            logger.error("A forward pass of model %s failed.", self._model.name, exc_info=error)
            self._batcher.fail(step, f"The forward pass failed: {type(error).__name__}: {error}")
        self._report()
        return 0.0

    def _pass(self, step: Planned) -> None:
        """Run a step, and those that can be launched behind it before its tokens are known."""
        with self._changed:
            self._in_pass = True
        try:
            with self._turn.taken(urgent=step.is_awaited):
                self._begin_measuring()
                launched = self._launch(step)
                while (following := self._following(launched.step)) is not None:
                    behind = self._launch(following, launched.choice.tokens)
                    if not self._complete(launched):
                        break
                    launched = behind
                else:
                    self._complete(launched)
        finally:
            try:
                if self._stream is not None:  # a pass that has returned has nothing pending on its GPU
                    self.waits_for_gpu = True
                    self._stream.synchronize()
            finally:
                self.waits_for_gpu = False
                with self._changed:
                    self._in_pass = False
                    self._changed.notify_all()

    def _launch(self, step: Planned, tokens: torch.Tensor | None = None) -> _Launched:
        self._is_urgent = step.is_awaited
        self._may_give_way = not self._is_urgent
        self._slice_began = time.perf_counter()
        batch = step.batch if self._led is None else self._led.begin(step.batch, tokens)
        with _blame(), self._others():
            logits = self._model.forward(batch, self._kv, self._at_layer, tokens)
        with _blame():
            launched = _Launched(step, step.choose(logits, self._model.likeliest))
        if self._last_launch is not None:
            self._last_launch.record(self._stream)
        return launched

    def _following(self, step: Planned) -> Planned | None:
        """The step to launch behind one that is under way; None if a command waits for the end of that one."""
        if not self.runs_ahead or self._inbox or self._closing:
            return None
        return self._batcher.plan_ahead(step)

    def _complete(self, launched: _Launched) -> bool:
        """Wait for a step's tokens and report them. False if a step was launched behind it with other tokens."""
        with _blame():
            sampled = self._take(launched.choice)
        self.steps += 1
        computing = time.perf_counter() - self._began - self._paging - self._giving_way
        if self._recorder.on:
            self._record(launched.step, computing)
        self._batcher.complete(launched.step, sampled, computing, self._paging)
        self._begin_measuring()
        self._report()
        return not launched.choice.revised

    def _take(self, choice: Results) -> list[Any]:
        """Wait for tokens. On a GPU, others launch their passes meanwhile, behind what is under way."""
        if not self.runs_ahead:
            return choice.take()
        self.waits_for_gpu = True
        self._turn.release()
        try:
            return choice.take()
        finally:
            self.waits_for_gpu = False
            began = time.perf_counter()
            self._turn.acquire()
            self._giving_way += time.perf_counter() - began

    def _begin_measuring(self) -> None:
        self._began, self._paging, self._giving_way = time.perf_counter(), 0.0, 0.0
        self._at_gate = None

    @contextmanager
    def _others(self) -> Iterator[None]:
        """A forward pass, which other ranks take part in: they must not be left in the middle of it."""
        try:
            yield
        except PageInAborted:
            if self._led is not None:
                self._led.give_up()
            raise
        except Exception as error:
            if self._led is not None:
                self._led.break_down(error)
            raise

    def _at_layer(self, nbytes: int) -> None:
        """The page gate of a layer, whose pass goes on when shard bytes `[0, nbytes)` are in, on every rank."""
        if self._recorder.on:
            self._record_layer()
        led = self._led
        if led is not None and led.is_granted(nbytes):
            return
        self._give_way()
        if led is not None:
            while not led.go_on(nbytes):
                self._wait_for_pages(nbytes)
        elif not self._shard.is_ready(nbytes):
            self._wait_for_pages(nbytes)

    def _give_way(self) -> None:
        """Between two layers, let in who waits urgently, once; on a GPU, anybody, now and then."""
        began = time.perf_counter()
        if self._may_give_way and self._turn.give_way(urgent=True):
            self._may_give_way = False
        elif not (self.runs_ahead and began >= self._slice_began + LAUNCH_SLICE and self._turn.give_way()):
            return
        self._slice_began = time.perf_counter()
        self._giving_way += self._slice_began - began

    def _wait_for_pages(self, nbytes: int) -> None:
        """Other models run meanwhile."""
        began = time.perf_counter()
        self._turn.release()
        try:
            if self._led is None:
                self._shard.wait(nbytes, self._is_interrupted)
            else:
                self._led.wait(nbytes, self._is_interrupted)
        finally:
            self._turn.acquire(urgent=self._is_urgent)
            self._slice_began = time.perf_counter()
            self._paging += self._slice_began - began

    def _is_interrupted(self) -> bool:
        return self._interrupted

    def _report(self) -> None:
        reports = self._batcher.take_reports()
        if self._led is not None:  # that frames are free is true when they are on all ranks
            self._led.flush(wait=any(isinstance(report, KvReleased | Suspended) for report in reports))
        if reports:
            self._emit(reports)

    def _record(self, step: Planned, computing: float) -> None:
        slices = step.batch.slices
        decoded = sum(its.length == 1 and its.context > 1 for its in slices)
        self._record_layer()
        self._recorder.add(
            "pass",
            self._model.name,
            self._began,
            computing,
            prefilled=len(step.batch.tokens) - decoded,
            decoded=decoded,
            sampled=len(step.batch.sampled),
            context=sum(its.context for its in slices),
            paging=self._paging,
        )
        self._recorder.peak(
            kv_frames=self._blocks.frames_held, kv_bytes=self._blocks.bytes_taken, sequences=len(slices)
        )

    def _record_layer(self) -> None:
        """A layer ends where the next one's gate is; on a GPU that is when it has been launched."""
        now = time.perf_counter()
        if self._at_gate is not None:
            self._recorder.add("layer", self._model.name, self._at_gate, now - self._at_gate)
        self._at_gate = now
