"""The kinds of objectives: each module is a value of `objective.kind`."""
