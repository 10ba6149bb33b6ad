"""The one Transformer core, configured by the families (bert, roberta) into their models."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trainer.models.attention import segment_mask
from trainer.models.config import TransformerConfig
from trainer.models.dropout import split_key
from trainer.models.embeddings import Embeddings
from trainer.models.heads import MaskedLMHead, NextSentenceHead
from trainer.models.initialization import initial_values
from trainer.models.layers import DROPOUT_PLACES, Layer, LayerNorm


class Transformer(nn.Module):
    """An encoder with a masked-LM head.

    Attributes:
        activation_checkpointing: recomputes each layer in the backward pass instead of keeping its activations.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.activation_checkpointing = False
        self.embeddings = Embeddings(config)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.final_norm = LayerNorm(config.width, eps=config.norm_eps) if config.norm == "pre" else None
        self.head = MaskedLMHead(config)
        self.nsp_head = NextSentenceHead(config) if config.nsp else None

    def forward(
        self,
        tokens: Tensor,
        segments: Tensor | None,
        positions: Tensor,
        predicted: Tensor | None = None,
        dropout_key: Tensor | None = None,
        token_types: Tensor | None = None,
        next_sentence: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Scores every token of the vocabulary at the predicted positions.

        Args:
            tokens: int [B, S].
            segments: int [B, S]; 0 is padding, 1, 2, ... the sequences packed in a row. A cell attends to its segment.
                None: each row is one sequence that fills it, and PyTorch may take its quickest attention, which
                knows no masks.
            positions: int [B, S], in [0, max_sequence_length); from 0 in each sequence.
            predicted: int [B, P], the cells to predict; None predicts all.
            dropout_key: int32 [B], a random key for each row; None, or a model in eval mode, means no dropout.
            token_types: int [B, S]; None means type 0 everywhere.
            next_sentence: whether to score the pair of segments, too; the model needs the head for it.

        Returns:
            Logits [B, P, V], or [B, S, V] when `predicted` is None. With `next_sentence`, a pair of these and the
            logits [B, 2] of "B follows A" and "B is from elsewhere".
        """
        embedding_key: Tensor | None = None
        layer_keys: Tensor | list[None] = [None] * len(self.layers)
        if self.training and dropout_key is not None:
            keys = split_key(dropout_key, 1 + DROPOUT_PLACES * len(self.layers))
            embedding_key, layer_keys = keys[0], keys[1:].view(len(self.layers), DROPOUT_PLACES, -1)
        if segments is None and self.config.causal:
            segments = torch.ones_like(tokens)
        mask = None if segments is None else segment_mask(segments, self.config.causal)
        hidden, matrix = self.embeddings(tokens, positions, token_types, embedding_key)
        read = predicted  # the cells of the last layer that the heads read
        if predicted is not None and next_sentence:
            read = F.pad(predicted, (1, 0))
        for layer, layer_key in zip(self.layers, layer_keys, strict=True):
            cells = read if layer is self.layers[-1] else None
            if self.activation_checkpointing and self.training:
                # Dropout masks come from keys, so there is no generator state to bring back for the second time.
                hidden = checkpoint(
                    layer, hidden, mask, layer_key, cells, use_reentrant=False, preserve_rng_state=False
                )
            else:
                hidden = layer(hidden, mask, layer_key, cells)
        if self.final_norm is not None:
            hidden = self.final_norm(hidden)
        if not next_sentence:
            logits: Tensor = self.head(hidden, matrix)
            return logits
        assert self.nsp_head is not None, "the model was built without a next-sentence head"
        return self.head(hidden if predicted is None else hidden[:, 1:], matrix), self.nsp_head(hidden[:, 0])

    @property
    def max_sequence_length(self) -> int:
        """The longest sequence that the position table serves, in tokens."""
        return self.config.max_positions

    def sharding_units(self) -> list[nn.Module]:
        """The layers in order; embeddings and head share a matrix and stay in the root unit."""
        return list(self.layers)

    def stacked(self) -> dict[str, int]:
        """How many tensors of equal size lie in the rows of a parameter, by name: queries', keys' and values'."""
        return {name: 3 for name, _ in self.named_parameters() if ".qkv." in name}

    def initial_values(self, name: str, start: int, stop: int, seed: int) -> Tensor:
        """Elements [start, stop) of the flattened parameter `name`: fp32 [stop - start], the same in any process."""
        return initial_values(name, start, stop, seed=seed, std=self.config.initializer_range)

    def flops_per_token(self, sequence_length: int, predicted_per_token: float = 1.0) -> float:
        """FLOPs of the matrix products in one forward and backward pass, per cell of the batch.

        6 per weight of a layer (2 in the forward pass, twice that in the backward pass) and 12 S D per layer for
        attention (scores and mixing, masked cells included); 6 (D D + V D) per predicted token for the head. What
        follows attention in the last layer is computed for predicted tokens alone.
        Recomputation under activation checkpointing does not count (Chowdhery et al. 2022, appendix B).
        """
        width = self.config.width
        weights = sum(weight.numel() for weight in self.layers.parameters() if weight.ndim == 2)
        last = self.layers[-1].named_parameters()
        for_predicted = sum(weight.numel() for name, weight in last if weight.ndim == 2 and "qkv" not in name)
        attention = 12 * len(self.layers) * sequence_length * width
        head = width * (width + self.config.vocab_size)
        return 6 * (weights - for_predicted) + attention + predicted_per_token * 6 * (for_predicted + head)
