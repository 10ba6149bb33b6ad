"""The Transformer layer: self-attention and a feed-forward network, each with a residual connection and a norm."""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch.nn.functional as F
from torch import Tensor, nn

from trainer.models.attention import SelfAttention
from trainer.models.dropout import dropout

Activation: TypeAlias = Literal["gelu", "gelu_tanh", "relu", "geglu"]
Norm: TypeAlias = Literal["post", "pre"]

DROPOUT_PLACES = 3
"""Where a layer applies dropout: attention probabilities, attention output, feed-forward output."""


def activate(x: Tensor, activation: Activation) -> Tensor:
    """Applies an activation function; `geglu` halves the last dimension (Shazeer 2020, "GLU variants")."""
    if activation == "geglu":
        value, gate = x.chunk(2, dim=-1)
        return value * F.gelu(gate)
    if activation == "relu":
        return F.relu(x)
    return F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")


class FeedForward(nn.Module):
    """Two projections with an activation between them."""

    def __init__(self, width: int, ffn_width: int, activation: Activation) -> None:
        super().__init__()
        self.activation = activation
        self.up = nn.Linear(width, 2 * ffn_width if activation == "geglu" else ffn_width)
        self.down = nn.Linear(ffn_width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        """[B, S, D] -> [B, S, D]."""
        out: Tensor = self.down(activate(self.up(hidden), self.activation))
        return out


class Layer(nn.Module):
    """One encoder layer.

    `post` normalises after each residual sum (Vaswani et al. 2017), `pre` the input of each branch (Xiong et al. 2020).
    """

    def __init__(
        self,
        width: int,
        heads: int,
        ffn_width: int,
        activation: Activation,
        norm: Norm,
        norm_eps: float,
        dropout: float,
        attention_dropout: float,
    ) -> None:
        super().__init__()
        self.norm = norm
        self.dropout = dropout
        self.attention = SelfAttention(width, heads, attention_dropout)
        self.attention_norm = nn.LayerNorm(width, eps=norm_eps)
        self.ffn = FeedForward(width, ffn_width, activation)
        self.ffn_norm = nn.LayerNorm(width, eps=norm_eps)

    def forward(self, hidden: Tensor, mask: Tensor, dropout_keys: Tensor | None) -> Tensor:
        """[B, S, D] -> [B, S, D]; mask: bool [B, 1, S, S]; dropout_keys: int32 [DROPOUT_PLACES, B]."""
        in_attention, after_attention, after_ffn = (None,) * DROPOUT_PLACES if dropout_keys is None else dropout_keys
        if self.norm == "pre":
            branch = self.attention(self.attention_norm(hidden), mask, in_attention)
            hidden = hidden + dropout(branch, self.dropout, after_attention)
            return hidden + dropout(self.ffn(self.ffn_norm(hidden)), self.dropout, after_ffn)
        branch = self.attention(hidden, mask, in_attention)
        hidden = self.attention_norm(hidden + dropout(branch, self.dropout, after_attention))
        out: Tensor = self.ffn_norm(hidden + dropout(self.ffn(hidden), self.dropout, after_ffn))
        return out
