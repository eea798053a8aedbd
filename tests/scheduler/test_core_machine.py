"""The core under random events, completions in any order, failures and deaths: its invariants hold, and all ends."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

from tests.scheduler.machine import SchedulerMachine

TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(
    max_examples=200,
    stateful_step_count=40,
    derandomize=True,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
