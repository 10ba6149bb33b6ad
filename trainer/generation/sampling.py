"""Samples tokens from a model's distribution, or from its most likely part."""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.generation.config import Config


def sample(logits: Tensor, uniform: Tensor, config: Config) -> Tensor:
    """Samples a token for each row by inverting the cumulative distribution.

    Args:
        logits: fp32 [B, V].
        uniform: fp64 [B], random numbers in [0, 1).
        config: its temperature, top_k and top_p.

    Returns:
        int64 [B].
    """
    logits = logits / config.temperature
    if config.top_k is not None or config.top_p < 1:
        logits = logits.masked_fill(logits < _lowest(logits, config), -torch.inf)
    # Example: of the probabilities 0.2 0.5 0.3, cumulated 0.2 0.7 1.0, the number 0.6 takes the
    # second token. The last sum is not exactly 1, so numbers are scaled by it.
    cumulative = logits.softmax(-1, dtype=torch.float64).cumsum(-1)
    found = torch.searchsorted(cumulative, uniform[:, None] * cumulative[:, -1:], right=True)
    return found[:, 0].clamp(max=logits.shape[1] - 1)


def _lowest(logits: Tensor, config: Config) -> Tensor:
    """The lowest logit to sample from: [B, 1]."""
    vocabulary = logits.shape[1]
    count = vocabulary if config.top_k is None else min(config.top_k, vocabulary)
    ordered = logits.topk(count).values
    probability = ordered.softmax(-1)
    # A token is kept if the more likely ones do not reach top_p: with 0.5 0.3 0.2 and top_p 0.7,
    # the sums before each are 0, 0.5 and 0.8, so two are kept.
    before = probability.cumsum(-1) - probability
    kept = before < config.top_p
    return ordered.gather(1, kept.sum(-1, keepdim=True) - 1)
