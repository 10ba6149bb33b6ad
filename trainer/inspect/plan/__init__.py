"""`samestep plan`: a run's memory per device and communication, computed before it is started."""
