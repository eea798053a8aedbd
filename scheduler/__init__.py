"""Decisions: a pure core (events in, actions out), its policy, and the driver that runs it live."""
