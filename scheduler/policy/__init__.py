"""Policy: which demand first, on which group, whose pages go. Pure functions over frozen views."""
