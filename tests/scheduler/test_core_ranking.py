"""The ranking of what is wanted: the order of sorting, at every moment, whoever came, went or changed before."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.core.group import Group, Shape
from scheduler.core.ledger import Ledger
from scheduler.core.ranking import Demand, Ranking
from scheduler.core.wanted import Wanted
from scheduler.policy.view import Rank, Want

Step = tuple[int, int, int, int, float]


def demand(number: int, rank: Rank) -> Demand:
    return Demand(Want(f"m{number}", number, 0.0, 0.0, 1, 1, 0.0, 1.0, 1.0), rank)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 12),
            st.integers(0, 2),
            st.integers(-50, 50),
            st.integers(-5, 0),
            st.sampled_from([0.0, 0.125, 3.0]),
        ),
        max_size=60,
    )
)
def test_the_order_is_that_of_sorting(steps: list[Step]) -> None:
    ranking, there, now = Ranking(), dict[int, Demand](), 0.0
    for number, tier, base, slope, passed in steps:
        now += passed
        if number in there and tier == 2:
            ranking.remove(there.pop(number), now)
        else:
            entered = there.setdefault(number, demand(number, Rank((tier,), base, slope)))
            entered.rank = Rank((tier,), base, slope)
            ranking.put(entered, now)
        assert list(ranking.ordered(now)) == sorted(there.values(), key=lambda one: one.key(now))


def test_who_waits_with_more_overtakes_though_nothing_else_happens() -> None:
    ranking = Ranking()
    one, many = demand(1, Rank((0,), -3.0, -1.0)), demand(2, Rank((0,), 0.0, -4.0))
    ranking.put(one, 0.0)
    ranking.put(many, 0.0)
    assert next(ranking.ordered(0.5)) is one
    assert next(ranking.ordered(1.5)) is many


def test_what_is_out_of_date_is_swept() -> None:
    """A daemon decides for months: places and moments that were noted and are not true any more must go."""
    shape, wanted = Shape(), Wanted()
    for name in "abcde":
        shape.groups[name] = Group(name, 1, Ledger(1, 100))
    wanted.add("m")
    for turn in range(1000):
        group = shape.groups["abcde"[turn % 5]]
        group.ledger.set_kv("m", turn * 7 % 90)
        shape.rank(group)
        assert shape.freest(1) == [
            max(shape.groups.values(), key=lambda each: (each.ledger.least_free, -ord(each.name)))
        ]
        wanted.put("m", Want("m", 1, 0.0, 0.0, 1, 1, 0.0, 1.0, 1.0), Rank((0,), 0.0, until=2000.0 - turn), False, 0.0)
    assert len(shape._heap) < 50
    assert len(wanted._again) < 50
