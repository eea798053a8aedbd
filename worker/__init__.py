"""The process that owns one shard of one group, and the daemon's client for it."""
