"""What a GPU's frame pool leaves: memory for what is not in frames.

Activations of one pass, of 512 tokens and with logits for each of 256 sequences; libraries' workspaces and the code of
kernels; recorded decodes. Bounds, not measures: an 8B model takes less than half.
"""

from __future__ import annotations

GRAPH_BYTES = 1 << 30
"""Recorded decodes of all models (`engine/graphs.py`)."""

WORKSPACE_BYTES = GRAPH_BYTES + (2 << 30)
"""All of it."""
