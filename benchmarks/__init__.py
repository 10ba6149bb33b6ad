"""Paired benchmarks against other systems.

`make bench` and `make bench-gpu` run them, and docs/benchmarks.md has their figures.
"""
