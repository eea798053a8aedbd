"""One shard of one group: a frame pool, a pager and an engine, driven by commands and heard through reports.

`post` leaves commands in an inbox, and one thread obeys them in order; the ends of page-ins and binds, which other
threads bring, come through the same inbox. So nothing here needs a lock. Reports go to a log that `poll` reads.

A model's module is built ("bound") beside its first page-in: reads start first, a helper thread builds meanwhile.
Requests for the model wait for the bind, and so does the report that its last page is in, because "in" means that it
can run. A failed bind is a failed page-in.

An error that no command's answer can carry is a defect: the shard stops, every poll from then on raises WorkerError,
and the group replaces the worker.
"""

from __future__ import annotations

import logging
import platform
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from engine.model import ModelRunnerProtocol
from engine.recorder import Recording, TorchProfiler
from engine.request import EngineReport, KvReleased, RequestFailed, Resumed, Suspended, Tokens
from swapper.errors import CorruptImage, GswapdError, WorkerError
from swapper.frames import FramePool
from swapper.host_tier import HostTier
from swapper.image import Image
from swapper.pager import PagedShard, PageInResult, Pager
from swapper.peers import Peers
from swapper.readers import Reader
from worker.inbox import Inbox
from worker.protocol import (
    AddModel,
    Batch,
    Cancel,
    Command,
    FailPageIn,
    GrantKv,
    Heartbeat,
    PagedIn,
    PagedOut,
    PageIn,
    PageInFailed,
    PageOut,
    PageOutFailed,
    RemoveModel,
    Resume,
    Serve,
    Suspend,
    WorkerSpec,
)
from worker.recordings import Recordings
from worker.report_log import ReportLog
from worker.slot import BindEnded, Bound, ModelSlot, PageInEnded

if TYPE_CHECKING:
    from engine.engine import Engine
    from engine.follower import FollowerEngine

logger = logging.getLogger(__name__)

BIND_TIMEOUT = 300.0
"""Seconds that RemoveModel waits for a bind that is under way, before the shard counts as broken."""

Bind = Callable[[Image, PagedShard], ModelRunnerProtocol]
Emit = Callable[[Sequence[EngineReport]], None]


class Shard:
    """Everything of one rank. It closes its pager and its engine; pool, reader and tier are closed by who made them."""

    def __init__(
        self,
        spec: WorkerSpec,
        pool: FramePool,
        reader: Reader,
        make_engine: Callable[[Emit], Engine | FollowerEngine],
        bind: Bind,
        *,
        rehearse: Callable[[Path], object] = lambda path: None,
        tier: HostTier | None = None,
        peers: Peers | None = None,
        depth: int = 8,
        run: int = 1,
    ) -> None:
        """`make_engine` is given the function that takes the engine's reports; `depth` and `run` are the pager's.

        `rehearse` is told of each image that becomes known. It must not wait.
        """
        self.spec = spec
        self._pool = pool
        self._tier = tier
        self._peers = peers
        self._bind = bind
        self._rehearse = rehearse
        self._log = ReportLog()
        self._engine = make_engine(self._log.append)
        self._recordings = Recordings(self._engine)
        self._pager = Pager(
            pool, reader, tier=tier, peers=peers, depth=depth, run=run, verify=spec.verify, quiesce=self._quiesce
        )
        self._slots: dict[str, ModelSlot] = {}
        self._inbox: Inbox[Command | PageInEnded | BindEnded] = Inbox()
        self._binder = ThreadPoolExecutor(1, thread_name_prefix="bind")
        self._process = psutil.Process()
        self._thread = threading.Thread(target=self._run, name="shard", daemon=True)
        self._thread.start()

    # ---- from any thread

    def post(self, commands: Sequence[Command]) -> None:
        """Have commands obeyed, in order. Returns at once, or when there is room for them."""
        self._inbox.post(commands)

    def poll(self, cursor: int, timeout: float) -> Batch:
        """Reports from index `cursor` on; acknowledges those before it. Waits up to `timeout` seconds for the first."""
        reports = self._log.read(cursor, timeout)
        return Batch(cursor, reports, self._heartbeat())

    def record(self, on: bool, torch_profiler: TorchProfiler = "off") -> Recording | None:
        """Begin a recording, or end it: then what it has. Torch's own profiler runs beside it if asked for."""
        if on:
            self._recordings.begin(torch_profiler)
            return None
        return self._recordings.end()

    def close(self) -> None:
        """Stop; what runs is dropped without a word, and all frames are given back."""
        self._inbox.close()
        self._log.close()
        self._thread.join()
        self._binder.shutdown(cancel_futures=True)
        self._engine.close()
        self._pager.shutdown()

    def _heartbeat(self) -> Heartbeat:
        return Heartbeat(
            steps=self._engine.steps,
            pages_read=self._pager.progress,
            computing=self._engine.busy or self._inbox.busy,
            paging=any(slot.is_busy for slot in list(self._slots.values())),
            frames=self._pool.frames,
            frames_free=self._pool.free,
            resident_bytes=self._process.memory_info().rss,
            tier=self._tier.status if self._tier is not None else None,
            peers=self._peers.status if self._peers is not None else (),
        )

    # ---- the shard's thread

    def _run(self) -> None:
        try:
            while (item := self._inbox.take()) is not None:
                self._obey(item)
        except Exception as error:
            logger.exception("The shard is broken.")
            self._log.fail(f"it broke: {type(error).__name__}: {error}")
            self._inbox.close()

    def _obey(self, item: Command | PageInEnded | BindEnded) -> None:
        match item:
            case AddModel():
                self._slots.setdefault(item.model, ModelSlot(item.model, item.path, item.identity))
                self._rehearse(Path(item.path))
            case RemoveModel():
                self._remove(item)
            case PageIn():
                self._page_in(item)
            case FailPageIn():
                self._fail_page_in(item)
            case PageInEnded():
                self._page_in_ended(item)
            case BindEnded():
                self._bind_ended(item.slot, item.binding)
            case PageOut():
                self._page_out(item)
            case GrantKv() | Suspend() | Resume():
                self._grant(item)
            case Serve():
                self._serve(item)
            case Cancel():
                self._cancel(item)

    # ---- pages in

    def _page_in(self, command: PageIn) -> None:
        slot = self._slots.get(command.model)
        if slot is None:
            self._log.append([PageInFailed(command.model, command.epoch, _unknown(command.model))])
        elif slot.bind_failure is not None and not slot.page_ins:
            self._page_in_failed(slot, [command], slot.bind_failure)
        elif slot.failed and command.first > 0:
            # It crossed the PageInFailed of the page-in before it.
            message = f"Pages before page {command.first} of {slot.name} did not come in."
            self._log.append([PageInFailed(slot.name, command.epoch, message)])
        else:
            self._begin_page_in(slot, command)

    def _begin_page_in(self, slot: ModelSlot, command: PageIn) -> None:
        slot.failed = False
        try:
            self._open(slot)
        except CorruptImage as error:
            elsewhere = f" (on node {platform.node()}, whose store must be as the daemon's)" if self.spec.images else ""
            self._page_in_failed(slot, [command], f"{error}{elsewhere}")
            return
        assert slot.paged is not None
        if command.first == 0:
            slot.told_in.clear()
        slot.page_ins.append(command)
        # Ranks move in lockstep, though this one may have fewer pages than another.
        first, last = (min(page, slot.paged.page_count) for page in (command.first, command.last))
        self._pager.page_in(slot.name, first, last, self._end_of(slot, command))
        if slot.bound is None and slot.binding is None and slot.image is not None:
            slot.binding = self._binder.submit(_build, self._bind, slot.image, slot.paged)
            slot.binding.add_done_callback(lambda binding: self._inbox.complete(BindEnded(slot, binding)))

    def _open(self, slot: ModelSlot) -> None:
        """Read the manifest and reserve the region, the first time; later see that the image is the same still.

        Raises CorruptImage. While page-ins are under way, their files are open, and there is nothing to see to.
        A page's hash is believed, so files of another image must never be read as this one's: not after `rm` and `add`
        of the same name, which the daemon notices a moment later.
        """
        if slot.page_ins:
            return
        path = Path(slot.path)
        image = Image.open(path) if slot.paged is None else None
        identity = Image.identity_at(path) if image is None else image.identity
        if identity != slot.identity:
            raise CorruptImage(f"The image at {path} was replaced by another one. Ask for the model again.")
        if image is None:
            return
        ranks = image.manifest.shards
        if self.spec.rank >= len(ranks):
            raise CorruptImage(
                f"{slot.path} is packed for {len(ranks)} ranks, but this worker is rank {self.spec.rank}. "
                "Add the model again, for a mesh of this group's shape."
            )
        slot.paged = self._pager.open(slot.name, ranks[self.spec.rank], image.shard_path(self.spec.rank))
        slot.image = image

    def _end_of(self, slot: ModelSlot, command: PageIn) -> Callable[[PageInResult | Exception], None]:
        """What a thread of the pager calls when the page-in has ended."""
        began = time.monotonic()
        return lambda result: self._inbox.complete(PageInEnded(slot, command, began, result))

    def _page_in_ended(self, ended: PageInEnded) -> None:
        slot, command, result = ended.slot, ended.command, ended.result
        if command not in slot.page_ins:
            return  # told already, with the one that failed before it
        if isinstance(result, Exception):
            doomed, slot.page_ins = slot.page_ins, []  # the pager fails those behind it too
            self._page_in_failed(slot, doomed, slot.doom or str(result) or repr(result))
            return
        slot.page_ins.remove(command)
        if slot.doom is not None and not slot.page_ins:
            self._page_in_failed(slot, [command], slot.doom)
        elif slot.bound is None and slot.paged is not None and result.last == slot.paged.page_count:
            slot.whole.append((ended, result))
        else:
            self._paged_in(ended, result)

    def _paged_in(self, ended: PageInEnded, result: PageInResult) -> None:
        slot = ended.slot
        stages = dict(result.stages)
        if slot.bound is not None and not slot.bind_told:
            stages["bind"] = slot.bound.seconds
            slot.bind_told = True
        slot.told_in.add(ended.command.epoch)
        self._log.append(
            [
                PagedIn(
                    model=slot.name,
                    first=ended.command.first,
                    last=ended.command.last,
                    epoch=ended.command.epoch,
                    seconds=time.monotonic() - ended.began,
                    sources=result.sources,
                    stages=stages,
                )
            ]
        )

    def _fail_page_in(self, command: FailPageIn) -> None:
        """Undo a page-in that failed on another rank. If it is under way, it is given up, and its end goes on here."""
        slot = self._slots.get(command.model)
        if slot is None:
            return
        under_way = [*slot.page_ins, *(ended.command for ended, _ in slot.whole)]
        if command.epoch not in slot.told_in and all(command.epoch != its.epoch for its in under_way):
            return  # it failed here, too, and that was told
        slot.undone.append(command)
        if slot.page_ins:
            self._pager.abort(slot.name)
        else:
            self._page_in_failed(slot, [], command.message)

    def _page_in_failed(self, slot: ModelSlot, commands: Sequence[PageIn], message: str) -> None:
        """Tell that page-ins failed, once the model is absent and none of its requests are left."""
        logger.warning("A page-in of %s failed: %s", slot.name, message)
        slot.failed = True
        slot.bind_failure = None  # told; the next page-in tries again
        epochs = {its.epoch for its in commands} | {its.epoch for its in slot.undone}
        epochs |= {ended.command.epoch for ended, _ in slot.whole}
        slot.undone.clear()
        slot.whole.clear()
        slot.told_in -= epochs
        if slot.bound is not None:
            self._engine.abort(slot.name)
        if slot.paged is not None:
            self._pager.page_out(slot.name, 0)
        self._drop_deferred(slot)
        self._log.append([PageInFailed(slot.name, epoch, message) for epoch in sorted(epochs)])

    def _quiesce(self, model: str) -> None:
        """Called by the pager's thread before it takes a failed model's pages away."""
        with suppress(KeyError):  # not bound yet, so nothing runs
            self._engine.fence(model)

    # ---- the bind

    def _bind_ended(self, slot: ModelSlot, binding: Future[Bound]) -> None:
        if slot.binding is not binding:
            return  # the model was removed meanwhile
        slot.binding = None
        error = binding.exception()
        if error is not None:
            reason = str(error) if isinstance(error, GswapdError) else repr(error)
            slot.bind_failure = f"The module of {slot.name} cannot be built: {reason}"
            if slot.page_ins:
                self._pager.abort(slot.name)  # the end of the page-in tells
            elif slot.whole:
                self._page_in_failed(slot, [], slot.bind_failure)
            return
        slot.bound = binding.result()
        assert slot.paged is not None
        self._engine.add(slot.bound.module, slot.paged)
        while slot.deferred:
            self._obey(slot.deferred.popleft())
        whole, slot.whole = slot.whole, []
        for ended, result in whole:
            self._paged_in(ended, result)

    # ---- pages out

    def _page_out(self, command: PageOut) -> None:
        began = time.monotonic()
        slot = self._slots.get(command.model)
        try:
            if slot is None:
                raise WorkerError(_unknown(command.model))
            if slot.is_loading:
                raise WorkerError(f"Pages of {slot.name} are still coming in.")
            if slot.bound is not None:
                self._engine.fence(slot.name)
            frames = self._pager.page_out(slot.name, command.keep) if slot.paged is not None else 0
        except (WorkerError, TimeoutError) as error:
            self._log.append([PageOutFailed(command.model, command.epoch, str(error))])
        else:
            seconds = time.monotonic() - began
            self._log.append([PagedOut(command.model, command.keep, command.epoch, frames, seconds)])

    def _remove(self, command: RemoveModel) -> None:
        slot = self._slots.pop(command.model, None)
        if slot is None:
            return
        binding, slot.binding = slot.binding, None
        if binding is not None and wait([binding], BIND_TIMEOUT).not_done:
            raise WorkerError(f"building the module of {slot.name} takes more than {BIND_TIMEOUT:g} s")
        self._drop_deferred(slot)
        if slot.bound is not None:
            self._engine.remove(slot.name)
        if slot.paged is not None:
            self._pager.close(slot.name)

    # ---- requests

    def _serve(self, command: Serve) -> None:
        request = command.request
        slot = self._slots.get(request.model)
        if slot is None:
            self._log.append([RequestFailed(request.id, _unknown(request.model))])
        elif slot.failed:
            # It crossed the PageInFailed that drops all requests of its model, itself included. Whoever sent it learns
            # that from there, and sends it again behind the next PageIn.
            logger.info("Request %s is dropped with its model's failed page-in.", request.id)
        elif slot.bound is None:
            slot.deferred.append(command)
        else:
            self._engine.submit(request)

    def _cancel(self, command: Cancel) -> None:
        for slot in self._slots.values():
            if (waiting := slot.find_deferred(command.request)) is not None:
                slot.deferred.remove(waiting)
                answered = len(waiting.request.answer)
                self._log.append([Tokens(command.request, answered, (), finish="cancelled")])
                return
        self._engine.cancel(command.request)

    def _grant(self, command: GrantKv | Suspend | Resume) -> None:
        """Suspend and Resume are grants too, and like these wait for the bind, behind the requests they are about."""
        slot = self._slots.get(command.model)
        if slot is not None and slot.bound is not None:
            match command:
                case GrantKv():
                    self._engine.grant_kv(slot.name, command.frames, command.epoch)
                case Suspend():
                    self._engine.suspend(slot.name, command.epoch)
                case Resume():
                    self._engine.resume(slot.name, command.kv_frames, command.epoch)
        elif slot is not None and not slot.failed:
            slot.deferred.append(command)
        else:
            self._log.append([_holds_none(command)])

    def _drop_deferred(self, slot: ModelSlot) -> None:
        """Requests that wait for the bind go without a word; grants are answered."""
        grants = [_holds_none(item) for item in slot.deferred if not isinstance(item, Serve)]
        slot.deferred.clear()
        self._log.append(grants)


def _build(bind: Bind, image: Image, paged: PagedShard) -> Bound:
    began = time.monotonic()
    return Bound(bind(image, paged), time.monotonic() - began)


def _unknown(model: str) -> str:
    return f"This worker does not have a model {model}."


def _holds_none(grant: GrantKv | Suspend | Resume) -> KvReleased | Suspended | Resumed:
    """A model without a module holds no KV frame, so any grant is kept."""
    if isinstance(grant, Suspend):
        return Suspended(grant.model, 0, grant.epoch)
    if isinstance(grant, Resume):
        return Resumed(grant.model, grant.epoch)
    return KvReleased(grant.model, grant.frames, grant.epoch)
