"""Inference: predictions, scores and hidden states of trained models for texts."""
