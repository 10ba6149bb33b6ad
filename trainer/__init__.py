"""samestep's trainer: one run description, the same steps on any hardware."""

__version__ = "0.1.0"
