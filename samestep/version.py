"""The version of samestep."""

__version__ = "0.1.0"
