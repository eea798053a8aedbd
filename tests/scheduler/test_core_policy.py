"""Policy: which group, whose tails, who must drain. Pure functions, so each case is a line or two."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from scheduler.policy.oldest_first import choose_site, in_order, make_room, overdue_at, who_must_drain
from scheduler.policy.view import Demand, Holder, Memory, Site, Tail

Shards = tuple[tuple[int, ...], ...]


def holder(model: str, *shards: tuple[int, ...], used: float = 0.0, kv: int = 0, pinned: bool = False) -> Holder:
    return Holder(model, shards, len(shards[0]), kv, used, number=ord(model[0]), pinned=pinned)


def memory(
    short: int | Sequence[int],
    idle: Sequence[Holder] = (),
    busy: Sequence[Holder] = (),
    incoming: Shards | None = None,
    leaving: Sequence[tuple[Holder, int]] = (),
) -> Memory:
    """A group on which these holders, and nobody else, hold pages."""
    lacking = [short] if isinstance(short, int) else list(short)
    holders = [*idle, *busy, *(holder for holder, _ in leaving)]
    counts = [Counter(page for h in holders for page in h.shards[rank]) for rank in range(len(lacking))]
    return Memory(
        short=lacking,
        incoming=[frozenset(shard) for shard in incoming] if incoming else [frozenset()] * len(lacking),
        counts=counts,
        leaving=leaving,
        idle=idle,
        busy=busy,
    )


def test_demands_go_in_the_order_of_their_arrival() -> None:
    late, early = Demand(2, 0.5, "A", 1), Demand(1, 0.5, "B", 1)
    assert in_order([late, early]) == [early, late]


def test_a_demand_is_overdue_when_it_has_waited_for_the_bound() -> None:
    assert overdue_at(Demand(1, 2.0, "A", 1), wait_bound=5.0) == 7.0


def test_a_model_goes_to_its_home_then_where_room_is_made_then_where_it_is_then_where_most_is_free() -> None:
    full, empty, partly = Site("full", 0, 1), Site("empty", 0, 9), Site("partly", 2, 1)
    target, home = Site("target", 0, 0, target=True), Site("home", 0, 0, home=True)
    assert choose_site([full, empty, partly, target, home]) == home
    assert choose_site([full, empty, partly, target]) == target
    assert choose_site([full, empty, partly]) == partly
    assert choose_site([full, empty]) == empty


def test_only_as_much_of_the_tail_as_needed_is_taken() -> None:
    room = make_room(memory(2, idle=[holder("A", (1, 2, 3, 4))]))
    assert room.tails == (Tail("A", 2),)
    assert room.short == 0


def test_the_least_recently_used_goes_first() -> None:
    room = make_room(memory(3, idle=[holder("A", (1, 2), used=9.0), holder("B", (3, 4), used=1.0)]))
    assert room.tails == (Tail("B", 0), Tail("A", 1))


def test_a_page_that_stays_with_somebody_else_frees_nothing() -> None:
    sibling = holder("B", (1, 2, 13), kv=1)
    room = make_room(memory(2, idle=[holder("A", (1, 2, 3))], busy=[sibling]))
    assert room.short == 1


def test_a_page_that_two_victims_share_is_free_when_both_have_lost_it() -> None:
    room = make_room(memory(1, idle=[holder("A", (1,)), holder("B", (1,), used=1.0)]))
    assert room.tails == (Tail("A", 0), Tail("B", 0))


def test_what_turns_out_to_free_nothing_is_left_alone() -> None:
    """A's only page is shared with a busy model: taking it would be in vain."""
    busy = holder("C", (1,), kv=1)
    room = make_room(memory(1, idle=[holder("A", (1,)), holder("B", (2, 3), used=1.0)], busy=[busy]))
    assert room.tails == (Tail("B", 1),)


def test_pages_of_the_incoming_model_are_no_gain() -> None:
    room = make_room(memory(1, idle=[holder("A", (5, 1)), holder("B", (2,), used=1.0)], incoming=((1, 7),)))
    assert room.tails == (Tail("A", 0),)
    assert make_room(memory(1, idle=[holder("A", (1,))], incoming=((1, 7),))).short == 1


def test_what_is_leaving_already_is_counted_and_not_taken_twice() -> None:
    leaving = holder("A", (1, 2, 3))
    room = make_room(memory(2, idle=[holder("B", (4, 5))], leaving=[(leaving, 1)]))
    assert room.tails == ()
    assert room.short == 0


def test_every_rank_must_have_enough() -> None:
    """Rank 1 shares all but one page with a busy model, so more of the tail has to go than rank 0 needs."""
    victim = holder("A", (1, 2, 3), (11, 12, 13))
    busy = holder("B", (4, 5), (12, 13), kv=1)
    assert make_room(memory([1, 1], idle=[victim], busy=[busy])).tails == (Tail("A", 0),)


def test_busy_models_drain_in_the_order_in_which_they_came_and_no_more_than_needed() -> None:
    first, second = holder("A", (1, 2), kv=1, used=9.0), holder("B", (3, 4), kv=1, used=1.0)
    assert who_must_drain(memory(3, busy=[second, first])) == ["A"]
    assert who_must_drain(memory(4, busy=[second, first])) == ["A", "B"]


def test_a_pinned_model_drains_last_and_gives_only_its_kv() -> None:
    pinned, other = holder("A", (1, 2), kv=2, pinned=True), holder("B", (3,), kv=1)
    assert who_must_drain(memory(2, busy=[pinned, other])) == ["B"]
    assert who_must_drain(memory(4, busy=[pinned, other])) == ["B", "A"]
