"""A mesh whose ranks are threads of one process: what a model is tried on before it is added for a real one."""

from __future__ import annotations

import queue
import threading
from collections import defaultdict

import torch

from engine.mesh import MeshRank, Traffic

Posts = defaultdict[tuple[int, int], "queue.Queue[torch.Tensor | None]"]  # by (sender, receiver)

TIMEOUT = 60.0  # seconds; a rank that waits longer has been left alone by one that failed


class _Meeting:
    """The ranks of one stage, who all bring a tensor and take away everybody's."""

    def __init__(self, ranks: int) -> None:
        self._barrier = threading.Barrier(ranks, timeout=TIMEOUT)
        self._brought: list[torch.Tensor] = [torch.empty(0)] * ranks

    def exchange(self, rank: int, tensor: torch.Tensor) -> torch.Tensor:
        self._brought[rank] = tensor.clone()
        self._barrier.wait()
        stacked = torch.stack(self._brought)
        self._barrier.wait()  # until all have taken
        return stacked

    def abort(self) -> None:
        self._barrier.abort()


class ThreadMesh:
    """One rank's place; see `engine.partition.Collectives`. Waits raise RuntimeError once a rank is `abort`ed."""

    def __init__(self, rank: MeshRank, meeting: _Meeting, posts: Posts) -> None:
        self.rank = rank
        self.traffic = Traffic()
        self._meeting = meeting
        self._posts = posts

    @staticmethod
    def of(tp: int, pp: int) -> list[ThreadMesh]:
        """All ranks of a mesh."""
        meetings = [_Meeting(tp) for _ in range(pp)]
        posts: Posts = defaultdict(queue.Queue)
        ranks = [MeshRank(tp, pp, number) for number in range(tp * pp)]
        return [ThreadMesh(rank, meetings[rank.stage], posts) for rank in ranks]

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.copy_(self._meeting.exchange(self.rank.tp_rank, tensor).sum(0))

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._meeting.exchange(self.rank.tp_rank, tensor)

    def send(self, tensor: torch.Tensor, rank: int) -> None:
        self._posts[self.rank.rank, rank].put(tensor.clone())

    def receive(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        try:
            sent = self._posts[rank, self.rank.rank].get(timeout=TIMEOUT)
        except queue.Empty:
            sent = None
        if sent is None:
            raise RuntimeError(f"Rank {rank} sends nothing any more.")
        return tensor.copy_(sent)

    def abort(self) -> None:
        """This rank has failed: nobody waits for it any longer."""
        self._meeting.abort()
        for rank in range(self.rank.size):
            self._posts[self.rank.rank, rank].put(None)
