"""Which models have pages in common with another. For all others a page is a frame, and counting is enough."""

from __future__ import annotations

from collections import Counter

from scheduler.core.model import Model


class Sharing:
    def __init__(self) -> None:
        self._counts: dict[int, Counter[int]] = {}  # rank → page → models that have it
        self._version = 1

    def add(self, model: Model) -> None:
        for rank, pages in enumerate(model.identities):
            self._counts.setdefault(rank, Counter()).update(pages)
        self._version += 1

    def remove(self, model: Model) -> None:
        for rank, pages in enumerate(model.identities):
            counts = self._counts[rank]
            for page in pages:
                counts[page] -= 1
                if not counts[page]:
                    del counts[page]
        self._version += 1

    def of(self, model: Model) -> bool:
        """Whether any of its pages is in another model too, or in it twice. Told anew when the models change."""
        if model.shares_as_of != self._version:
            model.shares_as_of = self._version
            model.shares = any(
                len(pages) < model.pages or any(counts[page] > 1 for page in pages)
                for pages, counts in zip(model.identities, self._counts.values(), strict=False)
            )
        return model.shares
