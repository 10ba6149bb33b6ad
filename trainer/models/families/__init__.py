"""The families of models: `model.kind` names a module here. `Family` has their common modules."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from trainer.models.config import TransformerConfig
from trainer.models.layers import LayerNorm, RMSNorm
from trainer.models.layers.attention import CrossAttention, SelfAttention
from trainer.models.layers.embeddings import Embeddings
from trainer.models.layers.layer import FeedForward, Layer


@dataclass(frozen=True)
class Family(TransformerConfig):
    """A family with standard layers; override the builder of a module that differs."""

    def build_norm(self, width: int | None = None) -> nn.Module:
        width = width or self.width
        if self.norm_kind == "rms":
            return RMSNorm(width, eps=self.norm_eps)
        return LayerNorm(width, eps=self.norm_eps, bias=self.norm_bias)

    def build_embeddings(self) -> nn.Module:
        return Embeddings(self)

    def build_layer(self, index: int, cross_attention: bool = False) -> nn.Module:
        return Layer(self, index, cross_attention)

    def build_attention(self, index: int) -> nn.Module:
        return SelfAttention(self)

    def build_cross_attention(self, index: int) -> nn.Module:
        return CrossAttention(self)

    def build_feed_forward(self, index: int) -> nn.Module:
        return FeedForward(self)
