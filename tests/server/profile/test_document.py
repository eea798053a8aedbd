"""What is kept beside an image, and what the rest of the daemon reads out of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from server.profile.document import FILE, Memory, PageIn, Point, Profile, Spread, Variant, load, save


def spread(value: float) -> Spread:
    return Spread(median=value, least=value, most=value)


def point(batch: int, prompt: int, *, by_pass: float = 0.02, by_token: float = 0.001, passes: int = 1) -> Point:
    """A point of an engine whose passes take a constant and something a token."""
    return Point(
        batch=batch,
        prompt_tokens=prompt,
        output_tokens=8,
        prefill=spread(passes * by_pass + batch * prompt * by_token),
        prefill_passes=passes,
        decode=spread(by_pass + batch * by_token),
        first_token=spread(0.1),
        latency=spread(0.5),
        tokens_per_second=spread(batch * 8 / 0.5),
        busy=0.9,
        memory=Memory(weights=90, kv=8, fragmentation=2, frames=100),
    )


def profile(*points: Point, identity: str = "one", page_ins: tuple[PageIn, ...] = ()) -> Profile:
    return Profile(
        model="m",
        identity=identity,
        architecture="LlamaForCausalLM",
        dtype="bfloat16",
        tp=1,
        pp=1,
        made=0.0,
        device="cpu",
        cores=2,
        versions={"torch": "2"},
        frames=10,
        page_bytes=1 << 21,
        page_ins=page_ins,
        variants=(Variant(name="as it comes", settings={}, points=points),),
        breaking_points=(),
    )


def test_it_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    saved = profile(point(1, 16), point(4, 16))
    save(saved, tmp_path)
    assert load(tmp_path, "one") == saved


@pytest.mark.parametrize("text", [None, "", "{}", '{"version": 3}'], ids=["none", "empty", "no profile", "newer"])
def test_what_is_not_a_profile_counts_as_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str | None
) -> None:
    if text is not None:
        (tmp_path / FILE).write_text(text)
    assert load(tmp_path, "one") is None
    assert ("gswapd profile" in caplog.text) == (text is not None)


def test_a_profile_that_cannot_be_read_counts_as_none(tmp_path: Path) -> None:
    (tmp_path / FILE).mkdir()
    assert load(tmp_path, "one") is None


def test_a_profile_of_an_image_that_was_replaced_counts_as_none(tmp_path: Path) -> None:
    save(profile(point(1, 16), identity="another"), tmp_path)
    assert load(tmp_path, "one") is None


def test_costs_are_found_again_from_what_points_took() -> None:
    costs = profile(point(1, 16), point(4, 16), point(4, 300, passes=3)).costs()
    assert costs == pytest.approx((0.02, 0.001), rel=1e-6)


def test_costs_of_no_points_are_not_known() -> None:
    assert profile().costs() is None


def test_a_page_takes_what_it_took_last() -> None:
    loads = tuple(PageIn(source=name, nbytes=100, pages=10, seconds=s) for name, s in (("storage", 4.0), ("host", 1.0)))
    assert profile(page_ins=loads).page_seconds(1 << 21) == 0.1
    assert profile(page_ins=loads).page_seconds(1 << 23) == 0.4
    assert profile().page_seconds(1 << 21) is None
    nothing = PageIn(source="none", nbytes=0, pages=0, seconds=0.0)  # all its pages were another model's, too
    assert profile(page_ins=(nothing,)).page_seconds(1 << 21) is None


def test_a_request_alone_takes_its_prompt_and_a_step_for_each_further_token() -> None:
    assert profile(point(1, 16), point(8, 16)).run_seconds() == pytest.approx(0.02 + 0.016 + 7 * 0.021)
    assert profile(point(8, 16)).run_seconds() is None
