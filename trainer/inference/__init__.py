"""Inference: what trained models make of texts."""
