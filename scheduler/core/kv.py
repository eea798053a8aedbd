"""One model's KV grant on one group, and the frames that must be kept for it.

A grant is changed by an action and takes effect on the worker some time later. Until the worker's answer to the
latest change is back, it may hold as much as any grant that it has not answered yet, and so much stays reserved.
"""

from __future__ import annotations

from typing import NamedTuple

from mypy_extensions import mypyc_attr


class Grant(NamedTuple):
    epoch: int
    frames: int


@mypyc_attr(allow_interpreted_subclasses=True)
class KvAccount:
    """Invariant: the worker never holds more KV frames of the model than `reserved`."""

    __slots__ = ("_ceiling", "_grants", "granted", "reserved", "wanted")

    def __init__(self) -> None:
        self.wanted = 0  # what the batch asked for last; 0 once the model is idle
        self.granted = 0
        self.reserved = 0
        self._grants = [Grant(0, 0)]  # the one answered last, then those not answered yet
        self._ceiling = 0  # the worker's last answer: it held at most this

    def grant(self, frames: int, epoch: int) -> None:
        self._grants.append(Grant(epoch, frames))
        self.granted = frames
        self.reserved = max(self.reserved, frames)

    def awaits(self, epoch: int) -> bool:
        """Whether an answer to this grant says something new."""
        return any(grant.epoch == epoch for grant in self._grants)

    def frames_of(self, epoch: int) -> int:
        """What the grant `epoch` is about; 0 once it is settled."""
        return next((grant.frames for grant in self._grants if grant.epoch == epoch), 0)

    def released(self, epoch: int, frames: int) -> None:
        """The worker's answer to the grant `epoch`.

        The race: a grant is lowered and, before the answer is back, raised again. The answer to the first change is
        true, but the second grant is on its way, so its frames stay reserved. An answer settles all grants before its
        own; one to a grant that another has settled says nothing new. A batch that could not give back enough at
        once answers again, with the same epoch, when it has.
        """
        if self.awaits(epoch):
            self._grants = [grant for grant in self._grants if grant.epoch >= epoch]
            self._ceiling = frames
            self.reserved = max(frames, max(grant.frames for grant in self._grants))
