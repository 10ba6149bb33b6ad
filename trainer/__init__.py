"""samestep's trainer: one run description, the same steps on any hardware."""
