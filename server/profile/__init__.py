"""Profiles: what a model costs at every batch size, and where it breaks."""
