"""A simulation as one HTML page that needs nothing else: figures, latencies, and who was in memory when."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from scheduler.simulate.outcome import Outcome

WIDTH, LEFT, RIGHT = 960, 150, 20  # of a picture, and its margins
PLOT = WIDTH - LEFT - RIGHT
CDF_HEIGHT, ROW = 300, 18
BINS = 480
MOST_ROWS = 24  # of the time line, a group
COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bb7744", "#777777")  # told apart by all

Shares = npt.NDArray[np.float64]

STYLE = """
:root { color-scheme: light dark; --ink: light-dark(#1b1f24, #e6e6e6); --soft: light-dark(#68717c, #9aa4af);
  --line: light-dark(#d8dde3, #3a414a); --paper: light-dark(#ffffff, #16191d); --card: light-dark(#f4f6f8, #20252b); }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 1000px;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; } p { color: var(--soft); }
.cards { display: flex; flex-wrap: wrap; gap: .75rem; margin: 1rem 0; }
.card { background: var(--card); border-radius: 8px; padding: .6rem 1rem; min-width: 7rem; }
.card b { display: block; font-size: 1.35rem; font-variant-numeric: tabular-nums; } .card span { color: var(--soft); }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .25rem .6rem; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; } th { color: var(--soft); font-weight: 500; }
svg { width: 100%; height: auto; display: block; } text { fill: var(--soft); font-size: 12px; }
.grid { stroke: var(--line); stroke-width: 1; } .curve { fill: none; stroke-width: 2; }
"""


def page(outcome: Outcome, title: str, setting: Sequence[str] = ()) -> str:
    """`setting` says in a few lines what was simulated."""
    models = sorted(outcome.models, key=lambda name: -len(outcome.models[name].latencies))
    colours = {name: COLOURS[index % len(COLOURS)] for index, name in enumerate(models)}
    body = [
        f"<h1>{escape(title)}</h1>",
        *(f"<p>{escape(line)}</p>" for line in setting),
        '<div class="cards">',
        *(
            f'<div class="card"><b>{escape(value)}</b><span>{escape(name)}</span></div>'
            for name, value in _cards(outcome)
        ),
        "</div>",
        "<h2>Latency: share of requests that are answered within a time</h2>",
        *_cdf(outcome, models[: len(COLOURS) - 1], colours),
        "<h2>Who is in memory</h2>",
        *_time_lines(outcome, colours),
        "<h2>Models</h2>",
        *_table(outcome, models, colours),
    ]
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n' + "\n".join(body) + "\n</body></html>\n"


def seconds(value: float) -> str:
    """Three digits that matter."""
    if value < 1:
        return f"{value * 1000:.3g} ms"
    return f"{value:.3g} s" if value < 1000 else f"{value:,.0f} s"


def size(nbytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if nbytes < 1000 or unit == "TB":
            break
        nbytes /= 1000
    return f"{nbytes:.3g} {unit}" if nbytes < 1000 else f"{nbytes:,.0f} {unit}"


def _cards(outcome: Outcome) -> Iterator[tuple[str, str]]:
    figures: dict[str, Any] = outcome.summary()
    yield "requests", f"{figures['requests']:,}"
    if figures["failed"]:
        yield "failed", f"{figures['failed']:,}"
    for name in ("mean", "p50", "p99"):
        yield name, seconds(figures[name])
    yield "within their objective", f"{figures['attainment']:.1%}"
    yield "page-ins", f"{figures['page_ins']:,}"
    yield "moved", size(outcome.bytes_moved)
    for source, nbytes in figures["bytes"].items():
        if nbytes and source == "alias":
            yield "not moved: shared", size(nbytes)
    busy = figures["busy"].values()
    yield "processors busy", f"{sum(busy) / max(1, len(busy)):.0%}"


def _table(outcome: Outcome, models: Sequence[str], colours: dict[str, str]) -> Iterator[str]:
    columns = ("requests", "mean", "p50", "p99", "longest", "attainment", "page_ins")
    names = ("requests", "mean", "p50", "p99", "longest", "in objective", "page-ins")
    yield "<table><tr><th>model</th>" + "".join(f"<th>{name}</th>" for name in names) + "</tr>"
    for model in models:
        figures = outcome.models[model].summary()
        cells = [f"<td><span style='color:{colours[model]}'>■</span> {escape(model)}</td>"]
        for column in columns:
            value = figures[column]
            if column in ("requests", "page_ins"):
                cells.append(f"<td>{value:,}</td>")
            else:
                cells.append(f"<td>{f'{value:.1%}' if column == 'attainment' else seconds(value)}</td>")
        yield "<tr>" + "".join(cells) + "</tr>"
    yield "</table>"


# ---- pictures


def _svg(height: float, content: Iterable[str]) -> Iterator[str]:
    yield f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img">'
    yield from content
    yield "</svg>"


def _cdf(outcome: Outcome, models: Sequence[str], colours: dict[str, str]) -> Iterator[str]:
    """Latency runs on a logarithmic scale."""
    everyone = outcome.latencies
    if not len(everyone):
        return
    low, high = np.log10(max(1e-4, everyone.min())), np.log10(max(2e-4, everyone.max()))
    low, high = np.floor(low * 3) / 3, max(np.ceil(high * 3) / 3, low + 1 / 3)

    def x(latency: Shares | float) -> Any:
        return LEFT + PLOT * (np.log10(np.maximum(latency, 1e-4)) - low) / (high - low)

    def curve(latencies: Shares, colour: str, dash: str = "") -> str:
        share = np.linspace(0, 1, min(200, max(2, len(latencies))))
        places = zip(x(np.quantile(latencies, share)), CDF_HEIGHT - 40 - (CDF_HEIGHT - 60) * share, strict=True)
        points = " ".join(f"{px:.1f},{py:.1f}" for px, py in places)
        return f'<polyline class="curve" stroke="{colour}" {dash} points="{points}"/>'

    def content() -> Iterator[str]:
        for share in (0.0, 0.25, 0.5, 0.75, 0.9, 1.0):
            y = CDF_HEIGHT - 40 - (CDF_HEIGHT - 60) * share
            yield f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:g}" y2="{y:g}"/>'
            yield f'<text x="{LEFT - 8}" y="{y + 4:g}" text-anchor="end">{share:.0%}</text>'
        for exponent in np.arange(np.ceil(low), high + 1e-9, 1):
            for factor in (1, 2, 5):
                value = float(factor * 10.0**exponent)
                if low - 1e-9 <= np.log10(value) <= high + 1e-9:
                    at = float(x(value))
                    yield f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="20" y2="{CDF_HEIGHT - 40}"/>'
                    label = seconds(value)
                    yield f'<text x="{at:.1f}" y="{CDF_HEIGHT - 22}" text-anchor="middle">{label}</text>'
        yield curve(everyone, "var(--ink)", 'stroke-dasharray="6 4"')
        for index, model in enumerate(["all", *models]):
            colour = colours.get(model, "var(--ink)")
            if model != "all" and outcome.models[model].latencies:
                yield curve(np.array(outcome.models[model].latencies), colour)
            y = 30 + 18 * index
            yield f'<line x1="8" x2="28" y1="{y}" y2="{y}" stroke="{colour}" stroke-width="3"/>'
            yield f'<text x="34" y="{y + 4}">{escape(_short(model))}</text>'

    yield from _svg(CDF_HEIGHT, content())


def _time_lines(outcome: Outcome, colours: dict[str, str]) -> Iterator[str]:
    """A row for each model that was ever there; how much of it was in is how strong its colour is."""
    until = outcome.changes_until or outcome.seconds
    by_group: dict[str, dict[str, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    for at, group, model, share in outcome.changes:
        by_group[group][model].append((at, share))
    if outcome.changes_until is not None:
        yield f"<p>The first {seconds(until)}; what came later was only counted.</p>"
    for group, rows in by_group.items():
        shown = sorted(rows, key=lambda model: (-len(rows[model]), model))[:MOST_ROWS]
        busy = outcome.busy_seconds[group] / max(outcome.seconds, 1e-9)
        left_out = f", {len(rows) - len(shown)} more models not shown" if len(rows) > len(shown) else ""
        yield f"<p>{escape(group)}: processor busy {busy:.0%}{left_out}</p>"
        yield from _svg(ROW * len(shown) + 30, _time_line(rows, sorted(shown), until, colours))


def _time_line(
    rows: dict[str, list[tuple[float, float]]], shown: Sequence[str], until: float, colours: dict[str, str]
) -> Iterator[str]:
    width = PLOT / BINS
    for row, model in enumerate(shown):
        y = ROW * row
        yield f'<text x="{LEFT - 8}" y="{y + 13}" text-anchor="end">{escape(_short(model))}</text>'
        shares = np.round(_binned(rows[model], until), 1)
        edges = [0, *(np.flatnonzero(np.diff(shares)) + 1).tolist(), BINS]
        for first, last in pairwise(edges):
            if shares[first] > 0:
                x, length = LEFT + width * first, width * (last - first)
                fill = f'fill="{colours[model]}" fill-opacity="{shares[first]:.1f}"'
                yield f'<rect x="{x:.1f}" y="{y + 2}" width="{length:.1f}" height="{ROW - 4}" {fill}/>'
    bottom = ROW * len(shown)
    for tick in range(6):
        x = LEFT + PLOT * tick / 5
        yield f'<line class="grid" x1="{x:g}" x2="{x:g}" y1="0" y2="{bottom}"/>'
        label = seconds(until * tick / 5) if tick else "0"
        yield f'<text x="{x:g}" y="{bottom + 16}" text-anchor="middle">{label}</text>'


def _binned(changes: Sequence[tuple[float, float]], until: float) -> Shares:
    """The mean share in each bin of time."""
    times = np.array([0.0, *(at for at, _ in changes), until])
    shares = np.array([0.0, *(share for _, share in changes)])
    area = np.concatenate([[0.0], np.cumsum(np.diff(times) * shares)])
    edges = np.linspace(0.0, until, BINS + 1)
    means: Shares = np.diff(np.interp(edges, times, area)) / max(until / BINS, 1e-12)
    return np.clip(means, 0.0, 1.0)


def _short(name: str) -> str:
    return name if len(name) <= 18 else name[:17] + "…"
