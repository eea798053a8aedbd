"""`gswapd profile` from beginning to end: which daemon, which models, what is written where."""

from __future__ import annotations

import asyncio
import os
import time
from base64 import b64decode
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from server.config import Config, load_config
from server.profile.accuracy import Yardstick, yardstick
from server.profile.document import Profile, ProfileError, Variant, save
from server.profile.measure import Client, Subject
from server.profile.offline import DTYPES, GROUP, SWITCHES, private_daemon
from server.profile.report import page
from server.profile.sweep import Place, Plan, Sweep
from server.profile.trace import trace
from server.tokens import ModelTokenizer
from swapper.image import Image
from swapper.store import Store

PACKAGES = ("gswapd", "torch", "transformers", "ray")
LOADS = 3
SCORED_TOKENS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """See `server/cli/profiling.py`."""

    batches: tuple[int, ...] | None = None
    prompt_tokens: tuple[int, ...]
    output_tokens: int
    repeat: int
    switches: tuple[str, ...] = ()
    url: str | None = None
    group: str | None = None
    memory: str | None = None
    break_at: int = 0
    report: Path | None = None
    trace: Path | None = None
    torch_profiler: Path | None = None
    store: Path | None = None
    api_key: str | None = None
    admin_key: str | None = None


def run(models: Sequence[str], options: Options) -> list[Profile]:
    """Raises ProfileError, and whatever the store or the daemon has to say. Profiles that were made are kept."""
    if unknown := sorted(set(options.switches) - SWITCHES.keys()):
        raise ProfileError(f"There is no switch {unknown[0]!r}; there are {', '.join(SWITCHES)}.")
    if options.url is not None and (options.switches or options.memory):
        raise ProfileError("A daemon that is serving keeps its settings: use --switch and --memory without --url.")
    if options.url is None and options.group is not None:
        raise ProfileError("A private daemon has one group only: use --group with --url.")
    if (options.trace is not None or options.torch_profiler is not None) and len(models) > 1:
        raise ProfileError("A trace is of one model: use --trace and --torch-profiler with a single one.")
    for path in (options.report, options.trace, options.torch_profiler):
        if path is not None and not path.parent.is_dir():
            raise ProfileError(f"There is no directory {path.parent} for {path.name}.")
    config = load_config(None, memory=options.memory)
    store = Store(options.store or config.store)
    images = [store.open(name) for name in models]
    for image in images:
        if image.manifest.embedding is not None:
            raise ProfileError(f"{image.manifest.model} is an encoder; profiles are of models that generate text.")
    profiles = []
    for image in images:
        profile = _profile(image, config, store, options)
        path = save(profile, image.path)
        print(f"The profile of {profile.label} is in {path}.")
        profiles.append(profile)
    if options.report is not None:
        options.report.write_text(page(profiles))
        print(f"The report is in {options.report}.")
    return profiles


def _profile(image: Image, config: Config, store: Store, options: Options) -> Profile:
    text = yardstick(image, SCORED_TOKENS)
    with _daemon(image, config, store, options, {}) as url:
        profile = asyncio.run(measure(url, image, config, options, text))
        if (path := options.torch_profiler) is not None:
            profile = asyncio.run(measure_with_torch(url, image, config, options, profile, path))
    variants = list(profile.variants)
    for name in options.switches:
        print(f"once more with {name}")
        with (
            _recast(image, store, name) as (same, where),
            _daemon(same, config, where, options, SWITCHES[name]) as url,
        ):
            variants.append(asyncio.run(measure_again(url, same, config, options, text, name)))
    return profile.model_copy(update={"variants": tuple(variants)})


@contextmanager
def _recast(image: Image, store: Store, switch: str) -> Iterator[tuple[Image, Store]]:
    """The image itself, or, for a switch that is a type of weights, one of that type, in a store of its own."""
    if switch not in DTYPES:
        yield image, store
        return
    from engine.reference import recast

    with TemporaryDirectory(dir=store.root, prefix="profile-") as directory:
        other = Store(Path(directory) / "store")
        yield recast(image, switch, other, Path(directory) / "checkpoint"), other


@contextmanager
def _daemon(image: Image, config: Config, store: Store, options: Options, settings: Mapping[str, Any]) -> Iterator[str]:
    most = 4 * max(config.cluster.max_batch_sequences, *(options.batches or (1,)))
    private = private_daemon(config, store.root, image, most, settings, one_pool=options.memory is not None)
    with private if options.url is None else nullcontext(options.url) as url:
        yield url


async def measure(url: str, image: Image, config: Config, options: Options, text: Yardstick | None) -> Profile:
    """Everything, with the engine as it comes."""
    manifest = image.manifest
    tokenizer = ModelTokenizer(manifest.model, image.path)
    subject = _subject(url, tokenizer, image, options)
    async with Client(subject) as client:
        await client.load()  # with all that only a first load has to do
        worker = await _worker(client, subject.group)
        sweep, place = await _sweep(client, worker, image, config)
        if options.break_at and not sweep.largest_batch(options.break_at):
            raise ProfileError(
                f"{manifest.model} has no room for a sequence of {options.break_at} tokens, in its context of "
                f"{manifest.context_length} or in {place.frames} frames. Choose a smaller --break-at."
            )
        page_ins = await sweep.page_ins(LOADS)
        points = await sweep.points(_plan(sweep, options))
        if not points:
            raise ProfileError(
                f"No batch of {manifest.model} fits into {place.frames} frames and its context of "
                f"{manifest.context_length} tokens. Choose a smaller --batch, --prompt-tokens or --output-tokens."
            )
        tokens = options.break_at or max(p.prompt_tokens + p.output_tokens for p in points)
        breaking = await sweep.breaking_point(tokens)
        found = f"predicted {breaking.predicted}, observed {breaking.observed}"
        print(f"breaking point at {breaking.tokens} tokens: {found}")
        accuracy = await sweep.accuracy(text)
        if options.trace is not None:
            ran = await client.run(points[-1].batch, points[-1].prompt_tokens, options.output_tokens, 0)
            options.trace.write_text(trace(ran.ranks))
            print(f"The trace is in {options.trace}.")
    return Profile(
        model=manifest.model,
        identity=image.identity,
        architecture=manifest.architecture,
        dtype=manifest.dtype,
        tp=manifest.tp,
        pp=manifest.pp,
        made=time.time(),
        device=worker["device"],
        cores=os.cpu_count() or 1,
        versions={name: version(name) for name in PACKAGES},
        frames=place.frames,
        page_bytes=place.page_bytes,
        page_ins=page_ins,
        variants=(Variant(name="as it comes", settings=_settings(image, config), points=points, accuracy=accuracy),),
        breaking_points=(breaking,),
    )


async def measure_with_torch(
    url: str, image: Image, config: Config, options: Options, profile: Profile, path: Path
) -> Profile:
    """What torch.profiler sees: a trace a rank, the first at `path`, and on GPUs the time of collectives."""
    tokenizer = ModelTokenizer(image.manifest.model, image.path)
    subject = _subject(url, tokenizer, image, options)
    async with Client(subject) as client:
        points = tuple(profile.points())
        if profile.device != "cpu":
            sweep, _ = await _sweep(client, await _worker(client, subject.group), image, config)
            points = await sweep.collectives(points)
        last = points[-1]
        ran = await client.run(last.batch, last.prompt_tokens, last.output_tokens, 0, torch_profiler="trace")
    for rank, its in enumerate(ran.ranks):
        target = path.with_name(f"rank-{rank}-{path.name}") if rank else path
        target.write_bytes(b64decode(its["torch_trace"]))
        print(f"Torch's trace of rank {rank} is in {target}.")
    first, *others = profile.variants
    return profile.model_copy(update={"variants": (first.model_copy(update={"points": points}), *others)})


async def measure_again(
    url: str, image: Image, config: Config, options: Options, text: Yardstick | None, switch: str
) -> Variant:
    """Points and accuracy alone, with one switch set."""
    tokenizer = ModelTokenizer(image.manifest.model, image.path)
    subject = _subject(url, tokenizer, image, options)
    async with Client(subject) as client:
        await client.load()
        sweep, _ = await _sweep(client, await _worker(client, subject.group), image, config)
        points = await sweep.points(_plan(sweep, options))
        accuracy = await sweep.accuracy(text)
    settings = {**_settings(image, config), **SWITCHES[switch]}
    return Variant(name=switch, settings=settings, points=points, accuracy=accuracy)


def _subject(url: str, tokenizer: ModelTokenizer, image: Image, options: Options) -> Subject:
    group = GROUP if options.url is None else options.group or "default"
    model = image.manifest.model
    return Subject(url, model, group, tokenizer.vocabulary_size, options.api_key, options.admin_key)


async def _worker(client: Client, group: str) -> dict[str, Any]:
    """The leader of the group. Raises ProfileError if it is not up."""
    workers = (await client.admin("GET", "/workers"))["workers"]
    found: dict[str, Any] | None = next((w for w in workers if w["group"] == group and w["state"] == "up"), None)
    if found is None or found["heartbeat"] is None:
        there = ", ".join(sorted({worker["group"] for worker in workers}))
        raise ProfileError(f"There is no group {group!r} that is up; there are: {there} (--group).")
    return found


async def _sweep(client: Client, worker: dict[str, Any], image: Image, config: Config) -> tuple[Sweep, Place]:
    frames = worker["heartbeat"]["frames"]
    cluster = config.cluster
    place = Place(frames, config.memory.page, cluster.max_batch_sequences, cluster.max_batch_tokens)
    return Sweep(client, image, place, print), place


def _plan(sweep: Sweep, options: Options) -> Plan:
    batches = options.batches
    if batches is None:
        most = sweep.largest_batch(min(options.prompt_tokens) + options.output_tokens)
        batches = tuple(size for size in (1 << power for power in range(20)) if size < most)
        batches = (*batches, most) if most else ()
    return Plan(batches, options.prompt_tokens, options.output_tokens, options.repeat)


def _settings(image: Image, config: Config) -> dict[str, str | int | bool]:
    cluster = config.cluster
    return {
        "dtype": image.manifest.dtype,
        "attention": cluster.attention,
        "max_batch_tokens": cluster.max_batch_tokens,
        "max_batch_sequences": cluster.max_batch_sequences,
        "graphs": cluster.graphs,
    }
