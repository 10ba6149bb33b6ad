"""The kinds of optimizers: each module is a value of `optimizer.kind`."""
