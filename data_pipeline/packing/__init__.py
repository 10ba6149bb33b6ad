"""Packing: which tokens of which documents make up an example."""
