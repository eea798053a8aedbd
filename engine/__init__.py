"""Forward passes: models bound to their regions, paged attention, KV blocks, batching, sampling."""
