"""Paired benchmarks against other systems.

`make bench` runs all of them, and docs/benchmarks.md has their figures.
"""
