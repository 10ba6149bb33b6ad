"""`samestep ledger`: proves which examples a run has consumed, and lists those of a step."""
