"""Building datasets: raw text to shards."""
