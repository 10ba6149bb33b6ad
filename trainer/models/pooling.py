"""The embedding of a text: its hidden states or its logits, pooled."""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch
from torch import Tensor

Pool: TypeAlias = Literal["mean", "first", "last", "max", "weighted"]
"""mean: of all tokens. first, last: one token. max: number by number. weighted: a mean in which the
token at position i, from 1, counts i times."""

TextPool: TypeAlias = Literal["mean", "first", "last", "max", "weighted", "splade"]
"""A `Pool`; or splade, see `splade`."""

Similarity: TypeAlias = Literal["cosine", "dot"]

ROLES = ("query", "document", "default")
"""Roles of a text, each with a prompt; texts of `default` are compared symmetrically."""


_LOGITS = 1 << 26  # computed at a time: 256 MB in fp32


def positions_at_a_time(how: TextPool, vocab_size: int, most: int) -> int:
    """The number of positions of a batch of texts that are embedded, at most `most`.

    SPLADE's logits limit it: with a vocabulary of 30,522, to 2,198.
    """
    return min(most, max(1, _LOGITS // vocab_size)) if how == "splade" else most


def output_of(how: TextPool, layers: int) -> str:
    """The output of a model with this number of layers that is pooled."""
    return "tokens" if how == "splade" else f"layer.{layers}"


def splade(logits: Tensor, texts: Tensor) -> Tensor:
    """Pools logits of tokens [B, S, V] to sparse embeddings, float32 [B, T, V].

    The number of vocabulary entry j is max_i log(1 + relu(logit_ij)) over the positions i of the
    text (Formal et al. 2021, "SPLADE v2", arXiv 2109.10086, equation 6).

    Args:
        texts: bool [B, T, S], as for `pool`.
    """
    # log(1 + relu(x)) does not fall, so the maximum can be taken first. For its gradient, only the
    # positions [B, V] are kept then, instead of [B, S, V]. One text at a time, as all at once would
    # be T copies of the logits.
    highest = [
        logits.masked_fill(~text[..., None], -torch.inf).max(1).values for text in texts.unbind(1)
    ]
    return torch.stack(highest, 1).float().relu().log1p()


def pool(states: Tensor, texts: Tensor, how: TextPool) -> Tensor:
    """Pools an output to embeddings, float32 [B, T, D], or [B, D] with one text in a row.

    Args:
        states: hidden states [B, S, D], or for SPLADE logits; see `output_of`.
        texts: bool [B, T, S] or [B, S], the positions of each text, special tokens included; False
            for padding.
    """
    if texts.ndim == 2:
        return pool(states, texts[:, None], how)[:, 0]
    if how == "splade":
        return splade(states, texts)
    hidden = states.float()
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
