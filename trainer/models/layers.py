"""The Transformer layer: self-attention and a feed-forward network, each with a residual connection and a norm."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from trainer.models.attention import SelfAttention, take
from trainer.models.config import Activation, TransformerConfig
from trainer.models.dropout import dropout

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


class LayerNorm(nn.LayerNorm):
    """Layer normalisation in fp32, whatever precision its input and its gathered parameters come in."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> fp32 [..., D]."""
        return F.layer_norm(x.float(), self.normalized_shape, self.weight.float(), self.bias.float(), self.eps)


class FeedForward(nn.Module):
    """Two projections with an activation between them."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.activation = config.activation
        gated = config.activation == "geglu"
        self.up = nn.Linear(config.width, 2 * config.ffn_width if gated else config.ffn_width)
        self.down = nn.Linear(config.ffn_width, config.width)

    def forward(self, hidden: Tensor) -> Tensor:
        """[B, S, D] -> [B, S, D]."""
        out: Tensor = self.down(activate(self.up(hidden), self.activation))
        return out


class Layer(nn.Module):
    """One encoder layer.

    `post` normalises after each residual sum (Vaswani et al. 2017), `pre` the input of each branch (Xiong et al. 2020).
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.norm = config.norm
        self.dropout = config.dropout
        self.attention = SelfAttention(config)
        self.attention_norm = LayerNorm(config.width, eps=config.norm_eps)
        self.ffn = FeedForward(config)
        self.ffn_norm = LayerNorm(config.width, eps=config.norm_eps)

    def forward(
        self, hidden: Tensor, mask: Tensor | None, dropout_keys: Tensor | None, cells: Tensor | None = None
    ) -> Tensor:
        """[B, S, D] -> [B, S, D], or [B, P, D] for cells [B, P] alone, without computing the others.

        mask: bool [B, 1, S, S], None allows all; dropout_keys: int32 [DROPOUT_PLACES, B].
        """
        in_attention, after_attention, after_ffn = (None,) * DROPOUT_PLACES if dropout_keys is None else dropout_keys
        pre = self.norm == "pre"
        branch = self.attention(self.attention_norm(hidden) if pre else hidden, mask, in_attention, cells)
        hidden = take(hidden, cells) + dropout(branch, self.dropout, after_attention, cells)
        if pre:
            return hidden + dropout(self.ffn(self.ffn_norm(hidden)), self.dropout, after_ffn, cells)
        hidden = self.attention_norm(hidden)
        out: Tensor = self.ffn_norm(hidden + dropout(self.ffn(hidden), self.dropout, after_ffn, cells))
        return out
