"""Submits runs to clusters: a readable script or manifest first, then the cluster's own client. Imports no torch.

A module with a `Config` is a kind of cluster (`kind: slurm` is `launch/slurm.py`); that class is a `Cluster`, see
`launch.job`. Rendering is pure; only `submit`, `states`, `cancel` and `logs` talk to anybody.
"""
