"""docs/metrics.md, written from the metrics' own definition.

python -m server.metrics_page > docs/metrics.md
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from server.metric_families import ASKED, FED, Family

HEAD = """\
# Metrics

`GET /metrics`, in Prometheus' text format, without a key. Base units; a counter ends in `_total`, a histogram has
`_bucket`, `_sum` and `_count`. `model` is a model's name in the store, and its series go when it goes. Series whose
labels are known beforehand exist from the start, at 0. Besides these there are `gswapd_build_info` (label `version`)
and the process's own `process_*`. This page is generated: `python -m server.metrics_page > docs/metrics.md`.
"""


def page() -> str:
    """The whole page, Markdown."""
    titles = {"Counted as it happens": FED, "True at the moment of a scrape": ASKED}
    return "\n".join([HEAD, *(line for title, families in titles.items() for line in _table(title, families))])


def _table(title: str, families: Iterable[Family]) -> Iterator[str]:
    yield from (f"## {title}", "", "| metric | labels | |", "|---|---|---|")
    for family in families:
        buckets = f". Buckets from {_time(family.buckets[0])} to {_time(family.buckets[-1])}" if family.buckets else ""
        labels = ", ".join(_label(name, values) for name, values in family.labels.items())
        yield f"| `{family.exposed}` {family.kind} | {labels} | {family.text}{buckets} |"
    yield ""


def _label(name: str, values: tuple[str, ...]) -> str:
    return f"`{name}`" + (f" ({', '.join(values)})" if values else "")


def _time(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1000:g} ms"
    return next(f"{seconds / size:g} {unit}" for size, unit in ((86400, "d"), (60, "min"), (1, "s")) if seconds >= size)


if __name__ == "__main__":
    print(page(), end="")
