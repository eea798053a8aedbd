"""Ranks that meet, collect and talk; and what becomes of them when one is lost. Ranks are threads here."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest
import torch

from engine.mesh import Mesh, MeshRank, Moved, Traffic
from swapper.errors import WorkerError

TIMEOUT = 20.0
CPU = torch.device("cpu")

Result = TypeVar("Result")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def on_all(meshes: list[Mesh], work: Callable[[Mesh], Result]) -> list[Result]:
    with ThreadPoolExecutor(len(meshes)) as pool:
        return list(pool.map(work, meshes, timeout=TIMEOUT))


@contextmanager
def joined(tp: int, pp: int = 1) -> Iterator[list[Mesh]]:
    rendezvous = f"127.0.0.1:{free_port()}"
    with ThreadPoolExecutor(tp * pp) as pool:
        meshes = list(
            pool.map(lambda rank: Mesh.join(MeshRank(tp, pp, rank), rendezvous, CPU, TIMEOUT), range(tp * pp))
        )
    try:
        yield meshes
    finally:
        for mesh in meshes:
            mesh.close()


def test_ranks_are_counted_stage_after_stage() -> None:
    rank = MeshRank(tp=2, pp=3, rank=5)
    assert (rank.size, rank.stage, rank.tp_rank, rank.is_first, rank.is_last) == (6, 2, 1, False, True)
    assert [MeshRank(2, 3, number).is_leader for number in range(6)] == [True] + [False] * 5


def test_collectives_are_of_one_stage_and_counted() -> None:
    with joined(2, 2) as meshes:
        own = [torch.full((2, 3), float(mesh.rank.rank)) for mesh in meshes]
        sums = on_all(meshes, lambda mesh: mesh.all_reduce(own[mesh.rank.rank].clone()))
        assert [float(total[0, 0]) for total in sums] == [1, 1, 5, 5]
        stacks = on_all(meshes, lambda mesh: mesh.all_gather(own[mesh.rank.rank]))
        assert [stack[:, 0, 0].tolist() for stack in stacks] == [[0, 1], [0, 1], [2, 3], [2, 3]]

        def hand_on(mesh: Mesh) -> torch.Tensor | None:
            if mesh.rank.is_first:
                mesh.send(own[mesh.rank.rank], mesh.rank.rank + 2)
                return None
            return mesh.receive(torch.empty(2, 3), mesh.rank.rank - 2)

        received = on_all(meshes, hand_on)
        assert [None if part is None else float(part[0, 0]) for part in received] == [None, None, 0, 1]
        counted = {kind: (moved.calls, moved.nbytes) for kind, moved in meshes[0].traffic.kinds.items()}
        assert counted == {"all_reduce": (1, 24), "all_gather": (1, 48), "send": (1, 24)}


def test_what_was_moved_since_is_the_difference() -> None:
    traffic = Traffic()
    traffic.count("send", 8)
    before = traffic.copy()
    traffic.count("send", 16)
    traffic.count("receive", 4)
    since = traffic.since(before)
    assert since.kinds == {"send": Moved(1, 16), "receive": Moved(1, 4)}
    traffic.add(since)  # a replay of the same pass
    assert traffic.kinds == {"send": Moved(3, 40), "receive": Moved(2, 8)}
    assert before.kinds == {"send": Moved(1, 8)}


def test_messages_keep_their_order_and_reach_every_follower() -> None:
    with joined(3) as meshes:
        heard: queue.SimpleQueue[tuple[int, list[Any]]] = queue.SimpleQueue()
        meshes[0].start(lambda rank, message: heard.put((rank, message)))
        for mesh in meshes[1:]:
            mesh.start(lambda rank, message, mesh=mesh: mesh.tell(message))  # type: ignore[misc]
        for number in range(100):
            meshes[0].tell(["step", number])
        echoes = [heard.get(timeout=TIMEOUT) for _ in range(200)]
        for rank in (1, 2):
            assert [message for peer, message in echoes if peer == rank] == [["step", n] for n in range(100)]


def test_a_lost_rank_breaks_the_mesh_for_all_others() -> None:
    with joined(3) as meshes:
        broken = [threading.Event() for _ in meshes]
        for mesh, event in zip(meshes, broken, strict=True):
            mesh.start(lambda rank, message: None)
            mesh.when_broken(event.set)
        meshes[2].close()
        for mesh, event in zip(meshes[:2], broken, strict=False):
            assert event.wait(TIMEOUT)
            with pytest.raises(WorkerError, match=r"left|lost"):
                mesh.tell(["step"])


def test_a_rank_that_nobody_meets_says_so_in_bounded_time() -> None:
    rendezvous = f"127.0.0.1:{free_port()}"
    for rank in (0, 1):
        with pytest.raises(WorkerError, match=f"Rank {rank} of a mesh of 2 × 1 did not meet the others"):
            Mesh.join(MeshRank(2, 1, rank), rendezvous, CPU, timeout=0.5)
