"""`samestep plan`: memory, traffic and throughput of a run, predicted before it is started."""
