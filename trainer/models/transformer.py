"""The one Transformer core, configured by the families (bert, roberta) into their models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trainer.errors import ConfigError
from trainer.models.attention import segment_mask
from trainer.models.dropout import split_key
from trainer.models.embeddings import Embeddings
from trainer.models.heads import MaskedLMHead
from trainer.models.initialization import initial_values
from trainer.models.layers import DROPOUT_PLACES, Activation, Layer, Norm


@dataclass(frozen=True)
class TransformerConfig:
    """Shape and regularisation of an encoder with a masked-LM head; the families set their own defaults.

    Attributes:
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
        tied: whether the head shares the matrix of the token embeddings.
        initializer_range: standard deviation of the initial weights.
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
    norm: Norm = "post"
    tied: bool = True
    initializer_range: float = 0.02

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

    def build(self) -> Transformer:
        return Transformer(self)

    @property
    def head_activation(self) -> Activation:
        """The activation inside the masked-LM head, where nothing is gated."""
        return "gelu" if self.activation == "geglu" else self.activation


class Transformer(nn.Module):
    """An encoder with a masked-LM head.

    Attributes:
        activation_checkpointing: recomputes each layer in the backward pass instead of keeping its activations.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.activation_checkpointing = False
        c = config
        self.embeddings = Embeddings(
            c.vocab_size, c.max_positions, c.position_offset, c.type_vocab, c.width, c.norm_eps, c.dropout
        )
        shape = (c.width, c.heads, c.ffn_width, c.activation, c.norm, c.norm_eps, c.dropout, c.attention_dropout)
        self.layers = nn.ModuleList(Layer(*shape) for _ in range(c.layers))
        self.final_norm = nn.LayerNorm(c.width, eps=c.norm_eps) if c.norm == "pre" else None
        self.head = MaskedLMHead(c.width, c.vocab_size, c.head_activation, c.norm_eps, c.tied)

    def forward(
        self,
        tokens: Tensor,
        segments: Tensor,
        positions: Tensor,
        predicted: Tensor | None = None,
        dropout_key: Tensor | None = None,
        token_types: Tensor | None = None,
    ) -> Tensor:
        """Scores every token of the vocabulary at the predicted positions.

        Args:
            tokens: int [B, S].
            segments: int [B, S]; 0 is padding, 1, 2, ... the sequences packed in a row. A cell attends to its segment.
            positions: int [B, S], in [0, max_sequence_length); from 0 in each sequence.
            predicted: int [B, P], the cells to predict; None predicts all.
            dropout_key: int32 [B], a random key for each row; None, or a model in eval mode, means no dropout.
            token_types: int [B, S]; None means type 0 everywhere.

        Returns:
            Logits [B, P, V], or [B, S, V] when `predicted` is None.
        """
        embedding_key: Tensor | None = None
        layer_keys: Tensor | list[None] = [None] * len(self.layers)
        if self.training and dropout_key is not None:
            keys = split_key(dropout_key, 1 + DROPOUT_PLACES * len(self.layers))
            embedding_key, layer_keys = keys[0], keys[1:].view(len(self.layers), DROPOUT_PLACES, -1)
        mask = segment_mask(segments)
        hidden = self.embeddings(tokens, positions, token_types, embedding_key)
        for layer, layer_key in zip(self.layers, layer_keys, strict=True):
            if self.activation_checkpointing and self.training:
                # Dropout masks come from keys, so there is no generator state to bring back for the second time.
                hidden = checkpoint(layer, hidden, mask, layer_key, use_reentrant=False, preserve_rng_state=False)
            else:
                hidden = layer(hidden, mask, layer_key)
        if predicted is not None:
            hidden = hidden.take_along_dim(predicted.long()[..., None], dim=1)
        if self.final_norm is not None:
            hidden = self.final_norm(hidden)
        logits: Tensor = self.head(hidden, self.embeddings.tokens.weight)
        return logits

    @property
    def max_sequence_length(self) -> int:
        """The longest sequence that the position table serves, in tokens."""
        return self.config.max_positions

    def sharding_units(self) -> list[nn.Module]:
        """The layers in order; embeddings and head share a matrix and stay in the root unit."""
        return list(self.layers)

    def initial_values(self, name: str, start: int, stop: int, seed: int) -> Tensor:
        """Elements [start, stop) of the flattened parameter `name`: fp32 [stop - start], the same in any process."""
        return initial_values(name, start, stop, seed=seed, std=self.config.initializer_range)

    def flops_per_token(self, sequence_length: int, predicted_per_token: float = 1.0) -> float:
        """FLOPs of the matrix products in one forward and backward pass, per cell of the batch.

        6 per weight of a layer (2 in the forward pass, twice that in the backward pass) and 12 S D per layer for
        attention (scores and mixing, masked cells included); 6 (D D + V D) per predicted token for the head.
        Recomputation under activation checkpointing does not count (Chowdhery et al. 2022, appendix B).
        """
        width = self.config.width
        weights = sum(weight.numel() for weight in self.layers.parameters() if weight.ndim == 2)
        attention = 12 * len(self.layers) * sequence_length * width
        return 6 * weights + attention + predicted_per_token * 6 * width * (width + self.config.vocab_size)
