"""Embeddings of texts, search among them, and scores of retrieval."""
