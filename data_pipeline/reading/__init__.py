"""Reading datasets: shards to batches."""
