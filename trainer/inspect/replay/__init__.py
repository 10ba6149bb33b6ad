"""`samestep replay`: a step of a run, made again on one CPU to see which of its examples are to
blame.
"""
