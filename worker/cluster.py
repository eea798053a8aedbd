"""Where workers run: a private Ray of this daemon alone, or one that is there already.

The private Ray is one node on this machine, closed to everyone else by a token, silent on the terminal, without usage
reports, and gone when the daemon is: everything that descends from it inherits this instance's id in its environment,
by which a watchdog process (`worker/reaper.py`) finds and kills it, however the daemon ended.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from swapper.errors import WorkerError
from worker import reaper

OBJECT_STORE_BYTES = 80 << 20  # about Ray's least: nothing of ours goes through it
NODE_ADDRESS = "127.0.0.2"
"""On the loopback interface, so that Ray does not depend on this machine's network; Ray takes 127.0.0.1 to mean any
address but that one."""

WATCH_INTERVAL = 1.0  # seconds
VITAL = ("gcs_server", "raylet")
JOIN_TIMEOUT = 10.0  # seconds
REAPER_TIMEOUT = 12.0  # seconds: a little more than the reaper's own patience

logger = logging.getLogger(__name__)

_SOCKET_ROOM = 40  # bytes of a directory's name that leave room for Ray's socket names (the kernel allows 107 in all)

_environment_lock = threading.Lock()

Result = TypeVar("Result")


class Cluster:
    """A running Ray. Made by `start`; one a process, as Ray has it."""

    def __init__(self, thread: ThreadPoolExecutor, private: PrivateRay | None, node: str) -> None:
        self._thread = thread
        self._private = private
        self.node = node  # Ray's id of the node the daemon itself is on
        self.is_private = private is not None

    @staticmethod
    async def start(address: str | None = None) -> Cluster:
        """Start a private Ray, or join the one at `address`. Raises WorkerError when that fails."""
        # A thread that lives as long as the cluster: when it ended, the kernel would kill the processes it started.
        thread = ThreadPoolExecutor(1, thread_name_prefix="ray")
        try:
            return await asyncio.get_running_loop().run_in_executor(thread, _start, thread, address)
        except BaseException:
            thread.shutdown(wait=False)
            raise

    @staticmethod
    async def call(function: Callable[..., Result], *arguments: Any) -> Result:
        """A call into Ray that waits for its control process, beside the event loop.

        If that process is gone, the call ends after a minute: whoever stops waiting leaves it to a thread that keeps
        nothing from ending.
        """
        loop = asyncio.get_running_loop()
        result: asyncio.Future[Result] = loop.create_future()

        def tell(outcome: Callable[[Any], None], value: object) -> None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(lambda: None if result.done() else outcome(value))

        def run() -> None:
            try:
                tell(result.set_result, function(*arguments))
            except Exception as error:  # noqa: BLE001 – whoever waits for the result gets it
                tell(result.set_exception, error)

        threading.Thread(target=run, name="ray call", daemon=True).start()
        return await result

    async def watch(self) -> None:
        """Raise WorkerError once a private Ray has lost a process without which no worker can be started or reached."""
        while True:
            await asyncio.sleep(WATCH_INTERVAL)
            if self.is_private and (dead := _dead_processes()):
                raise WorkerError(f"the private Ray has lost its {' and '.join(dead)}")

    async def stop(self) -> None:
        """Leave Ray; returns when a private one is gone, with its processes and files."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._stop)
        self._thread.shutdown()

    def _stop(self) -> None:
        import ray

        ray.shutdown()
        if self._private is not None:
            self._private.close()


def _start(thread: ThreadPoolExecutor, address: str | None) -> Cluster:
    import ray

    if ray.is_initialized():
        raise WorkerError("this process is connected to a Ray already, and can be connected to one only")
    private = PrivateRay() if address is None else None
    try:
        node = _join(address) if private is None else private.connect()
    except Exception as error:
        if private is None:
            raise WorkerError(f"Ray at {address} could not be joined: {error}") from error
        private.close()
        raise WorkerError(f"a private Ray did not start: {error}") from error
    return Cluster(thread, private, node)


def _join(address: str | None) -> str:
    host, _, port = (address or "").rpartition(":")
    if host and port.isdigit():
        # Ray would try for minutes to reach an address where nobody listens.
        socket.create_connection((host, int(port)), timeout=JOIN_TIMEOUT).close()
    return _connect(address=address)


def _connect(**options: Any) -> str:
    import ray

    logging.getLogger("ray").setLevel(logging.ERROR)
    # Ray prints what its node has to say to our standard output, and has no switch for that.
    ray._private.worker.print_to_stdstream = _log
    ray.init(
        namespace="gswapd",
        log_to_driver=False,
        configure_logging=False,
        **options,
    )
    return str(ray.get_runtime_context().get_node_id())


def _dead_processes() -> list[str]:
    """Which of the vital processes that this one started have ended."""
    import ray

    node = ray._private.worker._global_node
    return [] if node is None else [kind for kind, _ in node.dead_processes() if kind in VITAL]


def _log(data: Mapping[str, Any], ignore_prefix: bool) -> None:
    # Not for operators: an orderly end of a worker reads "A worker died or was killed" here.
    logger.debug("%s: %s", data.get("pid"), "; ".join(data.get("lines", ())))


class PrivateRay:
    """The private Ray's directory, token and watchdog."""

    def __init__(self) -> None:
        parent = tempfile.gettempdir()
        self.instance = uuid.uuid4().hex
        self.directory = Path(tempfile.mkdtemp(prefix="gswapd-", dir=parent if len(parent) <= _SOCKET_ROOM else "/tmp"))
        self._token = self.directory / "token"
        self._token.touch(mode=0o600)
        self._token.write_text(secrets.token_hex(32))
        self._reaper = self._start_reaper()

    def connect(self) -> str:
        """Start Ray and connect to it; returns the node's id."""
        with _environment(self._variables()):
            _reread_environment()
            return _connect(
                address="local",
                num_cpus=0,  # so that Ray starts no idle processes ahead; our actors ask for none
                include_dashboard=False,
                object_store_memory=OBJECT_STORE_BYTES,
                _node_ip_address=NODE_ADDRESS,
                _temp_dir=str(self.directory),
            )

    def close(self) -> None:
        """Have the watchdog end what is left; returns when it has."""
        assert self._reaper.stdin is not None
        self._reaper.stdin.close()
        try:
            self._reaper.wait(REAPER_TIMEOUT)
        except subprocess.TimeoutExpired:
            self._reaper.kill()
            self._reaper.wait()
            shutil.rmtree(self.directory, ignore_errors=True)

    def _start_reaper(self) -> subprocess.Popen[bytes]:
        watchdog = subprocess.Popen(
            [sys.executable, "-I", "-S", reaper.__file__, self.instance, str(self.directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
        )
        assert watchdog.stdout is not None
        with watchdog.stdout as stdout:
            if stdout.readline() != b"ready\n":
                watchdog.communicate()
                shutil.rmtree(self.directory)
                raise WorkerError("the watchdog process ended at once; is the Python installation complete?")
        return watchdog

    def _variables(self) -> Mapping[str, str]:
        return {
            reaper.VARIABLE: self.instance,
            "SPT_NOENV": "1",  # or Ray would write its processes' titles over the environment that they are found by
            # Ray listens on all interfaces whatever address its node has, so nobody may talk to it without the token.
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self._token),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_memory_monitor_refresh_ms": "0",  # it counts frames as the worker's own memory, and kills it
            "RAY_OBJECT_STORE_ALLOW_SLOW_STORAGE": "1",  # a small /dev/shm is fine
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        }


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Have variables in the environment for processes started here, and only for those."""
    with _environment_lock:
        before = {name: os.environ.get(name) for name in variables}
        os.environ.update(variables)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


def _reread_environment() -> None:
    """Ray looks for its token when it is imported, which may have been before there was one."""
    import ray

    raylet: Any = ray._raylet
    raylet.Config.initialize("")
    raylet.AuthenticationTokenLoader.instance().reset_cache()
