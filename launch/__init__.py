"""Submits runs to clusters: first a readable script or manifest, then the cluster's own client.

Imports no torch. Each module with a `Config` is a kind of cluster (`kind: slurm` is
`launch/kinds/slurm.py`), and the class is a `Cluster`, see `launch.job`. Rendering is pure; only
`check`, `submit`, `states`, `cancel` and `logs` talk to the cluster.
"""
