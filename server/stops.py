"""Stop strings: an answer ends before the first of them, even if it arrives in pieces.

Text that may be the beginning of a stop string is held back until more text decides. What is found does not depend on
how the text was cut into pieces: the stop string that is complete first ends the answer; of two complete at the same
character, the longer.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Looks for stop strings in one answer's text."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._longest = max(map(len, stops), default=0)
        self._held = ""
        self.matched: str | None = None  # set once; nothing may be pushed after it

    def push(self, text: str) -> str:
        """The text that may be shown now. Once `matched` is set it is the last."""
        if not self._stops:
            return text
        text = self._held + text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            _, start, self.matched = min(found)
            self._held = ""
            return text[:start]
        keep = self._undecided(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """The answer ended without a match: what was held back is text."""
        held, self._held = self._held, ""
        return held

    def _undecided(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            end = text[len(text) - length :]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0
