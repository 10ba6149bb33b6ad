"""Samples tokens from a model's distribution, or from its most likely part."""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.generation.config import Config


def sample(logits: Tensor, uniform: Tensor, config: Config) -> Tensor:
    """Draws a token of each row by inverting the cumulative distribution, in the order of the
    vocabulary.

    Args:
        logits: fp32 [B, V].
        uniform: fp64 [B], random numbers in [0, 1).
        config: its temperature, and the part of the distribution.

    Returns:
        int64 [B].
    """
    logits = logits / config.temperature
    if config.top_k is not None or config.top_p < 1:
        logits = logits.masked_fill(logits < _lowest(logits, config), -torch.inf)
    cumulative = logits.softmax(-1, dtype=torch.float64).cumsum(-1)
    found = torch.searchsorted(cumulative, uniform[:, None] * cumulative[:, -1:], right=True)
    return found[:, 0].clamp(max=logits.shape[1] - 1)


def _lowest(logits: Tensor, config: Config) -> Tensor:
    """The lowest of the logits to draw among: [B, 1]."""
    count = logits.shape[1] if config.top_k is None else min(config.top_k, logits.shape[1])
    ordered = logits.topk(count).values
    probability = ordered.softmax(-1)
    kept = probability.cumsum(-1) - probability < config.top_p  # what is likelier does not suffice
    return ordered.gather(1, kept.sum(-1, keepdim=True) - 1)
