"""The embedding of a text: its hidden states, pooled."""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch
from torch import Tensor

Pool: TypeAlias = Literal["mean", "first", "last", "max", "weighted"]
"""mean: of all tokens. first, last: one token. max: number by number. weighted: a mean in which the
token at position i, from 1, counts i times."""

Similarity: TypeAlias = Literal["cosine", "dot"]

ROLES = ("query", "document", "default")
"""Roles of a text, each with a prompt; texts of `default` are compared symmetrically."""


def pool(hidden: Tensor, texts: Tensor, how: Pool) -> Tensor:
    """Pools hidden states [B, S, D] to embeddings [B, T, D], or [B, D] with one text in a row.

    Args:
        texts: bool [B, T, S] or [B, S], the positions of each text, special tokens included; False
            for padding.
    """
    if texts.ndim == 2:
        return pool(hidden, texts[:, None], how)[:, 0]
    # Padding must not count: the maximum of a padded position could be the highest.
    if how == "max":
        return hidden[:, None].masked_fill(~texts[..., None], -torch.inf).amax(2)
    shares = texts
    if how != "mean":
        # Positions in each text, from 1. Of 3 tokens, weighted ones have the shares 1/6, 2/6, 3/6.
        shares = texts.cumsum(-1) * texts
        if how != "weighted":
            end = 1 if how == "first" else shares.amax(-1, keepdim=True)
            shares = (shares == end) & texts
    shares = shares.to(hidden.dtype)
    embedded: Tensor = (shares / shares.sum(-1, keepdim=True).clamp(min=1)) @ hidden
    return embedded
