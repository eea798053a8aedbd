"""The baselines of the benches: Computron's ticks, order and whole models, the core's own too; least recently used."""

from __future__ import annotations

import pytest

from bench.baselines import TICK
from bench.policies import EXECUTE, FIGURES, FOREVER, PAGES, SETTINGS, SWAP_IN, Setting, core, group, models, run
from scheduler.simulate.simulator import Simulator
from scheduler.simulate.workload import gamma
from tests.scheduler.test_simulate import asked

SETTING = Setting((1, 1, 1), 1.0)  # two of three models fit


def test_a_cold_request_waits_for_a_tick_the_whole_model_and_a_tick() -> None:
    figures = run(SETTING, "a", asked((0.003, "model0")))
    ready = -(-(TICK + SWAP_IN) // TICK) * TICK
    assert figures["mean"] == pytest.approx(ready + EXECUTE - 0.003, abs=1e-6)


def test_the_least_recently_used_model_goes_though_requests_wait_for_it() -> None:
    order = asked((0.0, "model0"), (0.6, "model1"), (1.2, "model0"), (1.8, "model2"), (1.81, "model1"))
    assert run(SETTING, "a", order)["page_ins"] == 4  # model1 made room for model2, and comes again


def test_nobody_else_is_served_while_the_oldest_waits_for_its_model() -> None:
    figures = run(SETTING, "a", asked((0.0, "model0"), (1.0, "model1"), (1.1, "model0")))
    assert figures["longest"] == pytest.approx(SWAP_IN + EXECUTE, abs=2 * TICK)
    assert figures["p50"] == pytest.approx(0.48 - 0.1 + EXECUTE + EXECUTE, abs=0.07)


def test_plain_least_recently_used_answers_while_the_model_comes_in_and_at_once_who_is_in() -> None:
    """Without ticks; the last page's share of a pass is all that is left to run when it is in."""
    figures = run(SETTING, "plain", asked((0.003, "model0"), (1.0, "model1"), (1.1, "model0")))
    assert figures["longest"] == pytest.approx(SWAP_IN + EXECUTE / PAGES, abs=1e-4)
    assert figures["mean"] == pytest.approx((2 * figures["longest"] + EXECUTE) / 3, abs=EXECUTE / PAGES)


def test_plain_least_recently_used_takes_a_model_for_which_requests_wait() -> None:
    """model1 waits for the processor, which model0 has, when model2 takes its memory."""
    order = asked((0.0, "model1"), (0.6, "model0"), (1.2, "model0"), (1.21, "model1"), (1.22, "model2"))
    assert run(SETTING, "plain", order)["page_ins"] == 4
    assert run(SETTING, "lru", order)["page_ins"] == 3  # the core has served it, and what is served keeps its pages


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_computrons_policy_in_the_core_is_the_baseline(setting: Setting) -> None:
    """The daemon is compared with it, so it must be neither weaker nor stronger."""
    workload = gamma(setting.named_rates, setting.cv, 20.0, seed=1)
    everyone = models(len(setting.rates), setting.batch)
    scheduler = core("computron", setting.batch)
    simulator = Simulator(scheduler, [group(setting.fit)], everyone, streaming=False, timeout=FOREVER)
    outcome, expected = simulator.run(workload), run(setting, "a", workload)
    figures = {**outcome.summary(), "bytes": outcome.bytes_moved}
    assert {name: figures[name] for name in FIGURES} == pytest.approx(
        {name: expected[name] for name in FIGURES}, rel=0.02
    )
