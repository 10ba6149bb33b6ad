"""The Transformer layer: attention and a feed-forward network with residual connections."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from trainer.models.config import Activation, TransformerConfig
from trainer.models.layers import Projection
from trainer.models.layers.attention import take
from trainer.models.layers.dropout import dropout
from trainer.models.stack import Context


def activate(x: Tensor, activation: Activation) -> Tensor:
    """Applies an activation; gated ones halve the last dimension (Shazeer 2020)."""
    if activation.startswith("geglu"):
        value, gate = x.chunk(2, dim=-1)
        return value * F.gelu(gate, approximate="tanh" if activation == "geglu_tanh" else "none")
    if activation == "swiglu":
        value, gate = x.chunk(2, dim=-1)
        return value * F.silu(gate)
    if activation == "relu":
        return F.relu(x)
    return F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")


class FeedForward(nn.Module):
    """Two projections with an activation between them, and dropout at the site `ffn_hidden`."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.activation = config.activation
        self.dropout = config.ffn_dropout
        parts = ("up", "gate") if config.gated else ("up",)
        bias = config.projection_bias
        self.up = Projection(config.width, len(parts) * config.ffn_width, parts, bias=bias)
        self.down = Projection(
            config.ffn_width, config.width, ("down",), bias=bias, into_residual=True
        )

    def forward(self, hidden: Tensor, context: Context) -> Tensor:
        """[B, S, D] -> [B, S, D]; S is P if `context.positions` are given."""
        inner = activate(self.up(hidden), self.activation)
        key = context.key("ffn_hidden")
        out: Tensor = self.down(dropout(inner, self.dropout, key, context.positions))
        return out


class Layer(nn.Module):
    """One layer of an encoder, or with `cross_attention` of a decoder.

    `post` normalizes after each residual sum (Vaswani et al. 2017), `pre` the input of each branch
    (Xiong et al. 2020).

    Attributes:
        static: what distinguishes it from layers that compute something else.
    """

    def __init__(
        self, config: TransformerConfig, index: int, cross_attention: bool = False
    ) -> None:
        super().__init__()
        self.static = (cross_attention, config.static(index))
        self.norm = config.norm
        self.dropout = config.dropout
        self.attention = config.build_attention(index)
        self.attention_norm = config.build_norm()
        if cross_attention:
            self.cross_attention = config.build_cross_attention(index)
            self.cross_attention_norm = config.build_norm()
        self.ffn = config.build_feed_forward(index)
        self.ffn_norm = config.build_norm()

    def forward(
        self, hidden: Tensor, memory: Tensor | None, bias: Tensor | None, context: Context
    ) -> Tensor:
        """[B, S, D] -> [B, S, D], or [B, P, D] for `context.positions` [B, P] alone.

        Args:
            hidden: [B, S, D].
            memory: [B, M, D], what cross-attention reads; None skips it.
            bias: added to the scores of self-attention.
            context: masks, dropout keys, positions to compute, cache.
        """
        # Pre-norm: x + f(norm(x)). Post-norm: norm(x + f(x)).
        pre = self.norm == "pre"
        # Positions are selected as soon as nothing needs the others: after self-attention, or after
        # cross-attention if there is one.
        read = context.positions if memory is None else None
        branch = self.attention(self.attention_norm(hidden) if pre else hidden, bias, context, read)
        key = context.key("attention_output")
        hidden = take(hidden, read) + dropout(branch, self.dropout, key, read)
        hidden = hidden if pre else self.attention_norm(hidden)
        if memory is not None:
            normed = self.cross_attention_norm(hidden) if pre else hidden
            branch = self.cross_attention(normed, memory, context)
            key = context.key("cross_attention_output")
            hidden = take(hidden + dropout(branch, self.dropout, key), context.positions)
            hidden = hidden if pre else self.cross_attention_norm(hidden)
        key = context.key("ffn_output")
        if pre:
            branch = self.ffn(self.ffn_norm(hidden), context)
            return hidden + dropout(branch, self.dropout, key, context.positions)
        branch = self.ffn(hidden, context)
        out: Tensor = self.ffn_norm(hidden + dropout(branch, self.dropout, key, context.positions))
        return out
