"""A scripted twin of the client of a group of workers: it keeps what was posted and reports what a test tells it to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, TypeVar

from engine.request import FinishReason, KvReleased, RequestFailed, Resumed, Started, Suspended, Tokens
from scheduler.interface import GroupCommand
from swapper.errors import WorkerError
from swapper.pager import SourceBytes
from worker.protocol import (
    AddModel,
    Cancel,
    GrantKv,
    GroupLost,
    GroupUp,
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
    WorkerStatus,
)

C = TypeVar("C", bound=GroupCommand)

PAGE_SECONDS = 0.01


class FakeGroup:
    """`todo` holds the commands that were posted and not yet answered; `posts` every post, for the record."""

    def __init__(self, name: str = "g0", frames: int = 8, refuses_to_start: str | None = None) -> None:
        self.name = name
        self.frames = frames
        self.posts: list[list[GroupCommand]] = []
        self.todo: list[GroupCommand] = []
        self.known: set[str] = set()
        self.resident: dict[str, int] = {}
        self.serving: dict[str, Serve] = {}
        self.generated: dict[str, int] = {}  # tokens of each answer, for tests that count them
        self.is_up = False
        self.stopped = False
        self._refuses_to_start = refuses_to_start
        self._sink: Callable[[Sequence[Report | GroupUp | GroupLost]], None] | None = None

    # ---- scheduler.interface.GroupClient

    def post(self, commands: Sequence[GroupCommand]) -> None:
        self.posts.append(list(commands))
        if not self.is_up:
            return
        for command in commands:
            self._accept(command)

    def subscribe(self, sink: Callable[[Sequence[Report | GroupUp | GroupLost]], None]) -> None:
        assert self._sink is None, "subscribed twice"
        self._sink = sink

    async def start(self) -> None:
        if self._refuses_to_start is not None:
            raise WorkerError(self._refuses_to_start)
        self.come_up()

    async def stop(self) -> None:
        self.is_up = False
        self.stopped = True

    @property
    def workers(self) -> Sequence[WorkerStatus]:
        state: Literal["up", "down"] = "up" if self.is_up else "down"
        return [WorkerStatus(self.name, 0, state, 1, 0, "cpu", "pread", None, None)]

    # ---- what a test lets happen

    def report(self, *reports: Report | GroupUp | GroupLost) -> None:
        assert self._sink is not None
        self._sink(reports)

    def come_up(self) -> None:
        self.is_up = True
        self.report(GroupUp(self.frames))

    def die(self, message: str = "killed") -> None:
        self.is_up = False
        self.todo.clear()
        self.known.clear()
        self.resident.clear()
        self.serving.clear()
        self.generated.clear()
        self.report(GroupLost(message))

    def waiting(self, kind: type[C]) -> list[C]:
        return [command for command in self.todo if isinstance(command, kind)]

    def next(self, kind: type[C]) -> C:
        """The oldest unanswered command of a kind, which must be there."""
        found = self.waiting(kind)
        assert found, f"no {kind.__name__} waits among {self.todo}"
        return found[0]

    def page_in(self, command: PageIn | None = None) -> None:
        """Finish a page-in; or fail it, if it was sent before the failure of those that it goes on from was known."""
        command = command or self.next(PageIn)
        if self.resident.get(command.model, 0) != command.first:
            self.fail_page_in("it does not go on where the last one ended", command)
            return
        self.todo.remove(command)
        self.resident[command.model] = command.last
        pages = command.last - command.first
        seconds = pages * PAGE_SECONDS
        sources = {"disk": SourceBytes(pages, pages * PAGE_BYTES)}
        stages = {"read": seconds}
        self.report(PagedIn(command.model, command.first, command.last, command.epoch, seconds, sources, stages))

    def fail_page_in(self, message: str, command: PageIn | None = None) -> None:
        """Fail a page-in, as a worker does: with those queued behind it, and what was served on those pages."""
        command = command or self.next(PageIn)
        failed = [other for other in self.waiting(PageIn) if other.model == command.model]
        self.todo = [other for other in self.todo if other not in failed]
        self.resident.pop(command.model, None)
        self.serving = {id: serve for id, serve in self.serving.items() if serve.request.model != command.model}
        self.report(*(PageInFailed(other.model, other.epoch, message) for other in failed))

    def page_out(self, command: PageOut | None = None) -> None:
        command = command or self.next(PageOut)
        self.todo.remove(command)
        freed = max(0, self.resident.get(command.model, 0) - command.keep)
        self.resident[command.model] = command.keep
        self.report(PagedOut(command.model, command.keep, command.epoch, freed, PAGE_SECONDS))

    def grant(self, command: GrantKv | None = None) -> None:
        command = command or self.next(GrantKv)
        self.todo.remove(command)
        self.report(KvReleased(command.model, command.frames, command.epoch))

    def suspend(self, command: Suspend | None = None) -> None:
        command = command or self.next(Suspend)
        self.todo.remove(command)
        self.report(Suspended(command.model, 1, command.epoch, kept_bytes=100, lost_tokens=7))

    def resume(self, command: Resume | None = None) -> None:
        command = command or self.next(Resume)
        self.todo.remove(command)
        self.report(Resumed(command.model, command.epoch))

    def do(self, command: GroupCommand) -> None:
        """Carry out one unanswered command."""
        match command:
            case PageIn():
                self.page_in(command)
            case PageOut():
                self.page_out(command)
            case GrantKv():
                self.grant(command)
            case Suspend():
                self.suspend(command)
            case Resume():
                self.resume(command)
            case Cancel():
                self.cancel(command)

    def cancel(self, command: Cancel | None = None) -> None:
        command = command or self.next(Cancel)
        self.todo.remove(command)
        if command.request in self.serving:
            self.tokens(command.request, len(self.serving[command.request].request.answer), finish="cancelled")

    def started(self, request: str) -> None:
        self.report(Started(request))

    def tokens(
        self,
        request: str,
        index: int,
        *tokens: int,
        finish: FinishReason | None = None,
        vectors: tuple[bytes, ...] | None = None,
    ) -> None:
        if finish is not None:
            self.serving.pop(request, None)
        self.report(Tokens(request, index, tokens, None, finish, vectors=vectors))

    def fail_request(self, request: str, message: str) -> None:
        del self.serving[request]
        self.report(RequestFailed(request, message))

    def _accept(self, command: GroupCommand) -> None:
        match command:
            case AddModel():
                assert command.model not in self.known, f"{command.model} was added twice"
                self.known.add(command.model)
            case RemoveModel():
                assert not self.resident.get(command.model), f"{command.model} is removed with pages in"
                self.known.remove(command.model)
            case Serve():
                assert command.request.model in self.known
                self.serving[command.request.id] = command
            case _:
                assert not isinstance(command, PageIn) or command.model in self.known
                self.todo.append(command)


PAGE_BYTES = 2 << 20
