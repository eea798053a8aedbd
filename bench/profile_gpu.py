"""Profiles on GPUs: a model of Llama 8B's shape at every batch size, its breaking point, and a thousand requests there.

    python -m bench.profile_gpu [--store /dev/shm] [--mesh 1x1 …] [--results DIR] [--small] [--page FILE.json …]

For each mesh that the GPUs allow (one: 1×1; two: 2×1 and 1×2) a store gets a random model cut for it, and a private
daemon of `gswapd profile` is swept. On one GPU the same daemon then answers with and without a recording by turns, and
serves a thousand requests with 99 % of the breaking point running at any time, on a GPU whose other memory is taken
but for a gibibyte. Then the sweep is repeated without CUDA graphs.

What there is is saved after each part: `profile-<host>.json` (whole profiles among it), `.csv` and `.html`. `--page`
draws one page from several such files. `--small` is the same on any host, in two minutes, to see that it works.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch

from bench.profile import body, recorded_and_not, recording_share
from bench.report import RESULTS, Bar, cpu_host, report
from bench.synthetic import LLAMA_8B, SMALL_LLAMA, make_mesh_image
from server.config import Config
from server.profile.document import Profile
from server.profile.measure import Client, Subject
from server.profile.offline import GROUP, private_daemon
from server.profile.report import page
from server.profile.run import Options, measure, measure_again, measure_with_torch
from server.profile.sweep import lasting_answer
from swapper.image import Image
from swapper.store import Store

MODEL = "llama-8b"
PATIENCE = 240.0
LEFT_FREE = 1 << 30
"""Of the GPU, while requests are served at the breaking point."""


@dataclass(frozen=True, slots=True)
class Scale:
    config: dict[str, object]
    dtype: str
    device: str
    page: int
    pool: int  # of all ranks together
    batches: tuple[int, ...]
    prompt_tokens: tuple[int, ...]
    output_tokens: int
    break_at: int
    pass_tokens: int
    requests: int  # at the breaking point
    rounds: int  # with a recording, and as many without
    repeat: int


FULL = Scale(
    config=LLAMA_8B,
    dtype="bfloat16",
    device="cuda",
    page=32 << 20,
    pool=32 << 30,
    batches=(1, 4, 16, 64, 256),
    prompt_tokens=(128, 1024, 4096),
    output_tokens=64,
    break_at=1088,
    pass_tokens=2048,
    requests=1000,
    rounds=10,
    repeat=3,
)
SMALL = Scale(
    config=SMALL_LLAMA,
    dtype="float32",
    device="cpu",
    page=2 << 20,
    pool=60 << 20,
    batches=(1, 4),
    prompt_tokens=(16, 64),
    output_tokens=16,
    break_at=160,
    pass_tokens=256,
    requests=100,
    rounds=2,
    repeat=2,
)


@dataclass(slots=True)
class Results:
    """Of all parts so far."""

    directory: Path
    host: str
    profiles: list[Profile] = field(default_factory=list)
    bars: list[Bar] = field(default_factory=list)
    samples: dict[str, list[float]] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)

    def save(self) -> int:
        broken = [(profile, its) for profile in self.profiles for its in profile.breaking_points]
        bars = [
            Bar(f"breaking point of {profile.label}, off by", abs(its.observed / its.predicted - 1), 0.03, "share")
            for profile, its in broken
        ]
        details = {**self.details, "profiles": [profile.model_dump() for profile in self.profiles]}
        status = report("profile", bars + self.bars, self.samples, details, host=self.host, directory=self.directory)
        name = self.directory / f"profile-{self.host}"
        name.with_suffix(".html").write_text(page(self.profiles))
        table = list(rows(self.profiles))
        with name.with_suffix(".csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, list(dict.fromkeys(key for row in table for key in row)))
            writer.writeheader()
            writer.writerows(table)
        return status


def rows(profiles: Sequence[Profile]) -> Iterator[dict[str, object]]:
    """A row a point."""
    for profile in profiles:
        for variant in profile.variants:
            for its in variant.points:
                yield {
                    "tp×pp": f"{profile.tp}×{profile.pp}",
                    "engine": variant.name,
                    "prompt": its.prompt_tokens,
                    "batch": its.batch,
                    "prefill s": round(its.prefill.median, 5),
                    "step s": round(its.decode.median, 6) if its.decode is not None else None,
                    "first token s": round(its.first_token.median, 5),
                    "tokens/s": round(its.tokens_per_second.median, 1),
                    "busy": round(its.busy, 3),
                    **{f"{name} bytes": value for name, value in its.memory.model_dump().items()},
                    **{f"{kind} bytes a step": moved.nbytes for kind, moved in its.moved.items()},
                    **{f"{kind} s a step": moved.seconds for kind, moved in its.moved.items()},
                }


class Experiment:
    """One mesh."""

    def __init__(self, scale: Scale, image: Image, store: Store, results: Results) -> None:
        self._scale = scale
        self._image = image
        self._store = store
        self._results = results
        self._options = Options(
            batches=scale.batches,
            prompt_tokens=scale.prompt_tokens if len(image.manifest.shards) == 1 else scale.prompt_tokens[:2],
            output_tokens=scale.output_tokens,
            repeat=scale.repeat,
            break_at=scale.break_at,
        )
        manifest = image.manifest
        self._trace = store.root / f"torch-{manifest.tp}x{manifest.pp}.json.gz"
        self._config = Config.model_validate(
            {
                "store": str(store.root),
                "memory": {"page": scale.page, "pool": scale.pool // (manifest.tp * manifest.pp), "peers": "off"},
                "cluster": {
                    "device": scale.device,
                    "max_batch_tokens": scale.pass_tokens,
                    "max_batch_sequences": scale.pass_tokens // 2,
                    "groups": [{"tp": manifest.tp, "pp": manifest.pp}],
                },
            }
        )

    def run(self) -> None:
        alone = len(self._image.manifest.shards) == 1
        with self._daemon({}) as url:
            with timed("sweep"):
                profile = asyncio.run(measure(url, self._image, self._config, self._options, None))
            self._results.profiles.append(profile)
            self._results.save()
            if alone:
                with timed("recording on and off"):
                    self._recording(url)
                self._results.save()
                with timed("at the breaking point"):
                    asyncio.run(self._at_the_edge(url, profile))
                self._results.save()
            else:
                with timed("collectives, as torch sees them"):
                    again = measure_with_torch(url, self._image, self._config, self._options, profile, self._trace)
                    self._results.profiles[-1] = asyncio.run(again)
        if alone:
            with self._daemon({"graphs": False}) as url, timed("without graphs"):
                few = replace(self._options, prompt_tokens=self._options.prompt_tokens[:2], repeat=1)
                variant = asyncio.run(measure_again(url, self._image, self._config, few, None, "no-graphs"))
            both = {"variants": (*profile.variants, variant)}
            self._results.profiles[-1] = profile.model_copy(update=both)

    def _daemon(self, switch: dict[str, Any]) -> AbstractContextManager[str]:
        most = max(4 * self._scale.pass_tokens, self._scale.requests)
        return private_daemon(self._config, self._store.root, self._image, most, switch, one_pool=False)

    def _recording(self, url: str) -> None:
        tokens = int(str(self._scale.config["vocab_size"]))
        output = 2 * self._scale.output_tokens
        on, off = recorded_and_not(url, GROUP, lambda seed: body(MODEL, seed, tokens, output), self._scale.rounds)
        self._results.samples |= {"recorded, s": on, "not recorded, s": off}
        self._results.bars.append(Bar("recording, of an answer's time", recording_share(on, off), 0.03, "share"))

    async def _at_the_edge(self, url: str, profile: Profile) -> None:
        """As many requests at once as 99 % of the breaking point, each in the place of one that has ended."""
        scale, tokens = self._scale, self._scale.break_at
        (broken,) = profile.breaking_points
        at_once = int(0.99 * broken.observed)
        output = lasting_answer(at_once, tokens, scale.pass_tokens)
        numbers = iter(range(scale.requests))
        failures: list[str] = []
        vocabulary = int(str(scale.config["vocab_size"]))

        async def ask(http: httpx.AsyncClient) -> None:
            for number in numbers:
                prompt = np.random.default_rng(number).integers(0, vocabulary, tokens - output).tolist()
                body = {"model": MODEL, "prompt": prompt, "max_tokens": output, "temperature": 0, "ignore_eos": True}
                try:
                    answer = await http.post("/v1/completions", json=body)
                except httpx.HTTPError as error:
                    failures.append(repr(error))
                    continue
                if answer.is_error or answer.json()["usage"]["completion_tokens"] != output:
                    failures.append(answer.text[:300])

        limits = httpx.Limits(max_connections=None)
        subject = Subject(url, MODEL, GROUP, vocabulary)
        http = httpx.AsyncClient(base_url=url, timeout=PATIENCE, limits=limits)
        async with http, Client(subject) as client:
            await client.admin("POST", f"/groups/{GROUP}/recording")
            began = time.perf_counter()
            with self._ballast() as ballast:
                await asyncio.gather(*(ask(http) for _ in range(at_once)))
            took = time.perf_counter() - began
            recorded = (await client.admin("DELETE", f"/groups/{GROUP}/recording"))["ranks"][0]
        passes = [its for its in recorded["spans"] if its["name"] == "pass"]
        self._results.details["at 99 % of the breaking point"] = {
            "requests": scale.requests,
            "at once": at_once,
            "prompt tokens": tokens - output,
            "output tokens": output,
            "seconds": took,
            "failures": failures[:5],
            "most sequences in a step": recorded["peaks"]["sequences"],
            "passes": len(passes),
            "prompt tokens computed again": sum(its["prefilled"] for its in passes)
            - scale.requests * (tokens - output),
            "spans dropped": recorded["dropped"],
            "peaks": recorded["peaks"],
            "ballast": ballast,
        }
        self._results.bars.append(
            Bar("requests that failed at 99 % of the breaking point", len(failures), 0, "requests")
        )

    @contextmanager
    def _ballast(self) -> Iterator[int]:
        """Takes what memory the GPU has besides the worker's; yields its bytes."""
        if self._scale.device != "cuda":
            yield 0
            return
        free, _ = torch.cuda.mem_get_info(0)
        ballast = torch.empty(max(1, free - LEFT_FREE), dtype=torch.uint8, device="cuda:0")
        yield ballast.nbytes
        del ballast
        torch.cuda.empty_cache()


@contextmanager
def timed(what: str) -> Iterator[None]:
    began = time.perf_counter()
    yield
    print(f"-- {what}: {time.perf_counter() - began:.1f} s", flush=True)


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    arguments.add_argument("--store", type=Path, help="where to make stores; by default a temporary directory")
    arguments.add_argument("--mesh", nargs="+", metavar="TPxPP", help="by default all that the GPUs allow")
    arguments.add_argument("--results", type=Path, default=RESULTS, help="where results go")
    arguments.add_argument("--small", action="store_true", help="a small model on the CPU, as if there were two GPUs")
    arguments.add_argument("--page", type=Path, nargs="+", help="draw profile.html from saved results, next to them")
    options = arguments.parse_args()
    if options.page:
        saved = [its for path in options.page for its in json.loads(path.read_text())["details"]["profiles"]]
        (options.page[0].parent / "profile.html").write_text(page([Profile.model_validate(its) for its in saved]))
        return 0
    scale = SMALL if options.small else FULL
    gpus = 0 if options.small else torch.cuda.device_count()
    meshes = options.mesh or {0: ["1x1", "2x1", "1x2"], 1: ["1x1"]}.get(gpus, ["2x1", "1x2"])
    results = Results(
        options.results, f"{cpu_host()}-small" if options.small else f"h200-x{gpus}" if gpus > 1 else "h200"
    )
    for mesh in meshes:
        tp, pp = map(int, mesh.split("x"))
        with tempfile.TemporaryDirectory(dir=options.store) as directory:
            store = Store(Path(directory) / "store")
            with timed(f"{mesh}: image"):
                image = make_mesh_image(store, MODEL, scale.config, scale.dtype, tp, pp, 0, scale.page)
            Experiment(scale, image, store, results).run()
            results.save()
    return results.save()


if __name__ == "__main__":
    sys.exit(main())
