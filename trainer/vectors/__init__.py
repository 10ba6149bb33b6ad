"""Word vectors of a dataset: word2vec, GloVe, and the SVD of a PPMI matrix.

One vector per word whatever its sentence, trained in minutes on a CPU: what contextual models are
compared with, and what the token embeddings of a model can start from.
"""
