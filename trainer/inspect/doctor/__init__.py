"""`samestep doctor`: tries the parts of this machine that a run will need."""
