"""Small pictures as SVG: lines over batch sizes, and stacked bars. Colours that everybody can tell apart."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 460, 260
LEFT, RIGHT, TOP, BOTTOM = 64, 12, 14, 40
COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bb7744", "#777777")

Series = Mapping[str, Sequence[tuple[float, float]]]


@dataclass(frozen=True, slots=True)
class Mark:
    """A vertical line with a word."""

    at: float
    word: str


def lines(title: str, unit: str, series: Series, marks: Sequence[Mark] = ()) -> str:
    """Values over batch sizes, both on logarithmic scales. Empty if there is nothing to draw."""
    points = [point for line in series.values() for point in line if point[1] > 0]
    if not points:
        return ""
    xs = [x for x, _ in points] + [mark.at for mark in marks]
    x = _Scale(min(xs), max(xs), LEFT, WIDTH - RIGHT)
    y = _Scale(min(v for _, v in points), max(v for _, v in points), HEIGHT - BOTTOM, TOP)

    def content() -> Iterator[str]:
        for value in y.ticks():
            yield f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}"/>'
            yield f'<text x="{LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{_told(value)}</text>'
        for value in sorted({x for x, _ in points}):
            yield f'<text x="{x(value):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{value:g}</text>'
        for mark in marks:
            yield (
                f'<line x1="{x(mark.at):.1f}" x2="{x(mark.at):.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" '
                f'stroke="{COLOURS[1]}" stroke-dasharray="4 3"/>'
                f'<text x="{x(mark.at) - 4:.1f}" y="{TOP + 10}" text-anchor="end">{escape(mark.word)}</text>'
            )
        for number, line in enumerate(series.values()):
            colour = COLOURS[number % len(COLOURS)]
            places = [(x(at), y(value)) for at, value in line if value > 0]
            path = " ".join(f"{px:.1f},{py:.1f}" for px, py in places)
            yield f'<polyline class="curve" stroke="{colour}" points="{path}"/>'
            yield from (f'<circle cx="{px:.1f}" cy="{py:.1f}" r="2.5" fill="{colour}"/>' for px, py in places)

    return _figure(title, unit, list(series), content())


def bars(title: str, unit: str, stacks: Mapping[str, Mapping[str, float]], limit: float | None = None) -> str:
    """One bar a name, of parts on top of one another; `limit` is a line across."""
    parts = list(dict.fromkeys(part for stack in stacks.values() for part in stack))
    highest = max([sum(stack.values()) for stack in stacks.values()] + ([limit] if limit else []), default=0)
    if not highest:
        return ""
    room, plot = (WIDTH - LEFT - RIGHT) / len(stacks), HEIGHT - TOP - BOTTOM

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - plot * value / highest

    def content() -> Iterator[str]:
        for value in (highest * step / 4 for step in range(5)):
            yield f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}"/>'
            yield f'<text x="{LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{_told(value)}</text>'
        for number, (name, stack) in enumerate(stacks.items()):
            left, base = LEFT + room * (number + 0.15), 0.0
            for part, value in stack.items():
                colour = COLOURS[parts.index(part) % len(COLOURS)]
                yield (
                    f'<rect x="{left:.1f}" y="{y(base + value):.1f}" width="{room * 0.7:.1f}" '
                    f'height="{plot * value / highest:.1f}" fill="{colour}"/>'
                )
                base += value
            yield (
                f'<text x="{left + room * 0.35:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">'
                f"{escape(name)}</text>"
            )
        if limit is not None:
            yield (
                f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(limit):.1f}" y2="{y(limit):.1f}" '
                f'stroke="{COLOURS[1]}" stroke-dasharray="4 3"/>'
            )

    return _figure(title, unit, parts, content())


def _told(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


@dataclass(frozen=True, slots=True)
class _Scale:
    """From values to places, logarithmically."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        if self.low == self.high:
            return (self.start + self.end) / 2
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return self.start + (self.end - self.start) * share

    def ticks(self) -> list[float]:
        exponents = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        ticks = [factor * 10.0**exponent for exponent in exponents for factor in (1, 2, 5)]
        within = [tick for tick in ticks if self.low <= tick <= self.high]
        return within if len(within) > 1 else sorted({self.low, self.high})


def _figure(title: str, unit: str, names: Sequence[str], content: Iterator[str]) -> str:
    legend = " ".join(
        f'<span><i style="background:{COLOURS[number % len(COLOURS)]}"></i>{escape(name)}</span>'
        for number, name in enumerate(names)
    )
    picture = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">{"".join(content)}</svg>'
    heading = f"<figcaption><b>{escape(title)}</b> <small>{escape(unit)}</small></figcaption>"
    return f'<figure>{heading}{picture}<p class="legend">{legend}</p></figure>'
