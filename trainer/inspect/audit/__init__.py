"""`samestep ledger`: proves which examples a run has consumed, and lists the examples of a step."""
