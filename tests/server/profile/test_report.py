"""The page and its pictures: well formed, without network, and with advice that follows from the figures."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from server.profile.charts import Mark, bars, lines
from server.profile.document import Accuracy, BreakingPoint, Memory, Moved, PageIn, Profile
from server.profile.report import advice, page
from tests.server.profile.test_document import point, profile


def full(**changes: object) -> Profile:
    moved = {"all_reduce": Moved(calls=4, nbytes=4096, seconds=0.002, counted=9000, expected=9000)}
    points = tuple(point(batch, 64).model_copy(update={"moved": moved}) for batch in (1, 2, 4))
    loads = (PageIn(source="storage", nbytes=10**9, pages=30, seconds=0.5),)
    broken = (BreakingPoint(tokens=72, predicted=9, observed=9, limited_by="memory"),)
    accuracy = Accuracy(tokens=400, perplexity=20.5, reference=20.25, agreement=0.975)
    whole = profile(*points, page_ins=loads)
    variants = (whole.variants[0].model_copy(update={"accuracy": accuracy}),)
    return whole.model_copy(update={"breaking_points": broken, "variants": variants, **changes})


def test_a_page_is_whole_and_needs_no_network() -> None:
    html = page([full(), full(tp=2)])
    assert html.startswith("<!doctype html>")
    assert html.rstrip().endswith("</html>")
    assert "http" not in html.replace("http-equiv", "")
    for wanted in ("20.5000", "97.50%", "memory ends: 9", "Communication", "Side by side", "2.00 GB/s"):
        assert wanted in html


def test_a_page_is_whole_where_nothing_was_moved_or_observed() -> None:
    loads = (PageIn(source="none", nbytes=0, pages=0, seconds=0.0),)
    broken = (BreakingPoint(tokens=72, predicted=1, observed=0, limited_by="memory"),)
    html = page([full(page_ins=loads, breaking_points=broken, variants=profile(point(1, 64)).variants)])
    assert "GB/s" not in html
    assert "memory ends:" not in html


def test_memory_of_a_gpu_is_told_as_each_counts_it_and_what_lies_between() -> None:
    gb = 10**9
    memory = Memory(
        weights=90, kv=8, fragmentation=2, frames=100, activations=gb // 2, reserved=gb, graphs=gb // 4,
        device=14 * gb, nvml=15 * gb, pool=10 * gb,
    )  # fmt: skip
    points = tuple(point(batch, 64).model_copy(update={"memory": memory, "joules": 1.25}) for batch in (1, 2))
    html = page([profile(*points).model_copy(update={"device": "cuda:0"})])
    for wanted in ("500 MB of it in use", "and 3 GB of contexts", "(250 MB)", "and 1 GB that", "1.25", "Energy"):
        assert wanted in html
    assert "no GPU" not in html
    assert "no GPU" in page([full()]), "so that nobody looks for it"


def test_a_model_s_name_cannot_break_out_of_the_page() -> None:
    assert "<script>" not in page([full(model="<script>")])


@pytest.mark.parametrize(
    ("speeds", "best"), [((10, 20, 40), 4), ((10, 20, 20.5), 2), ((10, 9, 8), 1)], ids=["grows", "levels off", "falls"]
)
def test_advice_is_the_smallest_batch_that_no_larger_one_beats_by_much(speeds: tuple[float, ...], best: int) -> None:
    points = [
        its.model_copy(update={"tokens_per_second": its.tokens_per_second.model_copy(update={"median": speed})})
        for its, speed in zip(full().points(), speeds, strict=True)
    ]
    told = profile(*points)
    assert f"batch {best} is best" in advice(told)


@pytest.mark.parametrize(("ratio", "told"), [(2.0, "with float32, 2.0 times as many"), (1.01, None)])
def test_advice_names_a_switch_that_gives_much_more(ratio: float, told: str | None) -> None:
    own = full().variants[0]
    (best,) = (its for its in own.points if its.batch == 4)
    speed = best.tokens_per_second
    faster = best.model_copy(update={"tokens_per_second": speed.model_copy(update={"median": speed.median * ratio})})
    other = own.model_copy(update={"name": "float32", "points": (faster,)})
    text = advice(full(variants=(own, other)))
    assert "batch 4 is best" in text
    assert told in text if told else "float32" not in text


@pytest.mark.parametrize(
    "picture",
    [
        lines("t", "u", {"a": [(1, 0.5), (8, 20)], "b": [(1, 3)]}, [Mark(16, "end")]),
        lines("t", "u", {"one": [(1, 1.0)]}),
        bars("t & u", "GiB", {"1": {"weights": 3, "KV": 1}, "2": {"weights": 3, "KV": 2}}, 8),
    ],
)
def test_pictures_are_well_formed_and_within_their_frame(picture: str) -> None:
    figure = ElementTree.fromstring(picture)
    svg = figure.find("svg")
    assert svg is not None
    width, height = map(float, svg.attrib["viewBox"].split()[2:])
    for mark in svg:
        for name in ("x", "x1", "x2", "cx"):
            assert 0 <= float(mark.attrib.get(name, 0)) <= width
        for name in ("y", "y1", "y2", "cy"):
            assert 0 <= float(mark.attrib.get(name, 0)) <= height


def test_nothing_to_draw_draws_nothing() -> None:
    assert lines("t", "u", {}) == ""
    assert bars("t", "u", {}) == ""
