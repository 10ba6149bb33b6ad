"""The kinds of clusters: each module is a value of `cluster.kind`."""
