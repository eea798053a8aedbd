"""What server, scheduler and Ray add to one request, the model's own time taken off, and where it goes.

    python -m bench.overhead

A real daemon, SmolLM2, one chat request after another with an answer of one token. The client's time from sending to
the answer, less the forward pass that computed it, is the overhead; the daemon says in `Server-Timing` where the time
went. Measured on an idle daemon, and while another model decodes: what then counts too is the wait for the other
model's pass (`batch`). Each request comes at a random moment after the other model's next token, so that it meets a
model that decodes and not the aftermath of the request before it; `busy, back to back` shows that case too. `client`
is what the daemon cannot see: the client itself, and the sockets.
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx

from bench.report import Bar, report
from server.demo.daemon import DaemonProcess
from server.demo.run import add_models
from swapper.store import Store

IDLE_MS, BUSY_MS = 10.0, 25.0
WARM_UP, COUNT = 5, 60
PASS_SECONDS = 0.06  # of a decode, about
MODEL, OTHER = "smollm2", "smollm2-late"


def prepare(directory: Path) -> DaemonProcess:
    """A daemon whose memory holds both models."""
    add_models(Store(directory / "store"), directory)
    return DaemonProcess(directory, {"store": str(directory / "store"), "memory": {"pool": "1GiB", "page": "2MiB"}})


def ask(client: httpx.Client) -> dict[str, float]:
    """One request: milliseconds by stage, with `client` and the whole as `total`."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 1, "temperature": 0}
    began = time.perf_counter()
    answer = client.post("/v1/chat/completions", json=body)
    total = 1e3 * (time.perf_counter() - began)
    answer.raise_for_status()
    parts = (part.split(";dur=") for part in answer.headers["server-timing"].split(", "))
    stages = {name: float(spent) for name, spent in parts}
    return {**stages, "client": total - sum(stages.values()), "total": total, "overhead": total - stages["compute"]}


def measure(client: httpx.Client, pause: Callable[[], None] = lambda: None) -> dict[str, list[float]]:
    """`COUNT` requests after a warm-up, by stage, with a pause before each."""
    asked = []
    for _ in range(WARM_UP + COUNT):
        pause()
        asked.append(ask(client))
    return {stage: [one[stage] for one in asked[WARM_UP:]] for stage in asked[0]}


class Decoding:
    """Another model that decodes all the while."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._token = threading.Event()
        self._random = random.Random(1)
        self._enough = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        body = {"model": OTHER, "prompt": "Once", "max_tokens": 8000, "temperature": 0, "stream": True}
        with httpx.stream("POST", f"{self._url}/v1/completions", json=body, timeout=60) as response:
            for _ in response.iter_lines():
                self._token.set()
                if self._enough.is_set():
                    return

    def __enter__(self) -> Decoding:
        self._thread.start()
        self.pause()
        return self

    def pause(self) -> None:
        """Until its next token has come, and a random moment more, of the length of a pass."""
        self._token.clear()
        if not self._token.wait(60):
            raise TimeoutError("the other model does not decode")
        time.sleep(self._random.uniform(0, PASS_SECONDS))

    def __exit__(self, *_: object) -> None:
        self._enough.set()
        self._thread.join(60)


def table(runs: dict[str, dict[str, list[float]]]) -> str:
    lines = [f"{'milliseconds, median':<22}" + "".join(f"{name:>20}" for name in runs)]
    for stage in runs["idle"]:
        lines.append(f"{stage:<22}" + "".join(f"{statistics.median(run[stage]):20.2f}" for run in runs.values()))
    return "\n".join(lines)


def main() -> int:
    with (
        tempfile.TemporaryDirectory() as directory,
        prepare(Path(directory)) as daemon,
        httpx.Client(base_url=daemon.url, timeout=60) as client,
    ):
        runs = {"idle": measure(client)}
        with Decoding(daemon.url) as other:
            runs["busy"] = measure(client, other.pause)
            runs["busy, back to back"] = measure(client)
    print(table(runs))
    bars = [
        Bar("overhead of a request, idle daemon", statistics.median(runs["idle"]["overhead"]), IDLE_MS, "ms"),
        Bar("overhead of a request, another model decodes", statistics.median(runs["busy"]["overhead"]), BUSY_MS, "ms"),
    ]
    samples = {f"{name} {stage}": values for name, run in runs.items() for stage, values in run.items()}
    return report("overhead", bars, samples, {"requests": COUNT})


if __name__ == "__main__":
    sys.exit(main())
