"""Policy: who first, whose tails, who must drain, what is kept. Pure functions, so each case is short."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from copy import copy
from itertools import accumulate
from typing import TypeVar

import pytest

from scheduler.core.ranking import Demand, Ranking
from scheduler.policy.base import Policy
from scheduler.policy.computron import Computron
from scheduler.policy.gswapd import Gswapd
from scheduler.policy.history import History
from scheduler.policy.lru import Lru
from scheduler.policy.tails import make_room, who_must_drain
from scheduler.policy.view import Holder, Memory, Want

Shards = tuple[tuple[int, ...], ...]


def holder(model: str, *shards: tuple[int, ...], kv: int = 0, pinned: bool = False) -> Holder:
    return Holder(model, shards, len(shards[0]), kv, 0.0, number=ord(model[0]), pinned=pinned)


def memory(
    short: int | Sequence[int],
    held: Sequence[Holder] = (),
    incoming: Shards | None = None,
    leaving: Sequence[tuple[Holder, int]] = (),
) -> Memory:
    """A group on which these holders, and nobody else, hold pages."""
    lacking = [short] if isinstance(short, int) else list(short)
    holders = [*held, *(holder for holder, _ in leaving)]
    counts = [Counter(page for h in holders for page in h.shards[rank]) for rank in range(len(lacking))]
    return Memory(
        short=lacking,
        incoming=[frozenset(shard) for shard in incoming] if incoming else [frozenset()] * len(lacking),
        counts=counts,
        leaving=leaving,
    )


def want(
    model: str,
    number: int = 1,
    due: float = 1e9,
    queue: int = 1,
    waited: float = 0.0,
    load: float = 1.0,
    at: float = 0.0,
) -> Want:
    """By `at`, all of them have waited for `waited` seconds together."""
    return Want(model, number, 0.0, due, queue, queue, queue * at - waited, load, run=0.1)


View = TypeVar("View", Want, Holder)


def but(view: View, **fields: object) -> View:
    """The same, with other values of some fields."""
    other = copy(view)
    for name, value in fields.items():
        setattr(other, name, value)
    return other


def order(policy: Policy, wants: Sequence[Want], now: float) -> list[str]:
    ranking = Ranking()
    for demand in [Demand(want, policy.rank(want, now)) for want in wants]:
        ranking.put(demand, now)
    return [demand.want.model for demand in ranking.ordered(now)]


def seen(*times: float) -> History:
    history = History()
    for time in times:
        history.arrived(time)
    return history


def regular(last: float) -> History:
    """Asked for every second, up to `last`."""
    return seen(*(last - 30 + second for second in range(31)))


def keeps(model: str, history: History, load: float = 0.4, wanted: bool = False, missing: float = 0.0) -> Holder:
    return Holder(model, ((1,),), 1, 0, 0.0, 1, history=history, load=load, is_wanted=wanted, missing=missing)


# ---- whose tails


def test_only_as_much_of_the_tail_as_needed_is_taken_and_the_first_victims_first() -> None:
    a, b = holder("A", (1, 2, 3, 4)), holder("B", (5, 6))
    assert make_room(memory(2, [a, b]), [a, b]) == ([("A", 2)], 0)
    assert make_room(memory(3, [a, b]), [b, a]) == ([("B", 0), ("A", 3)], 0)


def test_whole_models_go_whole() -> None:
    a = holder("A", (1, 2, 3, 4))
    assert make_room(memory(2, [a]), [a], whole=True)[0] == [("A", 0)]


def test_a_page_that_stays_with_somebody_else_frees_nothing() -> None:
    a, sibling = holder("A", (1, 2, 3)), holder("B", (1, 2, 13), kv=1)
    assert make_room(memory(2, [a, sibling]), [a])[1] == 1


def test_a_page_that_two_victims_share_is_free_when_both_have_lost_it() -> None:
    a, b = holder("A", (1,)), holder("B", (1,))
    assert make_room(memory(1, [a, b]), [a, b])[0] == [("A", 0), ("B", 0)]


def test_what_turns_out_to_free_nothing_is_left_alone() -> None:
    """A's only page is shared with a busy model: taking it would be in vain."""
    a, b, busy = holder("A", (1,)), holder("B", (2, 3)), holder("C", (1,), kv=1)
    assert make_room(memory(1, [a, b, busy]), [a, b])[0] == [("B", 1)]


def test_pages_of_the_incoming_model_are_no_gain() -> None:
    a = holder("A", (5, 1))
    assert make_room(memory(1, [a], incoming=((1, 7),)), [a])[0] == [("A", 0)]
    assert make_room(memory(2, [a], incoming=((1, 7),)), [a])[1] == 1


def test_what_is_leaving_already_is_counted_and_not_taken_twice() -> None:
    leaving, b = holder("A", (1, 2, 3)), holder("B", (4, 5))
    assert make_room(memory(2, [b], leaving=[(leaving, 1)]), [b]) == ([], 0)


def test_every_rank_must_have_enough() -> None:
    """Rank 1 shares all but one page with a busy model, so more of the tail has to go than rank 0 needs."""
    victim = holder("A", (1, 2, 3), (11, 12, 13))
    busy = holder("B", (4, 5), (12, 13), kv=1)
    assert make_room(memory([1, 1], [victim, busy]), [victim])[0] == [("A", 0)]


def test_busy_models_drain_in_the_order_in_which_they_came_and_no_more_than_needed() -> None:
    first, second = holder("A", (1, 2), kv=1), holder("B", (3, 4), kv=1)
    held = memory(3, [second, first])
    assert who_must_drain(held, [], [second, first]) == ["A"]
    assert who_must_drain(memory(4, [second, first]), [], [second, first]) == ["A", "B"]


def test_a_pinned_model_drains_last_and_gives_only_its_kv() -> None:
    pinned, other = holder("A", (1, 2), kv=2, pinned=True), holder("B", (3,), kv=1)
    assert who_must_drain(memory(2, [pinned, other]), [], [pinned, other]) == ["B"]
    assert who_must_drain(memory(4, [pinned, other]), [], [pinned, other]) == ["B", "A"]


# ---- who first


def test_the_baselines_go_by_arrival_and_last_use() -> None:
    old = Holder("A", ((1,),), 1, 0, used=1.0, number=2)
    new = Holder("B", ((2,),), 1, 0, used=2.0, number=1)
    for policy in (Lru(), Computron()):
        assert order(policy, [want("X", number=2), want("Y", number=1)], 0.0) == ["Y", "X"]
        assert policy.victims(want("X"), [new, old], 0.0) == [old, new]


def test_most_requests_a_second_of_loading_and_running_go_first() -> None:
    many, near, far = want("many", queue=6), want("near", load=0.1), want("far")
    assert order(Gswapd(), [far, near, many], 0.0) == ["many", "near", "far"]


def test_who_has_waited_past_its_bound_goes_before_all_others_the_longest_overdue_first() -> None:
    hot, late, later = want("hot", queue=60, load=0.01), want("late", due=3.0), want("later", due=2.0)
    assert order(Gswapd(), [hot, late, later], 4.0) == ["later", "late", "hot"]
    assert order(Gswapd(), [hot, late], 1.0)[0] == "hot"


def test_priority_goes_before_gain_and_a_bound_before_priority() -> None:
    dear, many, late = but(want("dear"), priority=1), want("many", queue=9), want("late", due=3.0)
    assert order(Gswapd(), [many, dear, late], 4.0) == ["late", "dear", "many"]


def test_an_objective_that_is_about_to_be_missed_goes_first_and_one_that_is_missed_does_not() -> None:
    tight, many, missed = (
        but(want("tight"), best_by=0.5),
        want("many", queue=9),
        but(want("missed"), best_by=-0.1),
    )
    assert order(Gswapd(), [many, missed, tight], 0.0) == ["tight", "many", "missed"]


def test_the_link_turns_in_the_middle_of_a_page_in_but_not_for_a_little_more() -> None:
    begun, other = but(want("begun"), is_next=True), want("other", load=0.8)
    assert order(Gswapd(), [other, begun], 0.0)[0] == "begun"
    assert order(Gswapd(), [want("other", load=0.5), begun], 0.0)[0] == "other"


# ---- what is kept


def test_a_model_that_is_asked_for_regularly_is_worth_more_towards_its_next_request() -> None:
    history = regular(100.0)
    assert history.value(100.1, 1.0) < history.value(100.9, 1.0)
    assert history.next_use(100.1) == pytest.approx(101.0)


def test_a_model_that_comes_in_bursts_is_worth_most_within_one() -> None:
    bursts = seen(*(burst + step / 100 for burst in (0, 20, 40) for step in range(10)))
    assert bursts.value(40.1, 1.0) > 5 * bursts.value(43.0, 1.0)


def test_a_few_gaps_are_believed() -> None:
    """Who was asked for nine times, once a second, is worth little just after that."""
    assert seen(*range(9)).value(8.1, 0.25) < 0.15


def test_a_scan_flushes_nothing() -> None:
    """Row 24. What was seen once goes before what is asked for regularly, however recent."""
    hot, scanned = keeps("hot", regular(99.5)), keeps("scanned", seen(99.9))
    assert Gswapd().victims(want("new", waited=9.0, at=100.0), [hot, scanned], 100.0)[0] is scanned


def test_what_is_needed_soon_is_displaced_when_those_who_wait_have_waited_for_what_it_costs() -> None:
    soon = keeps("soon", regular(99.1))
    assert Gswapd().victims(want("new", at=100.0), [soon], 100.0) == []
    at = Gswapd().worth_at(want("new", at=100.0), [soon], 100.0)
    assert at is not None
    assert 100.0 < at < 100.28
    assert Gswapd().victims(want("new", waited=1.0, at=100.0), [soon], 100.0) == [soon]


def test_what_is_asked_for_often_is_kept_the_longer_the_more_wait_for_the_link() -> None:
    """Whoever comes for it while it is away waits for their loads too."""
    often = keeps("often", seen(*(99.9 - 0.1 * back for back in reversed(range(61)))))
    waits = want("new", waited=1.5, at=100.0)
    assert Gswapd().victims(waits, [often], 100.0) == [often]
    assert Gswapd().victims(but(waits, rivals=2), [often], 100.0) == []


def test_what_is_about_to_be_idle_is_waited_for_if_its_return_costs_less() -> None:
    soon, scanned = keeps("soon", regular(99.1)), but(keeps("scanned", seen(99.9)), run=0.05)
    waits = want("new", waited=1.0, at=100.0)
    assert Gswapd().victims(waits, [soon], 100.0, [scanned]) == []
    assert Gswapd().victims(waits, [soon], 100.0, [but(scanned, run=5.0)]) == [soon]
    assert Gswapd().victims(but(waits, due=100.0), [soon], 100.0, [scanned]) == [soon]


def test_who_is_alone_comes_before_more_when_it_has_waited_for_long() -> None:
    alone, many = want("alone", waited=1.5), want("many", queue=3, waited=0.3)
    assert order(Gswapd(), [want("alone"), many], 0.0) == ["many", "alone"]
    assert order(Gswapd(), [alone, many], 0.0) == ["alone", "many"]


def test_looks_at_a_cost_that_rises_do_not_come_ever_closer() -> None:
    """They would end at a moment that is not later than the one before, from which nothing asks again."""
    times = list(accumulate((0.1 * (7 * index % 30 + 1) for index in range(30)), initial=0.0))
    begin = times[-1] + 0.5
    holders, now, looks = [keeps("kept", seen(*times))], begin, 0
    while looks < 8 and not Gswapd().victims(want("new", waited=now - begin, at=now), holders, now):
        at = Gswapd().worth_at(want("new", waited=now - begin, at=now), holders, now)
        assert at is not None
        now, looks = at, looks + 1
    assert now - begin < 0.1
    assert looks < 8


def test_a_complete_model_with_a_queue_is_taken_only_for_one_past_its_bound() -> None:
    wanted = keeps("wanted", regular(99.0), wanted=True)
    assert Gswapd().victims(want("new", due=9.0, waited=99.0, at=8.0), [wanted], 8.0) == []
    assert Gswapd().victims(want("new", due=9.0, waited=99.0, at=9.0), [wanted], 9.0) == [wanted]


def test_an_idle_link_brings_in_what_is_expected_soon_for_what_is_not() -> None:
    soon, later = keeps("soon", regular(99.2), missing=1.0), keeps("later", regular(100.0))
    choice = Gswapd().prefetch([soon], [later], 100.0)
    assert choice is not None
    assert (choice.model, [victim.model for victim in choice.victims]) == ("soon", ["later"])
    early = Gswapd().prefetch([keeps("soon", regular(99.9), missing=1.0)], [later], 100.0)
    assert early is not None
    assert early.model is None
    assert early.ask_at == pytest.approx(100.3)  # 1.5 loads before it is expected
