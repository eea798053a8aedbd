"""Which models have pages in common with another. For all others a page is a frame, and counting is enough."""

from __future__ import annotations

from mypy_extensions import mypyc_attr

from scheduler.core.model import Model


@mypyc_attr(allow_interpreted_subclasses=True)
class Sharing:
    """Keeps `Model.shares`. A model that shared a page goes on to count as one that does when the other is gone."""

    def __init__(self) -> None:
        self._sole: dict[tuple[int, int], Model] = {}  # a rank's page → the one model that has it
        self._shared: dict[tuple[int, int], int] = {}  # how many have it, of pages that two have had

    def add(self, model: Model) -> list[Model]:
        """Those that share pages now and did not before, besides the model itself."""
        found = []
        model.shares = any(len(pages) < model.pages for pages in model.identities)
        for page in _pages(model):
            if page in self._shared:
                model.shares = True
                self._shared[page] += 1
            elif page in self._sole:
                other = self._sole.pop(page)
                if not other.shares:
                    found.append(other)
                other.shares = model.shares = True
                self._shared[page] = 2
            else:
                self._sole[page] = model
        return found

    def remove(self, model: Model) -> None:
        for page in _pages(model):
            if page not in self._shared:
                del self._sole[page]
            elif self._shared[page] > 1:
                self._shared[page] -= 1
            else:
                del self._shared[page]


def _pages(model: Model) -> list[tuple[int, int]]:
    return [(rank, page) for rank, pages in enumerate(model.identities) for page in pages]
