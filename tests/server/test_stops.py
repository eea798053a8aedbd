"""An answer ends before the first stop string, however its text is cut into pieces."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from server.stops import StopMatcher


def run(stops: list[str], deltas: list[str]) -> tuple[str, str | None]:
    matcher = StopMatcher(stops)
    shown = ""
    for delta in deltas:
        shown += matcher.push(delta)
        if matcher.matched is not None:
            return shown, matcher.matched
    return shown + matcher.flush(), None


def by_definition(stops: list[str], text: str) -> tuple[str, str | None]:
    """Character by character: the first stop string that is complete, the longest of those."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


def test_without_stop_strings_text_passes_at_once() -> None:
    assert StopMatcher([]).push("anything") == "anything"


def test_a_stop_string_over_three_deltas_is_found_and_never_shown() -> None:
    matcher = StopMatcher(["\nUser:"])
    assert matcher.push("Paris.\nU") == "Paris."
    assert matcher.push("ser") == ""
    assert matcher.push(": more") == ""
    assert matcher.matched == "\nUser:"


def test_a_beginning_that_comes_to_nothing_is_shown_after_all() -> None:
    matcher = StopMatcher(["\nUser:"])
    assert matcher.push("a\nUs") == "a"
    assert matcher.push("ual") == "\nUsual"
    assert matcher.matched is None


def test_what_is_held_at_the_end_of_the_answer_is_text() -> None:
    assert run(["END"], ["the EN"]) == ("the EN", None)


def test_only_as_much_as_could_be_a_stop_string_is_held() -> None:
    assert StopMatcher(["aab"]).push("xaaa") == "xa"


@given(
    st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.text("abc", max_size=5), max_size=12),
)
def test_the_result_does_not_depend_on_the_pieces(stops: list[str], deltas: list[str]) -> None:
    assert run(stops, deltas) == by_definition(stops, "".join(deltas))
