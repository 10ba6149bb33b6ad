"""Output heads."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from trainer.models.config import Activation, TransformerConfig
from trainer.models.layers import LayerNorm, activate


class MaskedLMHead(nn.Module):
    """Predicts tokens: dense, activation, norm, then a product with the token embeddings or a matrix of its own."""

    def __init__(self, config: TransformerConfig, activation: Activation) -> None:
        super().__init__()
        self.activation = activation
        self.dense = nn.Linear(config.width, config.width)
        self.norm = LayerNorm(config.width, eps=config.norm_eps)
        self.decoder = None if config.tied else nn.Linear(config.width, config.vocab_size, bias=False)
        self.bias = nn.Parameter(self.dense.bias.new_zeros(config.vocab_size))

    def forward(self, hidden: Tensor, embedding: Tensor) -> Tensor:
        """[B, P, D] -> logits [B, P, V]; embedding: [V, D], the token embeddings, used when the head is tied."""
        hidden = self.norm(activate(self.dense(hidden), self.activation))
        return F.linear(hidden, embedding if self.decoder is None else self.decoder.weight, self.bias)


class LanguageModelHead(nn.Module):
    """Predicts tokens by a product with the token embeddings, the hidden states scaled, or with a matrix of its own."""

    def __init__(self, config: TransformerConfig, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale
        self.decoder = None if config.tied else nn.Linear(config.width, config.vocab_size, bias=False)

    def forward(self, hidden: Tensor, embedding: Tensor) -> Tensor:
        """[B, P, D] -> logits [B, P, V]; embedding: [V, D], the token embeddings, used when the head is tied."""
        if self.decoder is not None:
            logits: Tensor = self.decoder(hidden)
            return logits
        return F.linear(hidden if self.scale == 1 else hidden * self.scale, embedding)


class NextSentenceHead(nn.Module):
    """Says whether segment B is the text after A: BERT's pooler (dense, tanh) and a classifier."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.pooler = nn.Linear(config.width, config.width)
        self.classifier = nn.Linear(config.width, 2)

    def forward(self, first: Tensor) -> Tensor:
        """The hidden states of the first tokens [B, D] -> logits [B, 2] of "follows" and "is from elsewhere"."""
        logits: Tensor = self.classifier(self.pooler(first).tanh())
        return logits
