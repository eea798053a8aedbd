"""Neighbours lend pages and links, and a neighbour that dies, hangs or is busy costs nothing but its help.

Neighbours are processes of their own: what is tested is real memory, real sockets and real deaths.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.swapper.gpu import needs_two_gpus
from tests.swapper.paging import Outcome, data_of
from tests.swapper.stations import Neighbour, Station, until

TAGS = list(range(1, 33))  # a model of 32 pages
FRAMES = 40
TAIL = 8192


@pytest.fixture(autouse=True)
def neighbours_are_found_and_forgiven_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swapper.peers.LOOK_INTERVAL", 0.02)
    monkeypatch.setattr("swapper.peer_link.FIRST_DISTRUST", 0.001)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=needs_two_gpus)])
def station(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Station]:
    """This process's, whose host tier has room for the model."""
    with Station("here", tmp_path, FRAMES, request.param, len(TAGS)) as station:
        yield station


@pytest.fixture
def neighbour(station: Station) -> Iterator[Neighbour]:
    with start(station) as neighbour:
        yield neighbour


def start(station: Station) -> Neighbour:
    return Neighbour("there", station.directory, FRAMES, station.device)


def in_host_tier(station: Station) -> Station:
    """Have the model's pages in the host tier, and in no frame."""
    shard = station.know("model", TAGS, TAIL)
    station.bring_in(shard)
    assert station.tier is not None
    assert station.tier.wait_settled(20, len(TAGS))
    station.pager.page_out("model", 0)
    return station


def swap(station: Station) -> dict[str, int]:
    """Page the model in and out; every byte is right."""
    shard = station.pager._shard("model")
    sources = station.bring_in(shard)
    assert station.bytes_of(shard) == data_of(TAGS, TAIL)
    assert sum(sources.values()) == len(TAGS)
    station.pager.page_out("model", 0)
    return sources


def test_pages_that_a_neighbour_holds_are_copied_from_its_frames(station: Station, neighbour: Neighbour) -> None:
    neighbour.tell("in", "model", 1, 2, 3, 4)
    station.meet("there")
    shard = station.know("model", [1, 2, 9, 4, 2])
    assert station.bring_in(shard) == {"alias": 1, "peer": 3, "storage": 1}
    assert station.bytes_of(shard) == data_of([1, 2, 9, 4, 2])
    assert neighbour.tell("out", "model") == "4", "all frames were given back"
    assert station.bytes_of(shard) == data_of([1, 2, 9, 4, 2]), "what was copied stays"


def test_pages_that_came_from_a_neighbour_are_kept_in_the_host_tier(station: Station, neighbour: Neighbour) -> None:
    neighbour.tell("in", "model", 1, 2)
    station.meet("there")
    shard = station.know("model", [1, 2])
    assert station.bring_in(shard) == {"peer": 2}
    assert station.tier is not None
    assert station.tier.wait_settled(20, 2)


def test_two_workers_lend_to_each_other(station: Station, neighbour: Neighbour) -> None:
    assert neighbour.tell("in", "theirs", 1, 2) == "{'storage': 2}"
    station.meet("there")
    assert station.bring_in(station.know("ours", [1, 3])) == {"peer": 1, "storage": 1}
    neighbour.tell("meet", "here")
    assert neighbour.tell("in", "more", 3, 4) == "{'peer': 1, 'storage': 1}"


def test_an_idle_neighbour_stages_a_share_of_the_host_tiers_pages(station: Station, neighbour: Neighbour) -> None:
    in_host_tier(station)
    station.meet("there", staging=True)
    assert set(swap(station)) == {"host", "fan_in"}


def test_a_neighbour_that_is_killed_costs_nothing_but_its_help(station: Station, neighbour: Neighbour) -> None:
    """Killed while it stages and lends, at whatever moment, again and again."""
    in_host_tier(station)
    neighbour.kill()
    for delay in (0.0, 0.002, 0.006):
        with start(station) as other:
            other.tell("in", "half", *TAGS[::2])
            station.meet("there", staging=True)
            killer = threading.Timer(delay, other.send, (signal.SIGKILL,))
            killer.start()
            swap(station)
            swap(station)
            killer.join()
            assert swap(station).keys() <= {"host", "fan_in", "peer"}
        until(lambda: station.link("there") is None)
    assert swap(station) == {"host": len(TAGS)}


def test_a_neighbour_that_hangs_is_waited_for_once_and_used_again_when_it_lives(
    station: Station, neighbour: Neighbour
) -> None:
    in_host_tier(station)
    link = station.meet("there", staging=True)
    neighbour.send(signal.SIGSTOP)
    swap(station)
    assert not link.is_usable
    assert swap(station) == {"host": len(TAGS)}, "it is not asked again"
    neighbour.send(signal.SIGCONT)
    until(lambda: link.can_stage)  # it has answered what was given up
    assert "fan_in" in swap(station)


def test_what_a_hanging_neighbour_does_late_touches_no_page(station: Station, neighbour: Neighbour) -> None:
    """It stops while it stages pages of one model, and goes on when another has their frames and their slots."""
    in_host_tier(station)
    link = station.meet("there", staging=True)
    for _ in range(4):
        shard = station.pager._shard("model")
        outcome = Outcome()
        station.pager.page_in("model", 0, shard.page_count, outcome)
        until(lambda: link.stages > 0 or not station.pager.is_paging)
        neighbour.send(signal.SIGSTOP)
        outcome.result()
        station.pager.page_out("model", 0)
        other = station.know("other", TAGS[::-1])
        station.bring_in(other)
        neighbour.send(signal.SIGCONT)
        until(lambda: link.can_stage)
        assert station.bytes_of(other) == data_of(TAGS[::-1])
        station.pager.close("other")


def test_a_neighbour_comes_back(station: Station, neighbour: Neighbour) -> None:
    in_host_tier(station)
    station.meet("there", staging=True)
    neighbour.kill()
    until(lambda: station.link("there") is None)
    assert swap(station) == {"host": len(TAGS)}
    with start(station):
        station.meet("there", staging=True)
        assert "fan_in" in swap(station)
