"""Weights that a run starts from, or learns from: stored and published models, word vectors."""
