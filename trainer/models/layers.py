"""The Transformer layer: attention and a feed-forward network, each with a residual connection and a norm."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trainer.models.attention import CrossAttention, SelfAttention, take
from trainer.models.cache import Cache, LayerCache, Memory
from trainer.models.config import Activation, TransformerConfig
from trainer.models.dropout import dropout


def activate(x: Tensor, activation: Activation) -> Tensor:
    """Applies an activation function; the gated ones halve the last dimension (Shazeer 2020, "GLU variants")."""
    if activation.startswith("geglu"):
        value, gate = x.chunk(2, dim=-1)
        return value * F.gelu(gate, approximate="tanh" if activation == "geglu_tanh" else "none")
    if activation == "relu":
        return F.relu(x)
    return F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")


class LayerNorm(nn.LayerNorm):
    """Layer normalisation in fp32, whatever precision its input and its gathered parameters come in."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> fp32 [..., D]."""
        return F.layer_norm(x.float(), self.normalized_shape, self.weight.float(), self.bias.float(), self.eps)


class RMSNorm(nn.RMSNorm):
    """Division by the root mean square in fp32 (Zhang & Sennrich 2019): no mean is taken away, no bias added."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> fp32 [..., D]."""
        return F.rms_norm(x.float(), self.normalized_shape, self.weight.float(), self.eps)


def make_norm(config: TransformerConfig) -> LayerNorm | RMSNorm:
    """A norm of the model's kind."""
    kind = RMSNorm if config.rms_norm else LayerNorm
    return kind(config.width, eps=config.norm_eps)


class FeedForward(nn.Module):
    """Two projections with an activation between them, and in some families dropout before the second."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.activation = config.activation
        self.dropout = config.dropout
        bias = not config.rms_norm
        self.up = nn.Linear(config.width, 2 * config.ffn_width if config.gated else config.ffn_width, bias=bias)
        self.down = nn.Linear(config.ffn_width, config.width, bias=bias)

    def forward(self, hidden: Tensor, dropout_key: Tensor | None, cells: Tensor | None) -> Tensor:
        """[B, S, D] -> [B, S, D]; cells: as `dropout` takes them."""
        out: Tensor = self.down(dropout(activate(self.up(hidden), self.activation), self.dropout, dropout_key, cells))
        return out


class Layer(nn.Module):
    """One layer of an encoder, or with `cross_attention` of a decoder (which needs norm `pre`).

    `post` normalises after each residual sum (Vaswani et al. 2017), `pre` the input of each branch (Xiong et al. 2020).
    """

    def __init__(self, config: TransformerConfig, cross_attention: bool = False) -> None:
        super().__init__()
        self.norm = config.norm
        self.dropout = config.dropout
        self.dropout_places = config.dropout_places
        self.attention = SelfAttention(config)
        self.attention_norm = make_norm(config)
        if cross_attention:
            self.cross_attention = CrossAttention(config)
            self.cross_attention_norm = make_norm(config)
        self.ffn = FeedForward(config)
        self.ffn_norm = make_norm(config)

    def forward(
        self,
        hidden: Tensor,
        mask: Tensor | None,
        dropout_keys: Tensor | None,
        cells: Tensor | None = None,
        memory: Memory | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """[B, S, D] -> [B, S, D], or [B, P, D] for cells [B, P] alone, without computing the others.

        Args:
            hidden: [B, S, D].
            mask: of self-attention, as it takes it.
            dropout_keys: int32 [dropout_places, B].
            cells: int [B, P].
            memory: what cross-attention reads; None leaves it out.
            cache: the cells before these.
        """
        keys: list[Tensor | None] = [None] * 6
        if dropout_keys is not None:
            keys[: self.dropout_places] = dropout_keys
        in_attention, after_attention, after_ffn, in_ffn, in_cross, after_cross = keys
        pre = self.norm == "pre"
        read = cells if memory is None else None
        branch = self.attention(self.attention_norm(hidden) if pre else hidden, mask, in_attention, read, cache)
        hidden = take(hidden, read) + dropout(branch, self.dropout, after_attention, read)
        if memory is not None:
            branch = self.cross_attention(self.cross_attention_norm(hidden), memory, in_cross, cache)
            hidden = take(hidden + dropout(branch, self.dropout, after_cross), cells)
        if pre:
            return hidden + dropout(self.ffn(self.ffn_norm(hidden), in_ffn, cells), self.dropout, after_ffn, cells)
        hidden = self.attention_norm(hidden)
        out: Tensor = self.ffn_norm(hidden + dropout(self.ffn(hidden, in_ffn, cells), self.dropout, after_ffn, cells))
        return out


def run_layers(
    layers: nn.ModuleList,
    hidden: Tensor,
    mask: Tensor | None,
    dropout_keys: Tensor | Sequence[None],
    *,
    cells: Tensor | None = None,
    memory: Memory | None = None,
    cache: Cache | None = None,
    checkpointing: bool = False,
    segments: Tensor | None = None,
) -> Tensor:
    """Runs layers one after the other; arguments as of `Layer.forward`.

    dropout_keys: int32 [layers, dropout_places, B], or None for each layer; cells: those that the last layer computes;
    checkpointing: whether to recompute each layer in the backward pass; segments: int [B, S], if they say all that
    the mask does but for the order of cells, so that a strategy may hand them to a kernel in its place.
    """
    for index, (layer, keys) in enumerate(zip(layers, dropout_keys, strict=True)):
        read = cells if index == len(layers) - 1 else None
        if checkpointing:
            # Dropout masks come from keys, so there is no generator state to bring back for the second time.
            hidden = checkpoint(layer, hidden, mask, keys, read, memory, use_reentrant=False, preserve_rng_state=False)
        else:
            hidden = layer(hidden, mask, keys, read, memory, None if cache is None else cache.layers[index])
    return hidden
