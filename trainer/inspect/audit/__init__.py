"""What a run was fed, proven and shown from its ledger and its dataset: `samestep ledger`."""
