"""The state machine is worth something: it notices each planted fault."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.scheduler.machine import SchedulerMachine
from tests.scheduler.mutants import MUTANTS, NO_CHANGE, Mutant, core_with, loads

ONE_FAILURE_IS_ENOUGH = settings(
    max_examples=200,
    stateful_step_count=40,
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.generate],
    report_multiple_bugs=False,
    print_blob=False,
    suppress_health_check=list(HealthCheck),
)


def run(mutant: Mutant) -> None:
    with core_with(mutant) as core_class:
        machine = type("MutantMachine", (SchedulerMachine,), {"core_class": core_class})
        run_state_machine_as_test(machine, settings=ONE_FAILURE_IS_ENOUGH)


def test_the_machine_passes_what_was_loaded_in_the_same_way_and_not_changed() -> None:
    run(NO_CHANGE)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_machine_notices(mutant: Mutant) -> None:
    assert loads(mutant), f"what {mutant.name!r} changes is not in {mutant.module}, or not once"
    with pytest.raises(Exception):  # noqa: B017, PT011  whatever it breaks: a check, a table, a lookup
        run(mutant)
