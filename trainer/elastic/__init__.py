"""Elastic runs: agents that start, restart and connect the worker processes of a run."""
