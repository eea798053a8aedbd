"""A daemon as a child process, the way an operator runs it: used by the demo, the benches and the end-to-end tests."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
from collections import deque
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import yaml

from swapper.errors import WorkerError

START_SECONDS = 120.0
STOP_SECONDS = 60.0


class DaemonProcess:
    """`gswapd serve` with a configuration, as a context manager; `url` is set once it is ready to serve."""

    def __init__(self, directory: Path, config: dict[str, Any], *, env: dict[str, str] | None = None) -> None:
        self._path = directory / "gswapd.yaml"
        self._path.write_text(yaml.safe_dump(config))
        self._env = env
        self.url = ""
        self.output: deque[str] = deque(maxlen=1000)  # the last lines of its log

    def start(self) -> DaemonProcess:
        """Start it and return once `/readyz` says so. Raises WorkerError with the end of its log if it does not."""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "server.cli", "serve", "--config", str(self._path), "--port", "0"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=self._env,
            start_new_session=True,  # so that Ctrl-C reaches whoever started it, who then stops it in good order
        )
        ready = threading.Event()
        self._reader = threading.Thread(target=self._read, args=(ready,), daemon=True)
        self._reader.start()
        try:
            if not ready.wait(START_SECONDS) or not self.url:
                raise WorkerError("the daemon did not get ready:\n" + "\n".join(list(self.output)[-20:]))
        except BaseException:  # Ctrl-C too: nobody else would stop it
            self.stop()
            raise
        return self

    def _read(self, ready: threading.Event) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as log:
            for line in log:
                self.output.append(line.rstrip())
                if not self.url and (found := re.search(r"serving at (http://\S+)", line)):
                    self.url = found[1]
                    ready.set()
        ready.set()  # it ended: do not wait for the time-out

    def admin(self) -> list[dict[str, Any]]:
        """The models, as `GET /admin/models` tells."""
        models: list[dict[str, Any]] = (
            httpx.get(f"{self.url}/admin/models", timeout=10).raise_for_status().json()["models"]
        )
        return models

    def stop(self) -> int:
        """SIGTERM, and its exit status. Raises subprocess.TimeoutExpired, and kills it, if it does not end."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(STOP_SECONDS)
        finally:
            self.process.kill()
            self.process.wait()
            self._reader.join(5)

    def __enter__(self) -> DaemonProcess:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.process.poll() is None:
            self.stop()
