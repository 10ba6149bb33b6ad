"""Recomputes steps of a run in one process, to find examples of a high loss, or a difference."""
