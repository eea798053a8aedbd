"""Profiles as one HTML page that needs nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from html import escape

from scheduler.simulate.report import STYLE, seconds, size
from server.profile.charts import Mark, bars, lines
from server.profile.document import Point, Profile, Variant

MORE_STYLE = """
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(420px, 1fr)); gap: 1rem; }
figure { margin: 0; background: var(--card); border-radius: 8px; padding: .7rem; } small { color: var(--soft); }
.legend { margin: .2rem 0 0; font-size: 13px; } .legend span { margin-right: .8rem; white-space: nowrap; }
.legend i { display: inline-block; width: .7em; height: .7em; border-radius: 2px; margin-right: .3em; }
.advice { color: var(--ink); border-left: 3px solid #4477aa; padding-left: .8rem; }
"""

GIB = 1 << 30
WORTH = 1.05
"""A larger batch is advised only if it gives so much more throughput."""


def page(profiles: Sequence[Profile]) -> str:
    body = [f"<h1>What {escape(_names(profiles))} cost{'' if ',' in _names(profiles) else 's'}</h1>"]
    if len(profiles) > 1:
        body += ["<h2>Side by side</h2>", *_comparison(profiles)]
    for profile in profiles:
        body += _section(profile)
    title = escape(f"Profile of {_names(profiles)}")
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>'
    style = f"<style>{STYLE}{MORE_STYLE}</style>"
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}{style}</head>\n<body>\n'
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def advice(profile: Profile) -> str:
    """The smallest batch whose throughput no larger one beats by much, and why."""
    points = list(profile.points())
    longest = max(point.prompt_tokens for point in points)
    points = [point for point in points if point.prompt_tokens == longest]
    best = points[0]
    for point in points[1:]:
        if point.tokens_per_second.median > best.tokens_per_second.median * WORTH:
            best = point
    text = f"At {longest} prompt tokens, batch {best.batch} is best: {best.tokens_per_second.median:.0f} tokens/s"
    if best is points[0] and best.decode is not None:
        text += f", with a step of {seconds(best.decode.median)}"
    elif best.decode is not None and points[0].decode is not None:
        ratio = best.decode.median / points[0].decode.median
        text += f", with a step of {seconds(best.decode.median)}, {ratio:.1f} times that of batch {points[0].batch}"
    if best is not points[-1]:
        text += f"; batch {points[-1].batch} gives {points[-1].tokens_per_second.median:.0f}"
    if (share := _share(best)) is not None:
        text += f"; ranks spend {share:.0f} % of a step with one another"
    if (better := _better(profile, best)) is not None:
        text += f"; with {better[0]}, {better[1]:.1f} times as many"
    for broken in profile.breaking_points:
        what = "memory ends" if broken.limited_by == "memory" else "cluster.max_batch_sequences ends it"
        text += f". At {broken.tokens} tokens a sequence, {what} at {broken.observed} sequences"
    return text + "."


def _better(profile: Profile, best: Point) -> tuple[str, float] | None:
    """The variant that is best where `best` is, if one gives much more, and how much."""
    ratios = [
        (its.tokens_per_second.median / best.tokens_per_second.median, variant.name)
        for variant in profile.variants[1:]
        for its in variant.points
        if (its.batch, its.prompt_tokens) == (best.batch, best.prompt_tokens)
    ]
    ratio, name = max(ratios, default=(0.0, ""))
    return (name, ratio) if ratio > WORTH else None


# ---- parts of the page


def _section(profile: Profile) -> Iterator[str]:
    made = datetime.fromtimestamp(profile.made, UTC)
    versions = ", ".join(f"{name} {version}" for name, version in profile.versions.items())
    yield f"<h2>{escape(profile.label)}</h2>"
    yield (
        f"<p>{escape(profile.architecture)} on {escape(profile.device)}, {profile.cores} cores, {profile.frames:,} "
        f"frames of {profile.page_bytes >> 20} MiB; {made:%Y-%m-%d %H:%M} UTC; {escape(versions)}</p>"
    )
    yield f'<p class="advice">{escape(advice(profile))}</p>'
    yield '<div class="figures">'
    ends = [its for its in profile.breaking_points if its.limited_by == "memory" and its.observed]
    marks = [Mark(its.observed, f"memory ends: {its.observed} of {its.tokens} tokens") for its in ends]
    yield lines(
        "A decode step",
        "ms, over batch size",
        _by_length(profile, lambda p: None if p.decode is None else p.decode.median * 1e3),
        marks,
    )
    yield lines("Throughput", "output tokens/s, over batch size", _by_length(profile, _throughput), marks)
    yield lines("Time to first token", "ms, over batch size", _by_length(profile, lambda p: p.first_token.median * 1e3))
    yield lines("Prefill of the batch", "ms, over batch size", _by_length(profile, lambda p: p.prefill.median * 1e3))
    yield from _communication(profile)
    yield from _memory(profile)
    yield lines("Energy", "joules a token of output, over batch size", _by_length(profile, lambda p: p.joules))
    yield "</div>"
    for variant in profile.variants:
        yield from _points(variant)
    yield from _accounts(profile)
    yield from _page_ins(profile)
    yield from _accuracy(profile)


def _by_length(profile: Profile, value: Callable[[Point], float | None]) -> dict[str, list[tuple[float, float]]]:
    """One line a prompt length, and one for each other variant, at the longest that it has."""
    series: dict[str, list[tuple[float, float]]] = {}
    for number, variant in enumerate(profile.variants):
        longest = max((point.prompt_tokens for point in variant.points), default=0)
        for point in variant.points:
            name = f"{point.prompt_tokens} tokens" + (f", {variant.name}" if number else "")
            measured = value(point)
            if measured and (not number or point.prompt_tokens == longest):
                series.setdefault(name, []).append((point.batch, measured))
    return series


def _throughput(point: Point) -> float:
    return point.tokens_per_second.median


def _communication(profile: Profile) -> Iterator[str]:
    """Bytes a step by kind, and the share of a step's time where it is known."""
    longest = max((point.prompt_tokens for point in profile.points()), default=0)
    points = [point for point in profile.points() if point.prompt_tokens == longest and point.moved]
    kinds = list(dict.fromkeys(kind for point in points for kind in point.moved))
    if not kinds:
        return
    yield lines(
        "Communication",
        "kB a decode step and rank, over batch size",
        {kind: [(p.batch, p.moved[kind].nbytes / 1e3) for p in points if kind in p.moved] for kind in kinds},
    )
    shares = [(p.batch, share) for p in points if (share := _share(p)) is not None]
    if shares:
        yield lines("Communication's share", "of a decode step, in %", {"all kinds": shares})


def _share(point: Point) -> float | None:
    took = [moved.seconds for moved in point.moved.values()]
    if point.decode is None or not took or any(one is None for one in took):
        return None
    return 100 * sum(one or 0.0 for one in took) / point.decode.median


def _memory(profile: Profile) -> Iterator[str]:
    longest = max((point.prompt_tokens for point in profile.points()), default=0)
    stacks = {}
    for point in profile.points():
        if point.prompt_tokens == longest:
            memory = point.memory
            parts = {"weights": memory.weights, "KV": memory.kv, "fragmentation": memory.fragmentation}
            parts |= {"activations": memory.activations or 0, "graphs": memory.graphs or 0}
            stacks[str(point.batch)] = {name: nbytes / GIB for name, nbytes in parts.items() if nbytes}
    pool = profile.frames * profile.page_bytes / GIB
    yield bars(f"Memory at {longest} prompt tokens", "GiB, by batch size; dashed: the frame pool", stacks, pool)


def _points(variant: Variant) -> Iterator[str]:
    names = ["prompt", "batch", "prefill", "step", "first token", "tokens/s", "busy", "moved a step", "memory"]
    on_gpu = any(point.joules is not None or point.gpu_busy is not None for point in variant.points)
    names += ["GPU busy", "J/token"] if on_gpu else []
    yield f"<h3>{escape(variant.name)}</h3>"
    yield "<table><tr>" + "".join(f"<th>{name}</th>" for name in names) + "</tr>"
    for point in variant.points:
        moved = sum(its.nbytes for its in point.moved.values())
        cells = [
            f"{point.prompt_tokens}",
            f"{point.batch}",
            seconds(point.prefill.median),
            seconds(point.decode.median) if point.decode is not None else "never all at once",
            seconds(point.first_token.median),
            f"{point.tokens_per_second.median:.1f}",
            f"{point.busy:.0%}",
            size(moved) if moved else "",
            size(point.memory.frames),
        ]
        if on_gpu:
            cells.append("" if point.gpu_busy is None else f"{point.gpu_busy:.0%}")
            cells.append("" if point.joules is None else f"{point.joules:.3g}")
        yield "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"
    yield "</table>"


def _accounts(profile: Profile) -> Iterator[str]:
    """What each of those who give memory says of it, at the largest point, and where the difference comes from."""
    memory = max((point.memory for point in profile.points()), key=lambda its: its.frames, default=None)
    if memory is None:
        return
    found = [("frames held", memory.frames, "by our accounts: weights, blocks of keys and values, and ends of pages")]
    if memory.mapped is not None:
        found.append(("shared memory", memory.mapped, "as the kernel counts it: the same frames"))
    if memory.pool is not None and memory.reserved is not None:
        found += [
            ("frame pool", memory.pool, "all frames: they are taken once, and none is given back"),
            ("torch", memory.reserved, f"reserved by its allocator, {size(memory.activations or 0)} of it in use"),
        ]
        if memory.device is not None:
            beside = size(memory.device - memory.pool - memory.reserved)
            what = f"pool and torch, and {beside} of contexts, libraries, kernels, and recorded decodes"
            found.append(("GPU, by CUDA", memory.device, f"{what} ({size(memory.graphs or 0)})"))
            if memory.nvml is not None:
                kept = size(memory.nvml - memory.device)
                found.append(("GPU, by NVML", memory.nvml, f"the same, and {kept} that the driver keeps for itself"))
    yield "<h3>Memory, by who counts it</h3><table>"
    for name, nbytes, what in found:
        yield f'<tr><td>{name}</td><td>{size(nbytes)}</td><td style="text-align: left">{what}</td></tr>'
    yield "</table>"
    if profile.device == "cpu":
        yield "<p>There is no GPU: nothing is known of energy.</p>"


def _page_ins(profile: Profile) -> Iterator[str]:
    yield "<h3>Page-ins</h3><table><tr><th>mostly from</th><th>size</th><th>time</th><th>rate</th></tr>"
    for one in profile.page_ins:
        rate = f"{one.nbytes / one.seconds / 1e9:.2f} GB/s" if one.seconds else ""
        yield (
            f"<tr><td>{escape(one.source)}</td><td>{size(one.nbytes)}</td><td>{seconds(one.seconds)}</td>"
            f"<td>{rate}</td></tr>"
        )
    yield "</table>"


def _accuracy(profile: Profile) -> Iterator[str]:
    found = [(variant, variant.accuracy) for variant in profile.variants if variant.accuracy is not None]
    if not found:
        return
    names = ("engine", "perplexity", "in float32", "same likeliest token as in float32")
    yield f"<h3>Accuracy, over {found[0][1].tokens} tokens of a text</h3>"
    yield "<table><tr>" + "".join(f"<th>{name}</th>" for name in names) + "</tr>"
    for variant, its in found:
        cells = (
            escape(variant.name),
            f"{its.perplexity:.4f}",
            f"{its.reference:.4f}" if its.reference is not None else "not computed",
            f"{its.agreement:.2%}" if its.agreement is not None else "not computed",
        )
        yield "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"
    yield "</table>"


def _comparison(profiles: Sequence[Profile]) -> Iterator[str]:
    yield '<div class="figures">'
    shortest = min(point.prompt_tokens for profile in profiles for point in profile.points())
    steps = {
        profile.label: [
            (p.batch, p.decode.median * 1e3) for p in profile.points() if p.decode and p.prompt_tokens == shortest
        ]
        for profile in profiles
    }
    throughput = {
        profile.label: [(p.batch, _throughput(p)) for p in profile.points() if p.prompt_tokens == shortest]
        for profile in profiles
    }
    yield lines(f"A decode step at {shortest} prompt tokens", "ms, over batch size", steps)
    yield lines(f"Throughput at {shortest} prompt tokens", "output tokens/s, over batch size", throughput)
    yield "</div>"
    best = max(
        ((point, profile) for profile in profiles for point in profile.points()),
        key=lambda pair: pair[0].tokens_per_second.median,
    )
    yield (
        f'<p class="advice">{escape(best[1].label)} gives most: {_throughput(best[0]):.0f} tokens/s at batch '
        f"{best[0].batch} of {best[0].prompt_tokens} prompt tokens.</p>"
    )


def _names(profiles: Sequence[Profile]) -> str:
    return ", ".join(dict.fromkeys(profile.model for profile in profiles))
