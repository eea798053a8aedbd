"""The server's side of `bench.http`: the real server and scheduler over a stub, or bare Starlette, as a process.

    python -m bench.http_server gswapd|starlette DIRECTORY FEED

Tokens come from a feeder, a process of its own, as they come from workers in a daemon: FEED is the descriptor of a
pipe on which it writes the time of each step. At a step, one answer gets a token (`spread`), or all of them do
(`burst`): the feeder says which, by the sign. When the process ends it writes down when each token was fed.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import uvicorn
import uvloop
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

from engine.request import KvReleased, Started, Tokens
from scheduler.interface import GroupCommand, GroupLost, GroupUp, WorkerStatus
from scheduler.live import LiveScheduler
from server.backend import core_config
from server.config import Config
from server.daemon import bind, serve
from server.logs import set_up
from server.observers import Observers
from worker.protocol import Cancel, GrantKv, PagedIn, PagedOut, PageIn, PageOut, Report, Serve

STEP = struct.Struct("d")
STREAMS = 200
FRAMES = 1 << 16
SINK = Callable[[Sequence[Report | GroupUp | GroupLost]], None]


class Feed:
    """Calls `step(at, everyone)` for each step that the feeder writes."""

    def __init__(self, descriptor: int, step: Callable[[float, bool], None]) -> None:
        os.set_blocking(descriptor, False)
        self._descriptor = descriptor
        self._step = step
        asyncio.get_running_loop().add_reader(descriptor, self._read)

    def _read(self) -> None:
        for (at,) in STEP.iter_unpack(os.read(self._descriptor, 4096 * STEP.size)):
            self._step(abs(at), at < 0)


class StubGroup:
    """A group of workers whose model says the same word again and again; pages and KV cost nothing."""

    name = "default"

    def __init__(self, word: int) -> None:
        self._word = word
        self._answers: deque[tuple[str, int, int]] = deque()  # request, tokens so far, tokens wanted
        self._fed: dict[str, list[float]] = {}
        self._sink: SINK = lambda reports: None

    def subscribe(self, sink: SINK) -> None:
        self._sink = sink

    async def start(self) -> None:
        self._sink([GroupUp(FRAMES)])

    async def stop(self) -> None: ...

    @property
    def workers(self) -> Sequence[WorkerStatus]:
        return [WorkerStatus(self.name, 0, "up", os.getpid(), 0, "cpu", "pread", None, None)]

    def post(self, commands: Sequence[GroupCommand]) -> None:
        asyncio.get_running_loop().call_soon(self._obey, commands)

    def _obey(self, commands: Sequence[GroupCommand]) -> None:
        reports: list[Report] = []
        for command in commands:
            match command:
                case PageIn():
                    reports.append(PagedIn(command.model, command.first, command.last, command.epoch, 0.0, {}, {}))
                case PageOut():
                    reports.append(PagedOut(command.model, command.keep, command.epoch, 0, 0.0))
                case GrantKv():
                    reports.append(KvReleased(command.model, command.frames, command.epoch))
                case Serve():
                    self._answers.append((command.request.id, 0, command.request.sampling.max_tokens))
                    self._fed[command.request.id] = []
                case Cancel():
                    known = [answer for answer in self._answers if answer[0] == command.request]
                    for answer in known:
                        self._answers.remove(answer)
                        reports.append(Tokens(command.request, answer[1], (), finish="cancelled"))
        self._sink(reports)

    def step(self, at: float, everyone: bool) -> None:
        reports: list[Report] = []
        for _ in range(len(self._answers) if everyone else min(1, len(self._answers))):
            request, index, wanted = self._answers.popleft()
            self._fed[request].append(at)
            if not index:
                reports.append(Started(request))
            ends = index + 1 == wanted
            reports.append(Tokens(request, index, (self._word,), finish="length" if ends else None))
            if not ends:
                self._answers.append((request, index + 1, wanted))
        self._sink(reports)

    def fed(self) -> dict[str, list[float]]:
        """By the id that clients see: a request's own says besides which prompt's and which answer it is."""
        return {"-".join(request.split("-")[:2]): times for request, times in self._fed.items()}


class StubBackend:
    """`server.daemon.Backend` over the stub."""

    def __init__(self, config: Config, observers: Observers, group: StubGroup, feed: int) -> None:
        self.scheduler = LiveScheduler([group], core_config(config), observers)
        self._group = group
        self._feed = feed

    async def start(self) -> None:
        await self.scheduler.start()
        Feed(self._feed, self._group.step)

    async def watch(self) -> None:
        await asyncio.Event().wait()

    async def stop(self) -> None:
        await self.scheduler.stop()


def gswapd(directory: Path, feed: int) -> dict[str, list[float]]:
    from tokenizers import Tokenizer

    config = Config(
        store=directory / "store",
        server={"port": 0, "max_requests": 4 * STREAMS},  # type: ignore[arg-type]
        memory={"pool": FRAMES << 21, "page": "2MiB"},  # type: ignore[arg-type]
        cluster={"max_batch_sequences": 2 * STREAMS},  # type: ignore[arg-type]
        scheduler={"max_queue": 2 * STREAMS, "max_queue_total": 2 * STREAMS},  # type: ignore[arg-type]
    )
    tokenizer = Tokenizer.from_file(str(directory / "store" / "models" / "stub" / "tokenizer.json"))
    group = StubGroup(tokenizer.encode(" word").ids[-1])
    set_up("text")
    sys.setswitchinterval(0.0005)
    observers = Observers()

    async def main() -> None:
        await serve(config, bind(config.server), StubBackend(config, observers, group, feed), observers)

    uvloop.run(main())
    return group.fed()


class Server(uvicorn.Server):
    """uvicorn that does not end the process by the signal that ended it."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def starlette(directory: Path, feed: int) -> dict[str, list[float]]:
    """The same bytes to the same clients, with nothing between the feed and the streams but a queue for each."""
    answers: deque[tuple[str, int, int]] = deque()
    queues: dict[str, asyncio.Queue[bool]] = {}
    fed: dict[str, list[float]] = {}

    def step(at: float, everyone: bool) -> None:
        for _ in range(len(answers) if everyone else min(1, len(answers))):
            identity, index, wanted = answers.popleft()
            fed[identity].append(at)
            queues[identity].put_nowait(index + 1 == wanted)
            if index + 1 < wanted:
                answers.append((identity, index + 1, wanted))

    async def chunks(identity: str) -> AsyncIterator[bytes]:
        head = (
            f'data: {{"id":"{identity}","object":"text_completion","created":1,"model":"stub","choices":[{{"index":0,'
        )
        chunk = (head + '"text":" word","logprobs":null,"finish_reason":null}]}\n\n').encode()
        while not await queues[identity].get():
            yield chunk
        yield chunk + b"data: [DONE]\n\n"

    async def create(request: Request) -> StreamingResponse:
        wanted = (await request.json())["max_tokens"]
        identity = f"cmpl-{len(fed)}"
        fed[identity], queues[identity] = [], asyncio.Queue(wanted)
        answers.append((identity, 0, wanted))
        return StreamingResponse(chunks(identity), media_type="text/event-stream")

    async def main() -> None:
        listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
        app = Starlette(routes=[Route("/v1/completions", create, methods=["POST"])])
        server = Server(uvicorn.Config(app, loop="none", http="httptools", lifespan="off", log_level="warning"))
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, setattr, server, "should_exit", True)
        Feed(feed, step)
        print(f"serving at http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
        await server.serve([listener])

    uvloop.run(main())
    return fed


def feeder(descriptor: int, rate: float, streams: int) -> None:
    """Write `rate` tokens a second: single ones, or with `streams`, that many at once. Ends with its parent."""
    period = max(1, streams) / rate
    began = time.monotonic()
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    for step in range(1 << 62):
        time.sleep(max(0.0, began + step * period - time.monotonic()))
        now = time.monotonic()
        os.write(descriptor, STEP.pack(-now if streams else now))


if __name__ == "__main__":
    kind, place, pipe = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    times = {"gswapd": gswapd, "starlette": starlette}[kind](place, pipe)
    spent = resource.getrusage(resource.RUSAGE_SELF)
    (place / "fed.json").write_text(json.dumps({"fed": times, "cpu": spent.ru_utime + spent.ru_stime}))
