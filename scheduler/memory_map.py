"""Which model holds which frames, as a map of one rank of each group shows it.

Frames are interchangeable, so a map says how many, not which. Pages that are the same for several models lie in one
frame, which is theirs together. Every rank of a group moves in lockstep: the first one's map stands for all.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from scheduler.core.view import GroupView, ModelView, PlacementView
from scheduler.interface import FrameUse, GroupMemory, Holding, ServedModel


def memory_map(
    served: Mapping[str, ServedModel], models: Sequence[ModelView], groups: Sequence[GroupView], page_bytes: int
) -> list[GroupMemory]:
    places: defaultdict[str, list[tuple[str, PlacementView]]] = defaultdict(list)
    for model in models:
        for place in model.placements:
            if model.name in served and (place.reserved or place.kv_frames):
                places[place.group].append((model.name, place))
    return [
        GroupMemory(
            group.name, group.ranks, group.up, group.frames, page_bytes, tuple(_holdings(served, places[group.name]))
        )
        for group in groups
    ]


def _holdings(served: Mapping[str, ServedModel], places: Sequence[tuple[str, PlacementView]]) -> list[Holding]:
    holders: defaultdict[str, tuple[str, ...]] = defaultdict(tuple)  # by a page's hash
    is_in: set[str] = set()
    for name, place in places:
        pages = served[name].page_hashes[0][: place.reserved]
        is_in.update(pages[: place.resident])
        for page in dict.fromkeys(pages):
            holders[page] += (name,)
    frames: Counter[tuple[tuple[str, ...], FrameUse]] = Counter()
    for page, names in holders.items():
        frames[names, "weights" if page in is_in else "loading"] += 1
    for name, place in places:
        if place.kv_frames:
            frames[(name,), "kv"] += place.kv_frames
    return [Holding(names, use, count) for (names, use), count in frames.items()]
