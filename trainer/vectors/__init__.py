"""Word vectors of a dataset: word2vec, GloVe, and the SVD of a PPMI matrix.

One vector per word whatever its sentence, trained in minutes on a CPU: a baseline for contextual
models, and initial token embeddings of a model.
"""
