"""The engine of one worker: many models that share one processor and one frame pool.

Each model has a batch loop in a thread of its own (`engine/runner.py`); one `Turn` decides whose forward pass runs.
Models share nothing else, so a model that waits for its pages, or has a defect, holds up none of the others.

Requests come in with `submit` and go out as reports, in one list a step. How many may be queued is for the caller to
bound.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from engine.batching import Batcher
from engine.blocks import BlockManager
from engine.encoder_batching import EncoderBatcher
from engine.follower import FollowerEngine
from engine.kv_keeper import HostRoom, KvKeeper
from engine.leader import Leader, LedModel
from engine.mesh import Mesh, Traffic
from engine.model import ModelRunnerProtocol
from engine.recorder import Recorder
from engine.request import EngineReport, Request, RequestFailed
from engine.runner import AnyBatcher, ModelRunner
from engine.turn import Turn
from swapper.errors import WorkerError
from swapper.frames import FramePool
from swapper.geometry import KV_BLOCK_TOKENS, kv_blocks
from swapper.pager import PagedShard

PASS_TIMEOUT = 60.0
"""Seconds within which a forward pass that computes must end; a longer one is taken for a hang."""


def open_engine(
    pool: FramePool,
    emit: Callable[[Sequence[EngineReport]], None],
    *,
    mesh: Mesh | None = None,
    max_batch_tokens: int = 512,
    max_batch_sequences: int = 64,
    compute_threads: int = 1,
    suspended_bytes: int = 0,
    recorder: Recorder | None = None,
) -> Engine | FollowerEngine:
    """The engine of a rank: the leader's, which a rank that is alone has, too, or a follower's. It closes the mesh."""
    if mesh is not None and not mesh.rank.is_leader:
        return FollowerEngine(
            pool,
            emit,
            mesh,
            max_batch_sequences=max_batch_sequences,
            compute_threads=compute_threads,
            recorder=recorder,
        )
    return Engine(
        pool,
        emit,
        max_batch_tokens=max_batch_tokens,
        max_batch_sequences=max_batch_sequences,
        compute_threads=compute_threads,
        suspended_bytes=suspended_bytes,
        recorder=recorder,
        mesh=mesh if mesh is not None and mesh.rank.size > 1 else None,
    )


class Engine:
    """Forward passes of the models of one frame pool. Any thread may call any method, except from within `emit`."""

    def __init__(
        self,
        pool: FramePool,
        emit: Callable[[Sequence[EngineReport]], None],
        *,
        max_batch_tokens: int = 512,
        max_batch_sequences: int = 64,
        compute_threads: int = 1,
        suspended_bytes: int = 0,
        recorder: Recorder | None = None,
        mesh: Mesh | None = None,
    ) -> None:
        """`emit` gets each model's reports in order, from that model's thread. It must not wait.

        `suspended_bytes` of host memory, on each rank, may hold keys and values of suspended requests. A mesh is led,
        and closed.
        """
        self._pool = pool
        self._emit = emit
        self._max_batch_tokens = max_batch_tokens
        self._max_batch_sequences = max_batch_sequences
        self._compute_threads = compute_threads
        self._host_room = HostRoom(suspended_bytes)
        self._leader = Leader(mesh) if mesh is not None else None
        self.recorder = recorder or Recorder()
        if mesh is not None:
            mesh.recorder = self.recorder
        self._turn = Turn()
        self._lock = threading.Lock()  # guards everything below
        self._models: dict[str, ModelRunner] = {}
        self._steps_of_removed = 0
        self._owners: dict[str, ModelRunner] = {}  # of every request that has not ended

    def add(self, model: ModelRunnerProtocol, shard: PagedShard) -> None:
        """Know a model and reserve addresses for its KV blocks; no memory yet. Raises ValueError for a known name."""
        with self._lock:
            if model.name in self._models:
                raise ValueError(f"The engine has a model {model.name} already.")
            encodes = not model.kv_bytes_per_token
            # An encoder's region is never mapped.
            max_blocks = 1 if encodes else kv_blocks(model.context_length) * self._max_batch_sequences
            blocks = BlockManager(self._pool, model.kv_bytes_per_token or 1, max_blocks)
            led = self._leader.lead(model.name, shard, blocks.changes) if self._leader is not None else None
            batcher: AnyBatcher = self._encoder_batcher(model) if encodes else self._batcher(model, blocks, led)
            runner = ModelRunner(
                model, shard, blocks, batcher, self._turn, self._emit, self._compute_threads, self.recorder, led
            )
            self._models[model.name] = runner
            for region in (blocks.region, shard.region):
                self._pool.guard(region, runner.settle)

    def _batcher(self, model: ModelRunnerProtocol, blocks: BlockManager, led: LedModel | None) -> Batcher:
        keeper = KvKeeper(blocks.region, KV_BLOCK_TOKENS * model.kv_bytes_per_token, self._host_room, led)
        return Batcher(
            model.name,
            blocks,
            vocab_size=model.vocab_size,
            context_length=model.context_length,
            max_batch_tokens=self._max_batch_tokens,
            max_batch_sequences=self._max_batch_sequences,
            ended=self._forget,
            clock=time.perf_counter,
            grammars=model.grammars,
            keeper=keeper,
        )

    def _encoder_batcher(self, model: ModelRunnerProtocol) -> EncoderBatcher:
        return EncoderBatcher(
            model.name,
            vocab_size=model.vocab_size,
            context_length=model.context_length,
            max_batch_tokens=self._max_batch_tokens,
            max_batch_sequences=self._max_batch_sequences,
            ended=self._forget,
            clock=time.perf_counter,
        )

    def remove(self, name: str, timeout: float = PASS_TIMEOUT) -> None:
        """Forget a model, its sequences without a word, and give its KV memory back. Raises KeyError, TimeoutError."""
        runner = self._model(name)
        runner.close(timeout)
        with self._lock:
            del self._models[name]
            self._steps_of_removed += runner.steps

    def submit(self, request: Request) -> None:
        """Run a request. With an `answer`, it goes on behind it. Raises ValueError if one of that id is running."""
        with self._lock:
            runner = self._models.get(request.model)
            if request.id in self._owners:
                raise ValueError(f"The engine has a request {request.id} already.")
            if runner is not None:
                self._owners[request.id] = runner
        if runner is None or not runner.post(partial(runner.batcher.add, request, time.perf_counter())):
            with self._lock:
                self._owners.pop(request.id, None)
            self._emit([RequestFailed(request.id, f"This worker does not have a model {request.model}.")])

    def cancel(self, request: str) -> None:
        """Stop a request; it is answered by Tokens with finish "cancelled", unless it had ended."""
        with self._lock:
            runner = self._owners.get(request)
        if runner is not None:
            runner.post(partial(runner.batcher.cancel, request), interrupt=True)

    def grant_kv(self, model: str, frames: int, epoch: int) -> None:
        """Let a model hold `frames` KV frames in all; answered by KvReleased when it holds no more. Raises KeyError."""
        runner = self._model(model)
        runner.post(partial(runner.batcher.grant, frames, epoch), interrupt=True)

    def suspend(self, model: str, epoch: int) -> None:
        """Stop a model's requests between two passes and free its KV frames; answered by Suspended. Raises KeyError."""
        runner = self._model(model)
        runner.post(partial(runner.batcher.suspend, epoch), interrupt=True)

    def resume(self, model: str, kv_frames: int, epoch: int) -> None:
        """Let them go on, with a grant of KV frames; answered by Resumed. Raises KeyError."""
        runner = self._model(model)
        runner.post(partial(runner.batcher.resume, kv_frames, epoch), interrupt=True)

    def abort(self, model: str, timeout: float = PASS_TIMEOUT) -> None:
        """Drop a model's sequences without a word, because its page-in failed.

        When this returns, they hold no KV memory and no report of theirs will come. Raises KeyError, TimeoutError.
        """
        runner = self._model(model)
        runner.call(runner.drop_all, timeout)

    def fence(self, model: str, timeout: float = PASS_TIMEOUT) -> None:
        """Return once no forward pass of a model is under way, at once if the engine does not have it.

        It does not keep later passes from starting. They touch no page that is not in, so this is for pages that were
        taken back already, or of models that have no sequences left. Raises TimeoutError.
        """
        with self._lock:
            runner = self._models.get(model)
        if runner is not None:
            runner.fence(timeout)

    @property
    def busy(self) -> bool:
        """Whether a forward pass is computing now; one that waits for pages is not.

        Raises WorkerError once a batch loop or the mesh has broken down: such an engine must be replaced.
        """
        if self._leader is not None and self._leader.mesh.broken is not None:
            raise WorkerError(self._leader.mesh.broken)
        with self._lock:
            for name, runner in self._models.items():
                if runner.broken is not None:
                    raise WorkerError(f"The batch loop of model {name} broke down: {runner.broken!r}")
            return self._turn.held or any(runner.waits_for_gpu for runner in self._models.values())

    @property
    def traffic(self) -> Traffic | None:
        """What collectives have moved; None where there are no other ranks."""
        return self._leader.mesh.traffic if self._leader is not None else None

    @property
    def steps(self) -> int:
        """Forward passes done: moves as long as the engine computes."""
        with self._lock:
            return self._steps_of_removed + sum(runner.steps for runner in self._models.values())

    def close(self, timeout: float = PASS_TIMEOUT) -> None:
        """Remove every model, after the passes under way. Raises TimeoutError."""
        with self._lock:
            names = list(self._models)
            for runner in self._models.values():
                runner.stop()
        for name in names:
            self.remove(name, timeout)
        if self._leader is not None:
            self._leader.mesh.close()

    def _model(self, name: str) -> ModelRunner:
        with self._lock:
            return self._models[name]

    def _forget(self, request: str) -> None:
        with self._lock:
            del self._owners[request]
