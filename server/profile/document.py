"""`profile.json`: what was measured of a model, kept beside its image and read by the rest of the daemon.

Times are seconds, sizes are bytes; where ranks differ, a figure is the largest rank's. After KICS 2024 (49-10, 1377),
which profiles inference by time, accuracy, communication and memory against batch size and parallel strategy.
"""

from __future__ import annotations

import json
import logging
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from swapper.durable import write_file
from swapper.errors import StoreError

logger = logging.getLogger(__name__)

FILE = "profile.json"


class ProfileError(StoreError):
    """A profile that cannot be made, or read."""


class Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Spread(Part):
    """The median of several measures, the least and the most."""

    median: float
    least: float
    most: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread | None:
        return Spread(median=statistics.median(values), least=min(values), most=max(values)) if values else None


class Moved(Part):
    """One kind of call between ranks: in a decode step of the whole batch, and as a check in a whole run of it."""

    calls: int  # a step
    nbytes: int  # a step
    seconds: float | None  # a step; None: nobody saw it, on another rank or within a CUDA graph
    counted: int  # bytes in a run, where calls are made
    expected: int  # bytes in a run, by the arithmetic of the model's shape


class Memory(Part):
    """Peaks. `weights`, `kv` and `fragmentation` make up the frames that were held; the rest lies beside the pool."""

    weights: int
    kv: int  # blocks that were taken
    fragmentation: int  # of frames: ends of pages, and blocks not taken in frames that were
    frames: int  # held in all, by our own accounts
    mapped: int | None = None  # the same as the kernel counts it (CPU)
    activations: int | None = None  # torch's allocator, outside of the pool (GPU)
    reserved: int | None = None  # by torch's allocator, activations among it
    graphs: int | None = None  # recorded decodes, of all models
    device: int | None = None  # all that is taken on the GPU, as CUDA has it
    nvml: int | None = None  # the same, as the driver's management library has it
    pool: int | None = None  # all frames, held or not


class Point(Part):
    """One batch size at one length. `decode` is a step that gives each sequence one token."""

    batch: int
    prompt_tokens: int
    output_tokens: int
    prefill: Spread  # passes over the batch's prompts, summed
    prefill_passes: int
    decode: Spread | None  # None: the whole batch never decoded together
    first_token: Spread  # as a client sees it
    latency: Spread  # to the last token, as a client sees it
    tokens_per_second: Spread  # of output
    busy: float  # share of the time in which passes ran
    gpu_busy: float | None = None  # share of the time in which a kernel ran, by NVML (GPU)
    joules: float | None = None  # of all GPUs, for each token of output (GPU)
    moved: Mapping[str, Moved] = {}
    memory: Memory


class Accuracy(Part):
    """Over the text in `text.py`."""

    tokens: int
    perplexity: float
    reference: float | None  # perplexity in float32, of the same weights
    agreement: float | None  # share of tokens whose likeliest successor is the one of float32


class Variant(Part):
    """The engine with one setting of its switches."""

    name: str
    settings: Mapping[str, str | int | bool]
    points: tuple[Point, ...]
    accuracy: Accuracy | None = None


class PageIn(Part):
    source: str  # where most of it came from
    nbytes: int
    pages: int
    seconds: float


class BreakingPoint(Part):
    """The largest batch whose sequences, of so many tokens each, fit at once."""

    tokens: int
    predicted: int  # by the arithmetic of pages and KV blocks
    observed: int  # of a run that asked for more
    limited_by: Literal["memory", "engine"]  # frames, or `cluster.max_batch_sequences`
    preempted: bool = False  # whether that run had to take memory back


class Profile(Part):
    version: Literal[2] = 2
    model: str
    identity: str  # of the image
    architecture: str
    dtype: str
    tp: int
    pp: int
    made: float  # unix time
    device: str  # where its workers were: cpu, cuda:0
    cores: int
    versions: Mapping[str, str]
    frames: int
    page_bytes: int
    page_ins: tuple[PageIn, ...]
    variants: tuple[Variant, ...]
    breaking_points: tuple[BreakingPoint, ...]

    @property
    def label(self) -> str:
        return f"{self.model} ({self.dtype}, tp {self.tp}, pp {self.pp})"

    def points(self) -> Iterator[Point]:
        """Of the engine as it comes: the first variant."""
        yield from self.variants[0].points if self.variants else ()

    def page_seconds(self, page_bytes: int) -> float | None:
        """To bring a page of this size in, from wherever pages came last."""
        if not self.page_ins or not (last := self.page_ins[-1]).pages:
            return None
        return last.seconds / last.pages * page_bytes / self.page_bytes

    def run_seconds(self) -> float | None:
        """Of one request alone, from its first pass to its end: the median over the lengths that were tried."""
        alone = [
            point.prefill.median + point.decode.median * (point.output_tokens - 1)
            for point in self.points()
            if point.batch == 1 and point.decode is not None
        ]
        return statistics.median(alone) if alone else None

    def costs(self) -> tuple[float, float] | None:
        """Seconds of a pass, and of each token in it: what explains all points best, each within the same share."""
        rows = [(1, p.batch, p.decode.median) for p in self.points() if p.decode is not None]
        rows += [(p.prefill_passes, p.batch * p.prompt_tokens, p.prefill.median) for p in self.points()]
        if not rows:
            return None
        import numpy as np

        passes, tokens, seconds = (np.array(column, np.float64) for column in zip(*rows, strict=True))
        work = np.stack([passes / seconds, tokens / seconds], 1)
        (by_pass, by_token), *_ = np.linalg.lstsq(work, np.ones(len(rows)), rcond=None)
        if by_pass <= 0 or by_token < 0:
            return float((seconds / passes).min()), 0.0
        return float(by_pass), float(by_token)


def save(profile: Profile, directory: Path) -> Path:
    """Put it beside an image, in the place of an older one."""
    path = directory / FILE
    write_file(path, json.dumps(profile.model_dump(), indent=1))
    return path


def load(directory: Path, identity: str) -> Profile | None:
    """The profile beside an image; None if there is none, or, with a warning, if it cannot be used."""
    path = directory / FILE
    try:
        profile = Profile.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValidationError):
        why = "cannot be read, or is of another version"
    else:
        if profile.identity == identity:
            return profile
        why = "is of another image"
    logger.warning("%s %s, and is not used. Make a new one with: gswapd profile", path, why)
    return None
