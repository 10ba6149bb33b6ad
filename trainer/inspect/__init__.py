"""Inspection: commands around a run: before it, beside it and after it."""
