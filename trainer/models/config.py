"""The shape of a Transformer, which every part of one is built from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

from trainer.errors import ConfigError

Activation: TypeAlias = Literal["gelu", "gelu_tanh", "relu", "geglu"]


@dataclass(frozen=True)
class TransformerConfig:
    """Shape and regularisation of an encoder with a masked-LM head; the families set their own defaults.

    Attributes:
        position_offset: rows at the start of the position table that stay unused (RoBERTa); not a setting.
        vocab_size: rows of the token table; at least the tokenizer's size. A multiple of 64 is quicker on GPUs.
        layers: number of layers.
        width: D, of the hidden states.
        heads: H, attention heads of width / heads each.
        ffn_width: inner width of the feed-forward network.
        max_positions: the longest sequence, in tokens.
        type_vocab: rows of the token-type table.
        dropout: probability for embeddings and the output of each branch.
        attention_dropout: probability for attention probabilities; 0 allows the fused attention kernels in training.
        norm_eps: added to the variance in layer norms.
        activation: of the feed-forward network.
        norm: "post" (BERT) or "pre" (adds a norm after the last layer).
        causal: whether a token attends to those before it only (a left-to-right language model).
        tied: whether the head shares the matrix of the token embeddings.
        initializer_range: standard deviation of the initial weights.
        nsp: adds a pooler and a head that says whether the second of two segments follows the first (BERT).
    """

    position_offset: ClassVar[int] = 0

    vocab_size: int
    layers: int = 12
    width: int = 768
    heads: int = 12
    ffn_width: int = 3072
    max_positions: int = 512
    type_vocab: int = 2
    dropout: float = 0.1
    attention_dropout: float = 0.1
    norm_eps: float = 1e-12
    activation: Activation = "gelu"
    norm: Literal["post", "pre"] = "post"
    causal: bool = False
    tied: bool = True
    initializer_range: float = 0.02
    nsp: bool = False

    def __post_init__(self) -> None:
        for name in ("vocab_size", "layers", "width", "heads", "ffn_width", "max_positions", "type_vocab"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("dropout", "attention_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"{name} must be in [0, 1), not {getattr(self, name)}")
        for name in ("norm_eps", "initializer_range"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be above 0, not {getattr(self, name)}")
        if self.width % self.heads:
            divisors = [heads for heads in range(1, self.width + 1) if self.width % heads == 0]
            nearest = min(divisors, key=lambda heads: abs(heads - self.heads))
            raise ConfigError(f"width {self.width} is not a multiple of heads {self.heads}; use heads={nearest}")

    @property
    def head_activation(self) -> Activation:
        """The activation inside the masked-LM head, where nothing is gated."""
        return "gelu" if self.activation == "geglu" else self.activation
