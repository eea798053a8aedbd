"""The daemon: everything put together, started, and brought to an orderly end.

The port is bound before anything else, so that a wrong one is told at once; HTTP answers from then on, and requests
queue until the workers are up. If what the workers stand on is lost, the daemon ends, with an error, for whoever
supervises it to start it again. SIGTERM or SIGINT drains: new requests are refused, those that were admitted end
within the drain time, then everything is stopped and the exit status is 0. A second signal ends the process there and
then; what it leaves behind is reaped by the cluster's watchdog.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

import uvicorn
import uvloop

from scheduler.interface import Scheduler
from server import logs
from server.app import create_app
from server.auth import is_loopback
from server.catalog import Catalog
from server.config import Config, ServerConfig
from server.observers import Observers
from server.reload import reload_on_signal
from server.service import Service
from server.tokens import Tokenizers
from swapper.errors import ConfigError
from swapper.store import Store

if TYPE_CHECKING:
    from server.tracing import Tracing

logger = logging.getLogger(__name__)

HTTP_GRACE = 5
"""Seconds for connections to take their last bytes, once the scheduler has drained."""

CLEAN_UP = 1  # second

KEEP_ALIVE = 75
"""Seconds an idle connection is kept: longer than common clients and proxies keep theirs, so that they close first."""


class Backend(Protocol):
    """`server.backend.RayBackend`, for real."""

    @property
    def scheduler(self) -> Scheduler: ...

    async def start(self) -> None: ...

    async def watch(self) -> None: ...

    async def stop(self) -> None: ...


def run(config: Config, load: Callable[[], Config] | None = None) -> int:
    """Serve until a signal; the exit status. Raises ConfigError or WorkerError if the daemon cannot start."""
    from server.backend import RayBackend  # imports Ray

    logs.set_up(config.telemetry.log)
    # A thread that tokenizes gives the event loop way after half a millisecond, not after five.
    sys.setswitchinterval(0.0005)
    listener = bind(config.server)
    observers = Observers()

    async def main() -> None:
        await serve(config, listener, RayBackend(config, observers), observers, load)

    uvloop.run(main())
    return 0


def bind(config: ServerConfig) -> socket.socket:
    """A listening socket; port 0 takes a free one. Raises ConfigError naming the field."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"server.host: {config.host!r} is no address to listen on ({error}).") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise ConfigError(f"server.port: {config.host}:{config.port} cannot be listened on ({error}).") from error
    return listener


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def serve(
    config: Config,
    listener: socket.socket,
    backend: Backend,
    observers: Observers,
    load: Callable[[], Config] | None = None,
) -> None:
    """Serve on `listener` until a signal has been obeyed; `load` reads the configuration again. Raises what
    `backend.start` raises.
    """
    warn_if_open(config.server)
    signals = Signals()
    signals.listen()
    metrics = observers.metrics
    metrics.watch(backend.scheduler, config.scheduler.wait_bound)
    catalog = Catalog(
        Store(config.store), backend.scheduler, config.models, config.memory.page, config.cluster.groups, metrics
    )
    tokenizers = Tokenizers(config.server.tokenizer_threads)
    service = Service(config, backend.scheduler, catalog, tokenizers, metrics, observers.events, _tracing(config))
    service.load = load
    http = HttpServer(service)
    serving = asyncio.create_task(http.serve([listener]), name="http")
    watching = asyncio.create_task(catalog.run(), name="catalog")
    starting = asyncio.create_task(backend.start(), name="backend")
    stopping = asyncio.create_task(signals.terminated.wait(), name="signals")
    reloading = asyncio.create_task(_reload_when_told(signals, service), name="reload")
    running = {serving, watching, stopping, reloading}
    try:
        done, _ = await asyncio.wait({starting, *running}, return_when=asyncio.FIRST_COMPLETED)
        if starting in done:
            starting.result()
            catalog.workers_are_up()
            signals.listen()  # again: starting Ray has put a handler of its own over ours
            print(f"gswapd is serving at {url_of(listener)}", flush=True)
            standing = asyncio.create_task(backend.watch(), name="backend watch")
            running.add(standing)
            done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            if stopping in done:
                await _drain(service)
        for task in done - {stopping}:
            task.result()
    finally:
        http.should_exit = True
        for task in (starting, *running - {serving}):
            task.cancel()
        await asyncio.gather(starting, *running, return_exceptions=True)
        await catalog.close()
        await service.adds.close()
        await service.background.close()
        await backend.stop()
        tokenizers.close()
        if service.tracing is not None:
            await asyncio.to_thread(service.tracing.close)


def _tracing(config: Config) -> Tracing | None:
    """Raises ConfigError if traces are wanted and what makes them is not installed."""
    if config.telemetry.otlp_endpoint is None:
        return None
    try:
        from server.tracing import Tracing
    except ImportError as error:
        problem = f"telemetry.otlp_endpoint is set, but {error.name} is not installed: pip install 'gswapd[tracing]'"
        raise ConfigError(problem) from error
    return Tracing(config.telemetry)


async def _reload_when_told(signals: Signals, service: Service) -> None:
    while True:
        await signals.hung_up.wait()
        signals.hung_up.clear()
        await reload_on_signal(service)


async def _drain(service: Service) -> None:
    timeout = service.config.timeouts.drain
    logger.info("Shutting down: what runs may finish within %g s; a second signal ends it at once", timeout)
    service.begin_draining()
    await service.scheduler.drain(timeout)


class Signals:
    """SIGTERM and SIGINT: the first sets `terminated`, the second ends the process. SIGHUP sets `hung_up`."""

    def __init__(self) -> None:
        self.terminated = asyncio.Event()
        self.hung_up = asyncio.Event()

    def listen(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._signalled, number)
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self.hung_up.set)

    def _signalled(self, number: int) -> None:
        signal.alarm(0)  # which Ray's handler sets, to kill the process 3 s later, if it was in place while starting
        if self.terminated.is_set():
            logger.warning("Ended at once by a second signal")
            os._exit(128 + number)
        self.terminated.set()


def warn_if_open(config: ServerConfig) -> None:
    if is_loopback(config.host):
        return
    for key in ("api_key", "admin_key"):
        if getattr(config, key) is None:
            logger.warning(
                "server.host is %s and server.%s is not set: anyone who can reach it is let in", config.host, key
            )


def _is_news(record: logging.LogRecord) -> bool:
    """Answers are left incomplete on purpose, to clients that take no more of them; defects are logged where they are
    caught, in `server/errors.py`.
    """
    return record.msg != "ASGI callable returned without completing response."


class HttpServer(uvicorn.Server):
    """uvicorn with the signals left to the daemon."""

    def __init__(self, service: Service) -> None:
        logging.getLogger("uvicorn.error").addFilter(_is_news)
        self._events = service.events
        super().__init__(
            uvicorn.Config(
                create_app(service),
                loop="none",
                http="httptools",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE,
                timeout_graceful_shutdown=HTTP_GRACE,
            )
        )

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self._events.close()  # which would not end before the grace
        await super().shutdown(sockets)
        if cancelled := set(self.server_state.tasks):  # what took longer than the grace; it gets to clean up
            await asyncio.wait(cancelled, timeout=CLEAN_UP)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
