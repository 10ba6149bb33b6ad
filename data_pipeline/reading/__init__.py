"""Reading datasets: shards to batches."""

DEFAULT_CACHE = "100GB"
"""Maximum size of the cache of downloaded shards."""
