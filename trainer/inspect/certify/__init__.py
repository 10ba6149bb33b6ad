"""`samestep certify`: proves on a cluster's own devices that all of them compute the same bits."""
