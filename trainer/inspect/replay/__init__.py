"""`samestep replay`: recomputes a step on one CPU, to find the examples that cause a high loss."""
