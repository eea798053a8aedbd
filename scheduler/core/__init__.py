"""The pure scheduler: `SchedulerCore.step(event) -> list[Action]`, no clock, no I/O, no randomness."""
