"""Measurements against targets: `python -m bench.<name>`; each saves its figures in `bench/results/`."""
